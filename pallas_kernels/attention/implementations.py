"""The ways to compute attention, in the order in which `auto` tries them, and what each cannot do."""

import functools
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.attention.blocked import BLOCK_SIZE, blocked_attention
from pallas_kernels.attention.cudnn import cudnn_attention
from pallas_kernels.attention.pallas import pallas_attention, pallas_with_log_sum_exp
from pallas_kernels.attention.reference import reference_attention, reference_with_log_sum_exp
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.dispatch import Device, Implementation, against_compiling, only_by_name


@dataclass(frozen=True)
class AttentionCase:
    """What of the arguments decides who can compute them."""

    dtype: str
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    segmented: bool
    spec: AttentionSpec

    def __str__(self) -> str:
        spec = self.spec
        words = [self.dtype, f"{self.query_length} queries", f"{self.key_length} keys", f"heads of {self.head_dim}"]
        words += [f"values of {self.value_dim}"] * (self.value_dim != self.head_dim)
        words += ["causal"] * spec.causal + [f"window {spec.window}"] * (spec.window is not None)
        words += ["softcap"] * (spec.softcap is not None) + ["segments"] * self.segmented
        return ", ".join(words)


def _nothing_against(case: AttentionCase, device: Device) -> list[str]:
    return []


def _blocked_passed_over(case: AttentionCase, device: Device) -> str | None:
    if case.spec.reach == (None, None):
        return "every query sees every key: blocks would spare memory and no work"
    if case.query_length <= BLOCK_SIZE:
        return f"{case.query_length} queries are one block"
    return None


def _against_cudnn(case: AttentionCase, device: Device) -> list[str]:
    spec = case.spec
    return [
        reason
        for reason, holds in {
            "needs an NVIDIA GPU of compute capability 8.0 or more": device.platform != "gpu"
            or device.gpu is None
            or device.gpu.compute_capability < 80,
            f"takes float16 and bfloat16, not {case.dtype}": case.dtype not in ("float16", "bfloat16"),
            "takes no segment ids": case.segmented,
            "takes no softcap": spec.softcap is not None,
            "takes a window only with causality": spec.window is not None and not spec.causal,
            "takes values of the keys' head size alone": case.head_dim != case.value_dim,
            f"takes head sizes that are multiples of 8 up to 128, not {case.head_dim}": case.head_dim > 128
            or case.head_dim % 8 != 0,
        }.items()
        if holds
    ]


def _against_pallas(case: AttentionCase, device: Device) -> list[str]:
    return against_compiling(device) + _against_kernels(case, device)


def _against_kernels(case: AttentionCase, device: Device) -> list[str]:
    reasons = []
    if jnp.dtype(case.dtype).name not in ("float16", "bfloat16", "float32"):
        reasons.append(f"takes float16, bfloat16 and float32, not {case.dtype}")
    # Wider heads of float32 leave no registers for anything else.
    widest = 128 if case.dtype == "float32" else 256
    if max(case.head_dim, case.value_dim) > widest:
        reasons.append(f"takes head sizes of {case.dtype} up to {widest}, not {max(case.head_dim, case.value_dim)}")
    return reasons


def _pallas_passed_over(case: AttentionCase, device: Device) -> str | None:
    if case.dtype == "float32":
        return "multiplies float32 exactly and so without tensor cores; XLA rounds it to TensorFloat32 for them"
    return None


_INTERPRETED = only_by_name("interprets the kernels, slowly, for tests")

IMPLEMENTATIONS: tuple[Implementation[AttentionCase], ...] = (
    Implementation("cudnn", cudnn_attention, _against_cudnn),
    Implementation(
        "pallas", functools.partial(pallas_attention, interpret=False), _against_pallas, _pallas_passed_over
    ),
    Implementation("blocked", blocked_attention, _nothing_against, _blocked_passed_over),
    Implementation("reference", reference_attention, _nothing_against),
    Implementation(
        "pallas_interpreted", functools.partial(pallas_attention, interpret=True), _against_kernels, _INTERPRETED
    ),
)

WITH_LOG_SUM_EXP: tuple[Implementation[AttentionCase], ...] = (
    Implementation(
        "pallas", functools.partial(pallas_with_log_sum_exp, interpret=False), _against_pallas, _pallas_passed_over
    ),
    Implementation("reference", reference_with_log_sum_exp, _nothing_against),
    Implementation(
        "pallas_interpreted", functools.partial(pallas_with_log_sum_exp, interpret=True), _against_kernels, _INTERPRETED
    ),
)


def _example(
    dtype: str = "bfloat16",
    head_dim: int = 128,
    value_dim: int = 128,
    segmented: bool = False,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionCase:
    spec = AttentionSpec(causal, window, head_dim**-0.5, softcap)
    return AttentionCase(dtype, 4096, 4096, head_dim, value_dim, segmented, spec)


EXAMPLES: tuple[AttentionCase, ...] = (
    _example(),
    _example(segmented=True),
    _example(window=1024),
    _example(softcap=50.0),
    _example(head_dim=192),
    _example(causal=False),
    _example(causal=False, window=1024),
    _example("float32"),
)
"""Cases by which the choice is shown."""
