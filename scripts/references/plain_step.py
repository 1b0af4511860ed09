"""A GPT-2 and its AdamW step in plain JAX: one page, no layer library, nothing of dseekjax.

Parameters are a dict: `tokens [vocab, d]`, `positions [seq, d]`, `final_norm`, and `layers`, a list of dicts. A batch
is a dict of `tokens, targets, loss_weights, segment_ids, positions`, each `[batch, seq]`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BETA1, BETA2, EPSILON, DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0


def norm(x, p):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def attention(x, p, segment_ids):
    q, k, v = (jnp.einsum("bse,ehd->bhsd", x, p[f"{n}_kernel"]) + p[f"{n}_bias"][:, None] for n in "qkv")
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool)) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    mixed = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30)) @ v
    return jnp.einsum("bhsd,hde->bse", mixed, p["o_kernel"]) + p["o_bias"]


def forward(params, batch):
    x = params["tokens"][batch["tokens"]] + params["positions"][batch["positions"]]
    for p in params["layers"]:
        x = x + attention(norm(x, p["norm1"]), p, batch["segment_ids"])
        hidden = jax.nn.gelu(norm(x, p["norm2"]) @ p["up_kernel"] + p["up_bias"])
        x = x + hidden @ p["down_kernel"] + p["down_bias"]
    return norm(x, params["final_norm"]) @ params["tokens"].T


def mean_loss(params, batch):
    log_probability = jax.nn.log_softmax(forward(params, batch))
    losses = -jnp.take_along_axis(log_probability, batch["targets"][..., None], -1)[..., 0]
    return (losses * batch["loss_weights"]).sum() / batch["loss_weights"].sum()


def learning_rate(step, peak, warmup, steps):
    rising = peak * (step + 1) / max(warmup, 1)
    cosine = 0.1 + 0.9 * 0.5 * (1 + jnp.cos(jnp.pi * (step - warmup) / (steps - warmup)))
    return jnp.where(step < warmup, rising, peak * cosine)


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=(4, 5, 6))
def train_step(params, moments, step, batch, peak, warmup, steps):
    """Returns params, moments and the loss before the update; `moments` starts as zeros like (params, params)."""
    loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
    total = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / total), gradients)
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, moments[0], gradients)
    second = jax.tree.map(lambda m, g: BETA2 * m + (1 - BETA2) * g**2, moments[1], gradients)
    rate = learning_rate(step, peak, warmup, steps)

    def update(path, p, m, v):
        change = m / (1 - BETA1 ** (step + 1)) / (jnp.sqrt(v / (1 - BETA2 ** (step + 1))) + EPSILON)
        matrix = path[-1].key.endswith("kernel") or path[-1].key in ("tokens", "positions")
        return p - rate * (change + (DECAY * p if matrix else 0.0))

    return jax.tree_util.tree_map_with_path(update, params, first, second), (first, second), loss


def init(vocabulary, length, layers, width, heads, hidden, seed=0):
    """Random parameters of a model of these sizes."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    def flat():
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    size = width // heads
    return {
        "tokens": draw(vocabulary, width),
        "positions": draw(length, width),
        "final_norm": flat(),
        "layers": [
            {
                "norm1": flat(),
                "norm2": flat(),
                **{f"{n}_kernel": draw(width, heads, size) for n in "qkv"},
                **{f"{n}_bias": jnp.zeros((heads, size)) for n in "qkv"},
                "o_kernel": draw(heads, size, width),
                "o_bias": jnp.zeros(width),
                "up_kernel": draw(width, hidden),
                "up_bias": jnp.zeros(hidden),
                "down_kernel": draw(hidden, width),
                "down_bias": jnp.zeros(width),
            }
            for _ in range(layers)
        ],
    }
