"""Lowering for a GPU where there is none, and no CUDA compiler either."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.gpus import Gpu


@contextlib.contextmanager
def tracing_for(gpu: Gpu) -> Iterator[None]:
    """Within it, what is traced and lowered is for one `gpu`."""
    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=gpu.num_cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def lower_for(gpu: Gpu, function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """Lowers `function` for `gpu`: what kernels use that a GPU's compiler does not know is found here.

    Args:
        gpu: the target.
        function: what to lower; of arrays.
        arguments: arrays or `jax.ShapeDtypeStruct`s.
    """
    with tracing_for(gpu):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
