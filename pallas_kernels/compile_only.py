"""GPUs that are not there, for which XLA compiles all the same; it needs no GPU and no driver, but its CUDA plugin."""

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def has_compiler() -> bool:
    """Whether XLA's compiler for NVIDIA GPUs is installed."""
    return any(_is_installed(plugin) for plugin in PLUGINS)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def prepare_environment() -> None:
    """Lets JAX compile for CUDA where no driver is; call it before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def compile_only_devices(target_config: str, *, hosts: int = 1, gpus_per_host: int = 1) -> list["jax.Device"]:
    """Every GPU of `hosts` hosts, host by host; they compile and hold nothing.

    Args:
        target_config: XLA's description of the GPU, a GpuTargetConfigProto in text.
        hosts: how many.
        gpus_per_host: how many a fast network connects.

    Raises:
        jax.errors.JaxRuntimeError: XLA does not understand the description.
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        # Domains of the fast network x hosts of each x GPUs of a host. Told of one domain with many hosts, XLA
        # schedules for NVLink between them and puts kernels of its own in the place of NCCL.
        topology=f"{hosts}x1x{gpus_per_host}",
        target_config=target_config,
    )
    return list(topology.devices)
