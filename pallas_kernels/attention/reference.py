"""Attention written as its definition: the whole score matrix, one softmax."""

from typing import Any

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
    scale: float,
) -> Float[Array, "batch query_length heads value_dim"]:
    """Attends under an explicit mask; a query that sees no key gets zeros, and zero gradients."""
    batch, query_length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, query_length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32) * scale
    weights = masked_softmax(scores, mask[:, None, None])
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
