"""The operations of a model, carried out on a mesh."""

import dataclasses
import functools

import jax

from dseekjax.errors import UserError
from dseekjax.models.operations import Attention, Dense, Operations, Product, local_operations
from dseekjax.parallel.by_hand import attention_by_hand, whole_rows
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.context import context_attention
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.order import splits_rows
from dseekjax.parallel.tensor import annotated_in, annotated_out, project_in, project_out
from dseekjax.parallel.transport import AtOnce, RoundARing, Transport, WholeSequences
from dseekjax.parallel.vocabulary import sharded_cross_entropy, sharded_lookup, sharded_target_scores


def build_operations(
    config: MeshConfig, layout: Layout, attention: Attention, dense: Dense, *, splits_attention: bool = True
) -> Operations:
    """What a model on `layout` asks for, given how attention and matrix products run on one device.

    Args:
        config: how the mesh is used.
        layout: where logical axes lie.
        attention: as `Operations` has it.
        dense: likewise.
        splits_attention: whether XLA can split `attention` over devices; kernels it would run whole on each.

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
            target_scores=functools.partial(sharded_target_scores, layout, dense),
        )
    if layout.split_axes and not splits_attention:
        operations = dataclasses.replace(operations, attention=attention_by_hand(layout, whole_rows(attention)))
    if splits_rows(layout):
        operations = dataclasses.replace(operations, attention=context_attention(config, layout, attention))
    if layout.sizes["tensor"] > 1:
        operations = _tensor_parallel(config, layout, operations)
    return operations


def _tensor_parallel(config: MeshConfig, layout: Layout, operations: Operations) -> Operations:
    dense = operations.dense
    transport: Transport = WholeSequences()
    if "tensor" in layout.axes("residual_sequence"):
        transport = RoundARing() if config.tensor_overlap == "ring" else AtOnce()

    def by_hand(*products: Product) -> bool:
        inner = [{axis for name in product.inner_axes for axis in layout.axes(name)} for product in products]
        return config.tensor_overlap != "xla" and all("tensor" in axes for axes in inner)

    def into(x: jax.Array, products: tuple[Product, ...]) -> tuple[jax.Array, ...]:
        if by_hand(*products):
            return project_in(layout, transport, dense, x, products)
        return annotated_in(layout, dense, x, products)

    def out(x: jax.Array, product: Product) -> jax.Array:
        if by_hand(product):
            return project_out(layout, transport, dense, x, product)
        return annotated_out(layout, dense, x, product)

    return dataclasses.replace(operations, project_in=into, project_out=out)


def _check_rules(config: MeshConfig, layout: Layout) -> None:
    allowed = {
        "batch": {"fsdp", "expert"},
        "sequence": {"context"},
        "residual_sequence": {"context", "tensor"},
        "vocab": {"tensor"},
        "heads": {"tensor"},
        "kv_heads": {"tensor"},
        "mlp": {"tensor"},
        "embed": {"fsdp", "expert", "context"},
        "residual": set(),
        "head_dim": set(),
        "positions": set(),
        "layer": set(),
    }
    rings = config.tensor_overlap == "ring" and layout.split("tensor")
    for name, axes in layout.rules.items():
        wrong = sorted(set(axes) - allowed[name])
        if wrong:
            raise UserError(
                f"mesh.rules.{name} names the mesh axis {wrong[0]!r}, where {name} cannot go; "
                f"it may use {', '.join(sorted(allowed[name])) or 'none'}"
            )
        if rings and name in ("heads", "kv_heads", "mlp", "residual_sequence") and "tensor" not in axes:
            raise UserError(
                f"mesh.tensor_overlap ring needs {name} split over tensor, and mesh.rules.{name} keeps it from that; "
                "leave the rule out, or set mesh.tensor_overlap to none"
            )
    tokens = {*layout.axes("batch"), *layout.axes("sequence")}
    if unsplit := [axis for axis in layout.axes("embed") if axis not in tokens]:
        raise UserError(
            f"mesh.rules give the mesh axis {unsplit[0]!r} to embed and to no dimension of the batch; let batch or "
            "sequence use it, or set mesh.rules.embed without it"
        )
    sequence, residual = layout.axes("sequence"), layout.axes("residual_sequence")
    if residual not in (sequence, (*sequence, "tensor")):
        raise UserError(
            f"mesh.rules place residual_sequence on {list(residual)} and sequence on {list(sequence)}; "
            "residual_sequence must have the mesh axes of sequence, and may have tensor after them"
        )
    if config.tensor_overlap == "xla" and layout.split("tensor") and layout.split("context"):
        raise UserError(
            "mesh.tensor_overlap xla leaves communication to the compiler, which with mesh.context would gather whole "
            "activations; set mesh.tensor_overlap to none or ring"
        )
