import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.attention import attention, blocked, choose_implementation
from tests.references.attention import attention as exact


@st.composite
def cases(draw):
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    length = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 1 << 16))
    return (draw(st.integers(1, 2)), length, heads, kv_heads, seed, draw(st.booleans()), draw(st.booleans()))


def inputs(batch, length, heads, kv_heads, seed, size=4):
    rng = np.random.default_rng(seed)
    draw = lambda heads: jnp.asarray(rng.normal(size=(batch, length, heads, size)), jnp.float32)  # noqa: E731
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (batch, length)), axis=1), jnp.int32)
    return draw(heads), draw(kv_heads), draw(kv_heads), segments


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@given(cases())
def test_equals_float64(implementation, case):
    batch, length, heads, kv_heads, seed, causal, packed = case
    q, k, v, segments = inputs(batch, length, heads, kv_heads, seed)
    masks = {"query_segment_ids": segments, "key_segment_ids": segments} if packed else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK_SIZE", 4)
        out = attention(q, k, v, causal=causal, implementation=implementation, **masks)
    np.testing.assert_allclose(out, exact(q, k, v, *masks.values(), causal=causal), rtol=1e-5, atol=1e-5)


@given(cases())
def test_reference_has_the_gradient_of_the_definition(case):
    batch, length, heads, kv_heads, seed, causal, packed = case
    *arrays, segments = inputs(batch, length, heads, kv_heads, seed)
    masks = {"query_segment_ids": segments, "key_segment_ids": segments} if packed else {}
    mask = jnp.tri(length, dtype=bool) | (not causal)
    mask = mask & ((segments[:, :, None] == segments[:, None]) | (not packed))

    def definition(query, key, value):
        key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2
        scores = jnp.where(mask[:, None], scores, -1e30)
        return jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)).sum()

    def found(query, key, value):
        return jnp.sin(attention(query, key, value, causal=causal, implementation="reference", **masks)).sum()

    for a, b in zip(*(jax.grad(loss, (0, 1, 2))(*arrays) for loss in (definition, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 7, 13])
def test_blocked_has_the_gradient_of_reference(length, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_SIZE", 4)
    q, k, v, segments = inputs(2, length, 4, 2, seed=0)

    def loss(arrays, implementation):
        out = attention(*arrays, query_segment_ids=segments, key_segment_ids=segments, implementation=implementation)
        return jnp.sin(out).sum()

    expected, found = (jax.grad(loss)((q, k, v), name) for name in ("reference", "blocked"))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(implementation):
    q, k, v, segments = inputs(1, 4, 2, 2, seed=0)

    def total(q):
        out = attention(
            q, k, v, query_segment_ids=segments + 7, key_segment_ids=segments, implementation=implementation
        )
        return out.sum()

    assert total(q) == 0.0
    assert (jax.grad(total)(q) == 0.0).all()


def test_auto_blocks_only_long_causal_sequences():
    assert choose_implementation(query_length=128, causal=True) == "reference"
    assert choose_implementation(query_length=8192, causal=True) == "blocked"
    assert choose_implementation(query_length=8192, causal=False) == "reference"


def test_what_cannot_run_is_refused():
    q, k, v, segments = inputs(1, 4, 3, 2, seed=0)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="no implementation 'cudnn'"):
        attention(q[:, :, :2], k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="together"):
        attention(q[:, :, :2], k, v, query_segment_ids=segments)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attention(q[:, :2, :2], k, v)
