"""What XLA is told when it compiles a step: the one place for such options.

Figures for GPUs are from the scheduled program of Llama 3 8B for 64 H100s, fsdp 64 unless another mesh is named, with
jax 0.12.0.1. "Exposed" is the share of bytes sent by collectives that no matrix product runs beside.
"""

import math
import os
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.prefetch import Prefetch
from dseekjax.parallel.sharding import PARAMETER_AXES

Options = dict[str, str | int | bool]


VECTOR_WIDTH: Options = {
    # The default is 256 bits. On CPUs without AVX-512 it changes nothing.
    "xla_cpu_prefer_vector_width": 512,
}
ONEDNN: Options = {
    # Gives the products with the first operand transposed, those of weights' gradients, to oneDNN: 1.3 times as fast in
    # float32, 4 times in bfloat16, as by what has them otherwise (Eigen, which widens bfloat16). The rest stays with
    # YNNPACK. Products of bfloat16 with a float32 result are widened by either, so the step asks for few of that form.
    "xla_cpu_experimental_onednn_custom_call": True,
}
ONEDNN_FLOPS = 5e10
"""FLOPs of a step on one device, about a third of a second of two cores, from which oneDNN pays in float32."""


def cpu_options(dtype: str, step_flops: float) -> Options:
    """What makes a step on CPU fast.

    A program that calls oneDNN is compiled anew at every start, as jaxlib 0.12.0.1 cannot store it. For a small model
    that takes as long as is won in hundreds of steps; in bfloat16, twice as fast with it, it is worth that always. What
    `XLA_FLAGS` says goes first.

    Args:
        dtype: that products are computed in.
        step_flops: FLOPs of a step on one device.
    """
    pays = dtype == "bfloat16" or step_flops >= ONEDNN_FLOPS
    wanted = VECTOR_WIDTH | ONEDNN if pays else VECTOR_WIDTH
    told = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in wanted.items() if f"--{name}" not in told}


def gpu_options(config: MeshConfig, prefetch: Prefetch, layer_bytes: int) -> Options:
    """What hides the communication of a step on GPUs.

    The scheduler that hides latency and its model of NVLink and InfiniBand are on by default, and so is combining small
    gradients into one reduce-scatter; nothing here turns on what already is.

    Args:
        config: the mesh.
        prefetch: how gathered parameters come in time.
        layer_bytes: size of the largest layer's gathered parameters on one device.
    """
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
