import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import attention as kernels
from pallas_kernels.attention import Keys, Queries, attention, merge_attended, partial
from tests.pallas_kernels.test_attention import inputs
from tests.references.attention import attention as exact

SCALE = 0.5  # what 4 ** -0.5 is, for heads of 4
LENGTH = 6
# Few shapes, so that little is compiled.
partial_attention = jax.jit(functools.partial(kernels.partial_attention, scale=SCALE), static_argnames="causal")
partial_attention_gradient = jax.jit(
    functools.partial(kernels.partial_attention_gradient, scale=SCALE), static_argnames="causal"
)
merge_attended = jax.jit(merge_attended)


@pytest.fixture(autouse=True, scope="module")
def several_blocks_of_queries_to_a_part():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial, "BLOCK_SIZE", 1)
        yield


heads = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
parts = st.permutations(range(LENGTH)).map(lambda order: np.split(np.array(order), 3))
cases = given(parts=parts, seed=st.integers(0, 1 << 16), causal=st.booleans(), packed=st.booleans())


def cut(q, k, v, segments, parts, packed):
    """The tokens of each part, as queries and as keys."""
    ids = [segments[:, part] if packed else None for part in parts]
    queries = [Queries(q[:, part], jnp.asarray(part), i) for part, i in zip(parts, ids, strict=True)]
    keys = [Keys(k[:, part], v[:, part], jnp.asarray(part), i) for part, i in zip(parts, ids, strict=True)]
    return queries, keys


def attend(queries, keys, causal):
    whole = partial_attention(queries, keys[0], causal=causal)
    for part in keys[1:]:
        whole = merge_attended(whole, partial_attention(queries, part, causal=causal))
    return whole


@heads
@cases
def test_parts_in_any_order_make_up_the_whole(heads, kv_heads, parts, seed, causal, packed):
    q, k, v, segments = inputs(2, LENGTH, heads, kv_heads, seed)
    masks = (segments, segments) if packed else ()
    expected = exact(q, k, v, *masks, causal=causal)
    queries, keys = cut(q, k, v, segments, parts, packed)
    for part, at in zip(queries, parts, strict=True):
        found = attend(part, keys, causal)
        np.testing.assert_allclose(found.out, expected[:, at], rtol=1e-5, atol=1e-5)


@functools.partial(jax.jit, static_argnames="causal")
def of_the_whole(q, k, v, masks, causal):
    out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, causal=causal, implementation="reference", **masks), q, k, v)
    gradient = jnp.cos(out)
    return gradient, pull(gradient)


@heads
@cases
def test_gradients_of_parts_sum_to_those_of_the_whole(heads, kv_heads, parts, seed, causal, packed):
    q, k, v, segments = inputs(2, LENGTH, heads, kv_heads, seed)
    masks = {"query_segment_ids": segments, "key_segment_ids": segments} if packed else {}
    gradient, gradients = of_the_whole(q, k, v, masks, causal)
    totals = [np.zeros(x.shape) for x in (q, k, v)]
    queries, keys = cut(q, k, v, segments, parts, packed)
    for part, at in zip(queries, parts, strict=True):
        whole = attend(part, keys, causal)
        upstream = gradient[:, at]
        correction = (upstream * whole.out).sum(-1)
        for others, there in zip(keys, parts, strict=True):
            terms = partial_attention_gradient(part, others, whole.log_sum_exp, upstream, correction, causal=causal)
            for total, term, place in zip(totals, terms, (at, there, there), strict=True):
                total[:, place] += term
    for expected, found in zip(gradients, totals, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_counts_nothing():
    q, k, v, segments = inputs(1, 4, 2, 2, seed=0)
    places = jnp.arange(4)
    alone = partial_attention(Queries(q, places, segments + 7), Keys(k, v, places, segments), causal=True)
    assert (alone.out == 0).all()
    assert (alone.log_sum_exp == -jnp.inf).all()
    seen = partial_attention(Queries(q, places, segments), Keys(k, v, places, segments), causal=True)
    for merged in (merge_attended(alone, seen), merge_attended(seen, alone), merge_attended(seen, seen)):
        np.testing.assert_allclose(merged.out, seen.out, rtol=1e-6)
    assert (merge_attended(alone, alone).log_sum_exp == -jnp.inf).all()
    gradients = partial_attention_gradient(
        Queries(q, places, segments + 7),
        Keys(k, v, places, segments),
        alone.log_sum_exp,
        jnp.ones_like(q),
        jnp.zeros(q.shape[:3]),
        causal=True,
    )
    assert all((gradient == 0).all() for gradient in gradients)


def test_results_are_float32_whatever_comes_in():
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs(1, 4, 2, 2, seed=0))
    queries, keys = Queries(q, jnp.arange(4), None), Keys(k, v, jnp.arange(4), None)
    whole = partial_attention(queries, keys, causal=True)
    gradients = partial_attention_gradient(queries, keys, whole.log_sum_exp, q, jnp.zeros(q.shape[:3]), causal=True)
    assert {x.dtype.name for x in (*whole, *gradients)} == {"float32"}
