"""Context parallelism: attention within sequences that are split over the mesh axis `context`."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dseekjax.errors import UserError
from dseekjax.models.operations import Attention
from dseekjax.parallel.by_hand import Local, SegmentIds, attention_by_hand
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.order import AXIS, is_zigzag, splits_rows
from dseekjax.parallel.zigzag_attention import gathered_attention, ring_attention


def check_context(config: MeshConfig, layout: Layout, sequence_length: int, num_heads: int) -> None:
    """Refuses what `config.context_attention` cannot split.

    Raises:
        UserError: the sequence does not divide into half-chunks, or the heads do not divide over `context`.
    """
    if not splits_rows(layout):
        return
    kind, context = config.context_attention, layout.sizes[AXIS]
    if is_zigzag(config, layout):
        parts = math.prod(layout.sizes[axis] for axis in layout.axes("residual_sequence"))
        multiple = math.lcm(2 * context, parts)
        if sequence_length % multiple:
            raise UserError(
                f"data.sequence_length {sequence_length} does not divide into the {2 * context} half-chunks by which "
                f"mesh.context_attention {kind} balances the work of mesh.context {context} devices; make it a "
                f"multiple of {multiple}"
            )
    else:
        parts = context * math.prod(layout.sizes[axis] for axis in layout.axes("heads"))
        if num_heads % parts:
            raise UserError(
                f"model.attention.num_heads {num_heads} does not divide over the {parts} devices that mesh axes "
                f"{' and '.join((*layout.axes('heads'), AXIS))} give {kind} attention; make it a multiple of {parts}, "
                "or set mesh.context_attention to ring or all_gather"
            )


def context_attention(config: MeshConfig, layout: Layout, attention: Attention) -> Attention:
    """Attention as `pallas_kernels.attention.attention` has it, for rows that are split over `context`.

    Args:
        config: whose `context_attention` chooses the way.
        layout: where logical axes lie; tokens lie as `order_of_tokens` says.
        attention: what runs on one device, where that sees whole rows.
    """
    ways: dict[str, Local] = {
        "all_to_all": functools.partial(_all_to_all, attention),
        "all_gather": gathered_attention,
        "ring": ring_attention,
    }
    return attention_by_hand(layout, ways[config.context_attention])


def _all_to_all(
    attention: Attention,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    segment_ids: SegmentIds,
    causal: bool,
    scale: float,
) -> Float[Array, "batch seq heads value_dim"]:
    """Whole sequences of some of the heads on each device (Jacobs et al. 2023, arXiv:2309.14509).

    Key and value heads that do not divide over the devices are repeated up to the least number that does: every device
    needs at least one, and a device whose queries share one with another's must have it too.
    """
    size = jax.lax.axis_size(AXIS)
    repeats = size // math.gcd(key.shape[2], size)

    def scatter(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)

    of_queries, of_keys = None, None
    if segment_ids is not None:
        of_queries, of_keys = jax.lax.all_gather(jnp.stack(segment_ids), AXIS, axis=2, tiled=True)
    out = attention(
        scatter(query),
        scatter(jnp.repeat(key, repeats, axis=2)),
        scatter(jnp.repeat(value, repeats, axis=2)),
        query_segment_ids=of_queries,
        key_segment_ids=of_keys,
        causal=causal,
        scale=scale,
    )
    return jax.lax.all_to_all(out, AXIS, split_axis=1, concat_axis=2, tiled=True)
