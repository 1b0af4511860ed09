"""Products with epilogues in float64, by their definitions, which JAX differentiates."""

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": lambda x: x * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: jnp.where(x > 0, x, 0),
    "silu": lambda x: x / (1 + jnp.exp(-x)),
}


def matmul(x, w, bias, residual, activation):
    out = ACTIVATIONS[activation](x @ w + (0 if bias is None else bias))
    return out if residual is None else out + residual


def swiglu(x, w_gate, w_up):
    return ACTIVATIONS["silu"](x @ w_gate) * (x @ w_up)


def grouped_matmul(x, w, group_sizes):
    parts, start = [], 0
    for matrix, size in zip(w, group_sizes, strict=True):
        parts.append(x[start : start + size] @ matrix)
        start += size
    return jnp.concatenate([*parts, jnp.zeros((x.shape[0] - start, w.shape[2]))])


def qkv_rotary(x, w_qkv, positions, num_heads, num_kv_heads, theta):
    """Pairs as complex numbers, turned by multiplication."""
    head_dim = w_qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    half = head_dim // 2
    angles = np.asarray(positions, np.float64)[..., None, None] * theta ** (-np.arange(half) / half)
    heads = jnp.reshape(x @ w_qkv, (*x.shape[:2], -1, head_dim))

    def turned(y):
        pairs = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angles)
        return jnp.concatenate([pairs.real, pairs.imag], axis=-1)

    query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=2)
    return turned(query), turned(key), value


def with_gradients(definition, arrays, cotangents):
    """In float64: outputs, and the gradients of the arrays that are given."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (arrays, cotangents))
        out, pull = jax.vjp(definition, *wide[0])
        return jax.tree.map(np.asarray, (out, pull(wide[1])))


def relative_error(found, expected):
    """Of all arrays, the largest in the Frobenius norm; of an array that must be zero, its norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(np.linalg.norm(np.asarray(a, np.float64) - b) / (np.linalg.norm(b) or 1.0) for a, b in pairs)
