"""All that the kernels use of Pallas for Triton, which JAX means to drop; another way to Triton would begin here."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

load = pallas_triton.load
store = pallas_triton.store


def triton_call(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Callable[..., Any]:
    """The kernel as a function of arrays; `interpret` runs it as plain JAX, on any device, slowly."""
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pallas_triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )
