"""The product in plain JAX: of what the 8-bit floats stand for."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.fp8_matmul.quantize import dequantize


def reference_matmul(
    x_values: Float[Array, "rows contraction"],
    x_scales: Float32[Array, "rows tiles"],
    w_values: Float[Array, "columns contraction"],
    w_scales: Float32[Array, "w_scale_rows tiles"],
    out_dtype: DTypeLike,
) -> Float[Array, "rows columns"]:
    """See `pallas_kernels.fp8_matmul.fp8_matmul`; computed in float32, or in float64 for results of that dtype."""
    dtype = jnp.promote_types(jnp.float32, out_dtype)
    x, w = dequantize(x_values, x_scales, dtype=dtype), dequantize(w_values, w_scales, dtype=dtype)
    return jnp.einsum("mk,nk->mn", x, w, precision=jax.lax.Precision.HIGHEST).astype(out_dtype)


def dequantized_bf16_matmul(
    x_values: Float[Array, "rows contraction"],
    x_scales: Float32[Array, "rows tiles"],
    w_values: Float[Array, "columns contraction"],
    w_scales: Float32[Array, "w_scale_rows tiles"],
    out_dtype: DTypeLike,
) -> Float[Array, "rows columns"]:
    """See `pallas_kernels.fp8_matmul.fp8_matmul`; operands are rounded to bfloat16, sums are float32."""
    x, w = (dequantize(*q, dtype=jnp.bfloat16) for q in ((x_values, x_scales), (w_values, w_scales)))
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.float32).astype(out_dtype)
