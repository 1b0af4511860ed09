"""A dense layer whose three products, forward and backward, are of 8-bit floats."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8_matmul.api import KERNEL_OUT_DTYPES, Implementation, fp8_matmul
from pallas_kernels.fp8_matmul.quantize import (
    BLOCK_SIZE,
    FP8_DTYPES,
    Quantized,
    quantize_blocks,
    quantize_tiles,
    transpose_tiles,
)


def fp8_dense(
    x: Float[Array, "*batch in"],
    w: Float[Array, "in out"],
    *,
    gradient_dtype: DTypeLike = jnp.float8_e4m3fn,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out"]:
    """The product `x @ w` with everything quantized on the way (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    Activations and weights become E4M3. Activations are kept in 8 bits for the backward pass, with power-of-two
    scales, so that quantizing them anew along tokens loses nothing more. Gradients are quantized twice from what comes
    in, along `out` and along tokens; below 1e-8 their error grows, as scales are made for 1e-4 at least, so scale the
    loss if they are that small. Products add in float32; that for `w` is rounded to the dtype of `w` at the end.

    Args:
        x: activations, bfloat16 or float32; `in` must be a multiple of 128. Tokens, the product of `batch`, may be any
            number: they are padded with zeros to a multiple of 128.
        w: weights, of any floating dtype; `out` must be a multiple of 128.
        gradient_dtype: of the quantized gradients: float8_e4m3fn, or float8_e5m2 for more range and less precision.
        implementation: as in `fp8_matmul`.

    Returns:
        The product, in the dtype of `x`, differentiable in `x` and `w`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    if str(x.dtype) not in KERNEL_OUT_DTYPES:
        raise ValueError(f"fp8_dense: x is {x.dtype}; give {' or '.join(KERNEL_OUT_DTYPES)}")
    if jnp.dtype(gradient_dtype) not in FP8_DTYPES:
        raise ValueError(
            f"fp8_dense: gradient_dtype is {jnp.dtype(gradient_dtype)}; give {' or '.join(map(str, FP8_DTYPES))}"
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(f"fp8_dense: x ends in {x.shape[-1]} and w begins with {w.shape[0]}; both must be `in`")
    if any(size == 0 or size % BLOCK_SIZE for size in w.shape):
        raise ValueError(f"fp8_dense: w has shape {w.shape}, not multiples of {BLOCK_SIZE}; pad x and w with zeros")
    if x.size == 0:
        raise ValueError(f"fp8_dense: x has shape {x.shape}, which holds no token")
    tokens = x.reshape(-1, x.shape[-1])
    padded = jnp.pad(tokens, ((0, -tokens.shape[0] % BLOCK_SIZE), (0, 0)))
    y = _dense(padded, w, jnp.dtype(gradient_dtype), implementation)
    return y[: tokens.shape[0]].reshape(*x.shape[:-1], w.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dense(x: jax.Array, w: jax.Array, gradient_dtype: jnp.dtype, implementation: Implementation) -> jax.Array:
    return _forward(x, w, gradient_dtype, implementation)[0]


type Residuals = tuple[Quantized, Quantized, tuple[jax.Array, jax.Array]]


def _forward(
    x: jax.Array, w: jax.Array, gradient_dtype: jnp.dtype, implementation: Implementation
) -> tuple[jax.Array, Residuals]:
    x_tiles, w_blocks = quantize_tiles(x, power_of_two_scales=True), quantize_blocks(w)
    y = fp8_matmul(*x_tiles, w_blocks.values.T, w_blocks.scales.T, out_dtype=x.dtype, implementation=implementation)
    # Of the operands themselves only the dtypes are needed.
    return y, (x_tiles, w_blocks, (jnp.zeros(0, x.dtype), jnp.zeros(0, w.dtype)))


def _backward(
    gradient_dtype: jnp.dtype, implementation: Implementation, residuals: Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_tiles, w_blocks, (x, w) = residuals
    along_out, along_tokens = quantize_tiles(dy, dtype=gradient_dtype), quantize_tiles(dy.T, dtype=gradient_dtype)
    dx = fp8_matmul(*along_out, *w_blocks, out_dtype=x.dtype, implementation=implementation)
    x_along_tokens = transpose_tiles(*x_tiles, power_of_two_scales=True)
    dw = fp8_matmul(*x_along_tokens, *along_tokens, out_dtype=jnp.float32, implementation=implementation)
    return dx, dw.astype(w.dtype)


_dense.defvjp(_forward, _backward)
