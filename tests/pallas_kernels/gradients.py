"""Gradients to compress, and what tests of their compression share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

# Few, so that few programs are compiled: one element, no whole block, several tiles with the last not full.
LENGTHS = [1, 777, 5001]
dtypes = st.sampled_from([jnp.float32, jnp.bfloat16])
seeds = st.integers(0, 1 << 20)
plain = {"implementation": "reference"}
interpreted = {"implementation": "pallas_interpreted"}


def gradient(shape, seed, dtype=jnp.float32, bad=0):
    """Numbers of many magnitudes, runs of zeros, of what counts as zeros, of ties; and `bad` that are not finite."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    x = rng.normal(size=size) * np.exp(4 * rng.normal(size=size))
    runs = np.repeat(rng.integers(0, 8, -(-size // 64)), 64)[:size]
    x[runs == 0] = 0.0
    x[runs == 1] = 1e-29 * rng.normal(size=(runs == 1).sum())
    x[runs == 2] = rng.choice([-127.0, 2.5, -3.5, 0.5, 1.0, -1.0], (runs == 2).sum())
    x[rng.integers(0, size, bad)] = rng.choice([np.nan, np.inf, -np.inf])
    return jnp.asarray(x.reshape(shape), dtype)


def residual(length, seed):
    return 0.1 * gradient((length,), seed + 1)


def blocks_of(x, size):
    x = np.asarray(x, np.float64)
    return np.pad(x, (0, -len(x) % size)).reshape(-1, size)


def assert_same(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@functools.cache
def jitted(function, **options):
    return jax.jit(functools.partial(function, **options))
