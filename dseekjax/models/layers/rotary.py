"""Rotary position embedding."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dseekjax.models.config import LinearRotaryScaling, Llama3RotaryScaling, NoRotaryScaling, RotaryScalingConfig

UNSCALED = NoRotaryScaling()


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    positions: Int[Array, "batch seq"],
    theta: float,
    scaling: RotaryScalingConfig = UNSCALED,
) -> Float[Array, "batch seq heads head_dim"]:
    """Turns each pair (i, i + head_dim/2) of `x` by its position times `frequencies(…)[i]`, in float32.

    Su et al. 2021, arXiv:2104.09864, with the halves paired as in the Llama checkpoints.
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies(x.shape[-1], theta, scaling)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def frequencies(head_dim: int, theta: float, scaling: RotaryScalingConfig) -> Float[Array, "pairs"]:
    """Radians per position of each pair of dimensions: theta^(-2i/head_dim), slowed down by `scaling`.

    linear divides all by its factor (Chen et al. 2023, arXiv:2306.15595). llama3 divides those by its factor that make
    fewer than `low_frequency_factor` turns in `original_positions`, leaves those of more than `high_frequency_factor`
    turns, and goes from the one to the other in a line between them (Llama 3.1, arXiv:2407.21783, and its code).
    """
    half = head_dim // 2
    plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    match scaling:
        case LinearRotaryScaling():
            return plain / scaling.factor
        case Llama3RotaryScaling():
            turns = scaling.original_positions * plain / (2 * math.pi)
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            kept = jnp.clip((turns - low) / (high - low), 0, 1)
            return plain * (kept + (1 - kept) / scaling.factor)
    return plain
