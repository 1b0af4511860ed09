"""The kernel of dense products with an epilogue, and the gradients of a product."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.bf16_matmul.blocks import find_blocks
from pallas_kernels.pallas_triton import triton_call
from pallas_kernels.tiles import (
    Contraction,
    block_of_program,
    block_span,
    load_tile,
    load_vector,
    store_tile,
    sum_products,
)

type Tiles = Sequence[jax.Array]
"""Parts of arrays, as a kernel holds them."""
type Epilogue = Callable[[Tiles, Tiles, Tiles], Tiles]
"""From sums, tiles of vectors along columns and tiles of matrices, all in float32, to tiles of the outputs."""


def first_sum(sums: Tiles, vectors: Tiles, matrices: Tiles) -> Tiles:
    """The epilogue of a product alone."""
    return sums[:1]


@dataclass(frozen=True)
class Layout:
    """Which operands lie transposed in memory."""

    left: bool = False
    right: bool = False


def product(
    name: str,
    gpu: str | None,
    left: Float[Array, "rows inner"],
    rights: Sequence[Float[Array, "inner cols"]],
    *,
    out_dtypes: Sequence[jnp.dtype],
    layout: Layout = Layout(),
    vectors: Sequence[Float[Array, "cols"]] = (),
    matrices: Sequence[Float[Array, "rows cols"]] = (),
    epilogue: Epilogue = first_sum,
) -> list[Float[Array, "rows cols"]]:
    """Products of one matrix with others, summed in float32, and what an epilogue makes of them before they are cast.

    Args:
        name: of the kernel.
        gpu: the name of its folder, which has the sizes of blocks; None to interpret the kernel.
        left: of shape "inner rows" where `layout.left`.
        rights: each of shape "cols inner" where `layout.right`.
        out_dtypes: of the outputs, one per tile that the epilogue returns.
        layout: which operands lie transposed.
        vectors: for the epilogue.
        matrices: likewise.
        epilogue: from the sums to the outputs.
    """
    rows, inner = left.shape[::-1] if layout.left else left.shape
    cols = rights[0].shape[0 if layout.right else 1]
    # What an epilogue holds beside the sums, they cannot have of the registers.
    kind = "two_products" if len(rights) > 1 else "product_with_matrix" if matrices else "product"
    blocks = find_blocks(gpu, kind, rows=rows, cols=cols)
    row_blocks, col_blocks = pl.cdiv(rows, blocks.rows), pl.cdiv(cols, blocks.cols)

    def kernel(*refs: jax.Ref) -> None:
        left_ref, *rest = refs
        right_refs, rest = rest[: len(rights)], rest[len(rights) :]
        vector_refs, rest = rest[: len(vectors)], rest[len(vectors) :]
        matrix_refs, out_refs = rest[: len(matrices)], rest[len(matrices) :]
        row_block, col_block = block_of_program(pl.program_id(0), row_blocks, col_blocks)
        row_span = block_span(row_block, blocks.rows, rows)
        col_span = block_span(col_block, blocks.cols, cols)

        def load_step(step: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            inner_span = block_span(step, blocks.inner, inner)
            left_spans = (inner_span, row_span) if layout.left else (row_span, inner_span)
            right_spans = (col_span, inner_span) if layout.right else (inner_span, col_span)
            return load_tile(left_ref, *left_spans), [load_tile(ref, *right_spans) for ref in right_refs]

        sums = sum_products(
            load_step,
            pl.cdiv(inner, blocks.inner),
            [(blocks.rows, blocks.cols)] * len(rights),
            Contraction(0 if layout.left else 1, 1 if layout.right else 0),
        )
        outputs = epilogue(
            sums,
            [load_vector(ref, col_span).astype(jnp.float32)[None, :] for ref in vector_refs],
            [load_tile(ref, row_span, col_span).astype(jnp.float32) for ref in matrix_refs],
        )
        for ref, output in zip(out_refs, outputs, strict=True):
            store_tile(ref, output, row_span, col_span)

    operands = (left, *rights, *vectors, *matrices)
    outputs: list[jax.Array] = triton_call(
        kernel,
        name,
        grid=(row_blocks * col_blocks,),
        in_specs=[pl.BlockSpec()] * len(operands),
        out_specs=[pl.BlockSpec()] * len(out_dtypes),
        out_shape=[jax.ShapeDtypeStruct((rows, cols), dtype) for dtype in out_dtypes],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=gpu is None,
        flops=2 * rows * inner * cols * len(rights),
    )(*operands)
    return outputs


def left_gradient(
    gpu: str | None,
    gradient: Float[Array, "rows cols"],
    w: Float[Array, "inner cols"],
    *,
    add: Float[Array, "rows inner"] | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "rows inner"]:
    """What x gets from the gradient of its product with w, on top of `add`."""
    (out,) = product(
        "matmul_x_gradient",
        gpu,
        gradient,
        [w],
        out_dtypes=[gradient.dtype if out_dtype is None else out_dtype],
        layout=Layout(right=True),
        matrices=given(add),
        epilogue=lambda sums, _, matrices: [sums[0] + matrices[0] if matrices else sums[0]],
    )
    return out


def right_gradient(
    gpu: str | None, x: Float[Array, "rows inner"], gradient: Float[Array, "rows cols"]
) -> Float[Array, "inner cols"]:
    """What w gets from the gradient of the product of x with it."""
    (out,) = product("matmul_w_gradient", gpu, x, [gradient], out_dtypes=[x.dtype], layout=Layout(left=True))
    return out


def given(x: Array | None) -> list[Array]:
    """A list of what there is."""
    return [] if x is None else [x]
