"""Attention over some of the keys, so that the rest may be elsewhere or come later.

The softmax over all keys is put together from parts by their log-sum-exps (Rabe and Staats 2021, arXiv:2112.05682), and
the gradient of a part follows from the log-sum-exp over all (Dao et al. 2022, arXiv:2205.14135).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.spec import AttentionSpec, visible

BLOCK_SIZE = 512
"""Scores exist for no more queries than this at a time."""


class Queries(NamedTuple):
    """Some of the queries of a sequence."""

    query: Float[Array, "batch queries heads head_dim"]
    positions: Int[Array, "queries"]
    """Place of each in the whole sequence."""
    segment_ids: Int[Array, "batch queries"] | None
    """Document number of each; given together with that of the keys."""


class Keys(NamedTuple):
    """Some of the keys of a sequence, and their values."""

    key: Float[Array, "batch keys kv_heads head_dim"]
    value: Float[Array, "batch keys kv_heads value_dim"]
    positions: Int[Array, "keys"]
    segment_ids: Int[Array, "batch keys"] | None


class Attended(NamedTuple):
    """The result of attention over some of the keys."""

    out: Float[Array, "batch queries heads value_dim"]
    """In float32; zeros for a query that sees none of the keys."""
    log_sum_exp: Float[Array, "batch queries heads"]
    """Logarithm of the sum of the exponentials of each query's scores; -inf where it sees none of the keys."""


def partial_attention(queries: Queries, keys: Keys, *, causal: bool, scale: float) -> Attended:
    """Attends to `keys` alone, with float32 scores, those of a block of queries at a time.

    Its gradient is `partial_attention_gradient`; differentiated as it stands it keeps the scores.

    Args:
        queries: heads must be a multiple of those of the keys.
        keys: the keys at hand.
        causal: a query sees keys up to its own position.
        scale: factor on the scores.
    """

    def attend(block: Queries) -> Attended:
        return _attend(block, keys, causal, scale)

    return Attended(*map(_joined, jax.lax.map(attend, _blocks(queries))))


def _attend(queries: Queries, keys: Keys, causal: bool, scale: float) -> Attended:
    query, value = _grouped(queries.query, keys), keys.value
    mask = _mask(queries, keys, causal)
    scores = jnp.where(mask, _scores(query, keys, scale), -jnp.inf)
    largest = scores.max(-1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    log_sum_exp = (largest + jnp.log(total))[..., 0]
    return Attended(out.reshape(*queries.query.shape[:3], value.shape[-1]), _per_query(log_sum_exp))


def merge_attended(a: Attended, b: Attended) -> Attended:
    """What the same queries get from the keys of both; no key may be in both."""
    largest = jnp.maximum(a.log_sum_exp, b.log_sum_exp)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    share_a, share_b = jnp.exp(a.log_sum_exp - largest), jnp.exp(b.log_sum_exp - largest)
    total = share_a + share_b
    scaled = share_a[..., None] * a.out + share_b[..., None] * b.out
    return Attended(
        scaled / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None],
        largest + jnp.log(total),
    )


