"""The backward pass of attention as two kernels (Dao 2023, arXiv:2307.08691, algorithm 2), weights computed anew.

One holds a block of queries and goes over keys, the other a block of keys and goes over queries, and over the heads
that share them: every gradient is summed by one program, in one order, so results do not change from run to run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.attention.pallas.blocks import Blocks
from pallas_kernels.attention.pallas.tiles import (
    LOG2_E,
    Rows,
    contract,
    contract_heads,
    load_row,
    load_tiles,
    loop_over_visible,
    pieces,
    store_tiles,
    visible_tile,
)
from pallas_kernels.attention.spec import AttentionSpec, SegmentIds
from pallas_kernels.pallas_triton import triton_call


def query_gradient(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    gradient: Float[Array, "batch query_length heads value_dim"],
    log_sum_exp: Float[Array, "batch heads query_length"],
    correction: Float[Array, "batch heads query_length"],
    spec: AttentionSpec,
    blocks: Blocks,
    interpret: bool,
) -> Float[Array, "batch query_length heads head_dim"]:
    """The gradient of `query`.

    Args:
        query: as in the forward pass.
        key: likewise.
        value: likewise.
        segment_ids: likewise.
        gradient: of the attended values.
        log_sum_exp: as the forward pass gave it.
        correction: what is subtracted from the gradient of a row's weights, times `gradient`: its product with the
            attended values, less the gradient of `log_sum_exp`.
        spec: as in the forward pass.
        blocks: sizes of this kernel.
        interpret: run it as plain JAX.
    """
    batch, query_length, heads, head_dim = query.shape
    pairs = batch * heads * spec.pairs(query_length, key.shape[1])
    (result,) = triton_call(
        functools.partial(_query_kernel, spec=spec, blocks=blocks, segmented=segment_ids is not None),
        "attention_query_gradient",
        grid=(-(-query_length // blocks.queries), heads, batch),
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        flops=2 * pairs * (2 * head_dim + value.shape[-1]),
    )(query, key, value, gradient, log_sum_exp, correction, *(segment_ids or ()))
    gradient_of_query: jax.Array = result
    return gradient_of_query


def _query_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    gradient_ref: Any,
    log_sum_exp_ref: Any,
    correction_ref: Any,
    *refs: Any,
    spec: AttentionSpec,
    blocks: Blocks,
    segmented: bool,
) -> None:
    (*id_refs, out_ref) = refs
    head_dim, value_dim = query_ref.shape[-1], value_ref.shape[-1]
    block, head, batch = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = jax.lax.div(head, query_ref.shape[2] // key_ref.shape[2])
    rows = Rows(block * blocks.queries, blocks.queries, query_ref.shape[1])
    query = load_tiles(query_ref, batch, rows, head, head_dim)
    gradient = load_tiles(gradient_ref, batch, rows, head, value_dim)
    log_sum_exp = load_row(log_sum_exp_ref, rows, batch, head)[:, None]
    correction = load_row(correction_ref, rows, batch, head)[:, None]
    query_ids = load_row(id_refs[0], rows, batch)[:, None] if segmented else None

    def add(masked: bool, cols: Rows, sums: Any) -> Any:
        key = load_tiles(key_ref, batch, cols, kv_head, head_dim)
        mask = None
        if masked:
            same = None if query_ids is None else query_ids == load_row(id_refs[1], cols, batch)[None, :]
            end = None if cols.inside is None else cols.length
            mask = visible_tile(spec, rows.positions[:, None], cols.positions[None, :], end, same)
        _, slopes = _weights(contract_heads(query, key), log_sum_exp, mask, spec)
        upstream = contract_heads(gradient, load_tiles(value_ref, batch, cols, kv_head, value_dim))
        of_scores = (slopes * (upstream - correction)).astype(query[0].dtype)
        return tuple(total + contract(of_scores, tile) for total, tile in zip(sums, key, strict=True))

    start = tuple(jnp.zeros((rows.size, piece.size), jnp.float32) for piece in pieces(head_dim))
    others = Rows(block, blocks.keys, key_ref.shape[1])
    sums = loop_over_visible(rows, others, spec.reach, segmented, add, start)
    store_tiles(out_ref, batch, rows, head, head_dim, sums)


def key_value_gradient(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    gradient: Float[Array, "batch query_length heads value_dim"],
    log_sum_exp: Float[Array, "batch heads query_length"],
    correction: Float[Array, "batch heads query_length"],
    spec: AttentionSpec,
    blocks: Blocks,
    interpret: bool,
) -> tuple[Float[Array, "batch key_length kv_heads head_dim"], Float[Array, "batch key_length kv_heads value_dim"]]:
    """The gradients of `key` and of `value`; arguments as of `query_gradient`."""
    batch, key_length, kv_heads, head_dim = key.shape
    pairs = batch * query.shape[2] * spec.pairs(query.shape[1], key_length)
    of_key, of_value = triton_call(
        functools.partial(_key_value_kernel, spec=spec, blocks=blocks, segmented=segment_ids is not None),
        "attention_key_value_gradient",
        grid=(-(-key_length // blocks.keys), kv_heads, batch),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        flops=4 * pairs * (head_dim + value.shape[-1]),
    )(query, key, value, gradient, log_sum_exp, correction, *(segment_ids or ()))
    return of_key, of_value


def _key_value_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    gradient_ref: Any,
    log_sum_exp_ref: Any,
    correction_ref: Any,
    *refs: Any,
    spec: AttentionSpec,
    blocks: Blocks,
    segmented: bool,
) -> None:
    (*id_refs, key_out_ref, value_out_ref) = refs
    head_dim, value_dim = query_ref.shape[-1], value_ref.shape[-1]
    group = query_ref.shape[2] // key_ref.shape[2]
    block, kv_head, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    cols = Rows(block * blocks.keys, blocks.keys, key_ref.shape[1])
    key = load_tiles(key_ref, batch, cols, kv_head, head_dim)
    value = load_tiles(value_ref, batch, cols, kv_head, value_dim)
    key_ids = load_row(id_refs[1], cols, batch)[:, None] if segmented else None

    def add(head: jax.Array, masked: bool, rows: Rows, sums: Any) -> Any:
        query = load_tiles(query_ref, batch, rows, head, head_dim)
        gradient = load_tiles(gradient_ref, batch, rows, head, value_dim)
        mask = None
        if masked:
            same = None if key_ids is None else key_ids == load_row(id_refs[0], rows, batch)[None, :]
            mask = visible_tile(spec, rows.positions[None, :], cols.positions[:, None], None, same)
        log_sum_exp = load_row(log_sum_exp_ref, rows, batch, head)[None, :]
        weights, slopes = _weights(contract_heads(key, query), log_sum_exp, mask, spec)
        upstream = contract_heads(value, gradient)
        of_scores = slopes * (upstream - load_row(correction_ref, rows, batch, head)[None, :])
        of_key, of_value = sums
        of_value = tuple(
            total + contract(weights.astype(tile.dtype), tile) for total, tile in zip(of_value, gradient, strict=True)
        )
        of_key = tuple(
            total + contract(of_scores.astype(tile.dtype), tile) for total, tile in zip(of_key, query, strict=True)
        )
        return of_key, of_value

    def add_head(member: Any, sums: Any) -> Any:
        before, after = spec.reach
        others = Rows(block, blocks.queries, query_ref.shape[1])
        body = functools.partial(add, kv_head * group + member)
        return loop_over_visible(cols, others, (after, before), segmented, body, sums)

    start = tuple(
        tuple(jnp.zeros((cols.size, piece.size), jnp.float32) for piece in pieces(dim)) for dim in (head_dim, value_dim)
    )
    of_key, of_value = jax.lax.fori_loop(0, group, add_head, start) if group > 1 else add_head(0, start)
    store_tiles(key_out_ref, batch, cols, kv_head, head_dim, of_key)
    store_tiles(value_out_ref, batch, cols, kv_head, value_dim, of_value)


def _weights(
    products: jax.Array, log_sum_exp: jax.Array, mask: jax.Array | None, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Weights, and weights times the slope of scores in products of queries and keys."""
    if spec.softcap is None:
        weights = jnp.exp2(products * (spec.scale * LOG2_E) - log_sum_exp * LOG2_E)
        slope: Any = spec.scale
    else:
        capped = jnp.tanh(products * (spec.scale / spec.softcap))
        weights = jnp.exp2(capped * (spec.softcap * LOG2_E) - log_sum_exp * LOG2_E)
        slope = spec.scale * (1.0 - capped * capped)
    if mask is not None:
        weights = jnp.where(mask, weights, 0.0)
    return weights, weights * slope
