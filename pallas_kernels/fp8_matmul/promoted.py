"""The product on 16-bit tensor cores, by Pallas for Triton: for GPUs that have none of 8 bits, and with their sums."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float16, Float32, UInt32

from pallas_kernels.fp8_matmul.quantize import BLOCK_SIZE
from pallas_kernels.pallas_triton import load, triton_call
from pallas_kernels.tiles import block_of_program, block_span, load_tile, load_vector, store_tile

PER_WORD = 4
"""8-bit floats that are loaded and widened together."""


class Blocks(NamedTuple):
    """How the kernel cuts its work."""

    rows: int
    """Of the result, per block; a power of two."""
    columns: int
    """Likewise; no more than share a scale."""
    num_warps: int
    num_stages: int
    """How many steps' operands are in shared memory at a time."""


COMPILED = Blocks(rows=128, columns=128, num_warps=8, num_stages=3)
"""Sums and a step's product fill the registers of an A100; smaller blocks convert more numbers per product."""
INTERPRETED = Blocks(rows=32, columns=64, num_warps=4, num_stages=1)
"""Small, so that small arrays have edges and more than one block."""


def promoted_matmul(
    x_values: Float[Array, "rows contraction"],
    x_scales: Float32[Array, "rows tiles"],
    w_values: Float[Array, "columns contraction"],
    w_scales: Float32[Array, "w_scale_rows tiles"],
    out_dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "rows columns"]:
    """See `pallas_kernels.fp8_matmul.fp8_matmul`; `interpret` runs the kernel on any device, slowly.

    Every 8-bit float is a float16, up to a power of two that goes to the scales, and products of float16 are exact in
    float32. So only sums round: those of 128 products, and those of their results times both scales.
    """
    (rows, contraction), columns = x_values.shape, w_values.shape[0]
    blocks = INTERPRETED if interpret else COMPILED
    w_by_tiles = w_scales.shape[0] == columns
    row_blocks, column_blocks = pl.cdiv(rows, blocks.rows), pl.cdiv(columns, blocks.columns)
    shape = (blocks.rows, blocks.columns)

    def kernel(
        x_words_ref: jax.Ref, x_scales_ref: jax.Ref, w_words_ref: jax.Ref, w_scales_ref: jax.Ref, out_ref: jax.Ref
    ) -> None:
        row_block, column_block = block_of_program(pl.program_id(0), row_blocks, column_blocks)
        row_span = block_span(row_block, blocks.rows, rows)
        column_span = block_span(column_block, blocks.columns, columns)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            words = block_span(step, BLOCK_SIZE // PER_WORD, contraction // PER_WORD)
            x = widened(load_tile(x_words_ref, row_span, words), x_values.dtype)
            w = widened(load_tile(w_words_ref, column_span, words), w_values.dtype)
            product = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            x_scale = load_vector(x_scales_ref, row_span, step)
            if w_by_tiles:
                w_scale = load_vector(w_scales_ref, column_span, step)
                return total + product * x_scale[:, None] * w_scale[None, :]
            w_scale = load(w_scales_ref.at[step, column_span.start // BLOCK_SIZE])
            return total + product * (x_scale * w_scale)[:, None]

        total = jax.lax.fori_loop(0, contraction // BLOCK_SIZE, add, jnp.zeros(shape, jnp.float32))
        store_tile(out_ref, total, row_span, column_span)

    operands = (
        *(_words(x_values), _scales_by_step(x_scales, x_values.dtype)),
        *(_words(w_values), _scales_by_step(w_scales, w_values.dtype)),
    )
    (out,) = triton_call(
        kernel,
        f"fp8_matmul_{'tiles' if w_by_tiles else 'blocks'}_promoted",
        grid=(row_blocks * column_blocks,),
        in_specs=[pl.BlockSpec()] * len(operands),
        out_specs=[pl.BlockSpec()],
        out_shape=[jax.ShapeDtypeStruct((rows, columns), out_dtype)],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        flops=2 * rows * columns * contraction,
    )(*operands)
    product: jax.Array = out
    return product


def widened(words: UInt32[Array, "rows words"], dtype: DTypeLike) -> Float16[Array, "rows 4*words"]:
    """The 8-bit floats in words, as float16: exact in E5M2, and 2^-8 times what they are in E4M3. NaN stays NaN.

    Those of a word are permuted, which is nothing to a product if it is the same in both operands. Two are made with
    each instruction, and lie in a register as tensor cores want them: converted one by one, the same loop compiled for
    an A100 has 3.2 times the instructions. Triton itself has no conversion from E4M3 for an A100.
    """
    # The first and third number have their sign in the middle of a word once it is shifted, the others as they are.
    halves = [_halves(_widened_pair(shifted, dtype)) for shifted in (words << 8, words)]
    by_half = [jnp.stack(numbers, axis=-1) for numbers in zip(*halves, strict=True)]
    return jnp.stack(by_half, axis=-1).reshape(words.shape[0], words.shape[1] * PER_WORD)


def _widened_pair(words: UInt32[Array, "rows words"], dtype: DTypeLike) -> UInt32[Array, "rows words"]:
    """Two float16 in a word, of the 8-bit floats in the upper bytes of its halves."""
    if dtype == jnp.float8_e5m2:
        return words & jnp.uint32(0xFF00FF00)
    # The exponent has a bit less, and a bias that is 8 less.
    numbers = (words & jnp.uint32(0x80008000)) | ((words >> 1) & jnp.uint32(0x3F803F80))
    # NaN is the magnitude with all bits set, which one more carries into the exponent's first bit.
    return numbers | ((numbers + jnp.uint32(0x00800080)) & jnp.uint32(0x40004000))


def _halves(words: UInt32[Array, "rows words"]) -> tuple[Float16[Array, "rows words"], Float16[Array, "rows words"]]:
    lower, upper = (half.astype(jnp.uint16) for half in (words & jnp.uint32(0xFFFF), words >> 16))
    return jax.lax.bitcast_convert_type(lower, jnp.float16), jax.lax.bitcast_convert_type(upper, jnp.float16)


def _words(values: Float[Array, "rows contraction"]) -> UInt32[Array, "rows words"]:
    return jax.lax.bitcast_convert_type(values.reshape(values.shape[0], -1, PER_WORD), jnp.uint32)


def _scales_by_step(scales: Float32[Array, "rows tiles"], dtype: DTypeLike) -> Float32[Array, "tiles rows"]:
    """Scales of one step side by side, times what `widened` numbers lack.

    In E4M3 those from 2^120 on become infinite; with them, numbers from 256 on stand for infinity as it is.
    """
    return scales.T * jnp.float32(256 if dtype == jnp.float8_e4m3fn else 1)
