"""Moving arrays between devices: from one placement to another, to the neighbour on a ring."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from dseekjax.parallel.sharding import PARAMETER_AXES


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


@jax.custom_vjp
def differentiate_together[Tree](tree: Tree) -> Tree:
    """`tree`; in the backward pass, nothing uses the gradient of one part before those of all are there."""
    return tree


def _finish_together(_: None, gradients: Any) -> tuple[Any]:
    return (jax.lax.optimization_barrier(gradients),)


differentiate_together.defvjp(lambda tree: (tree, None), _finish_together)


def gather_tree(params: Any, specs: Any) -> Any:
    """Gathers every parameter of a tree to be used, given where each rests, except tables.

    What looks rows up in a table, or projects with it, knows a better time or way.
    """

    def gather(path: Any, parameter: jax.Array, spec: PartitionSpec) -> jax.Array:
        if path[-1].key == "embedding":
            return parameter
        return move(parameter, spec, PartitionSpec(*map(_in_use, spec)))

    return jax.tree.map_with_path(gather, params, specs)


def _in_use(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    axes = (entry,) if isinstance(entry, str) else entry or ()
    kept = tuple(axis for axis in axes if axis not in PARAMETER_AXES)
    return kept or None


def pass_on(tree: Any, axis: str) -> Any:
    """Inside an island, every array of `tree` from the neighbour before on the ring of `axis`."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(tree, axis, [(source, (source + 1) % size) for source in range(size)])
