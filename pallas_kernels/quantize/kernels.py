"""Pallas-Triton kernels that read a gradient once and write what is sent of it, and what is left."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.pallas_triton import load, store, triton_call
from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize.formats import Int8Blocks, Signs, Sparse, TwoOfFour
from pallas_kernels.quantize.reference import in_blocks, packed_two_of_four, passing_bits

TILE = 2048
"""Elements that a program works on, at least a block; a multiple of 32."""
NUM_WARPS = 8
TILE_COLUMNS = 64
"""8 x 8 tiles that a program prunes, side by side."""


def pallas_quantize_int8(
    x: Float[Array, "elements"], key_words: Array | None, *, block_size: int, interpret: bool
) -> Int8Blocks:
    """See `pallas_kernels.quantize.quantize_int8`; blocks of a power of two elements."""
    elements, blocks = x.size, pl.cdiv(x.size, block_size)
    tile = max(TILE, block_size)
    stochastic = key_words is not None
    values, scales = triton_call(
        functools.partial(_quantize_int8, elements=elements, block_size=block_size, stochastic=stochastic),
        "quantize_int8_stochastic" if stochastic else "quantize_int8",
        grid=(pl.cdiv(elements, tile),),
        in_specs=[_flat(tile), *([_whole(2)] if stochastic else [])],
        out_specs=[_flat(tile), _flat(tile // block_size)],
        out_shape=[jax.ShapeDtypeStruct((elements,), jnp.int8), jax.ShapeDtypeStruct((blocks,), jnp.float32)],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )(x, *([key_words] if stochastic else []))
    return Int8Blocks(values, scales, block_size)


def _quantize_int8(x_ref: Any, *refs: Any, elements: int, block_size: int, stochastic: bool) -> None:
    values_ref, scales_ref = refs[-2:]
    tile, blocks = x_ref.shape[0], scales_ref.shape[0]
    index = _index(tile)
    x = load(x_ref, mask=index < elements, other=0.0).astype(jnp.float32).reshape(blocks, block_size)
    largest = arithmetic.magnitude_bits(x).max(1)
    scale = arithmetic.integer_scale(largest)
    fraction: Array | float = 0.5
    if stochastic:
        key_ref = refs[0]
        unsigned = index.astype(jnp.uint32).reshape(blocks, block_size)
        fraction = arithmetic.random_fraction(key_ref[0], key_ref[1], unsigned)
    usable = jnp.where(arithmetic.is_usable(largest)[:, None], x, 0.0)
    integers = arithmetic.round_to_scale(usable, scale[:, None], fraction).astype(jnp.int8)
    store(values_ref, integers.reshape(tile), mask=index < elements)
    store(scales_ref, arithmetic.marked(scale, largest), mask=_index(blocks) * block_size < elements)


def pallas_compress_signs(
    gradient: Float[Array, "elements"], residual: Float[Array, "elements"], *, block_size: int, interpret: bool
) -> tuple[Signs, Float[Array, "elements"]]:
    """See `pallas_kernels.quantize.compress_signs`; blocks of a power of two elements."""
    elements = gradient.size
    tile = max(TILE, block_size)
    words, scales, left = triton_call(
        functools.partial(_compress_signs, elements=elements, block_size=block_size),
        "compress_signs",
        grid=(pl.cdiv(elements, tile),),
        in_specs=[_flat(tile), _flat(tile)],
        out_specs=[_flat(tile // 32), _flat(tile // block_size), _flat(tile)],
        out_shape=[
            jax.ShapeDtypeStruct((pl.cdiv(elements, 32),), jnp.uint32),
            jax.ShapeDtypeStruct((pl.cdiv(elements, block_size),), jnp.float32),
            jax.ShapeDtypeStruct((elements,), jnp.float32),
        ],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )(gradient, residual)
    return Signs(words, scales, elements, block_size), left


def _compress_signs(
    gradient_ref: Any,
    residual_ref: Any,
    words_ref: Any,
    scales_ref: Any,
    left_ref: Any,
    *,
    elements: int,
    block_size: int,
) -> None:
    tile, blocks = gradient_ref.shape[0], scales_ref.shape[0]
    index = _index(tile)
    inside = index < elements
    residual = load(residual_ref, mask=inside, other=0.0)
    corrected = load(gradient_ref, mask=inside, other=0.0).astype(jnp.float32) + residual
    bits = (corrected < 0.0).astype(jnp.uint32).reshape(tile // 32, 32)
    lanes = jax.lax.broadcasted_iota(jnp.uint32, (tile // 32, 32), 1)
    store(words_ref, (bits << lanes).sum(1, dtype=jnp.uint32), mask=_index(tile // 32) * 32 < elements)

    corrected = corrected.reshape(blocks, block_size)
    largest = arithmetic.magnitude_bits(corrected).max(1)
    usable = jnp.where(arithmetic.is_usable(largest)[:, None], corrected, 0.0)
    starts = _index(blocks) * block_size
    counts = jnp.minimum(jnp.maximum(elements - starts, 1), block_size)
    scale = arithmetic.marked(arithmetic.mean_magnitude(usable, counts, largest), largest)
    left = corrected - jnp.where(corrected < 0.0, -scale[:, None], scale[:, None])
    left = jnp.where(arithmetic.is_nonfinite(largest)[:, None], residual.reshape(blocks, block_size), left)
    store(scales_ref, scale, mask=starts < elements)
    store(left_ref, left.reshape(tile), mask=inside)


def pallas_sparsify(
    gradient: Float[Array, "elements"],
    residual: Float[Array, "elements"],
    threshold: Float[Array, ""],
    *,
    budget: int,
    interpret: bool,
) -> tuple[Sparse, Float[Array, "elements"]]:
    """See `pallas_kernels.quantize.sparsify`.

    XLA counts what passes in each tile, a kernel packs each tile behind those before it: the arrays are read twice.
    """
    elements = gradient.size
    limit = passing_bits(threshold)
    bits = in_blocks(arithmetic.magnitude_bits(gradient.astype(jnp.float32) + residual), TILE)
    counts = (bits >= limit).sum(1, dtype=jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # By tile as well, so that one kernel counts and finds it.
    nonfinite = arithmetic.is_nonfinite(bits.max(1)).any().astype(jnp.int32)
    indices, values, left = triton_call(
        functools.partial(_sparsify, elements=elements, budget=budget),
        "sparsify",
        grid=(len(counts),),
        in_specs=[_flat(TILE), _flat(TILE), _flat(1), _whole(2)],
        out_specs=[_whole(budget + TILE), _whole(budget + TILE), _flat(TILE)],
        out_shape=[
            jax.ShapeDtypeStruct((budget + TILE,), jnp.int32),
            jax.ShapeDtypeStruct((budget + TILE,), jnp.float32),
            jax.ShapeDtypeStruct((elements,), jnp.float32),
        ],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )(gradient, residual, ends - counts, jnp.stack([limit, nonfinite]))
    used = jnp.arange(budget, dtype=jnp.int32) < ends[-1]
    return Sparse(jnp.where(used, indices[:budget], elements), jnp.where(used, values[:budget], 0.0), elements), left


def _sparsify(
    gradient_ref: Any,
    residual_ref: Any,
    start_ref: Any,
    limit_ref: Any,
    indices_ref: Any,
    values_ref: Any,
    left_ref: Any,
    *,
    elements: int,
    budget: int,
) -> None:
    index = _index(TILE)
    inside = index < elements
    residual = load(residual_ref, mask=inside, other=0.0)
    corrected = load(gradient_ref, mask=inside, other=0.0).astype(jnp.float32) + residual
    nonfinite = limit_ref[1] != 0
    passes = arithmetic.magnitude_bits(corrected) >= limit_ref[0]
    slots = start_ref[0] + jnp.cumsum(passes.astype(jnp.int32)) - 1
    taken = passes & (slots < budget)
    # Interpreted, a masked store writes back what it read: what is not taken needs a place that no other has.
    slots = jnp.where(taken, slots, budget + jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0))
    store(indices_ref.at[slots], index, mask=taken)
    store(values_ref.at[slots], jnp.where(nonfinite, jnp.nan, corrected), mask=taken)
    store(left_ref, jnp.where(nonfinite, residual, jnp.where(taken, 0.0, corrected)), mask=inside)


def pallas_prune_two_of_four(x: Float[Array, "rows columns"], *, interpret: bool) -> TwoOfFour:
    """See `pallas_kernels.quantize.prune_two_of_four`."""
    rows, columns = x.shape
    padded = jnp.pad(x, ((0, -rows % 8), (0, -columns % 8)))
    tile_rows, tile_columns = padded.shape[0] // 8, padded.shape[1] // 8
    # One dimension, as the others of a grid are small.
    across = pl.cdiv(tile_columns, TILE_COLUMNS)
    by_row = pl.BlockSpec((8, TILE_COLUMNS), lambda i: (i // across, i % across))
    values, places, scales = triton_call(
        functools.partial(_prune_two_of_four, tile_columns=tile_columns),
        "prune_two_of_four",
        grid=(tile_rows * across,),
        in_specs=[pl.BlockSpec((8, TILE_COLUMNS, 8), lambda i: (i // across, i % across, 0))],
        out_specs=[by_row, by_row, pl.BlockSpec((1, TILE_COLUMNS), lambda i: (i // across, i % across))],
        out_shape=[
            jax.ShapeDtypeStruct((tile_rows * 8, tile_columns), jnp.uint32),
            jax.ShapeDtypeStruct((tile_rows * 8, tile_columns), jnp.uint8),
            jax.ShapeDtypeStruct((tile_rows, tile_columns), jnp.float32),
        ],
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=interpret,
    )(padded.reshape(tile_rows * 8, tile_columns, 8))
    return TwoOfFour(values, places, scales, rows, columns)


def _prune_two_of_four(x_ref: Any, values_ref: Any, places_ref: Any, scales_ref: Any, *, tile_columns: int) -> None:
    def inside(shape: tuple[int, ...]) -> Array:
        first = pl.program_id(0) % pl.cdiv(tile_columns, TILE_COLUMNS) * TILE_COLUMNS
        return first + jax.lax.broadcasted_iota(jnp.int32, shape, 1) < tile_columns

    x = load(x_ref, mask=inside(x_ref.shape), other=0.0).astype(jnp.float32)
    fours = x.reshape(8, TILE_COLUMNS, 2, 4)
    place = jax.lax.broadcasted_iota(jnp.int32, fours.shape, 3)
    # There is no indexing of values; a sum with zeros is exact, and within a thread.
    four = [jnp.where(place == i, fours, 0.0).sum(3) for i in range(4)]
    largest = arithmetic.magnitude_bits(x).max(2).max(0, keepdims=True)
    values, places = packed_two_of_four(four, largest[:, :, None])
    mask = inside((8, TILE_COLUMNS))
    store(values_ref, values.sum(2).astype(jnp.uint32), mask=mask)
    store(places_ref, places.sum(2).astype(jnp.uint8), mask=mask)
    scale = arithmetic.marked(arithmetic.integer_scale(largest), largest)
    store(scales_ref, scale, mask=inside((1, TILE_COLUMNS)))


def _index(size: int) -> Array:
    """Where in the whole array the `size` things are that this program has."""
    return pl.program_id(0) * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)


def _flat(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((size,), lambda i: (i,))


def _whole(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((size,), lambda i: (0,))
