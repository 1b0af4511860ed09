"""Fully sharded data parallelism: parameters rest in shards and are gathered where they are used."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(parameter: Float[Array, "..."], resting: PartitionSpec, gathered: PartitionSpec) -> Float[Array, "..."]:
    """Changes the placement of a parameter from `resting` to `gathered`, and of its gradient back.

    A plain sharding constraint would hold the gradient in the gathered placement too: an all-reduce where a
    reduce-scatter is enough.
    """
    return jax.lax.with_sharding_constraint(parameter, gathered)


def _forward(parameter: jax.Array, resting: PartitionSpec, gathered: PartitionSpec) -> tuple[jax.Array, None]:
    return gather(parameter, resting, gathered), None


def _backward(resting: PartitionSpec, gathered: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, resting),)


gather.defvjp(_forward, _backward)


def gather_tree(params: Any, specs: Any) -> Any:
    """Gathers every parameter of a tree over `fsdp`, given where each rests."""

    def gather_leaf(parameter: jax.Array, spec: PartitionSpec) -> jax.Array:
        return gather(parameter, spec, PartitionSpec(*(_without_fsdp(entry) for entry in spec)))

    return jax.tree.map(gather_leaf, params, specs)


def _without_fsdp(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    axes = (entry,) if isinstance(entry, str) else entry or ()
    kept = tuple(axis for axis in axes if axis != "fsdp")
    return kept or None
