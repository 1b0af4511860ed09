"""Which source each record of an endless mixture comes from."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int


def assign(
    indices: Int[np.ndarray, "n"], weights: Sequence[float]
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """The source of each record of a mixture, and the record's running number within that source.

    The first source takes record `n` when `floor((n + 1) p)` exceeds `floor(n p)`, p being its share; what it leaves is
    dealt to the others in the same way. After any number of records each source has had its share to within one
    per source before it, and every running number occurs exactly once.

    Args:
        indices: numbers of records in the mixture, within 2^22 of each other.
        weights: relative shares, not all zero.
    """
    remaining = np.asarray(indices, np.int64).copy()
    source = np.zeros(remaining.shape, np.int64)
    running = np.zeros(remaining.shape, np.int64)
    undecided = np.ones(remaining.shape, bool)
    for i, share in enumerate(_shares(tuple(weights))):
        before = _floor(remaining, share)
        taken = undecided & (_floor(remaining + 1, share) > before)
        source[taken], running[taken] = i, before[taken]
        undecided &= ~taken
        remaining = remaining - before
    return source, running


def counts(number: int, weights: Sequence[float]) -> list[int]:
    """How many of the first `number` records come from each source."""
    found = []
    for share in _shares(tuple(weights)):
        found.append(number * share.numerator // share.denominator)
        number -= found[-1]
    return found


@functools.cache
def _shares(weights: tuple[float, ...]) -> list[Fraction]:
    """Of each source among those from it on. Weights count as they are written, 0.1 being a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = (weight / sum(exact[i:]) if weight else Fraction(0) for i, weight in enumerate(exact))
    # A share of more digits is off by less than 2^-40: by a record in as many.
    return [share.limit_denominator(1 << 40) for share in shares]


def _floor(numbers: Int[np.ndarray, "n"], share: Fraction) -> Int[np.ndarray, "n"]:
    """`floor(numbers * share)`, in whole numbers; they may be large, but must be within 2^22 of each other."""
    first = int(numbers.min()) if len(numbers) else 0
    whole, rest = divmod(first * share.numerator, share.denominator)
    return whole + (rest + (numbers - first) * share.numerator) // share.denominator


@dataclass(frozen=True)
class Stretch:
    """Records dealt by the same weights."""

    start: int
    """Number of its first record."""
    weights: tuple[float, ...]
    taken: tuple[int, ...]
    """How many records of each source came before it."""


@dataclass(frozen=True)
class Mixture:
    """A mixture whose weights may change on the way: every source goes on where it is, and what was dealt stays."""

    stretches: tuple[Stretch, ...]

    @classmethod
    def of(cls, history: Sequence[tuple[int, Sequence[float]]], limits: Sequence[int | None]) -> "Mixture":
        """A mixture from the weights that its records were dealt by.

        Args:
            history: the number of the first record and the weights from there on, in order, beginning at 0.
            limits: how many records each source has to give; the others then share what it would have had.
        """
        stretches: list[Stretch] = []
        taken = [0] * len(limits)
        stops = [start for start, _ in history[1:]] + [None]
        for (start, weights), stop in zip(history, stops, strict=True):
            while True:
                used_up = [limit is not None and taken[i] >= limit for i, limit in enumerate(limits)]
                left = tuple(0.0 if gone else weight for gone, weight in zip(used_up, weights, strict=True))
                stretches.append(Stretch(start, left, tuple(taken)))
                if not any(left):
                    break
                length = _until_used_up(left, taken, limits)
                if length is None or (stop is not None and start + length >= stop):
                    length = None if stop is None else stop - start
                if length is None:
                    break
                taken = [before + count for before, count in zip(taken, counts(length, left), strict=True)]
                start += length
                if start == stop:
                    break
        return cls(tuple(stretches))

    @property
    def num_records(self) -> int | None:
        """How many records there are until all sources have reached their limits; None if there is no end."""
        last = self.stretches[-1]
        return None if any(last.weights) else last.start

    def assign(self, indices: Int[np.ndarray, "n"]) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """The source of each record, and the record's running number within that source."""
        source, running = np.zeros(len(indices), np.int64), np.zeros(len(indices), np.int64)
        which = np.searchsorted([stretch.start for stretch in self.stretches], indices, side="right") - 1
        for i in np.unique(which):
            stretch, chosen = self.stretches[i], which == i
            source[chosen], number = assign(indices[chosen] - stretch.start, stretch.weights)
            running[chosen] = number + np.asarray(stretch.taken)[source[chosen]]
        return source, running

    def taken(self, number: int) -> list[int]:
        """How many of the first `number` records come from each source."""
        stretch = [stretch for stretch in self.stretches if stretch.start <= number][-1]
        if not any(stretch.weights):
            return list(stretch.taken)
        new = counts(number - stretch.start, stretch.weights)
        return [before + count for before, count in zip(stretch.taken, new, strict=True)]


def _until_used_up(weights: Sequence[float], taken: Sequence[int], limits: Sequence[int | None]) -> int | None:
    """The fewest records after which a source has reached its limit; None if none ever does."""
    fewest = None
    for i, limit in enumerate(limits):
        if limit is None or not _shares(tuple(weights))[i]:
            continue
        missing = limit - taken[i]
        low, high = 0, 1
        while counts(high, weights)[i] < missing:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if counts(middle, weights)[i] >= missing else (middle, high)
        fewest = high if fewest is None else min(fewest, high)
    return fewest
