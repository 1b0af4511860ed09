"""Which source each record of an endless mixture comes from."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int


def assign(
    indices: Int[np.ndarray, "n"], weights: Sequence[float]
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """The source of each record of the mixture, and the record's running number within that source.

    The first source takes record `n` when `floor((n + 1) p)` exceeds `floor(n p)`, p being its share; what it leaves is
    dealt to the others in the same way. After any number of records each source has had its share to within one
    per source before it, and every running number occurs exactly once.

    Args:
        indices: numbers of records in the mixture.
        weights: relative shares, taken to a precision of 2^-20; a source with less than half of that is never read.
    """
    remaining = np.asarray(indices, np.int64).copy()
    source = np.full(remaining.shape, len(weights) - 1)
    running = remaining.copy()
    undecided = np.ones(remaining.shape, bool)
    for i in range(len(weights) - 1):
        share = Fraction(weights[i] / sum(weights[i:])).limit_denominator(1 << 20)
        before = remaining * share.numerator // share.denominator
        taken = undecided & ((remaining + 1) * share.numerator // share.denominator > before)
        source[taken], running[taken] = i, before[taken]
        undecided &= ~taken
        remaining = remaining - before
    running[undecided] = remaining[undecided]
    return source, running
