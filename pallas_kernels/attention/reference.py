"""Attention written as its definition: the whole score matrix, one softmax."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention.spec import AttentionSpec, SegmentIds, visible


@jax.custom_jvp
def masked_softmax(scores: Float[Array, "*rows keys"], mask: Bool[Array, "*#rows keys"]) -> Float[Array, "*rows keys"]:
    """Softmax over the keys that the mask lets through; zeros for a row that sees none.

    The result alone is kept for the backward pass.
    """
    scores = jnp.where(mask, scores, -jnp.inf)
    largest = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(scores.dtype).min)
    exponentials = jnp.exp(scores - largest)
    # The sum is 0 where nothing is seen, and 1 or more elsewhere.
    return exponentials * (1.0 / jnp.maximum(exponentials.sum(-1, keepdims=True), 1.0))


@masked_softmax.defjvp
def _masked_softmax_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, Any]) -> tuple[Array, Array]:
    weights = masked_softmax(*primals)
    return weights, weights * (tangents[0] - (weights * tangents[0]).sum(-1, keepdims=True))


def masked_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    mask: Bool[Array, "#batch query_length key_length"],
    spec: AttentionSpec,
) -> Float[Array, "batch query_length heads value_dim"]:
    """Attends under an explicit mask; a query that sees no key gets zeros, and zero gradients."""
    weights = masked_softmax(_scores(query, key, spec), mask[:, None, None])
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)
    return out.reshape(*query.shape[:3], value.shape[-1])


def _scores(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    spec: AttentionSpec,
) -> Float[Array, "batch kv_heads group query_length key_length"]:
    """In float32, or in float64 if the inputs are."""
    batch, query_length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, query_length, kv_heads, heads // kv_heads, head_dim)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=dtype) * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)


def _mask(query: Array, key: Array, segment_ids: SegmentIds, spec: AttentionSpec) -> Bool[Array, "#batch queries keys"]:
    return visible(spec, jnp.arange(query.shape[1]), jnp.arange(key.shape[1]), segment_ids)


def reference_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
) -> Float[Array, "batch query_length heads value_dim"]:
    """See `pallas_kernels.attention.attention`."""
    return masked_attention(query, key, value, _mask(query, key, segment_ids, spec), spec)


def reference_with_log_sum_exp(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
) -> tuple[Float[Array, "batch query_length heads value_dim"], Float[Array, "batch query_length heads"]]:
    """See `pallas_kernels.attention.attention_with_log_sum_exp`."""
    mask = _mask(query, key, segment_ids, spec)[:, None, None]
    scores = _scores(query, key, spec)
    sees = mask.any(-1)
    # Where nothing is seen, the sum is over all and thrown away: -inf alone would have NaN for its gradient.
    among = jnp.where(mask | ~sees[..., None], scores, -jnp.inf)
    log_sum_exp = jnp.where(sees, jax.nn.logsumexp(among, -1), -jnp.inf)
    by_query = jnp.moveaxis(log_sum_exp, 3, 1).reshape(query.shape[:3])
    return reference_attention(query, key, value, segment_ids, spec), by_query
