"""The products as their definitions, in plain JAX: any device, any float dtype."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(
    x: Float[Array, "rows inner"], w: Float[Array, "inner cols"], dtype: DTypeLike
) -> Float[Array, "rows cols"]:
    """The product, summed in float32 at least and rounded once, to `dtype`.

    It is asked for in that dtype, as a cast beside it would be one more pass over memory on a GPU. Gradients are
    rounded to the dtype of the operands before they are multiplied: differentiated as it stands, the product of narrow
    operands would have wide ones backward, which no fast unit takes.
    """
    return jnp.dot(x, w, preferred_element_type=dtype)


def _forward(x: Array, w: Array, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return product(x, w, dtype), (x, w)


def _backward(dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, w = kept
    gradient = gradient.astype(x.dtype)
    return product(gradient, w.T, x.dtype), product(x.T, gradient, w.dtype)


product.defvjp(_forward, _backward)


def sum_dtype(x: Array) -> jnp.dtype:
    """What products of elements of `x` are summed in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def reference_matmul(
    x: Float[Array, "rows inner"],
    w: Float[Array, "inner cols"],
    bias: Float[Array, "cols"] | None,
    residual: Float[Array, "rows cols"] | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
) -> Float[Array, "rows cols"]:
    """See `pallas_kernels.bf16_matmul.matmul`."""
    if bias is None and activation is None and residual is None and x.dtype == out_dtype:
        return product(x, w, out_dtype)
    out = product(x, w, sum_dtype(x))
    if bias is not None:
        out = out + bias
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    if residual is not None:
        out = out + residual
    return out.astype(out_dtype)


def reference_swiglu(
    x: Float[Array, "rows inner"], w_gate: Float[Array, "inner cols"], w_up: Float[Array, "inner cols"]
) -> Float[Array, "rows cols"]:
    """See `pallas_kernels.bf16_matmul.swiglu`."""
    return (jax.nn.silu(product(x, w_gate, sum_dtype(x))) * product(x, w_up, sum_dtype(x))).astype(x.dtype)


def reference_grouped_matmul(
    x: Float[Array, "rows inner"], w: Float[Array, "groups inner cols"], group_sizes: Int[Array, "groups"]
) -> Float[Array, "rows cols"]:
    """See `pallas_kernels.bf16_matmul.grouped_matmul`.

    All rows are multiplied with the matrix of each group in turn, and those of the group are kept: as many times the
    FLOPs as there are groups, but only one group's products at a time. (`jax.lax.ragged_dot` is far slower on a CPU.)
    """
    stops = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def add(
        out: Float[Array, "rows cols"], group: tuple[Array, Array, Array]
    ) -> tuple[Float[Array, "rows cols"], None]:
        matrix, start, stop = group
        ours = (row >= start) & (row < stop)
        # Before the product too: what another group holds, were it NaN, must not reach this matrix's gradient.
        return jnp.where(ours, product(jnp.where(ours, x, 0), matrix, x.dtype), out), None

    out, _ = jax.lax.scan(add, jnp.zeros((x.shape[0], w.shape[2]), x.dtype), (w, stops - group_sizes, stops))
    return out


type Turns = tuple[Float[Array, "rows half"], Float[Array, "rows half"]]
"""Cosines and sines of the angles by which the pairs of each row turn."""


def turns(positions: Int[Array, "rows"], head_dim: int, theta: float, dtype: jnp.dtype) -> Turns:
    """Angles are position times theta^(-2i / head_dim) for pair i."""
    half = head_dim // 2
    frequencies = jnp.asarray(theta, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
    angles = positions[:, None].astype(dtype) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def turn(first: jax.Array, second: jax.Array, cosine: jax.Array, sine: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns pairs whose halves are `first` and `second`."""
    return first * cosine - second * sine, second * cosine + first * sine


def reference_qkv_rotary(
    x: Float[Array, "rows embed"],
    w_qkv: Float[Array, "embed all_heads_times_head_dim"],
    positions: Int[Array, "rows"],
    theta: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.bf16_matmul.qkv_rotary`; rows and columns are not yet split."""
    all_heads = num_heads + 2 * num_kv_heads
    heads = product(x, w_qkv, sum_dtype(x)).reshape(x.shape[0], all_heads, -1)
    query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    cosine, sine = (table[:, None] for table in turns(positions, heads.shape[-1], theta, sum_dtype(x)))

    def turned(heads: Float[Array, "rows heads head_dim"]) -> Float[Array, "rows heads head_dim"]:
        first, second = jnp.split(heads, 2, axis=-1)
        return jnp.concatenate(turn(first, second, cosine, sine), axis=-1)

    query, key, value = (y.reshape(x.shape[0], -1).astype(x.dtype) for y in (turned(query), turned(key), value))
    return query, key, value
