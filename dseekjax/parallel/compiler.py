"""What XLA is told when it compiles a step for GPUs: the one place for such options.

Figures are from the scheduled program of Llama 3 8B for 64 H100s, fsdp 64 unless another mesh is named, with jax
0.12.0.1. "Exposed" is the share of bytes sent by collectives that no matrix product runs beside.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.prefetch import Prefetch
from dseekjax.parallel.sharding import PARAMETER_AXES

Options = dict[str, str | int | bool]


def compiler_options(platform: str, config: MeshConfig, prefetch: Prefetch, layer_bytes: int) -> Options:
    """Options for `jax.jit`; none but on GPU.

    The scheduler that hides latency and its model of NVLink and InfiniBand are on by default, and so is combining small
    gradients into one reduce-scatter; nothing here turns on what already is.

    Args:
        platform: of the devices, as JAX names it.
        config: the mesh.
        prefetch: how gathered parameters come in time.
        layer_bytes: size of the largest layer's gathered parameters on one device.
    """
    if platform != "gpu":
        return {}
    options: Options = {
        # Leaves small all-reduces to NCCL. With XLA's own kernels for them, the compiler aborts at that of the gradient
        # norm as soon as fsdp spans hosts ("size mismatch when packing elements for LLVM struct").
        "xla_gpu_experimental_use_collective_kernels": "",
    }
    if prefetch == "compiler":
        # Pipelines the collectives of loops: each layer's gathers run beside the layer before it, its reduce-scatter
        # beside the one after it; and unrolls by two, which spares copies of what the loop then carries. Exposed
        # 40 % -> 23 %, waiting, by an estimate, 70 -> 48 ms a step, temporaries 53.0 -> 63.1 GiB, as many bytes sent.
        options["optimization_level"] = "O1"
    if prefetch != "none":
        # All gathers of a layer are one, or two with tensor, instead of six. With O1: exposed 23 % -> 7 %, waiting
        # 48 -> 24 ms, temporaries 63.1 -> 59.9 GiB. More bytes, and the output table's gather would join a layer's,
        # which then comes too late.
        options["xla_gpu_all_gather_combine_threshold_bytes"] = layer_bytes
    if config.tensor_overlap == "xla":
        # Cuts matrix products that need a gather or a reduce-scatter over tensor into a ring of smaller ones with
        # collective-permutes between them, whatever their size. Nine in ten of the bytes that two of Llama 3 8B's
        # layers on tensor 8 permute have no product beside them; for that XLA has
        # xla_gpu_multi_streamed_windowed_einsum, with which products of this size do not compile, neither as Triton's
        # ("No supported config found") nor as cuBLAS's. The ring written by hand, tensor_overlap ring, exposes none.
        options["xla_gpu_threshold_for_windowed_einsum_mib"] = 0
    return options


def layer_bytes(runs: Iterable[Any], itemsize: int) -> int:
    """Bytes of the largest layer's parameters on one device while they are gathered.

    Args:
        runs: placed shapes of stacked parameters, one pytree per run; their first dimension is that of layers.
        itemsize: bytes per element.
    """

    def gathered(shape: jax.ShapeDtypeStruct) -> int:
        placement: NamedSharding = shape.sharding
        one_device = placement.shard_shape(shape.shape)[1:]
        axes = {axis for entry in placement.spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
        parts = math.prod(placement.mesh.shape[axis] for axis in axes if axis in PARAMETER_AXES)
        return math.prod(one_device) * parts * itemsize

    return max(sum(map(gathered, jax.tree.leaves(run))) for run in runs)
