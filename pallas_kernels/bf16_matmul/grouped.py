"""Products where each group of rows has a matrix of its own, as kernels, with gradients that are kernels too.

`gpu` is the name of a GPU's folder, or None to interpret kernels.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.bf16_matmul.blocks import find_blocks
from pallas_kernels.pallas_triton import load, triton_call
from pallas_kernels.tiles import (
    Contraction,
    Span,
    block_of_program,
    block_span,
    load_tile,
    store_tile,
    sum_products,
)


class RowBlocks(NamedTuple):
    """Blocks of rows, none of which holds rows of two groups."""

    group: Int[Array, "blocks"]
    start: Int[Array, "blocks"]
    """First row of each."""
    stop: Int[Array, "blocks"]
    """Row after the last of its group; at most `start` for a block that is not needed."""
    is_live: Int[Array, "blocks"]
    """0 where the rows belong to no group, and get zeros."""


def row_blocks(group_sizes: Int[Array, "groups"], rows: int, size: int) -> RowBlocks:
    """Cuts each group into blocks of `size` rows; a group's last block may have fewer.

    Their number is that of the worst split, as it must be known before the sizes are: each group, and the rest that
    belongs to none, adds at most one block that is not full.
    """
    groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    ends = jnp.minimum(jnp.concatenate([ends, jnp.full(1, rows, jnp.int32)]), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    blocks_to_here = jnp.cumsum((ends - starts + size - 1) // size, dtype=jnp.int32)
    block = jnp.arange(rows // size + groups + 1, dtype=jnp.int32)
    group = jnp.searchsorted(blocks_to_here, block, side="right").astype(jnp.int32)
    # What lies beyond the last block is found in no group, and begins where rows end.
    owner = jnp.minimum(group, groups)
    first_block = jnp.where(owner > 0, blocks_to_here[owner - 1], 0)
    start = jnp.minimum(starts[owner] + (block - first_block) * size, rows)
    return RowBlocks(jnp.minimum(group, groups - 1), start, ends[owner], (group < groups).astype(jnp.int32))


def grouped_product(
    name: str,
    gpu: str | None,
    left: Float[Array, "rows inner"],
    right: Float[Array, "groups inner cols"],
    group_sizes: Int[Array, "groups"],
    *,
    transposed: bool = False,
) -> Float[Array, "rows cols"]:
    """Rows of each group times the matrix of the group; zeros for rows that belong to none.

    Args:
        name: of the kernel.
        gpu: the name of its folder, which has the sizes of blocks; None to interpret the kernel.
        left: rows, sorted by group.
        right: each matrix of shape "cols inner" where `transposed`.
        group_sizes: rows of each group.
        transposed: whether matrices lie transposed.
    """
    rows, inner = left.shape
    cols = right.shape[1 if transposed else 2]
    # Groups are of different sizes; their mean tells how many rows a block can fill.
    groups = right.shape[0]
    blocks = find_blocks(gpu, "grouped_product", rows=rows // groups, cols=cols, groups=groups)
    table = row_blocks(group_sizes, rows, blocks.rows)
    count, col_blocks = table.group.shape[0], pl.cdiv(cols, blocks.cols)

    def kernel(
        group_ref: jax.Ref,
        start_ref: jax.Ref,
        stop_ref: jax.Ref,
        live_ref: jax.Ref,
        left_ref: jax.Ref,
        right_ref: jax.Ref,
        out_ref: jax.Ref,
    ) -> None:
        row_block, col_block = block_of_program(pl.program_id(0), count, col_blocks)
        group = load(group_ref.at[row_block])
        row_span = Span(load(start_ref.at[row_block]), blocks.rows, load(stop_ref.at[row_block]))
        col_span = block_span(col_block, blocks.cols, cols)

        def load_step(step: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            inner_span = block_span(step, blocks.inner, inner)
            right_spans = (col_span, inner_span) if transposed else (inner_span, col_span)
            return load_tile(left_ref, row_span, inner_span), [load_tile(right_ref, *right_spans, group)]

        (total,) = sum_products(
            load_step,
            load(live_ref.at[row_block]) * pl.cdiv(inner, blocks.inner),
            [(blocks.rows, blocks.cols)],
            Contraction(1, 1 if transposed else 0),
        )
        store_tile(out_ref, total, row_span, col_span)

    (out,) = triton_call(
        kernel,
        name,
        grid=(count * col_blocks,),
        in_specs=[pl.BlockSpec()] * 6,
        out_specs=[pl.BlockSpec()],
        out_shape=[jax.ShapeDtypeStruct((rows, cols), left.dtype)],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=gpu is None,
        flops=2 * rows * inner * cols,
    )(*table, left, right)
    return out


def grouped_outer_product(
    name: str,
    gpu: str | None,
    left: Float[Array, "rows inner"],
    right: Float[Array, "rows cols"],
    group_sizes: Int[Array, "groups"],
) -> Float[Array, "groups inner cols"]:
    """Sums, over the rows of each group, the outer products of rows of two matrices; zeros for an empty group.

    Args:
        name: of the kernel.
        gpu: the name of its folder, which has the sizes of blocks; None to interpret the kernel.
        left: rows, sorted by group.
        right: likewise.
        group_sizes: rows of each group.
    """
    rows, inner = left.shape
    cols, groups = right.shape[1], group_sizes.shape[0]
    # The rows of a block are those of a group's matrix; it is the rows of the operands that are summed over.
    blocks = find_blocks(gpu, "grouped_outer_product", rows=inner, cols=cols, groups=groups)
    inner_blocks, col_blocks = pl.cdiv(inner, blocks.rows), pl.cdiv(cols, blocks.cols)
    stops = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]])

    def kernel(start_ref: jax.Ref, stop_ref: jax.Ref, left_ref: jax.Ref, right_ref: jax.Ref, out_ref: jax.Ref) -> None:
        group = pl.program_id(1)
        inner_block, col_block = block_of_program(pl.program_id(0), inner_blocks, col_blocks)
        start, stop = load(start_ref.at[group]), load(stop_ref.at[group])
        inner_span = block_span(inner_block, blocks.rows, inner)
        col_span = block_span(col_block, blocks.cols, cols)

        def load_step(step: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            row_span = Span(start + step * blocks.inner, blocks.inner, stop)
            return load_tile(left_ref, row_span, inner_span), [load_tile(right_ref, row_span, col_span)]

        (total,) = sum_products(
            load_step,
            jax.lax.div(stop - start + blocks.inner - 1, blocks.inner),
            [(blocks.rows, blocks.cols)],
            Contraction(0, 0),
        )
        store_tile(out_ref, total, inner_span, col_span, group)

    (out,) = triton_call(
        kernel,
        name,
        grid=(inner_blocks * col_blocks, groups),
        in_specs=[pl.BlockSpec()] * 4,
        out_specs=[pl.BlockSpec()],
        out_shape=[jax.ShapeDtypeStruct((groups, inner, cols), left.dtype)],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=gpu is None,
        flops=2 * rows * inner * cols,
    )(starts, stops, left, right)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def pallas_grouped_matmul(
    gpu: str | None,
    x: Float[Array, "rows inner"],
    w: Float[Array, "groups inner cols"],
    group_sizes: Int[Array, "groups"],
) -> Float[Array, "rows cols"]:
    """See `pallas_kernels.bf16_matmul.grouped_matmul`."""
    return grouped_product("grouped_matmul", gpu, x, w, group_sizes)


def _grouped_forward(
    gpu: str | None, x: Array, w: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return pallas_grouped_matmul(gpu, x, w, group_sizes), (x, w, group_sizes)


def _grouped_backward(gpu: str | None, kept: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, None]:
    x, w, group_sizes = kept
    of_x = grouped_product("grouped_matmul_x_gradient", gpu, gradient, w, group_sizes, transposed=True)
    return of_x, grouped_outer_product("grouped_matmul_w_gradient", gpu, x, gradient, group_sizes), None


pallas_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
