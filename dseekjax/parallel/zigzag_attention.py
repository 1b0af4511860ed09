"""Attention from the queries that a device holds to keys that are everywhere, tokens being in zig-zag order.

Work is done in pairs of half-chunks, one of queries and one of keys. Of a row's `2 C` half-chunks every device's two
see `2 C + 1` in all; pairs that causality hides are left out. Scores exist for one pair at a time, forward and
backward. All functions run inside an island.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dseekjax.parallel.by_hand import Local, SegmentIds
from dseekjax.parallel.order import AXIS, Index, half_chunks, places
from dseekjax.parallel.placement import pass_on
from pallas_kernels.attention import (
    Attended,
    Keys,
    Queries,
    merge_attended,
    partial_attention,
    partial_attention_gradient,
)

Pair = tuple[Index, Index]
"""Which half-chunk of the queries at hand, and which of the keys at hand."""


class _Block(NamedTuple):
    """What a device holds of the keys."""

    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads value_dim"]
    segment_ids: Int[Array, "batch seq"] | None


class _Upstream(NamedTuple):
    """See `partial_attention_gradient`; half-chunks lead, as in everything that is cut."""

    log_sum_exp: Float[Array, "2 batch seq heads"]
    gradient: Float[Array, "2 batch seq heads value_dim"]
    correction: Float[Array, "2 batch seq heads"]


class _Gradients(NamedTuple):
    """Sums in float32."""

    query: Float[Array, "2 batch seq heads head_dim"]
    key: Float[Array, "chunks batch seq kv_heads head_dim"]
    value: Float[Array, "chunks batch seq kv_heads value_dim"]


def ring_pairs(step: int, device: Index, causal: bool) -> Sequence[Pair]:
    """The pairs to work on when keys have gone `step` stops round the ring."""
    if not causal:
        return [(0, 0), (0, 1), (1, 0), (1, 1)]
    if step == 0:
        return [(0, 0), (1, 0), (1, 1)]
    # The late half-chunk of queries sees every early one of keys. Beside it, the early one sees the early one of keys
    # that come from in front of it, or else the late one sees the late one.
    beside = jnp.where(device >= step, 0, 1)
    return [(1, 0), (beside, beside)]


def gathered_pairs(device: Index, devices: int, causal: bool) -> Pair:
    """The pairs to work on, one per element, when the half-chunks of all devices lie one after the other."""
    if not causal:
        return jnp.repeat(jnp.arange(2), 2 * devices), jnp.tile(jnp.arange(2 * devices), 2)
    early, _ = half_chunks(device, devices)
    pair = jnp.arange(2 * devices + 1)
    late = pair > early
    chunk = jnp.where(late, pair - early - 1, pair)
    return late.astype(jnp.int32), jnp.where(chunk < devices, 2 * chunk, 2 * (2 * devices - 1 - chunk) + 1)


def _ring_forward(queries: Queries, block: _Block, causal: bool, scale: float) -> Attended:
    def stop(attended: Attended, keys: Keys, pairs: Sequence[Pair], following: Any) -> tuple[Attended, Any]:
        for pair in pairs:
            attended = _attend(attended, queries, keys, pair, causal, scale)
        return attended, following

    return _round_the_ring(stop, _nothing(queries, block), block, causal)


def _ring_backward(queries: Queries, block: _Block, upstream: _Upstream, causal: bool, scale: float) -> _Gradients:
    def stop(
        state: tuple[jax.Array, Any], keys: Keys, pairs: Sequence[Pair], following: Any
    ) -> tuple[tuple[jax.Array, Any], Any]:
        query_gradient, travelling = state
        first, *others = pairs
        terms = _Gradients(query_gradient, _zeros(keys.key), _zeros(keys.value))
        terms = _differentiate(terms, queries, keys, upstream, first, causal, scale)
        # Keys hop beside the first pair, sums, which travel after them, beside the others: of two hops at a time one
        # would not hide. What this stop adds does not wait for them.
        terms, travelling, following = jax.lax.optimization_barrier((terms, travelling, following))
        arriving = pass_on(travelling, AXIS)
        for pair in others:
            terms = _differentiate(terms, queries, keys, upstream, pair, causal, scale)
        added = _pack(terms.key, terms.value)
        return (terms.query, added if arriving is None else arriving + added), following

    start = (_zeros(queries.query), None)
    query_gradient, travelling = _round_the_ring(stop, start, block, causal)
    return _Gradients(query_gradient, *_unpack(pass_on(travelling, AXIS), block.key.shape[-1]))


def _round_the_ring[State](
    stop: Callable[[State, Keys, Sequence[Pair], Any], tuple[State, Any]], state: State, block: _Block, causal: bool
) -> State:
    """Works on the keys of each device in turn, from this one backwards, while the next are on their way.

    A stop is given those too, to hand on: with what it lets wait for them.
    """
    size, device = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    packed = _pack(block.key, block.value), block.segment_ids
    for step in range(size):
        following = pass_on(packed, AXIS) if step < size - 1 else packed
        keys = _Block(*_unpack(packed[0], block.key.shape[-1]), packed[1])
        chunks = jnp.stack(half_chunks((device - step) % size, size))
        state, following = stop(state, _keys(keys, chunks), ring_pairs(step, device, causal), following)
        # One hop per stop: left to itself, the compiler sends keys all the way round before it starts to work.
        state, packed = jax.lax.optimization_barrier((state, following))
    return state


def _pack(key: jax.Array, value: jax.Array) -> jax.Array:
    """One array to send: of several collectives only one at a time hides behind work."""
    return jnp.concatenate([key, value], axis=-1)


def _unpack(packed: jax.Array, key_dim: int) -> tuple[jax.Array, jax.Array]:
    return packed[..., :key_dim], packed[..., key_dim:]


def _gathered_forward(queries: Queries, block: _Block, causal: bool, scale: float) -> Attended:
    keys, pairs = _gather(block, causal)

    def step(attended: Attended, pair: Pair) -> tuple[Attended, None]:
        return _attend(attended, queries, keys, pair, causal, scale), None

    return jax.lax.scan(step, _nothing(queries, block), pairs)[0]


def _gathered_backward(queries: Queries, block: _Block, upstream: _Upstream, causal: bool, scale: float) -> _Gradients:
    # Gathered anew, so that between the passes a device keeps its own keys only.
    keys, pairs = _gather(block, causal)

    def step(sums: _Gradients, pair: Pair) -> tuple[_Gradients, None]:
        return _differentiate(sums, queries, keys, upstream, pair, causal, scale), None

    sums, _ = jax.lax.scan(step, _Gradients(*map(_zeros, (queries.query, keys.key, keys.value))), pairs)

    def scatter(total: jax.Array, like: jax.Array) -> jax.Array:
        return _cut(jax.lax.psum_scatter(_join(total).astype(like.dtype), AXIS, scatter_dimension=1, tiled=True))

    return _Gradients(sums.query, scatter(sums.key, block.key), scatter(sums.value, block.value))


def _gather(block: _Block, causal: bool) -> tuple[Keys, Pair]:
    size = jax.lax.axis_size(AXIS)
    whole = jax.lax.all_gather(block, AXIS, axis=1, tiled=True)
    chunks = jnp.asarray([chunk for device in range(size) for chunk in half_chunks(device, size)])
    return _keys(whole, chunks), gathered_pairs(jax.lax.axis_index(AXIS), size, causal)


def _build(forward: Callable[..., Attended], backward: Callable[..., _Gradients]) -> Local:
    def run(
        query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: SegmentIds, causal: bool, scale: float
    ) -> tuple[jax.Array, Any]:
        of_queries, of_keys = (None, None) if segment_ids is None else segment_ids
        queries, block = _queries(query, of_queries), _Block(key, value, of_keys)
        attended = forward(queries, block, causal, scale)
        out = _join(attended.out).astype(value.dtype)
        return out, (queries, block, out, attended.log_sum_exp)

    def run_backward(causal: bool, scale: float, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
        queries, block, out, log_sum_exp = kept
        correction = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        upstream = _Upstream(log_sum_exp, _cut(gradient), _cut(correction))
        sums = backward(queries, block, upstream, causal, scale)
        inputs = (queries.query, block.key, block.value)
        return *(_join(total).astype(x.dtype) for total, x in zip(sums, inputs, strict=True)), None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
    def attend(*inputs: Any) -> jax.Array:
        return run(*inputs)[0]

    attend.defvjp(run, run_backward)
    return attend


ring_attention: Local = _build(_ring_forward, _ring_backward)
"""Keys and values go round a ring, and so do their gradients (Liu et al. 2023, arXiv:2310.01889)."""
gathered_attention: Local = _build(_gathered_forward, _gathered_backward)
"""Keys and values are gathered, forward and backward, and their gradients reduced and scattered (arXiv:2407.21783)."""


def _attend(attended: Attended, queries: Queries, keys: Keys, pair: Pair, causal: bool, scale: float) -> Attended:
    own, other = pair
    found = partial_attention(_at(queries, own), _at(keys, other), causal=causal, scale=scale)
    return _put(attended, own, merge_attended(_at(attended, own), found))


def _differentiate(
    sums: _Gradients, queries: Queries, keys: Keys, upstream: _Upstream, pair: Pair, causal: bool, scale: float
) -> _Gradients:
    own, other = pair
    terms = partial_attention_gradient(
        _at(queries, own), _at(keys, other), *_at(upstream, own), causal=causal, scale=scale
    )
    added = (
        _put(total, i, _at(total, i) + term) for total, i, term in zip(sums, (own, other, other), terms, strict=True)
    )
    return _Gradients(*added)


def _queries(query: jax.Array, segment_ids: jax.Array | None) -> Queries:
    chunks = jnp.stack(half_chunks(jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)))
    return Queries(_cut(query), places(chunks, query.shape[1] // 2), jax.tree.map(_cut, segment_ids))


def _keys(block: _Block, chunks: Int[Array, "chunks"]) -> Keys:
    key, value, segment_ids = jax.tree.map(functools.partial(_cut, parts=chunks.size), block)
    return Keys(key, value, places(chunks, key.shape[2]), segment_ids)


def _nothing(queries: Queries, block: _Block) -> Attended:
    shape = queries.query.shape[:-1]
    return Attended(jnp.zeros((*shape, block.value.shape[-1]), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32))


def _zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, jnp.float32)


def _cut(x: Array, parts: int = 2) -> Array:
    """`[batch, seq, ...]` in equal parts, which lead."""
    return jnp.moveaxis(x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]), 1, 0)


def _join(x: Array) -> Array:
    parts, batch, length, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, parts * length, *rest)


def _at[Tree](tree: Tree, index: Index) -> Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put[Tree](tree: Tree, index: Index, part: Tree) -> Tree:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), tree, part)
