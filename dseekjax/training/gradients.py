"""Gradients of a batch, worked through in microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dseekjax.training.forward import Sums

Loss = Callable[[Any, Any], Sums]
"""`(params, examples) -> sums`."""


def gradient_sums(
    loss: Loss, params: Any, examples: Any, num_microbatches: int, tokens_spec: PartitionSpec, specs: Any
) -> tuple[Any, Sums]:
    """Gradient of the summed loss, and all sums, over every example.

    Args:
        loss: to differentiate.
        params: in the compute dtype.
        examples: a pytree whose leaves lead with the batch dimension.
        num_microbatches: parts to work through one after the other; microbatch `k` is every
            `num_microbatches`-th example from `k` on, so that cutting moves nothing between devices.
        tokens_spec: placement of the examples' dimensions, batch and sequence.
        specs: placement of each gradient.

    Returns:
        Float32 gradient sums like `params`, and the sums.
    """

    def one(examples: Any) -> tuple[Any, Sums]:
        def total(params: Any) -> tuple[jax.Array, Sums]:
            sums = loss(params, examples)
            return sums["loss"], sums

        gradients, sums = jax.grad(total, has_aux=True)(params)
        return jax.tree.map(_wide, gradients, specs), sums

    if num_microbatches == 1:
        return one(examples)

    def cut(x: jax.Array) -> jax.Array:
        parts = x.reshape(x.shape[0] // num_microbatches, num_microbatches, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, *tokens_spec))

    def add(total: Any, examples: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(examples)), None

    parts = jax.tree.map(cut, examples)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    zeros = (jax.tree.map(_wide, zeros[0], specs), zeros[1])
    total, _ = jax.lax.scan(add, zeros, parts)
    return total


def _wide(gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(gradient.astype(jnp.float32), spec)
