"""The forward pass of attention as one kernel (Dao 2023, FlashAttention-2, arXiv:2307.08691).

A program holds a block of queries of one head, goes over the keys that they see, and keeps a running maximum, sum and
weighted mean of values. Scores never leave the core.
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
from pallas_kernels.pallas_triton import store, triton_call


def forward(
    query: Float[Array, "batch query_length heads head_dim"],
    key: Float[Array, "batch key_length kv_heads head_dim"],
    value: Float[Array, "batch key_length kv_heads value_dim"],
    segment_ids: SegmentIds,
    spec: AttentionSpec,
    blocks: Blocks,
    interpret: bool,
) -> tuple[Float[Array, "batch query_length heads value_dim"], Float[Array, "batch heads query_length"]]:
    """The attended values, and the logarithm of the sum of each query's exponentials."""
    batch, query_length, heads, head_dim = query.shape
    pairs = batch * heads * spec.pairs(query_length, key.shape[1])
    call = triton_call(
        functools.partial(_kernel, spec=spec, blocks=blocks, segmented=segment_ids is not None),
        "attention_forward",
        grid=(-(-query_length // blocks.queries), heads, batch),
        out_shape=[
            jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), value.dtype),
            jax.ShapeDtypeStruct((batch, heads, query_length), jnp.float32),
        ],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
        flops=2 * pairs * (head_dim + value.shape[-1]),
    )
    out, log_sum_exp = call(query, key, value, *(segment_ids or ()))
    return out, log_sum_exp


def _kernel(
    query_ref: Any, key_ref: Any, value_ref: Any, *refs: Any, spec: AttentionSpec, blocks: Blocks, segmented: bool
) -> None:
    (*id_refs, out_ref, log_sum_exp_ref) = refs
    head_dim, value_dim = query_ref.shape[-1], value_ref.shape[-1]
    key_length = key_ref.shape[1]
    # The last queries see the most keys under causality; begun first, they do not end last.
    block, head, batch = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    kv_head = jax.lax.div(head, query_ref.shape[2] // key_ref.shape[2])
    rows = Rows(block * blocks.queries, blocks.queries, query_ref.shape[1])
    query = load_tiles(query_ref, batch, rows, head, head_dim)
    query_ids = load_row(id_refs[0], rows, batch)[:, None] if segmented else None

    def attend(masked: bool, cols: Rows, carry: Any) -> Any:
        largest, total, sums = carry
        scores = contract_heads(query, load_tiles(key_ref, batch, cols, kv_head, head_dim))
        if spec.softcap is None:
            scores = scores * (spec.scale * LOG2_E)
        else:
            scores = jnp.tanh(scores * (spec.scale / spec.softcap)) * (spec.softcap * LOG2_E)
        if masked:
            same = None if query_ids is None else query_ids == load_row(id_refs[1], cols, batch)[None, :]
            end = None if cols.inside is None else key_length
            mask = visible_tile(spec, rows.positions[:, None], cols.positions[None, :], end, same)
            scores = jnp.where(mask, scores, -jnp.inf)
        now_largest = jnp.maximum(largest, scores.max(1))
        base = jnp.where(now_largest == -jnp.inf, 0.0, now_largest) if masked else now_largest
        weights = jnp.exp2(scores - base[:, None])
        keep = jnp.exp2(largest - base)
        total = total * keep + weights.sum(1)
        values = load_tiles(value_ref, batch, cols, kv_head, value_dim)
        sums = tuple(
            old * keep[:, None] + contract(weights.astype(new.dtype), new)
            for old, new in zip(sums, values, strict=True)
        )
        return now_largest, total, sums

    start = (
        jnp.full(rows.size, -jnp.inf, jnp.float32),
        jnp.zeros(rows.size, jnp.float32),
        tuple(jnp.zeros((rows.size, piece.size), jnp.float32) for piece in pieces(value_dim)),
    )
    others = Rows(block, blocks.keys, key_length)
    largest, total, sums = loop_over_visible(rows, others, spec.reach, segmented, attend, start)
    sees = total != 0.0
    share = 1.0 / jnp.where(sees, total, 1.0)
    store_tiles(out_ref, batch, rows, head, value_dim, tuple(x * share[:, None] for x in sums))
    log_sum_exp = jnp.where(sees, (largest + jnp.log2(jnp.where(sees, total, 1.0))) / LOG2_E, -jnp.inf)
    place = log_sum_exp_ref.at[batch, head, pl.dslice(rows.start, rows.size)]
    store(place, log_sum_exp, mask=rows.inside)
