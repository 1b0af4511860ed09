"""What the check of kernels finds, a row at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from pallas_kernels.testing.numerics import relative_error
from pallas_kernels.testing.timing import random_arrays


@dataclass(frozen=True)
class Row:
    """One thing found."""

    what: str
    values: dict[str, float] = field(default_factory=dict)
    passed: bool = True

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.3g}" for name, value in self.values.items())
        return f"{'ok  ' if self.passed else 'FAIL'} {self.what}: {values}"


Check = Callable[[], Iterator[Row]]


Check = Callable[[], Iterator[Row]]


def arrays(dtype: Any, *shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
    """Normal numbers."""
    return random_arrays([jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], seed)


def compare(what: str, found: Any, exact: Any, tolerance: float) -> Row:
    """The largest relative error among the arrays of two trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    error = max(relative_error(a, b) for a, b in pairs)
    return Row(what, {"error": error, "tolerance": tolerance}, error < tolerance)
