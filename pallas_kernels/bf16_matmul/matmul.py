"""Dense products with fused epilogues as kernels, with gradients that are kernels too.

Only what goes in is kept for the backward pass; sums that an epilogue changed are computed again, in a kernel whose
epilogue is the derivative. `gpu` is the name of a GPU's folder, or None to interpret kernels.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.bf16_matmul.activations import ACTIVATIONS
from pallas_kernels.bf16_matmul.product import Tiles, given, left_gradient, product, right_gradient


def pallas_matmul(
    gpu: str | None,
    x: Float[Array, "rows inner"],
    w: Float[Array, "inner cols"],
    bias: Float[Array, "cols"] | None,
    residual: Float[Array, "rows cols"] | None,
    *,
    activation: str | None,
    out_dtype: jnp.dtype,
) -> Float[Array, "rows cols"]:
    """See `pallas_kernels.bf16_matmul.matmul`."""
    residual_dtype = None if residual is None else residual.dtype
    return _matmul(_Matmul(gpu, activation, out_dtype, residual_dtype), x, w, bias, residual)


@dataclass(frozen=True)
class _Matmul:
    gpu: str | None
    activation: str | None
    out_dtype: jnp.dtype
    residual_dtype: jnp.dtype | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(op: _Matmul, x: Array, w: Array, bias: Array | None, residual: Array | None) -> Array:
    def epilogue(sums: Tiles, vectors: Tiles, matrices: Tiles) -> Tiles:
        out = sums[0] + vectors[0] if vectors else sums[0]
        if op.activation is not None:
            out = ACTIVATIONS[op.activation].function(out)
        return [out + matrices[0] if matrices else out]

    (out,) = product(
        "matmul",
        op.gpu,
        x,
        [w],
        out_dtypes=[op.out_dtype],
        vectors=given(bias),
        matrices=given(residual),
        epilogue=epilogue,
    )
    return out


def _matmul_forward(
    op: _Matmul, x: Array, w: Array, bias: Array | None, residual: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return _matmul(op, x, w, bias, residual), (x, w, bias)


def _matmul_backward(
    op: _Matmul, kept: tuple[Array, Array, Array | None], gradient: Array
) -> tuple[Array, Array, Array | None, Array | None]:
    x, w, bias = kept
    of_sum = gradient.astype(x.dtype)
    if op.activation is not None:
        derivative = ACTIVATIONS[op.activation].derivative

        def epilogue(sums: Tiles, vectors: Tiles, matrices: Tiles) -> Tiles:
            return [derivative(sums[0] + vectors[0] if vectors else sums[0]) * matrices[0]]

        (of_sum,) = product(
            "matmul_sum_gradient",
            op.gpu,
            x,
            [w],
            out_dtypes=[x.dtype],
            vectors=given(bias),
            matrices=[gradient],
            epilogue=epilogue,
        )
    of_bias = None if bias is None else of_sum.sum(0, dtype=jnp.float32).astype(bias.dtype)
    of_residual = None if op.residual_dtype is None else gradient.astype(op.residual_dtype)
    return left_gradient(op.gpu, of_sum, w), right_gradient(op.gpu, x, of_sum), of_bias, of_residual


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pallas_swiglu(
    gpu: str | None,
    x: Float[Array, "rows inner"],
    w_gate: Float[Array, "inner cols"],
    w_up: Float[Array, "inner cols"],
) -> Float[Array, "rows cols"]:
    """See `pallas_kernels.bf16_matmul.swiglu`."""
    silu = ACTIVATIONS["silu"].function
    (out,) = product(
        "swiglu", gpu, x, [w_gate, w_up], out_dtypes=[x.dtype], epilogue=lambda sums, _, __: [silu(sums[0]) * sums[1]]
    )
    return out


def _swiglu_forward(gpu: str | None, x: Array, w_gate: Array, w_up: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return pallas_swiglu(gpu, x, w_gate, w_up), (x, w_gate, w_up)


def _swiglu_backward(gpu: str | None, kept: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    x, w_gate, w_up = kept
    silu = ACTIVATIONS["silu"]

    def epilogue(sums: Tiles, vectors: Tiles, matrices: Tiles) -> Tiles:
        gate, up = sums
        return [matrices[0] * up * silu.derivative(gate), matrices[0] * silu.function(gate)]

    of_gate, of_up = product(
        "swiglu_sums_gradient",
        gpu,
        x,
        [w_gate, w_up],
        out_dtypes=[x.dtype] * 2,
        matrices=[gradient],
        epilogue=epilogue,
    )
    of_x = left_gradient(gpu, of_gate, w_gate, out_dtype=jnp.dtype(jnp.float32))
    of_x = left_gradient(gpu, of_up, w_up, add=of_x)
    return of_x, right_gradient(gpu, x, of_gate), right_gradient(gpu, x, of_up)


pallas_swiglu.defvjp(_swiglu_forward, _swiglu_backward)
