"""The product on Hopper's 8-bit tensor cores (compute capability 9.0), by Pallas for Mosaic."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.fp8_matmul.quantize import BLOCK_SIZE

COMPUTE_WARPGROUPS = 2
WARPGROUP_ROWS = BLOCK_SIZE // COMPUTE_WARPGROUPS
STAGES = 4
"""As many as shared memory holds beside a block of float32 results."""
COPY_REGISTERS = 40
"""Per thread of the warpgroup that only starts copies."""
SWIZZLE_BYTES = 128


def mosaic_matmul(
    x_values: Float[Array, "rows contraction"],
    x_scales: Float32[Array, "rows tiles"],
    w_values: Float[Array, "columns contraction"],
    w_scales: Float32[Array, "w_scale_rows tiles"],
    out_dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "rows columns"]:
    """See `pallas_kernels.fp8_matmul.fp8_matmul`; `interpret` runs the kernel on a CPU, slowly.

    A block computes 128 x 128 of the result: one warpgroup keeps `STAGES` steps of 128 of the contraction on their way
    into shared memory, two multiply. Rows and columns that are no multiple of 128 are padded with zeros.
    """
    rows, columns = x_values.shape[0], w_values.shape[0]
    by_tiles = w_scales.shape[0] == columns
    x_values, x_scales = _padded(x_values, x_scales)
    if by_tiles:
        w_values, w_scales = _padded(w_values, w_scales)
    shape = (x_values.shape[0], w_values.shape[0])
    kernel = plgpu.kernel(
        functools.partial(_kernel, w_by_tiles=by_tiles),
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        scratch_types={"out_smem": plgpu.SMEM((BLOCK_SIZE,) * 2, out_dtype, transforms=_transforms(out_dtype))},
        grid=(shape[0] // BLOCK_SIZE, shape[1] // BLOCK_SIZE),
        grid_names=("row_block", "column_block"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=f"fp8_matmul_{'tiles' if by_tiles else 'blocks'}",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    # Scales of one step lie side by side, so that one copy fetches them.
    return kernel(x_values, x_scales.T, w_values, w_scales.T)[:rows, :columns]


def _kernel(
    x_values: Any,
    x_scales: Any,
    w_values: Any,
    w_scales: Any,
    out: Any,
    out_smem: Any,
    *,
    w_by_tiles: bool,
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    row_block, column_block = lax.axis_index("row_block"), lax.axis_index("column_block")
    block_rows, block_columns = (pl.ds(block * BLOCK_SIZE, BLOCK_SIZE) for block in (row_block, column_block))
    rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
    shape = (WARPGROUP_ROWS, BLOCK_SIZE)

    def step(index: Any, x_smem: Any, w_smem: Any, x_scales_smem: Any, *rest: Any) -> Any:
        x_scale = plgpu.load(x_scales_smem.at[0, rows], layout=plgpu.Layout.WGMMA.reduce(1))
        if not w_by_tiles:
            # Read from afar, so it is asked for before the product, which hides the wait.
            x_scale = x_scale * w_scales[index[0], column_block]

        def product(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, x_smem.at[rows], w_smem.T)
            return accumulator[...]

        # Tensor cores keep few bits of long sums of 8-bit products: sums over more than one step are taken outside.
        scaled = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32)) * lax.broadcast_in_dim(x_scale, shape, (0,))
        if w_by_tiles:
            # Read after the product: there are not enough registers to hold these beside it.
            w_scale = plgpu.load(rest[0].at[0], layout=plgpu.Layout.WGMMA.reduce(0))
            scaled = scaled * lax.broadcast_in_dim(w_scale, shape, (1,))
        # Scales have been read by threads, and the next to lie there are written by a copy: that takes a fence.
        plgpu.commit_smem()
        return rest[-1] + scaled

    def around_steps(run: Any) -> None:
        total = run(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA))
        out_smem[rows] = total.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[rows], out.at[block_rows, block_columns].at[rows])
        plgpu.wait_smem_to_gmem(0)

    block = (BLOCK_SIZE, BLOCK_SIZE)
    operands = [
        (x_values.at[block_rows], plgpu.BlockSpec(block, lambda k: (0, k), transforms=_transforms(x_values.dtype))),
        (w_values.at[block_columns], plgpu.BlockSpec(block, lambda k: (0, k), transforms=_transforms(w_values.dtype))),
        (x_scales.at[:, block_rows], plgpu.BlockSpec((1, BLOCK_SIZE), lambda k: (k, 0))),
    ]
    if w_by_tiles:
        operands.append((w_scales.at[:, block_columns], plgpu.BlockSpec((1, BLOCK_SIZE), lambda k: (k, 0))))
    references, specs = zip(*operands, strict=True)
    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(x_values.shape[1] // BLOCK_SIZE,),
        in_specs=specs,
        memory_registers=COPY_REGISTERS,
        wg_axis="warpgroup",
        num_compute_wgs=COMPUTE_WARPGROUPS,
        max_concurrent_steps=STAGES,
        compute_context=around_steps,
    )(*references)


def _transforms(dtype: DTypeLike) -> tuple[Any, ...]:
    """How tensor cores want a matrix to lie in shared memory."""
    row = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(SWIZZLE_BYTES)  # type: ignore[abstract]


def _padded(values: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = ((0, -values.shape[0] % BLOCK_SIZE), (0, 0))
    return jnp.pad(values, rows), jnp.pad(scales, rows)
