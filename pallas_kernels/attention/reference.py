"""Attention written as its definition: the whole score matrix, one softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def visible(
    query_positions: Int[Array, "query_length"],
    key_positions: Int[Array, "key_length"],
    query_segment_ids: Int[Array, "batch query_length"] | None,
    key_segment_ids: Int[Array, "batch key_length"] | None,
    causal: bool,
) -> Bool[Array, "#batch query_length key_length"]:
    """Which key each query may see."""
    mask = jnp.ones((1, query_positions.size, key_positions.size), bool)
    if causal:
        mask = mask & (query_positions[:, None] >= key_positions[None, :])
    if query_segment_ids is not None and key_segment_ids is not None:
        mask = mask & (query_segment_ids[:, :, None] == key_segment_ids[:, None, :])
    return mask


def masked_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    mask: Bool[Array, "#batch query_length key_length"],
    scale: float,
) -> Float[Array, "batch query_length heads value_dim"]:
    """Attends under an explicit mask; a query that sees no key gets zeros, and zero gradients."""
    batch, query_length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, query_length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32) * scale
    mask = mask[:, None, None]
    # JAX's softmax keeps its result alone for the backward pass.
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    weights = jnp.where(mask, weights, 0.0)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)
    return out.reshape(batch, query_length, heads, value.shape[-1])


def reference_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    *,
    query_segment_ids: Int[Array, "batch query_length"] | None,
    key_segment_ids: Int[Array, "batch key_length"] | None,
    causal: bool,
    scale: float,
) -> Float[Array, "batch query_length heads value_dim"]:
    """See `pallas_kernels.attention.attention`."""
    mask = visible(jnp.arange(query.shape[1]), jnp.arange(key.shape[1]), query_segment_ids, key_segment_ids, causal)
    return masked_attention(query, key, value, mask, scale)
