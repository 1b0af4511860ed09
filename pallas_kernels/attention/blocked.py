"""Attention in blocks of queries, each against only the keys that causality lets it see."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import masked_attention, visible

BLOCK_SIZE = 256
MAX_BLOCKS = 16


def blocked_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    *,
    query_segment_ids: Int[Array, "batch query_length"] | None,
    key_segment_ids: Int[Array, "batch key_length"] | None,
    causal: bool,
    scale: float,
) -> Float[Array, "batch query_length heads value_dim"]:
    """See `pallas_kernels.attention.attention`.

    Scores of one block at a time exist, forward and backward (each block is recomputed when its gradient is
    taken). Causal work is 1/2 + 1/(2 blocks) of the whole matrix. Blocks are unrolled, so their number is
    bounded and their size grows with the sequence.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    block = max(BLOCK_SIZE, -(-query_length // MAX_BLOCKS))

    # What a block needs is cut out and masked inside what is recomputed, so that only whole inputs are kept.
    @functools.partial(jax.checkpoint, static_argnums=(5, 6))
    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        query_segment_ids: jax.Array | None,
        key_segment_ids: jax.Array | None,
        start: int,
        stop: int,
    ) -> jax.Array:
        keys = stop if causal else key_length
        mask = visible(
            jnp.arange(start, stop),
            jnp.arange(keys),
            None if query_segment_ids is None else query_segment_ids[:, start:stop],
            None if key_segment_ids is None else key_segment_ids[:, :keys],
            causal,
        )
        return masked_attention(query[:, start:stop], key[:, :keys], value[:, :keys], mask, scale)

    outputs = [
        attend(query, key, value, query_segment_ids, key_segment_ids, start, min(start + block, query_length))
        for start in range(0, query_length, block)
    ]
    return jnp.concatenate(outputs, axis=1)