def partial_attention_gradient(
    queries: Queries,
    keys: Keys,
    log_sum_exp: Float[Array, "batch queries heads"],
    gradient: Float[Array, "batch queries heads value_dim"],
    correction: Float[Array, "batch queries heads"],
    *,
    causal: bool,
    scale: float,
) -> tuple[
    Float[Array, "batch queries heads head_dim"],
    Float[Array, "batch keys kv_heads head_dim"],
    Float[Array, "batch keys kv_heads value_dim"],
]:
    """What `keys` add to the gradients of query, key and value, in float32.

    Args:
        queries: as they were given to `partial_attention`.
        keys: likewise.
        log_sum_exp: over *all* keys that the queries saw, these among them.
        gradient: of the output of attention to all keys.
        correction: that gradient times that output, summed over `value_dim`, in float32.
        causal: as before.
        scale: as before.
    """

    def add(
        sums: tuple[jax.Array, jax.Array], block: tuple[Queries, jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        of_query, of_key, of_value = _gradient(*block, keys, causal, scale)
        return (sums[0] + of_key, sums[1] + of_value), of_query

    zeros = (jnp.zeros(keys.key.shape, jnp.float32), jnp.zeros(keys.value.shape, jnp.float32))
    blocks = (_blocks(queries), _cut(log_sum_exp), _cut(gradient), _cut(correction))
    (key_gradient, value_gradient), query_gradient = jax.lax.scan(add, zeros, blocks)
    return _joined(query_gradient), key_gradient, value_gradient


def _gradient(
    queries: Queries,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
    correction: jax.Array,
    keys: Keys,
    causal: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, gradient = _grouped(queries.query, keys), _grouped(gradient, keys)
    scores = _scores(query, keys, scale)
    weights = jnp.where(_mask(queries, keys, causal), jnp.exp(scores - _per_score(log_sum_exp, keys)), 0.0)
    upstream = jnp.einsum("bqhgd,bkhd->bhgqk", gradient, keys.value, preferred_element_type=jnp.float32)
    score_gradient = weights * (upstream - _per_score(correction, keys)) * scale
    narrow = score_gradient.astype(queries.query.dtype)
    query_gradient = jnp.einsum("bhgqk,bkhd->bqhgd", narrow, keys.key, preferred_element_type=jnp.float32)
    key_gradient = jnp.einsum("bhgqk,bqhgd->bkhd", narrow, query, preferred_element_type=jnp.float32)
    value_gradient = jnp.einsum(
        "bhgqk,bqhgd->bkhd", weights.astype(gradient.dtype), gradient, preferred_element_type=jnp.float32
    )
    return query_gradient.reshape(queries.query.shape), key_gradient, value_gradient


def _blocks(queries: Queries) -> Queries:
    query, positions, segment_ids = queries
    return Queries(_cut(query), _cut(positions, 0), None if segment_ids is None else _cut(segment_ids))


def _cut(x: Array, axis: int = 1) -> Array:
    """The queries, along `axis`, in the fewest equal blocks of at most `BLOCK_SIZE`; blocks lead."""
    length = x.shape[axis]
    blocks = next(n for n in range(-(-length // BLOCK_SIZE), length + 1) if length % n == 0)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], blocks, length // blocks, *x.shape[axis + 1 :]), axis, 0)


def _joined(x: Float[Array, "blocks batch queries ..."]) -> Float[Array, "batch all_queries ..."]:
    blocks, batch, length, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, blocks * length, *rest)


def _grouped(
    x: Float[Array, "batch queries heads dim"], keys: Keys
) -> Float[Array, "batch queries kv_heads group dim"]:
    batch, length, heads, dim = x.shape
    kv_heads = keys.key.shape[2]
    return x.reshape(batch, length, kv_heads, heads // kv_heads, dim)


def _scores(
    query: Float[Array, "batch queries kv_heads group head_dim"], keys: Keys, scale: float
) -> Float[Array, "batch kv_heads group queries keys"]:
    return jnp.einsum("bqhgd,bkhd->bhgqk", query, keys.key, preferred_element_type=jnp.float32) * scale


def _mask(queries: Queries, keys: Keys, causal: bool) -> Bool[Array, "#batch 1 1 queries keys"]:
    spec = AttentionSpec(causal=causal, window=None, scale=1.0, softcap=None)
    ids = None
    if queries.segment_ids is not None and keys.segment_ids is not None:
        ids = queries.segment_ids, keys.segment_ids
    return visible(spec, queries.positions, keys.positions, ids)[:, None, None]


def _per_query(x: Float[Array, "batch kv_heads group queries"]) -> Float[Array, "batch queries heads"]:
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1)


def _per_score(x: Float[Array, "batch queries heads"], keys: Keys) -> Float[Array, "batch kv_heads group queries 1"]:
    return jnp.moveaxis(_grouped(x[..., None], keys), 1, 3)
