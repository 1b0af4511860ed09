"""Which tokens are drawn, and how often."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.errors import UserError
from dseekjax.generation.sampling import Sampling, _draw, restrict, sample


def allowed_by_definition(logits, top_k, top_p):
    """Tokens that may be drawn, by sorting each row."""
    allowed = []
    for row in np.asarray(logits, np.float64):
        order = np.argsort(-row, kind="stable")[:top_k]
        probabilities = np.exp(row[order] - row.max())
        probabilities /= probabilities.sum()
        kept, total = [], 0.0
        for token, probability in zip(order, probabilities, strict=True):
            kept.append(token)
            total += probability
            if top_p is not None and total >= top_p - 1e-6:
                break
        allowed.append(set(kept))
    return allowed


@given(st.integers(0, 2**31 - 1), st.integers(1, 12), st.sampled_from([None, 0.1, 0.5, 0.9, 1.0]))
def test_only_what_top_k_and_top_p_leave_can_be_drawn(seed, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=(2, 10)).astype(np.float32) * 2
    found = np.asarray(restrict(jnp.asarray(logits), top_k, top_p))
    for row, allowed in zip(found, allowed_by_definition(logits, top_k, top_p), strict=True):
        assert set(np.flatnonzero(np.isfinite(row))) == allowed


def test_tokens_come_as_often_as_the_model_says():
    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0])
    count = 4000
    sampling = Sampling(temperature=2.0, top_k=3, seed=7)
    tokens = sample(jnp.tile(logits, (count, 1)), jnp.arange(count), jnp.int32(0), sampling)
    expected = np.exp(np.array([1.0, 0.5, 0.0]))
    found = np.bincount(np.asarray(tokens), minlength=4) / count
    np.testing.assert_allclose(found, [*(expected / expected.sum()), 0], atol=0.03)


def test_a_draw_depends_on_seed_text_and_place_alone():
    logits = jnp.tile(jnp.zeros(1000), (3, 1))
    sampling = Sampling(seed=1)
    tokens = sample(logits, jnp.array([4, 5, 6]), jnp.int32(2), sampling)
    alone = sample(logits[:1], jnp.array([6]), jnp.int32(2), sampling)
    assert int(tokens[2]) == int(alone[0])
    assert len(set(np.asarray(tokens).tolist())) == 3
    for other in (
        sample(logits, jnp.array([4, 5, 6]), jnp.int32(3), sampling),
        sample(logits, jnp.array([4, 5, 6]), jnp.int32(2), dataclasses.replace(sampling, seed=2)),
    ):
        assert np.all(np.asarray(other) != np.asarray(tokens))


def test_temperature_zero_takes_the_most_likely():
    logits = jnp.asarray([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, jnp.arange(2), jnp.int32(0), Sampling(temperature=0)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 1e-40}, {"temperature": 1e-300}, {"top_p": 1e-50}, {"temperature": 1e-10, "top_p": 1e-9}],
)
def test_what_float32_cannot_tell_from_nothing_takes_the_most_likely(extreme):
    logits = jnp.asarray([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]) * 100
    assert sample(logits, jnp.arange(2), jnp.int32(0), Sampling(**extreme)).tolist() == [1, 0]


def test_a_temperature_beyond_float32_draws_from_all_alike():
    tokens = sample(jnp.tile(jnp.asarray([5.0, 0.0]), (400, 1)), jnp.arange(400), jnp.int32(0), Sampling(1e300))
    assert 100 < int(tokens.sum()) < 300


def test_another_seed_or_temperature_compiles_nothing():
    before = None
    for sampling in (Sampling(0.5, 2, seed=1), Sampling(0.7, 2, seed=2)):
        sample(jnp.zeros((2, 5)), jnp.arange(2), jnp.int32(0), sampling)
        assert before in (None, _draw._cache_size())
        before = _draw._cache_size()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Sampling(**wrong)
