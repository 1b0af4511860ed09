"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"], theta: float
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns each pair (i, i + head_dim/2) of `x` by its position times theta^(-2i/head_dim), in float32.

    Su et al. 2021, arXiv:2104.09864, with the halves paired as in the Llama checkpoints.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
