"""Attention in float64, written as its definition."""

import jax
import jax.numpy as jnp
import numpy as np


def attention(query, key, value, query_segment_ids=None, key_segment_ids=None, causal=True, window=None, softcap=None):
    """In numpy, one query at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, length, heads, size = query.shape
    group = heads // key.shape[2]
    out = np.zeros((batch, length, heads, value.shape[-1]))
    for b, i, h in np.ndindex(batch, length, heads):
        places = np.arange(key.shape[1])
        seen = np.ones(key.shape[1], bool)
        if causal:
            seen &= places <= i
        if window is not None:
            seen &= np.abs(places - i) < window
        if query_segment_ids is not None:
            seen &= np.asarray(key_segment_ids)[b] == np.asarray(query_segment_ids)[b, i]
        if seen.any():
            scores = key[b, seen, h // group] @ query[b, i, h] / np.sqrt(size)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights / weights.sum() @ value[b, seen, h // group]
    return out


def with_gradients(query, key, value, ids, out_gradient, log_sum_exp_gradient, *, causal, window, softcap):
    """Attended values, log-sum-exps (0 where nothing is seen), and gradients of query, key and value, by JAX."""
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in (query, key, value)]
        places = np.arange(key.shape[1])[None, :] - np.arange(query.shape[1])[:, None]
        seen = np.ones((1, *places.shape), bool)
        if causal:
            seen = seen & (places <= 0)
        if window is not None:
            seen = seen & (np.abs(places) < window)
        if ids is not None:
            seen = seen & (np.asarray(ids[0])[:, :, None] == np.asarray(ids[1])[:, None, :])
        sees = seen.any(-1)[:, :, None]

        def run(query, key, value):
            group = query.shape[2] // key.shape[2]
            key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.where(seen[:, None], scores, -1e300)
            out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value) * sees[..., None]
            return out, jnp.swapaxes(jax.nn.logsumexp(scores, -1), 1, 2) * sees

        def loss(*arrays):
            out, log_sum_exp = run(*arrays)
            return (out * np.asarray(out_gradient)).sum() + (log_sum_exp * np.asarray(log_sum_exp_gradient)).sum()

        results = (*run(*arrays), *jax.grad(loss, (0, 1, 2))(*arrays))
        return [np.asarray(x, np.float64) for x in results]
