"""What the kernels share: tiles of arrays, sums of products of tiles, the order in which blocks are worked on."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.pallas_triton import load, store

BAND = 8
"""Blocks of rows that are worked on together."""


class Span(NamedTuple):
    """A block along one dimension of an array."""

    start: jax.Array | int
    size: int
    stop: jax.Array | int | None
    """Where what counts ends, in the array's indices; None where the whole block counts."""

    def mask(self) -> jax.Array | None:
        """Which of the block count."""
        if self.stop is None:
            return None
        return self.start + jnp.arange(self.size, dtype=jnp.int32) < self.stop


def block_span(index: jax.Array | int, size: int, length: int) -> Span:
    """Block `index` of a dimension of `length`; masked only where blocks do not divide it."""
    return Span(index * size, size, length if length % size else None)


def tile_mask(rows: Span, cols: Span) -> jax.Array | None:
    """Which elements of a tile count; None if all."""
    row_mask, col_mask = rows.mask(), cols.mask()
    if row_mask is None:
        return None if col_mask is None else jnp.broadcast_to(col_mask[None, :], (rows.size, cols.size))
    if col_mask is None:
        return jnp.broadcast_to(row_mask[:, None], (rows.size, cols.size))
    return row_mask[:, None] & col_mask[None, :]


def load_tile(ref: jax.Ref, rows: Span, cols: Span, *leading: jax.Array) -> jax.Array:
    """A tile of an array, zeros where it does not count; `leading` are the indices of the dimensions before."""
    mask = tile_mask(rows, cols)
    view = ref.at[(*leading, pl.ds(rows.start, rows.size), pl.ds(cols.start, cols.size))]
    return load(view, mask=mask, other=None if mask is None else 0)


def load_vector(ref: jax.Ref, span: Span, *leading: jax.Array) -> jax.Array:
    """A block of a vector, zeros where it does not count; `leading` are the indices of the dimensions before."""
    mask = span.mask()
    view = ref.at[(*leading, pl.ds(span.start, span.size))]
    return load(view, mask=mask, other=None if mask is None else 0)


def store_tile(ref: jax.Ref, value: jax.Array, rows: Span, cols: Span, *leading: jax.Array) -> None:
    """Writes what counts of a tile, cast to the array's dtype."""
    view = ref.at[(*leading, pl.ds(rows.start, rows.size), pl.ds(cols.start, cols.size))]
    store(view, value.astype(ref.dtype), mask=tile_mask(rows, cols))


class Contraction(NamedTuple):
    """Which dimension of a tile of each operand is summed over: 0 for a left operand that lies transposed."""

    left: int = 1
    right: int = 0


def sum_products(
    load_step: Callable[[jax.Array], tuple[jax.Array, Sequence[jax.Array]]],
    steps: jax.Array | int,
    shapes: Sequence[tuple[int, int]],
    contraction: Contraction,
) -> tuple[jax.Array, ...]:
    """Sums the products of one left with several right tiles over `steps`, in float32.

    Args:
        load_step: the left tile and the right tiles of a step.
        steps: how many there are.
        shapes: of the sums.
        contraction: which dimensions meet.
    """
    dimensions = (((contraction.left,), (contraction.right,)), ((), ()))

    def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, rights = load_step(step)
        return tuple(
            total + jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
            for total, right in zip(sums, rights, strict=True)
        )

    return jax.lax.fori_loop(0, steps, add, tuple(jnp.zeros(shape, jnp.float32) for shape in shapes))


def block_of_program(program: jax.Array, row_blocks: int, col_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Which block a program works on.

    Bands of a few blocks of rows, column by column: programs that run at the same time read the same rows and columns,
    which the second-level cache then holds.
    """
    band, within = jax.lax.div(program, BAND * col_blocks), jax.lax.rem(program, BAND * col_blocks)
    first = band * BAND
    height = jnp.minimum(row_blocks - first, BAND)
    return first + jax.lax.rem(within, height), jax.lax.div(within, height)
