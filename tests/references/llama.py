"""The forward pass of a Llama-type decoder in float64 numpy, written from the papers."""

import numpy as np

from tests.references.attention import attention


def rms_norm(x, scale, epsilon=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def rotate(x, positions, theta):
    """Multiplies the complex number of coordinates (i, i + half) by exp(j * position * theta^(-2i/size))."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[..., None, None] * theta ** (-2 * np.arange(half) / x.shape[-1]))
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def logits(params, tokens, positions, segment_ids, theta):
    """`params` as the package keeps them."""
    params = _float64(params)
    x = params["token_embedding"]["embedding"][tokens]
    layers = params["runs"][0]
    for i in range(layers["attention"]["query"]["kernel"].shape[0]):
        p = _layer(layers, i)
        h = rms_norm(x, p["attention_norm"]["scale"])
        q, k, v = (np.einsum("bse,ehd->bshd", h, p["attention"][n]["kernel"]) for n in ("query", "key", "value"))
        mixed = attention(rotate(q, positions, theta), rotate(k, positions, theta), v, segment_ids, segment_ids)
        x = x + np.einsum("bshd,hde->bse", mixed, p["attention"]["output"]["kernel"])
        h = rms_norm(x, p["feed_forward_norm"]["scale"])
        gate = h @ p["feed_forward"]["gate"]["kernel"]
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (h @ p["feed_forward"]["up"]["kernel"]))
            @ p["feed_forward"]["down"]["kernel"]
        )
    return rms_norm(x, params["final_norm"]["scale"]) @ params["unembedding"]["embedding"].T


def _float64(tree):
    return {k: _float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def _layer(tree, i):
    return {k: _layer(v, i) if isinstance(v, dict) else v[i] for k, v in tree.items()}
