"""Quantizing to 8-bit floats, with the largest magnitude at hand (arXiv:2412.19437, section 3.3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

BLOCK_SIZE = 128
SMALLEST_AMAX = 1e-4
"""Smaller tiles are scaled as if their largest magnitude were this, so that a tile of zeros has a scale."""
FP8_DTYPES = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))


class Quantized(NamedTuple):
    """8-bit floats and what to multiply them by."""

    values: Float[Array, "rows cols"]
    """float8_e4m3fn or float8_e5m2."""
    scales: Float32[Array, "scale_rows scale_cols"]
    """One per 128 columns, and per row (tiles) or per 128 rows (blocks)."""


def quantize_tiles(
    x: Float[Array, "rows cols"], *, dtype: DTypeLike = jnp.float8_e4m3fn, power_of_two_scales: bool = False
) -> Quantized:
    """Quantizes by tiles of 1 x 128, as activations and gradients are.

    A scale is the largest magnitude of its tile, taken as 1e-4 at least, over the largest that `dtype` has (448 for
    E4M3, 57344 for E5M2). A tile with an infinity or a NaN becomes NaN as a whole when it is dequantized.

    Args:
        x: what to quantize; `cols` must be a multiple of 128.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two_scales: rounds scales up to powers of two. A rescaling between such scales is exact but for
            underflow, so `transpose_tiles` then adds no second error; but magnitudes from 2^127 on may decode to
            infinity.

    Returns:
        The values, of the shape of `x`, and their scales, `[rows, cols / 128]`.

    Raises:
        ValueError: `cols` is no multiple of 128, or `dtype` is no such type.
    """
    rows, cols = x.shape
    if cols % BLOCK_SIZE:
        raise ValueError(f"quantize_tiles: cols is {cols}, no multiple of {BLOCK_SIZE}; pad x with zeros")
    tiles = x.reshape(rows, cols // BLOCK_SIZE, BLOCK_SIZE).astype(jnp.float32)
    scales = _scales(_amax(tiles, (2,)), dtype, power_of_two_scales, "quantize_tiles")
    return Quantized((tiles / scales[..., None]).astype(dtype).reshape(x.shape), scales)


def quantize_blocks(
    w: Float[Array, "rows cols"], *, dtype: DTypeLike = jnp.float8_e4m3fn, power_of_two_scales: bool = False
) -> Quantized:
    """Quantizes by blocks of 128 x 128, as weights are; `values.T` and `scales.T` quantize `w.T`.

    Args:
        w: what to quantize; both dimensions must be multiples of 128.
        dtype: as in `quantize_tiles`.
        power_of_two_scales: as in `quantize_tiles`.

    Returns:
        The values, of the shape of `w`, and their scales, `[rows / 128, cols / 128]`.

    Raises:
        ValueError: a dimension is no multiple of 128, or `dtype` is neither of the two.
    """
    rows, cols = w.shape
    if rows % BLOCK_SIZE or cols % BLOCK_SIZE:
        raise ValueError(f"quantize_blocks: shape is {w.shape}, not multiples of {BLOCK_SIZE}; pad w with zeros")
    blocks = w.reshape(rows // BLOCK_SIZE, BLOCK_SIZE, cols // BLOCK_SIZE, BLOCK_SIZE).astype(jnp.float32)
    scales = _scales(_amax(blocks, (1, 3)), dtype, power_of_two_scales, "quantize_blocks")
    return Quantized((blocks / scales[:, None, :, None]).astype(dtype).reshape(w.shape), scales)


def transpose_tiles(
    values: Float[Array, "rows cols"], scales: Float32[Array, "rows col_tiles"], *, power_of_two_scales: bool = False
) -> Quantized:
    """Quantizes the transpose, so that tiles run along what were rows: what a weight's gradient contracts.

    Args:
        values: as `quantize_tiles` gave them; `rows` must be a multiple of 128.
        scales: likewise.
        power_of_two_scales: as in `quantize_tiles`; if the old scales are powers of two and the new ones too, what is
            lost is below the smallest number of the new tile.

    Raises:
        ValueError: `rows` is no multiple of 128.
    """
    if values.shape[0] % BLOCK_SIZE:
        raise ValueError(
            f"transpose_tiles: rows is {values.shape[0]}, no multiple of {BLOCK_SIZE}; pad with zeros before quantizing"
        )
    return quantize_tiles(dequantize(values, scales).T, dtype=values.dtype, power_of_two_scales=power_of_two_scales)


def dequantize(
    values: Float[Array, "rows cols"],
    scales: Float32[Array, "scale_rows scale_cols"],
    *,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "rows cols"]:
    """What the values stand for: each times the scale of its tile or block.

    Args:
        values: 8-bit floats.
        scales: `[rows, cols / 128]` or `[rows / 128, cols / 128]`.
        dtype: of the result; products are rounded to it once.
    """
    rows, cols = values.shape
    height = rows // scales.shape[0]
    blocks = values.reshape(scales.shape[0], height, scales.shape[1], cols // scales.shape[1])
    wide = jnp.promote_types(jnp.float32, dtype)
    return (blocks.astype(wide) * scales[:, None, :, None].astype(wide)).astype(dtype).reshape(rows, cols)


def _amax(x: Float32[Array, "..."], axes: tuple[int, ...]) -> Float32[Array, "..."]:
    # Without their sign, floats are ordered as their bits are, NaN last. XLA's maximum of floats can lose a NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits.max(axes), jnp.float32)


def _scales(amax: jax.Array, dtype: DTypeLike, power_of_two: bool, op: str) -> jax.Array:
    if jnp.dtype(dtype) not in FP8_DTYPES:
        raise ValueError(f"{op}: dtype is {jnp.dtype(dtype)}; give {' or '.join(map(str, FP8_DTYPES))}")
    scales = jnp.where(amax < SMALLEST_AMAX, SMALLEST_AMAX, amax) / float(jnp.finfo(dtype).max)
    return _rounded_up_to_power_of_two(scales) if power_of_two else scales


def _rounded_up_to_power_of_two(x: jax.Array) -> jax.Array:
    mantissa_mask = jnp.uint32((1 << 23) - 1)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + mantissa_mask) & ~mantissa_mask, jnp.float32)
    # The bits of a NaN would be carried into those of a finite number.
    return jnp.where(jnp.isfinite(x), rounded, x)
