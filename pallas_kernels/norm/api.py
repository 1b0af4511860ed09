"""The public norms, and the implementations among which `auto` picks."""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Device, Implementation, against_compiling, choose, device_at_hand, only_by_name
from pallas_kernels.norm.differentiable import pallas_layer_norm, pallas_rms_norm
from pallas_kernels.norm.kernels import MOST_ELEMENTS, WIDEST
from pallas_kernels.norm.reference import reference_layer_norm, reference_rms_norm

ImplementationName = Literal["auto", "pallas", "reference", "pallas_interpreted"]

_KERNEL_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class NormCase:
    """What decides whether an implementation can compute a norm and its gradient."""

    rows: int
    width: int
    dtype: str
    parameter_dtypes: tuple[str, ...] = ("float32",)
    """Of the scale, and of the bias if there is one."""

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.width} in {self.dtype}, parameters in {', '.join(self.parameter_dtypes)}"


def _against_kernels(case: NormCase, device: Device) -> list[str]:
    reasons = []
    if wide := sorted({case.dtype, *case.parameter_dtypes} - set(_KERNEL_DTYPES)):
        reasons.append(f"its kernels compute in float32, which is not for {', '.join(wide)}")
    if case.width > WIDEST:
        reasons.append(f"its kernels hold rows of up to {WIDEST} in registers, not of {case.width}")
    if not 0 < case.rows * case.width <= MOST_ELEMENTS:
        reasons.append(f"its kernels take 1 to {MOST_ELEMENTS} elements, not {case.rows * case.width}")
    return reasons


def _against_pallas(case: NormCase, device: Device) -> list[str]:
    return against_compiling(device) + _against_kernels(case, device)


def _implementations(kernel: Any, plain: Any) -> tuple[Implementation[NormCase], ...]:
    return (
        Implementation("pallas", functools.partial(kernel, interpret=False), _against_pallas),
        Implementation("reference", plain, lambda case, device: []),
        Implementation(
            "pallas_interpreted",
            functools.partial(kernel, interpret=True),
            _against_kernels,
            passed_over=only_by_name("interprets kernels, for tests"),
        ),
    )


IMPLEMENTATIONS: dict[str, tuple[Implementation[NormCase], ...]] = {
    "rms_norm": _implementations(pallas_rms_norm, reference_rms_norm),
    "layer_norm": _implementations(pallas_layer_norm, reference_layer_norm),
}
"""By function."""

EXAMPLES = (NormCase(16384, 4096, "bfloat16"), NormCase(16384, 18432, "bfloat16"))
"""Cases by which the choice is shown."""


def rms_norm(
    x: Float[Array, "*batch width"],
    scale: Float[Array, "width"],
    *,
    epsilon: float,
    implementation: ImplementationName = "auto",
) -> Float[Array, "*batch width"]:
    """`x / sqrt(mean(x^2) + epsilon) * scale` over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Computed in float32 (float64 for float64), then cast to the dtype of `x`. All implementations give the same bits
    forward, as that is plain JAX in each. They differ in the gradient: `pallas` has one kernel, which reads `x` and the
    upstream gradient once and keeps nothing but the arguments from the forward pass. It is deterministic: each of a
    fixed number of programs sums its rows for the gradient of the scale, in float32, and XLA sums what they give.
    Under a mesh, `pallas` needs `jax.shard_map` with `check_vma=False`, on whole rows: XLA cannot split a kernel.

    Args:
        x: float32, bfloat16 or float16 for the kernel, and up to 16384 wide; any float dtype for `reference`.
        scale: of any such dtype.
        epsilon: added to the mean of squares; 0 or more, and known before tracing.
        implementation: `auto`, or a name in `IMPLEMENTATIONS["rms_norm"]`.

    Raises:
        ValueError: arguments that do not fit together, or an implementation that cannot compute this here.
    """
    out: Array = _chosen("rms_norm", implementation, x, epsilon, scale=scale)(x, scale, epsilon)
    return out


def layer_norm(
    x: Float[Array, "*batch width"],
    scale: Float[Array, "width"],
    bias: Float[Array, "width"],
    *,
    epsilon: float,
    implementation: ImplementationName = "auto",
) -> Float[Array, "*batch width"]:
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias` over the last dimension.

    Ba et al. 2016, arXiv:1607.06450. As `rms_norm` otherwise.

    Args:
        x: float32, bfloat16 or float16 for the kernel, and up to 16384 wide; any float dtype for `reference`.
        scale: of any such dtype.
        bias: likewise.
        epsilon: added to the variance; 0 or more, and known before tracing.
        implementation: `auto`, or a name in `IMPLEMENTATIONS["layer_norm"]`.

    Raises:
        ValueError: arguments that do not fit together, or an implementation that cannot compute this here.
    """
    out: Array = _chosen("layer_norm", implementation, x, epsilon, scale=scale, bias=bias)(x, scale, bias, epsilon)
    return out


def _chosen(op: str, requested: str, x: Array, epsilon: float, **parameters: Array) -> Any:
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: x is {x.dtype} {x.shape}; give floats with a last dimension to normalise")
    for name, parameter in parameters.items():
        if parameter.shape != x.shape[-1:] or not jnp.issubdtype(parameter.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} is {parameter.dtype} {parameter.shape}; give floats of {x.shape[-1:]}")
    if epsilon < 0.0:
        raise ValueError(f"{op}: epsilon {epsilon} is negative; give 0 or more, such as 1e-5")
    width = x.shape[-1]
    rows = x.size // width if width else 0
    case = NormCase(rows, width, x.dtype.name, tuple(parameter.dtype.name for parameter in parameters.values()))
    return choose(op, IMPLEMENTATIONS[op], requested, case, device_at_hand()).run
