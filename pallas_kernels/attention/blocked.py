"""Attention in blocks of queries, each against only the keys that causality lets it see."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.partial import Attended, Keys, Queries, attend_at_once, gradient_at_once

BLOCK_SIZE = 128
MAX_BLOCKS = 16

SegmentIds = Int[Array, "batch length"] | None


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

    Scores of one block at a time exist, forward and backward: what is kept is the output and each query's log-sum-exp,
    from which the backward pass computes the scores again (Dao et al. 2022, arXiv:2205.14135). Causal work is
    1/2 + 1/(2 blocks) of the whole matrix. Blocks are unrolled, so their number is bounded and their size grows with
    the sequence.
    """

    def blocks(
        query: jax.Array, key: jax.Array, value: jax.Array, query_ids: SegmentIds, key_ids: SegmentIds
    ) -> Iterator[tuple[Queries, Keys, slice, slice]]:
        length = query.shape[1]
        size = max(BLOCK_SIZE, -(-length // MAX_BLOCKS))
        for start in range(0, length, size):
            here = slice(start, min(start + size, length))
            seen = slice(0, here.stop if causal else key.shape[1])
            queries = Queries(query[:, here], jnp.arange(here.start, here.stop), _at(query_ids, here))
            yield queries, Keys(key[:, seen], value[:, seen], jnp.arange(seen.stop), _at(key_ids, seen)), here, seen

    def forward(*arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        parts = [attend_at_once(queries, keys, causal, scale) for queries, keys, _, _ in blocks(*arrays)]
        found = Attended(*(jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True)))
        out = found.out.astype(value.dtype)
        return out, (arrays, out, found.log_sum_exp)

    def backward(kept: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
        arrays, out, log_sum_exp = kept
        correction = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        terms = [
            gradient_at_once(queries, log_sum_exp[:, at], gradient[:, at], correction[:, at], keys, causal, scale)
            for queries, keys, at, _ in blocks(*arrays)
        ]
        # The last block sees all keys, so the others' terms are added to its own.
        *others, (_, of_key, of_value) = terms
        for (_, more_of_key, more_of_value), (_, _, _, seen) in zip(others, blocks(*arrays), strict=False):
            of_key, of_value = of_key.at[:, seen].add(more_of_key), of_value.at[:, seen].add(more_of_value)
        gradients = jnp.concatenate([of_query for of_query, _, _ in terms], axis=1), of_key, of_value
        narrow = (gradient.astype(array.dtype) for gradient, array in zip(gradients, arrays, strict=False))
        return (*narrow, None, None)

    attend = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    attend.defvjp(forward, backward)
    return attend(query, key, value, query_segment_ids, key_segment_ids)


def _at(segment_ids: SegmentIds, where: slice) -> SegmentIds:
    return None if segment_ids is None else segment_ids[:, where]
