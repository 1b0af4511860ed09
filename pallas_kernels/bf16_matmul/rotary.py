"""The projection to queries, keys and values that turns queries and keys by their positions, as a kernel.

`gpu` is the name of a GPU's folder, or None to interpret kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.bf16_matmul.blocks import find_head_blocks
from pallas_kernels.bf16_matmul.product import left_gradient, right_gradient
from pallas_kernels.bf16_matmul.reference import Turns, turn, turns
from pallas_kernels.pallas_triton import triton_call
from pallas_kernels.tiles import (
    Contraction,
    Span,
    block_of_program,
    block_span,
    load_tile,
    store_tile,
    sum_products,
)


def qkv_product(
    name: str,
    gpu: str | None,
    x: Float[Array, "rows embed"],
    w_qkv: Float[Array, "embed all_heads_times_head_dim"],
    cosine_and_sine: Turns,
    *,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values, each of shape "rows heads_times_head_dim".

    A block is some rows of one head. The halves of a head are two sums, so that what is paired is in the same place of
    both. Cosines and sines come from outside: they are small beside what is written, and a GPU's own cosine of a large
    angle is slow.

    Args:
        name: of the kernel.
        gpu: the name of its folder, which has the sizes of blocks; None to interpret the kernel.
        x: what is projected.
        w_qkv: columns of the heads of queries, then of keys, then of values.
        cosine_and_sine: in float32.
        num_heads: of queries.
        num_kv_heads: of keys, and of values.
    """
    rows, inner = x.shape
    all_heads = num_heads + 2 * num_kv_heads
    head_dim = w_qkv.shape[1] // all_heads
    blocks = find_head_blocks(gpu, head_dim)
    half, row_blocks = head_dim // 2, pl.cdiv(rows, blocks.rows)

    def kernel(
        x_ref: jax.Ref,
        w_ref: jax.Ref,
        cosine_ref: jax.Ref,
        sine_ref: jax.Ref,
        query_ref: jax.Ref,
        key_ref: jax.Ref,
        value_ref: jax.Ref,
    ) -> None:
        row_block, head = block_of_program(pl.program_id(0), row_blocks, all_heads)
        row_span = block_span(row_block, blocks.rows, rows)

        def halves(head: jax.Array) -> tuple[Span, Span]:
            return Span(head * head_dim, half, None), Span(head * head_dim + half, half, None)

        def load_step(step: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            inner_span = block_span(step, blocks.inner, inner)
            return load_tile(x_ref, row_span, inner_span), [load_tile(w_ref, inner_span, span) for span in halves(head)]

        sums = sum_products(load_step, pl.cdiv(inner, blocks.inner), [(blocks.rows, half)] * 2, Contraction())

        def store_head(ref: jax.Ref, head: jax.Array, turned: bool) -> None:
            tiles = sums
            if turned:
                angle_span = Span(0, half, None)
                tiles = turn(*sums, *(load_tile(table, row_span, angle_span) for table in (cosine_ref, sine_ref)))
            for tile, span in zip(tiles, halves(head), strict=True):
                store_tile(ref, tile, row_span, span)

        first_key, first_value = num_heads, num_heads + num_kv_heads
        pl.when(head < first_key)(lambda: store_head(query_ref, head, True))
        pl.when((head >= first_key) & (head < first_value))(lambda: store_head(key_ref, head - first_key, True))
        pl.when(head >= first_value)(lambda: store_head(value_ref, head - first_value, False))

    query, key, value = triton_call(
        kernel,
        name,
        grid=(row_blocks * all_heads,),
        in_specs=[pl.BlockSpec()] * 4,
        out_specs=[pl.BlockSpec()] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads * head_dim), x.dtype) for heads in (num_heads, num_kv_heads, num_kv_heads)
        ],
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=gpu is None,
        flops=2 * rows * inner * all_heads * head_dim,
    )(x, w_qkv, *cosine_and_sine)
    return query, key, value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5, 6))
def pallas_qkv_rotary(
    gpu: str | None,
    x: Float[Array, "rows embed"],
    w_qkv: Float[Array, "embed all_heads_times_head_dim"],
    positions: Int[Array, "rows"],
    theta: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.bf16_matmul.qkv_rotary`; rows and columns are not yet split."""
    head_dim = w_qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    return qkv_product(
        "qkv_rotary",
        gpu,
        x,
        w_qkv,
        turns(positions, head_dim, theta, jnp.dtype(jnp.float32)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )


def _qkv_forward(
    gpu: str | None, x: Array, w_qkv: Array, positions: Array, theta: float, num_heads: int, num_kv_heads: int
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    return pallas_qkv_rotary(gpu, x, w_qkv, positions, theta, num_heads, num_kv_heads), (x, w_qkv, positions)


def _qkv_backward(
    gpu: str | None,
    theta: float,
    num_heads: int,
    num_kv_heads: int,
    kept: tuple[Array, Array, Array],
    gradients: tuple[Array, Array, Array],
) -> tuple[Array, Array, None]:
    x, w_qkv, positions = kept
    rows, head_dim = x.shape[0], w_qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    cosine, sine = (table[:, None] for table in turns(positions, head_dim, theta, jnp.dtype(jnp.float32)))

    def turned_back(gradient: Array) -> Array:
        first, second = jnp.split(gradient.reshape(rows, -1, head_dim).astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate(turn(first, second, cosine, -sine), axis=-1).reshape(rows, -1).astype(x.dtype)

    of_query, of_key, of_value = gradients
    of_sum = jnp.concatenate([turned_back(of_query), turned_back(of_key), of_value], axis=1)
    return left_gradient(gpu, of_sum, w_qkv), right_gradient(gpu, x, of_sum), None


pallas_qkv_rotary.defvjp(_qkv_forward, _qkv_backward)
