"""Order of tokens: which tokens of a row lie on which device of the mesh axis `context`.

Causality makes late queries see more keys than early ones. So where queries stay where they are, a row is cut into
twice as many half-chunks as there are devices, and each device holds one from the front and its mirror image from the
back (zig-zag, as in Llama 3, arXiv:2407.21783): then all have equal work.

All that happens outside attention is per token, and the loss is a sum over tokens. So the arrays of a batch are put
into this order once, where they enter a step (`Arrange`), and nobody but attention needs to know.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.layout import Layout

AXIS = "context"
Index = jax.Array | int
Arrange = Callable[[Any], Any]
"""Puts a pytree of `[batch, seq]` arrays, in the order of their rows, into the order in which the mesh holds tokens."""


def splits_rows(layout: Layout) -> bool:
    """Whether the tokens of a row lie on several devices."""
    return AXIS in layout.axes("sequence")


def is_zigzag(config: MeshConfig, layout: Layout) -> bool:
    """Whether tokens lie in zig-zag order, not in the order of the row."""
    return splits_rows(layout) and config.context_attention != "all_to_all"


def half_chunks(device: Index, devices: int) -> tuple[Index, Index]:
    """Numbers of the two half-chunks, of `2 * devices`, that a device holds in zig-zag order."""
    return device, 2 * devices - 1 - device


def places(chunks: Int[Array, "chunks"], length: int) -> Int[Array, "chunks length"]:
    """Indices within the row of the tokens of half-chunks, each of `length` tokens."""
    return chunks[:, None] * length + jnp.arange(length)


def order_of_tokens(config: MeshConfig, layout: Layout) -> Arrange:
    """How a batch is arranged on a mesh; to be called where the mesh axis `data` is manual."""
    return _rearrange(layout, half_chunks) if is_zigzag(config, layout) else lambda batch: batch


def order_of_rows(config: MeshConfig, layout: Layout) -> Arrange:
    """Puts back what `order_of_tokens` arranged; to be called in the same place."""

    def places_of_chunks(device: Index, devices: int) -> tuple[Index, Index]:
        def place(chunk: Index) -> Index:
            return jnp.where(chunk < devices, 2 * chunk, 2 * (2 * devices - 1 - chunk) + 1)

        return place(2 * device), place(2 * device + 1)

    return _rearrange(layout, places_of_chunks) if is_zigzag(config, layout) else lambda batch: batch


def _rearrange(layout: Layout, chosen: Callable[[Index, int], tuple[Index, Index]]) -> Arrange:
    """Gives each device, of as many, the two half-chunks `chosen` of all that the mesh holds, as it holds them."""

    def rearrange(x: jax.Array) -> jax.Array:
        size = jax.lax.axis_size(AXIS)
        length = x.shape[1] // 2
        row = jax.lax.all_gather(x, AXIS, axis=1, tiled=True)
        mine = chosen(jax.lax.axis_index(AXIS), size)
        return jnp.concatenate(
            [jax.lax.dynamic_slice_in_dim(row, chunk * length, length, axis=1) for chunk in mine], axis=1
        )

    spec = layout.spec(("batch", "sequence"))
    return layout.island(lambda batch: jax.tree.map(rearrange, batch), (spec,), spec)
