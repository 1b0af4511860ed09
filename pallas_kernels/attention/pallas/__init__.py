"""Attention as kernels: forward, and backward with weights computed anew."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.pallas.backward import key_value_gradient, query_gradient
from pallas_kernels.attention.pallas.blocks import KernelBlocks, choose_blocks
from pallas_kernels.attention.pallas.forward import forward
from pallas_kernels.attention.pallas.tiles import SMALLEST_TILE
from pallas_kernels.attention.spec import AttentionSpec, SegmentIds
from pallas_kernels.dispatch import device_at_hand

__all__ = ["pallas_attention", "pallas_with_log_sum_exp"]


def pallas_with_log_sum_exp(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
    *,
    interpret: bool,
) -> tuple[Float[Array, "batch query_length heads value_dim"], Float[Array, "batch query_length heads"]]:
    """See `pallas_kernels.attention.attention_with_log_sum_exp`."""
    blocks = choose_blocks(device_at_hand().gpu, query, key, value)
    value_dim = value.shape[-1]
    query, key, value = (_whole_tiles(x) for x in (query, key, value))
    out, log_sum_exp = attend_with_blocks(query, key, value, segment_ids, spec, blocks, interpret)
    return out[..., :value_dim], jnp.swapaxes(log_sum_exp, 1, 2)


def pallas_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
    *,
    interpret: bool,
) -> Float[Array, "batch query_length heads value_dim"]:
    """See `pallas_kernels.attention.attention`. Memory grows with the length, not with its square."""
    return pallas_with_log_sum_exp(query, key, value, segment_ids, spec, interpret=interpret)[0]


def _whole_tiles(x: Float[Array, "batch length heads dim"]) -> Float[Array, "batch length heads padded_dim"]:
    """Zeros behind each head, up to what tensor cores multiply; most sizes need none."""
    missing = -x.shape[-1] % SMALLEST_TILE
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend_with_blocks(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: SegmentIds,
    spec: AttentionSpec,
    blocks: KernelBlocks,
    interpret: bool,
) -> tuple[Array, Array]:
    return forward(query, key, value, segment_ids, spec, blocks.forward, interpret)


Residuals = tuple[Array, Array, Array, SegmentIds, Array, Array]


def _attend_forward(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: SegmentIds,
    spec: AttentionSpec,
    blocks: KernelBlocks,
    interpret: bool,
) -> tuple[tuple[Array, Array], Residuals]:
    out, log_sum_exp = forward(query, key, value, segment_ids, spec, blocks.forward, interpret)
    return (out, log_sum_exp), (query, key, value, segment_ids, out, log_sum_exp)


def _attend_backward(
    spec: AttentionSpec,
    blocks: KernelBlocks,
    interpret: bool,
    residuals: Residuals,
    gradients: tuple[Array, Array],
) -> tuple[Array, Array, Array, None]:
    query, key, value, segment_ids, out, log_sum_exp = residuals
    gradient, gradient_of_log_sum_exp = gradients
    products = gradient.astype(jnp.float32) * out.astype(jnp.float32)
    # A query that sees nothing has -inf for its logarithm, whatever it is.
    of_logarithm = jnp.where(jnp.isfinite(log_sum_exp), gradient_of_log_sum_exp, 0.0)
    correction = jnp.swapaxes(products.sum(-1), 1, 2) - of_logarithm
    operands = (query, key, value, segment_ids, gradient, log_sum_exp, correction, spec)
    of_query = query_gradient(*operands, blocks.query_gradient, interpret)
    of_key, of_value = key_value_gradient(*operands, blocks.key_value_gradient, interpret)
    return of_query, of_key, of_value, None


attend_with_blocks.defvjp(_attend_forward, _attend_backward)
