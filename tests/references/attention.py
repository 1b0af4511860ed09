"""Attention in float64 numpy, one query at a time."""

import numpy as np


def attention(query, key, value, query_segment_ids=None, key_segment_ids=None, causal=True):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, length, heads, size = query.shape
    group = heads // key.shape[2]
    out = np.zeros((batch, length, heads, value.shape[-1]))
    for b, i, h in np.ndindex(batch, length, heads):
        seen = np.ones(key.shape[1], bool)
        if causal:
            seen &= np.arange(key.shape[1]) <= i
        if query_segment_ids is not None:
            seen &= np.asarray(key_segment_ids)[b] == np.asarray(query_segment_ids)[b, i]
        if seen.any():
            scores = key[b, seen, h // group] @ query[b, i, h] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights / weights.sum() @ value[b, seen, h // group]
    return out
