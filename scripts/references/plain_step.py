"""A GPT-2 and its AdamW step in plain JAX: one page, no layer library, nothing of dseekjax.

Parameters are a dict: `tokens [vocab, d]`, `positions [seq, d]`, `final_norm`, and `layers`, a list of dicts. A batch
is a dict of `tokens, targets, loss_weights, segment_ids, positions`, each `[batch, seq]`.
"""

import jax
import jax.numpy as jnp
import numpy as np

BETA1, BETA2, EPSILON, DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0


def norm(x, p):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    normal = (wide - mean) / jnp.sqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (normal * p["scale"] + p["bias"]).astype(x.dtype)


def attention(x, p, segment_ids):
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, p[f"{n}_kernel"]) + p[f"{n}_bias"] for n in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool)) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30)).astype(v.dtype), v)
    return jnp.einsum("bshd,hde->bse", mixed, p["o_kernel"]) + p["o_bias"]


def activations(params, batch):
    x = params["tokens"][batch["tokens"]] + params["positions"][batch["positions"]]
    for p in params["layers"]:
        x = x + attention(norm(x, p["norm1"]), p, batch["segment_ids"])
        hidden = jax.nn.gelu(norm(x, p["norm2"]) @ p["up_kernel"] + p["up_bias"])
        x = x + hidden @ p["down_kernel"] + p["down_bias"]
    return norm(x, params["final_norm"])


def logits_of(x, table):
    return jnp.matmul(x, table.T, preferred_element_type=jnp.float32)


def forward(params, batch):
    return logits_of(activations(params, batch), params["tokens"])


def mean_loss(params, batch):
    log_probability = jax.nn.log_softmax(forward(params, batch))
    losses = -jnp.take_along_axis(log_probability, batch["targets"][..., None], -1)[..., 0]
    return (losses * batch["loss_weights"]).sum() / batch["loss_weights"].sum()


def quick_mean_loss(params, batch, chunk=1024):
    """`mean_loss` as one who tunes this page would have it: `chunk` tokens' logits at a time, computed once."""
    x, table = activations(params, batch), params["tokens"]
    chunk = min(chunk, batch["targets"].size)
    pieces = tuple(batch[name].reshape(-1, chunk) for name in ("targets", "loss_weights"))

    def of_chunk(x, table, targets, weights):
        log_probability = jax.nn.log_softmax(logits_of(x, table))
        losses = -jnp.take_along_axis(log_probability, targets[:, None], -1)[:, 0]
        slope = (jnp.exp(log_probability) - jax.nn.one_hot(targets, table.shape[0])) * weights[:, None]
        return (losses * weights).sum(), slope.astype(x.dtype)

    @jax.custom_vjp
    def total(x, table, pieces):
        return forward_pass(x, table, pieces)[0]

    def forward_pass(x, table, pieces):
        def step(sums, piece):
            x, targets, weights = piece
            loss, slope = of_chunk(x, table, targets, weights)
            # The barrier keeps the sum in float32, which oneDNN would take over with the product.
            return (sums[0] + loss, sums[1] + jax.lax.optimization_barrier(slope.T @ x)), slope @ table

        rows = x.reshape(-1, chunk, x.shape[-1])
        (loss, of_table), of_x = jax.lax.scan(step, (0.0, jnp.zeros(table.shape)), (rows, *pieces))
        return loss, (of_x.reshape(x.shape), of_table)

    def backward_pass(gradients, of_loss):
        return *((gradient * of_loss).astype(x.dtype) for gradient in gradients), None

    total.defvjp(forward_pass, backward_pass)
    return total(x, table, pieces) / batch["loss_weights"].sum()


def learning_rate(step, peak, warmup, steps):
    rising = peak * (step + 1) / max(warmup, 1)
    cosine = 0.1 + 0.9 * 0.5 * (1 + jnp.cos(jnp.pi * (step - warmup) / (steps - warmup)))
    return jnp.where(step < warmup, rising, peak * cosine)


def update(params, moments, step, batch, peak, warmup, steps, mean_loss=mean_loss, dtype="float32"):
    """Returns params, moments and the loss before the update; `moments` starts as zeros like (params, params)."""
    narrow = jax.tree.map(lambda p: p.astype(dtype), params)
    loss, gradients = jax.value_and_grad(mean_loss)(narrow, batch)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    total = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / total), gradients)
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, moments[0], gradients)
    second = jax.tree.map(lambda m, g: BETA2 * m + (1 - BETA2) * g**2, moments[1], gradients)
    rate = learning_rate(step, peak, warmup, steps)

    def change(path, p, m, v):
        direction = m / (1 - BETA1 ** (step + 1)) / (jnp.sqrt(v / (1 - BETA2 ** (step + 1))) + EPSILON)
        matrix = path[-1].key.endswith("kernel") or path[-1].key in ("tokens", "positions")
        return p - rate * (direction + (DECAY * p if matrix else 0.0))

    return jax.tree_util.tree_map_with_path(change, params, first, second), (first, second), loss


train_step = jax.jit(update, donate_argnums=(0, 1), static_argnums=(4, 5, 6))


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
