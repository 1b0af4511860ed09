"""Rules from logical axis names to mesh axes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dseekjax.errors import UserError
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.mesh import AnyMesh

Rules = Mapping[str, tuple[str, ...]]

LOGICAL_AXES = (
    *("batch", "sequence", "residual_sequence", "residual"),  # of activations
    *("embed", "layer", "positions"),  # of parameters
    *("vocab", "heads", "kv_heads", "head_dim", "mlp"),  # of both
)
# What each style of parallelism adds to nothing being split.
REPLICATED: Rules = dict.fromkeys(LOGICAL_AXES, ())
PARAMETER_AXES = ("fsdp", "expert", "context")
"""The mesh axes whose devices use the same parameters at different tokens, and so share the keeping of them."""
SHARDED_DATA: Rules = {"batch": ("data", "fsdp", "expert"), "embed": PARAMETER_AXES}
CONTEXT: Rules = {"sequence": ("context",), "residual_sequence": ("context",)}
TENSOR: Rules = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), ("tensor",))
SEQUENCE: Rules = {"residual_sequence": ("context", "tensor")}


def build_rules(config: MeshConfig) -> Rules:
    """The mesh axes of every logical axis.

    Raises:
        UserError: `config.rules` names a logical axis that does not exist.
    """
    unknown = sorted(config.rules.keys() - REPLICATED.keys())
    if unknown:
        raise UserError(f"mesh.rules: there is no logical axis {unknown[0]!r}; there are {', '.join(REPLICATED)}")
    sequence = SEQUENCE if config.sequence_parallel else {}
    return {**REPLICATED, **SHARDED_DATA, **CONTEXT, **TENSOR, **sequence, **config.rules}


def shards_parameters(sizes: Mapping[str, int]) -> bool:
    """Whether, on a mesh of these sizes, parameters rest in shards and are gathered to be used."""
    return any(sizes[axis] > 1 for axis in PARAMETER_AXES)


def without(rules: Rules, *mesh_axes: str) -> Rules:
    """The rules with some mesh axes left out of every entry."""
    return {name: tuple(axis for axis in axes if axis not in mesh_axes) for name, axes in rules.items()}


def partition_spec(
    logical_axes: Sequence[str],
    rules: Rules,
    *,
    shape: Sequence[int] | None = None,
    mesh_sizes: Mapping[str, int] | None = None,
    array: str = "array",
) -> PartitionSpec:
    """The placement of an array whose dimensions are named `logical_axes`.

    With `shape` and `mesh_sizes`, sizes are checked too.

    Raises:
        UserError: a name without a rule, two dimensions on one mesh axis, or a size that does not divide.
    """
    used: dict[str, str] = {}
    entries = []
    for dimension, name in enumerate(logical_axes):
        if name not in rules:
            raise UserError(f"{array}: no sharding rule for the logical axis {name!r}; known are {sorted(rules)}")
        mesh_axes = rules[name]
        for axis in mesh_axes:
            if axis in used:
                raise UserError(
                    f"{array} with dimensions {tuple(logical_axes)}: {used[axis]!r} and {name!r} both go to the mesh "
                    f"axis {axis!r}; change one of the two rules"
                )
            used[axis] = name
        if shape is not None and mesh_sizes is not None:
            parts = math.prod(mesh_sizes[axis] for axis in mesh_axes)
            if shape[dimension] % parts:
                raise UserError(
                    f"{array}: its dimension {name!r} of {shape[dimension]} is not divisible by the {parts} parts that "
                    f"mesh axes {mesh_axes} cut it into; choose a size that divides, or leave it whole with "
                    f"mesh.rules.{name}=[]"
                )
        entries.append(mesh_axes if len(mesh_axes) > 1 else (mesh_axes[0] if mesh_axes else None))
    return PartitionSpec(*entries)


def parameter_specs(params: nnx.State, rules: Rules, mesh: AnyMesh) -> dict[Any, Any]:
    """A `PartitionSpec` per parameter, as a plain nested dict, from the logical names that it carries.

    Args:
        params: abstract parameters as `nnx.split` gives them.
        rules: logical name to mesh axes.
        mesh: whose sizes every dimension must be divisible by.
    """
    mesh_sizes = dict(mesh.shape)
    specs = [
        (
            path,
            partition_spec(
                variable.get_metadata()["out_sharding"],
                rules,
                shape=variable.shape,
                mesh_sizes=mesh_sizes,
                array=".".join(map(str, path)),
            ),
        )
        for path, variable in nnx.to_flat_state(params)
    ]
    return nnx.traversals.unflatten_mapping(dict(specs))


def shardings(specs: Any, mesh: AnyMesh) -> Any:
    """`NamedSharding`s on `mesh` for a pytree of specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def bytes_per_device(shapes: Any) -> int:
    """Memory that a pytree of placed arrays takes on each device."""
    return sum(
        math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize for shape in jax.tree.leaves(shapes)
    )
