"""Compile-only GPUs of a cluster that is not there."""

from pathlib import Path
from typing import TYPE_CHECKING

from dseekjax.errors import UserError
from dseekjax.plan.cluster import ClusterConfig
from pallas_kernels import compile_only

if TYPE_CHECKING:
    import jax


def require_compiler() -> None:
    """Raises UserError if XLA's compiler for NVIDIA GPUs is not installed."""
    if not compile_only.has_compiler():
        raise UserError(
            "compiling for GPUs needs XLA's CUDA compiler, which is not installed (5 GB, no GPU needed); install it "
            'with `pip install "dseekjax[cuda12]"`, or in a checkout run scripts/plan, which does'
        )


def compile_only_devices(cluster: ClusterConfig, hosts: int) -> list["jax.Device"]:
    """Every GPU of `hosts` hosts, host by host; they compile and hold nothing.

    Args:
        cluster: as `load_cluster` gives it, its `target` being the path of XLA's description.
        hosts: how many of them.

    Raises:
        UserError: XLA does not understand the description.
    """
    import jax

    try:
        return compile_only.compile_only_devices(
            Path(cluster.target).read_text("utf-8"), hosts=hosts, gpus_per_host=cluster.gpus_per_host
        )
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--cluster: target {cluster.target}: XLA does not take it: {reason}") from error
