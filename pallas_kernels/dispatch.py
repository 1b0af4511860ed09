"""Which implementation of an op runs: one rule for all ops, that can be asked and printed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.gpus import Gpu, find_gpu


@dataclass(frozen=True)
class Device:
    """What a program will run on."""

    platform: str
    """`cpu` or `gpu`."""
    gpu: Gpu | None = None
    """None for a CPU, or a GPU of a kind that is not known."""

    def __str__(self) -> str:
        return self.platform if self.gpu is None else self.gpu.device_kind


def device_at_hand() -> Device:
    """The device that tracing is for: that of `jax.sharding.use_abstract_mesh`, or of `jax.default_device`."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.platform or "gpu", find_gpu(abstract.device_kind))
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return device_of(device)


def device_of(device: jax.Device) -> Device:
    """What `device` is; it may be one that only compiles."""
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    return Device(platform, find_gpu(device.device_kind))


COMPILED_FOR = (80, 90)
"""Compute capabilities for which kernels by Triton were compiled, and what came of it was looked at."""


def against_compiling(device: Device) -> list[str]:
    """Why kernels by Triton do not run on a device; empty if they do."""
    if device.platform != "gpu" or device.gpu is None:
        return ["needs an NVIDIA GPU that pallas_kernels.gpus describes"]
    if device.gpu.compute_capability not in COMPILED_FOR:
        return [f"was not compiled and looked at for compute capability {device.gpu.compute_capability / 10}"]
    return []


@dataclass(frozen=True)
class Implementation[Case]:
    """One way to compute an op."""

    name: str
    run: Callable[..., Any]
    reasons_against: Callable[[Case, Device], list[str]]
    """Why it cannot compute a case on a device; empty if it can."""
    passed_over: Callable[[Case, Device], str | None] = lambda case, device: None
    """Why `auto` does not stand for it, though it could compute the case; None if it may."""


def only_by_name(reason: str) -> Callable[[Any, Device], str]:
    """For what `auto` never stands for."""
    return lambda case, device: reason


def choose[Case](
    op: str, implementations: Sequence[Implementation[Case]], requested: str, case: Case, device: Device
) -> Implementation[Case]:
    """The implementation that `requested` stands for: itself, or for `auto` the first that can run.

    Raises:
        ValueError: there is none of that name, or it cannot compute this case on this device; with the reasons.
    """
    if requested == "auto":
        for implementation in implementations:
            if _why_not(implementation, case, device) is None:
                return implementation
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals(implementations, case, device).items())
        raise ValueError(f"{op}: nothing here can compute {case} on {device}: {reasons}")
    for implementation in implementations:
        if implementation.name == requested:
            if against := implementation.reasons_against(case, device):
                raise ValueError(f"{op}: implementation {requested} cannot run on {device}: {'; '.join(against)}")
            return implementation
    known = ", ".join(["auto", *(implementation.name for implementation in implementations)])
    raise ValueError(f"{op}: no implementation {requested!r}; there are {known}")


def refusals[Case](implementations: Sequence[Implementation[Case]], case: Case, device: Device) -> dict[str, str]:
    """Why `auto` does not take each implementation that it passes over."""
    reasons = {implementation.name: _why_not(implementation, case, device) for implementation in implementations}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _why_not[Case](implementation: Implementation[Case], case: Case, device: Device) -> str | None:
    against = implementation.reasons_against(case, device)
    return "; ".join(against) if against else implementation.passed_over(case, device)
