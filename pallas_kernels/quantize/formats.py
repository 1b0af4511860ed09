"""What crosses the wire: pytrees whose leaves are all that is sent, and whose sizes are known before they are."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int8, Int32, UInt8, UInt32


def _static() -> int:
    value: int = field(metadata={"static": True})
    return value


def wire_bytes(packed: "Int8Blocks | Signs | Sparse | Masked | TwoOfFour") -> int:
    """How many bytes `packed` is, all of which are sent."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(packed))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Blocks:
    """Integers with a scale per block of consecutive elements: 1 + 4 / block_size bytes per element."""

    values: Int8[Array, "elements"]
    scales: Float[Array, "blocks"]
    """In float32, of 16 significant bits. NaN where a block held what is not finite."""
    block_size: int = _static()
    """The last block may be shorter."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Signs:
    """A bit per element and a scale per block of consecutive elements: 1 / 8 + 4 / block_size bytes per element."""

    words: UInt32[Array, "words"]
    """Bit b of word w is set where element 32 w + b is negative."""
    scales: Float[Array, "blocks"]
    """In float32. NaN where a block held what is not finite."""
    elements: int = _static()
    block_size: int = _static()
    """The last block may be shorter."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sparse:
    """Some elements and where they belong: 8 bytes per slot, 8 budget / elements bytes per element."""

    indices: Int32[Array, "budget"]
    """Ascending. Slots that are not used come last and have the index `elements`, which is none."""
    values: Float[Array, "budget"]
    """In float32; 0 in slots that are not used. NaN in all others if anything was not finite."""
    elements: int = _static()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masked:
    """Some elements, and a bit per element that says which: 1 / 8 + 4 budget / elements bytes per element.

    From one element of 32 on it is smaller than `Sparse`.
    """

    words: UInt32[Array, "words"]
    """Bit b of word w is set where element 32 w + b is there."""
    values: Float[Array, "budget"]
    """As those of `Sparse`."""
    elements: int = _static()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TwoOfFour:
    """Two integers of every four elements of a row, a scale per 8 x 8 tile: 44 bytes per tile, 0.6875 per element.

    Rows and columns are rounded up to whole tiles.
    """

    values: UInt32[Array, "padded_rows tile_columns"]
    """Four int8 for eight elements of a row, the first in the lowest byte."""
    places: UInt8[Array, "padded_rows tile_columns"]
    """Four numbers of 2 bits, the first in the lowest: where each value stood among its four elements."""
    scales: Float[Array, "tile_rows tile_columns"]
    """In float32, of 16 significant bits. NaN where a tile held what is not finite."""
    rows: int = _static()
    columns: int = _static()
