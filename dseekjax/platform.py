"""The machine: what JAX is told before it starts, and what can be asked of it.

What XLA is told of one program is in `parallel.compiler`, for CPUs as for GPUs; how memory is got, in `allocator`.
"""

import math
import os
import tempfile
import warnings
from pathlib import Path

import psutil

from dseekjax.errors import UserError

# Dense bfloat16 peak per GPU in FLOP/s, from NVIDIA's data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""In a container: microseconds of processor time in each period of so many microseconds, or `max`."""


def available_cores() -> int:
    """CPU cores that this process may use, rounded up where a container is given part of one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))


def compute_threads() -> int:
    """How many threads XLA for CPU computes with in this process, which is at least one for each of its devices."""
    import jax

    told = os.environ.get("NPROC", "")
    return max(int(told) if told.isdigit() else available_cores(), jax.local_device_count())


def prepare_platform(virtual_devices: int, compilation_cache_dir: str | None = None) -> None:
    """Sets JAX up for a run; call it before anything asks for devices.

    XLA starts as many threads as there are cores to be had, which it does not know of a container's share. A setting
    that the user has made of JAX's or XLA's own stays as it is.

    Args:
        virtual_devices: how many CPU devices to run on instead of what the machine has; 0 is off.
        compilation_cache_dir: where compiled programs are kept for the next run, None for nowhere.

    Raises:
        UserError: JAX has started already, with other devices; or programs cannot be kept where they should be.
    """
    os.environ.setdefault("NPROC", str(available_cores()))
    import jax

    if compilation_cache_dir is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_writable(compilation_cache_dir)))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            # Of what is quicker to compile than to find, a run has many.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    # What calls oneDNN cannot be kept, see `parallel.compiler`; any other failure is told.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry .*std::bad_alloc")
    if virtual_devices:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", virtual_devices)
        except RuntimeError as error:
            raise UserError(
                f"run.virtual_devices {virtual_devices} cannot be set once JAX has started; set it before the "
                "first use of JAX in this process, or start another"
            ) from error


def _writable(name: str) -> Path:
    # Not `Path.expanduser`, which fails for a user who has no home.
    folder = Path(os.path.expanduser(name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"run.compilation_cache_dir {folder}: cannot write there ({error.strerror}); choose another folder, or set "
            "it to null to compile anew at each start"
        ) from error
    return folder


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of a device by its name, None if it is not in the table."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def memory_in_use() -> float:
    """Bytes in use on the first local device; on CPU, those of this process."""
    import jax

    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_in_use" in statistics:
        return float(statistics["bytes_in_use"])
    return float(psutil.Process().memory_info().rss)
