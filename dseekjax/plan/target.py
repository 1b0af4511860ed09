"""Compile-only GPUs: devices of a cluster that is not there, for which XLA compiles all the same."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dseekjax.errors import UserError
from dseekjax.plan.cluster import ClusterConfig

if TYPE_CHECKING:
    import jax

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def has_compiler() -> bool:
    """Whether XLA's compiler for NVIDIA GPUs is installed; it needs no GPU and no driver."""
    return any(_is_installed(plugin) for plugin in PLUGINS)


def require_compiler() -> None:
    """Raises UserError if XLA's compiler for NVIDIA GPUs is not installed."""
    if not has_compiler():
        raise UserError(
            "compiling for GPUs needs XLA's CUDA compiler, which is not installed (5 GB, no GPU needed); install it "
            'with `pip install "dseekjax[cuda12]"`, or in a checkout run scripts/plan, which does'
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def prepare_environment() -> None:
    """Lets JAX compile for CUDA where no driver is; call it before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def compile_only_devices(cluster: ClusterConfig, hosts: int) -> list["jax.Device"]:
    """Every GPU of `hosts` hosts, host by host; they compile and hold nothing.

    Args:
        cluster: as `load_cluster` gives it, its `target` being the path of XLA's description.
        hosts: how many of them.

    Raises:
        UserError: XLA does not understand the description.
    """
    import jax
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            # Domains of the fast network x hosts of each x GPUs of a host. Told of one domain with many hosts, XLA
            # schedules for NVLink between them and puts kernels of its own in the place of NCCL.
            topology=f"{hosts}x1x{cluster.gpus_per_host}",
            target_config=Path(cluster.target).read_text("utf-8"),
        )
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--cluster: target {cluster.target}: XLA does not take it: {reason}") from error
    return list(topology.devices)
