"""Where logical axes lie on a mesh, as seen by code that runs under the manual `data` axis."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from dseekjax.parallel.sharding import PARAMETER_AXES, Rules, partition_spec, without

Names = Sequence[str]
"""Logical axes of an array, one per dimension."""


@dataclass(frozen=True)
class Layout:
    """The rules without the manual axes, and the sizes of the mesh."""

    rules: Rules
    sizes: Mapping[str, int]

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes, larger than one, that a logical axis is split over."""
        return tuple(axis for axis in self.rules[name] if self.sizes[axis] > 1)

    def split(self, *axes: str) -> bool:
        """Whether any of the mesh axes is larger than one."""
        return any(self.sizes[axis] > 1 for axis in axes)

    def spec(self, names: Names) -> PartitionSpec:
        """The placement of an array."""
        return partition_spec(names, self.rules)

    def gathered(self, names: Names) -> PartitionSpec:
        """The placement of a parameter while it is used: whole wherever the tokens are others."""
        return partition_spec(names, without(self.rules, *PARAMETER_AXES))

    def constrain(self, x: jax.Array, *names: str) -> jax.Array:
        """Places `x`, and its gradient, by its logical axes."""
        return jax.lax.with_sharding_constraint(x, self.spec(names))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes larger than one over which anything is split."""
        inside = {axis for axes in self.rules.values() for axis in axes}
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis in inside)

    def island(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` on each device's part of its arguments, so that it does its own communication."""
        # Also over axes of one: among automatic axes, XLA for CPU aborts at sums in bfloat16.
        axes = set(self.sizes) - {"data"}
        idle = [axis for axis in self.sizes if axis in axes and self.sizes[axis] == 1]
        in_specs, out_specs = jax.tree.map(
            lambda spec: _only(spec, axes, idle),
            (in_specs, out_specs),
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)

    def reduce_to(self, gradient: Float[Array, "..."], names: Names) -> Float[Array, "..."]:
        """Inside an island, sums a parameter's gradient over the examples' axes, down to where the parameter rests."""
        splits_examples = [axis for axis in self.split_axes if axis in {*self.rules["batch"], *self.rules["sequence"]}]
        for dimension, name in enumerate(names):
            for axis in self.axes(name):
                if axis in splits_examples:
                    splits_examples.remove(axis)
                    gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dimension, tiled=True)
        return jax.lax.psum(gradient, tuple(splits_examples)) if splits_examples else gradient


def _only(spec: PartitionSpec, kept: Set[str], idle: Sequence[str]) -> PartitionSpec:
    def entry(axes: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return tuple(axis for axis in names if axis in kept) or None

    entries = [entry(axes) or () for axes in spec]
    if entries:
        # An axis that no dimension names would be summed over in the backward pass, even if it is of one.
        named = {axis for axes in entries for axis in axes}
        entries[0] = (*entries[0], *(axis for axis in idle if axis not in named))
    return PartitionSpec(*(axes or None for axes in entries))
