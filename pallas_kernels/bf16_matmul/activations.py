"""Activations as kernels compute them, with their derivatives: what Triton has no function for is put otherwise."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Activation(NamedTuple):
    """A function of each element, in float32, and its derivative."""

    function: Callable[[jax.Array], jax.Array]
    derivative: Callable[[jax.Array], jax.Array]


def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


def _silu_derivative(x: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(x)
    return gate + x * gate * (1.0 - gate)


_SCALE = 2.0 * (2.0 / jnp.pi) ** 0.5
_CUBIC = 0.044715


def _gelu(x: jax.Array) -> jax.Array:
    # (1 + tanh(a)) / 2 is sigmoid(2 a), which takes one exponential.
    return x * jax.nn.sigmoid(_SCALE * (x + _CUBIC * x * x * x))


def _gelu_derivative(x: jax.Array) -> jax.Array:
    gate = jax.nn.sigmoid(_SCALE * (x + _CUBIC * x * x * x))
    return gate + x * gate * (1.0 - gate) * _SCALE * (1.0 + 3.0 * _CUBIC * x * x)


def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


def _relu_derivative(x: jax.Array) -> jax.Array:
    return (x > 0.0).astype(x.dtype)


ACTIVATIONS = {
    "gelu": Activation(_gelu, _gelu_derivative),
    "relu": Activation(_relu, _relu_derivative),
    "silu": Activation(_silu, _silu_derivative),
}
"""By name; gelu in its tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
