"""The optimizer and its schedules against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.optim.config import AdamWConfig
from dseekjax.optim.optimizer import build_optimizer, clip_by_global_norm, decays
from dseekjax.optim.schedules import build_schedule


def rates(total, **schedule):
    config = AdamWConfig(learning_rate=2.0, schedule=schedule)
    return np.array(jax.vmap(build_schedule(config, total))(jnp.arange(total)))


def test_cosine():
    found = rates(110, kind="cosine", warmup_steps=10, final_fraction=0.25)
    t = np.arange(100) / 100
    expected = np.concatenate([2 * (np.arange(10) + 1) / 10, 2 * (0.25 + 0.75 * (1 + np.cos(np.pi * t)) / 2)])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_linear():
    found = rates(110, kind="linear", warmup_steps=10, final_fraction=0.5)
    np.testing.assert_allclose(found[10:], 2 * (1 - 0.5 * np.arange(100) / 100), rtol=1e-5)


def test_warmup_stable_decay():
    found = rates(100, kind="wsd", warmup_steps=10, decay_steps=20)
    np.testing.assert_allclose(found[10:80], 2.0)
    np.testing.assert_allclose(found[80:], 2 * (1 - np.arange(20) / 20), rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 1])
def test_short_warmups_begin_at_the_peak(warmup):
    np.testing.assert_allclose(rates(5, kind="constant", warmup_steps=warmup), 2.0)


def test_adamw_equals_its_formula():
    config = AdamWConfig(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    optimizer = build_optimizer(config)
    params = {"a": {"kernel": jnp.array([1.0, -2.0])}, "b": {"bias": jnp.array([3.0])}}
    state = optimizer.init(params)
    m, v = 0.0, 0.0
    for t in range(1, 4):
        gradient = np.array([0.5, -1.0]) * t
        gradients = {"a": {"kernel": jnp.asarray(gradient)}, "b": {"bias": jnp.array([0.0])}}
        direction, state = optimizer.update(gradients, state, params, good=jnp.array(True))
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        expected = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.3 * np.array([1.0, -2.0])
        np.testing.assert_allclose(direction["a"]["kernel"], expected, rtol=1e-5)
        assert direction["b"]["bias"] == 0.0  # a bias does not decay
        _, kept = optimizer.update(gradients, state, params, good=jnp.array(False))
        jax.tree.map(np.testing.assert_array_equal, kept, state)


def test_matrices_decay_vectors_do_not():
    params = {"x": {"kernel": 1, "bias": 1}, "y": {"embedding": 1}, "z": {"scale": 1}}
    assert decays(params) == {"x": {"kernel": True, "bias": False}, "y": {"embedding": True}, "z": {"scale": False}}


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.floats(0.01, 10))
def test_clipping_bounds_the_norm_and_keeps_the_direction(values, limit):
    gradients = {"a": jnp.asarray(values, jnp.float32)}
    clipped, norm = clip_by_global_norm(gradients, limit)
    exact = np.linalg.norm(np.asarray(values, np.float64))
    assert norm == pytest.approx(exact, rel=1e-5)
    factor = min(1.0, limit / exact) if exact else 1.0
    np.testing.assert_allclose(clipped["a"], np.asarray(values) * factor, rtol=1e-4, atol=1e-30)
