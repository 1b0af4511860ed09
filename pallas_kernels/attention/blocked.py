"""Attention in blocks of queries, each against only the keys that causality and the window let it see."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.reference import masked_attention
from pallas_kernels.attention.spec import AttentionSpec, SegmentIds, visible

BLOCK_SIZE = 256
MAX_BLOCKS = 16


def blocked_attention(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
) -> Float[Array, "batch query_length heads value_dim"]:
    """See `pallas_kernels.attention.attention`.

    Scores of one block at a time exist, forward and backward (each block is recomputed when its gradient is
    taken). Causal work is 1/2 + 1/(2 blocks) of the whole matrix. Blocks are unrolled, so their number is
    bounded and their size grows with the sequence.
    """
    query_length, key_length = query.shape[1], key.shape[1]
    block = max(BLOCK_SIZE, -(-query_length // MAX_BLOCKS))
    before, after = spec.reach

    # What a block needs is cut out and masked inside what is recomputed, so that only whole inputs are kept.
    @functools.partial(jax.checkpoint, static_argnums=(4, 5))
    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: SegmentIds, start: int, stop: int
    ) -> jax.Array:
        first = 0 if before is None else min(max(0, start - before), key_length - 1)
        last = key_length if after is None else min(stop + after, key_length)
        mask = visible(
            spec,
            jnp.arange(start, stop),
            jnp.arange(first, last),
            None if segment_ids is None else (segment_ids[0][:, start:stop], segment_ids[1][:, first:last]),
        )
        return masked_attention(query[:, start:stop], key[:, first:last], value[:, first:last], mask, spec)

    outputs = [
        attend(query, key, value, segment_ids, start, min(start + block, query_length))
        for start in range(0, query_length, block)
    ]
    return jnp.concatenate(outputs, axis=1)
