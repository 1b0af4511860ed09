"""The machine: what JAX is told before it starts, and what can be asked of it."""

import os

import psutil

from dseekjax.errors import UserError

# Dense bfloat16 peak per GPU in FLOP/s, from NVIDIA's data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_platform(virtual_devices: int) -> None:
    """Sets JAX up for a run; call it before anything asks for devices.

    Args:
        virtual_devices: how many CPU devices to run on instead of what the machine has; 0 is off.

    Raises:
        UserError: JAX has started already, with other devices.
    """
    import jax

    if virtual_devices:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", virtual_devices)
        except RuntimeError as error:
            raise UserError(
                f"run.virtual_devices {virtual_devices} cannot be set once JAX has started; set it before the "
                "first use of JAX in this process, or start another"
            ) from error


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
