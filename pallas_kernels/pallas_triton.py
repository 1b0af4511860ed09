"""All that the kernels use of Pallas for Triton, which JAX means to drop; another way to Triton would begin here."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

load = pallas_triton.load
store = pallas_triton.store


def triton_call(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    in_specs: Any = pl.no_block_spec,
    out_specs: Any = pl.no_block_spec,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    flops: int | None = None,
) -> Callable[..., Any]:
    """The kernel as a function of arrays.

    Without specs each program gets whole arrays, to load from what it needs. `interpret` runs it as plain JAX, on any
    device, slowly. `flops` is how many floating-point operations its matrix products take, if it has any; it stands in
    the compiled program, where nothing else tells.
    """

    def narrow(*refs: Any) -> None:
        # Indices are int32, on GPUs and in what `pl.program_id` gives.
        with jax.enable_x64(False):
            kernel(*refs)

    return pl.pallas_call(
        narrow,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        metadata=None if flops is None else {"flops": str(flops)},
    )
