"""Attention as each device computes its part of it, where XLA is not to split it."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dseekjax.models.operations import Attention
from dseekjax.parallel.layout import Layout

SegmentIds = tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]] | None
"""Of the queries and of the keys."""
Local = Callable[..., Float[Array, "batch seq heads value_dim"]]
"""`(query, key, value, segment_ids, causal, scale) -> attended`, all of it one device's part."""


def attention_by_hand(layout: Layout, local: Local) -> Attention:
    """Attention as `pallas_kernels.attention.attention` has it, `local` being run on each device.

    Args:
        layout: where logical axes lie.
        local: gets a device's sequences, or its part of each, and its heads, with the keys and values of those.
    """
    heads, kv_heads = layout.axes("heads"), layout.axes("kv_heads")
    queries = layout.spec(("batch", "sequence", "heads", "head_dim"))
    keys = layout.spec(("batch", "sequence", "kv_heads" if kv_heads == heads else "head_dim", "head_dim"))
    tokens = layout.spec(("batch", "sequence"))

    def attend(
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        *,
        query_segment_ids: Int[Array, "batch seq"] | None = None,
        key_segment_ids: Int[Array, "batch seq"] | None = None,
        causal: bool = True,
        scale: float | None = None,
    ) -> Float[Array, "batch seq heads value_dim"]:
        group = query.shape[2] // key.shape[2]
        factor = query.shape[-1] ** -0.5 if scale is None else scale

        def run(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: SegmentIds) -> jax.Array:
            if kv_heads != heads:
                first = jax.lax.axis_index(heads) * query.shape[2] if heads else 0
                key, value = (_of_heads(x, first, query.shape[2], group) for x in (key, value))
            return local(query, key, value, segment_ids, causal, factor)

        ids = None if query_segment_ids is None else (query_segment_ids, key_segment_ids)
        return layout.island(run, (queries, keys, keys, tokens), queries)(query, key, value, ids)

    return attend


def whole_rows(attention: Attention) -> Local:
    """`attention` for devices that hold whole sequences."""

    def local(
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        segment_ids: SegmentIds,
        causal: bool,
        scale: float,
    ) -> Float[Array, "batch seq heads value_dim"]:
        of_queries, of_keys = segment_ids or (None, None)
        return attention(
            query,
            key,
            value,
            query_segment_ids=of_queries,
            key_segment_ids=of_keys,
            causal=causal,
            scale=scale,
        )

    return local


def _of_heads(
    x: Float[Array, "batch seq kv_heads dim"], first: jax.Array | int, count: int, group: int
) -> Float[Array, "batch seq local_kv_heads dim"]:
    """The keys or values that `count` query heads from `first` on use, `group` of them sharing each."""
    together = math.gcd(count, group)
    return jnp.take(x, (first + jnp.arange(0, count, together)) // group, axis=2)
