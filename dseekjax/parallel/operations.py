"""The operations of a model, carried out on a mesh."""

import dataclasses
import functools

from dseekjax.errors import UserError
from dseekjax.models.operations import Attention, Dense, Operations, local_operations
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.context import context_attention
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.order import splits_rows
from dseekjax.parallel.tensor import project_in, project_out
from dseekjax.parallel.tensor_ring import ring_in, ring_out
from dseekjax.parallel.vocabulary import sharded_cross_entropy, sharded_lookup


def build_operations(config: MeshConfig, layout: Layout, attention: Attention, dense: Dense) -> Operations:
    """What a model on `layout` asks for, given how attention and matrix products run on one device.

    Raises:
        UserError: `mesh.rules` place something where nothing here can deal with it.
    """
    _check_rules(config, layout)
    operations = dataclasses.replace(local_operations(attention, dense), constrain=layout.constrain)
    if layout.split_axes:
        operations = dataclasses.replace(
            operations,
            embed_lookup=functools.partial(sharded_lookup, layout),
            cross_entropy=functools.partial(sharded_cross_entropy, layout, dense),
        )
    if splits_rows(layout):
        operations = dataclasses.replace(operations, attention=context_attention(config, layout, attention))
    if layout.sizes["tensor"] > 1:
        into, out = (ring_in, ring_out) if config.tensor_overlap == "ring" else (project_in, project_out)
        operations = dataclasses.replace(
            operations,
            project_in=functools.partial(into, layout, dense),
            project_out=functools.partial(out, layout, dense),
        )
    return operations


def _check_rules(config: MeshConfig, layout: Layout) -> None:
    allowed = {
        "batch": {"fsdp", "expert"},
        "sequence": {"context"},
        "residual_sequence": {"context", "tensor"},
        "vocab": {"tensor"},
        "heads": {"tensor"},
        "kv_heads": {"tensor"},
        "mlp": {"tensor"},
        "embed": {*layout.rules["batch"], *layout.rules["sequence"]},
        "residual": set(),
        "head_dim": set(),
        "positions": set(),
        "layer": set(),
    }
    for name, axes in layout.rules.items():
        wrong = sorted(set(axes) - allowed[name])
        if wrong:
            raise UserError(
                f"mesh.rules.{name} names the mesh axis {wrong[0]!r}, where {name} cannot go; "
                f"it may use {', '.join(sorted(allowed[name])) or 'none'}"
            )
        if config.tensor_overlap == "ring" and allowed[name] == {"tensor"} and not axes:
            raise UserError(
                f"mesh.tensor_overlap ring needs {name} split over tensor, and mesh.rules.{name} keeps it from that; "
                "leave the rule out, or set mesh.tensor_overlap to none"
            )
