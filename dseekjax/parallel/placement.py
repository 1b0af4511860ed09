"""Moving an array from one placement to another, and its gradient back."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def move(x: Float[Array, "..."], source: PartitionSpec, target: PartitionSpec) -> Float[Array, "..."]:
    """Changes the placement of `x` from `source` to `target`, and of its gradient back.

    A plain sharding constraint would hold the gradient in the target's placement too: an all-reduce where a
    reduce-scatter is enough.
    """
    return jax.lax.with_sharding_constraint(x, target)


def _forward(x: jax.Array, source: PartitionSpec, target: PartitionSpec) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(x, target), None


def _backward(source: PartitionSpec, target: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, source),)


move.defvjp(_forward, _backward)


def gather_tree(params: Any, specs: Any) -> Any:
    """Gathers every parameter of a tree over `fsdp`, given where each rests, except tables.

    What looks rows up in a table, or projects with it, knows a better time or way.
    """

    def gather(path: Any, parameter: jax.Array, spec: PartitionSpec) -> jax.Array:
        if path[-1].key == "embedding":
            return parameter
        return move(parameter, spec, PartitionSpec(*(_without_fsdp(entry) for entry in spec)))

    return jax.tree.map_with_path(gather, params, specs)


def _without_fsdp(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    axes = (entry,) if isinstance(entry, str) else entry or ()
    kept = tuple(axis for axis in axes if axis != "fsdp")
    return kept or None
