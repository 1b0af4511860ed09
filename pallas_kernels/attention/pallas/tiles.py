"""What the kernels of attention share: how a tile is cut, loaded and masked, and which tiles see each other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.pallas_triton import load, store

LOG2_E = 1.4426950408889634
SMALLEST_TILE = 16
"""Tensor cores multiply no smaller ones."""


class Piece(NamedTuple):
    """Some of the columns of a head."""

    start: int
    size: int
    """A power of two, as every tile's sides have to be."""


def pieces(dim: int) -> list[Piece]:
    """Cuts a head of `dim` columns, a multiple of 16: 192 into 128 and 64, rather than padding it to 256."""
    found, start = [], 0
    while start < dim:
        size = 1 << (dim - start).bit_length() - 1
        found.append(Piece(start, size))
        start += size
    return found


class Rows(NamedTuple):
    """A block of queries or of keys."""

    start: jax.Array
    size: int
    length: int
    """Of the whole sequence."""

    @property
    def positions(self) -> jax.Array:
        return self.start + jnp.arange(self.size)

    @property
    def inside(self) -> jax.Array | None:
        """Which rows the sequence has; None where it is made of whole blocks."""
        return None if self.length % self.size == 0 else self.positions < self.length


def load_tiles(ref: Any, batch: jax.Array, rows: Rows, head: jax.Array, dim: int) -> tuple[jax.Array, ...]:
    """Loads `rows` of `[batch, length, heads, dim]`, a tile for each piece of the head, with zeros around it."""
    mask = None if rows.inside is None else rows.inside[:, None]
    return tuple(_load(_place(ref, batch, rows, head, piece), mask) for piece in pieces(dim))


def store_tiles(ref: Any, batch: jax.Array, rows: Rows, head: jax.Array, dim: int, tiles: Any) -> None:
    """What `load_tiles` loads, stored."""
    mask = None if rows.inside is None else rows.inside[:, None]
    for piece, tile in zip(pieces(dim), tiles, strict=True):
        place = _place(ref, batch, rows, head, piece)
        store(place, tile.astype(ref.dtype), mask=None if mask is None else jnp.broadcast_to(mask, place.shape))


def load_row(ref: Any, rows: Rows, *index: jax.Array) -> jax.Array:
    """Loads `ref[*index, rows]`, with zeros beyond the end."""
    return _load(ref.at[(*index, pl.dslice(rows.start, rows.size))], rows.inside)


def _place(ref: Any, batch: jax.Array, rows: Rows, head: jax.Array, piece: Piece) -> Any:
    return ref.at[batch, pl.dslice(rows.start, rows.size), head, pl.dslice(piece.start, piece.size)]


def _load(place: Any, mask: jax.Array | None) -> jax.Array:
    return load(place) if mask is None else load(place, mask=jnp.broadcast_to(mask, place.shape), other=0)


def contract(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two tiles, in float32; of float32 tiles it is exact, where tensor cores would round them first."""
    exact = a.dtype == jnp.float32
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST if exact else None)


def contract_heads(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
    """The products of each row's head in `a` with each row's in `b`."""
    total = contract(a[0], b[0].T)
    for left, right in zip(a[1:], b[1:], strict=True):
        total += contract(left, right.T)
    return total


def visible_tile(
    spec: AttentionSpec, queries: jax.Array, keys: jax.Array, key_length: int | None, same_document: jax.Array | None
) -> jax.Array:
    """Which key each query may see, from their positions as a column and a row (or a row and a column).

    Args:
        spec: the mask.
        queries: positions.
        keys: positions.
        key_length: where the keys end, if the tile may reach beyond.
        same_document: which query and key share one; None where all do.
    """
    before, after = spec.reach
    mask = jnp.ones(jnp.broadcast_shapes(queries.shape, keys.shape), jnp.bool_)
    if before is not None:
        mask = mask & (queries - keys <= before)
    if after is not None:
        mask = mask & (keys - queries <= after)
    if key_length is not None:
        mask = mask & (keys < key_length)
    return mask if same_document is None else mask & same_document


def loop_over_visible(
    own: Rows,
    other: Rows,
    reach: tuple[int | None, int | None],
    segmented: bool,
    body: Callable[[bool, Rows, Any], Any],
    carry: Any,
) -> Any:
    """Runs `body` over the blocks of `other` of which `own` may see something.

    All are masked if any is: a loop of its own for blocks that are seen whole would spare a comparison for each score,
    but two loops take more registers than there are for large blocks.

    Args:
        own: the block at hand.
        other: any block of the others; its size and length count.
        reach: how far before its own position a row sees, and how far after.
        segmented: whether a mask that is known only when the kernel runs hides more.
        body: `(masked, block of others, carry) -> carry`.
        carry: what the first `body` gets.
    """
    before, after = reach
    first, last, size = own.start, own.start + own.size - 1, other.size
    count = -(-other.length // size)
    low = 0 if before is None else lax.div(jnp.maximum(first - before, 0), size)
    high = count if after is None else jnp.minimum(lax.div(last + after, size) + 1, count)
    masked = segmented or before is not None or after is not None or other.length % size != 0
    return lax.fori_loop(low, high, lambda j, carry: body(masked, Rows(j * size, size, other.length), carry), carry)
