"""The public product and its implementations."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Device, device_at_hand
from pallas_kernels.fp8_matmul.mosaic import mosaic_matmul
from pallas_kernels.fp8_matmul.promoted import promoted_matmul
from pallas_kernels.fp8_matmul.quantize import BLOCK_SIZE, FP8_DTYPES
from pallas_kernels.fp8_matmul.reference import dequantized_bf16_matmul, reference_matmul

Implementation = Literal[
    "auto", "mosaic", "pallas", "dequantized_bf16", "reference", "mosaic_interpreted", "pallas_interpreted"
]

MOSAIC_CAPABILITY = 90
KERNEL_OUT_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Fp8MatmulCase:
    """What of a product decides who can compute it."""

    rows: int
    columns: int
    contraction: int
    x_dtype: str
    w_dtype: str
    out_dtype: str

    def __str__(self) -> str:
        product = f"{self.x_dtype} [{self.rows}, {self.contraction}] x {self.w_dtype} [{self.columns}]"
        return f"{product} to {self.out_dtype}"


def _against_mosaic(case: Fp8MatmulCase, device: Device) -> list[str]:
    reasons = _against_its_results(case)
    if device.gpu is None or device.gpu.compute_capability != MOSAIC_CAPABILITY:
        reasons.append("it is written for GPUs of compute capability 9.0")
    return reasons


def _against_triton(case: Fp8MatmulCase, device: Device) -> list[str]:
    return _against_its_results(case) + dispatch.against_compiling(device)


def _against_interpreting_mosaic(case: Fp8MatmulCase, device: Device) -> list[str]:
    reasons = _against_its_results(case)
    if device.platform != "cpu":
        reasons.append("kernels for Mosaic are interpreted on CPUs alone")
    return reasons


def _against_interpreting_triton(case: Fp8MatmulCase, device: Device) -> list[str]:
    return _against_its_results(case)


def _against_its_results(case: Fp8MatmulCase) -> list[str]:
    if case.out_dtype in KERNEL_OUT_DTYPES:
        return []
    return [f"it writes {' or '.join(KERNEL_OUT_DTYPES)}, not {case.out_dtype}"]


def _nothing_against(case: Fp8MatmulCase, device: Device) -> list[str]:
    return []


def _against_bfloat16(case: Fp8MatmulCase, device: Device) -> list[str]:
    return ["float64 results would not be such"] if case.out_dtype == "float64" else []


IMPLEMENTATIONS: tuple[dispatch.Implementation[Fp8MatmulCase], ...] = (
    dispatch.Implementation("mosaic", mosaic_matmul, _against_mosaic),
    dispatch.Implementation("pallas", promoted_matmul, _against_triton),
    dispatch.Implementation("dequantized_bf16", dequantized_bf16_matmul, _against_bfloat16),
    dispatch.Implementation("reference", reference_matmul, _nothing_against),
    dispatch.Implementation(
        "mosaic_interpreted",
        partial(mosaic_matmul, interpret=True),
        _against_interpreting_mosaic,
        passed_over=dispatch.only_by_name("interprets kernels, for tests"),
    ),
    dispatch.Implementation(
        "pallas_interpreted",
        partial(promoted_matmul, interpret=True),
        _against_interpreting_triton,
        passed_over=dispatch.only_by_name("interprets kernels, for tests"),
    ),
)


EXAMPLES = (Fp8MatmulCase(4096, 7168, 2048, "float8_e4m3fn", "float8_e4m3fn", "bfloat16"),)
"""Cases by which the choice is shown."""


def choose_implementation(
    case: Fp8MatmulCase, requested: Implementation = "auto", device: Device | None = None
) -> dispatch.Implementation[Fp8MatmulCase]:
    """The implementation that `requested` stands for, on `device` or the one at hand.

    Raises:
        ValueError: there is none of that name, or it cannot compute this case there.
    """
    return dispatch.choose("fp8_matmul", IMPLEMENTATIONS, requested, case, device or device_at_hand())


def fp8_matmul(
    x_values: Float[Array, "rows contraction"],
    x_scales: Float32[Array, "rows tiles"],
    w_values: Float[Array, "columns contraction"],
    w_scales: Float32[Array, "w_scale_rows tiles"],
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: Implementation = "auto",
) -> Float[Array, "rows columns"]:
    """The product `x @ w.T` of quantized matrices (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    Both matrices have the contracted dimension last and contiguous, as 8-bit tensor cores want it. With activations
    `x [tokens, in]`, weights `w [in, out]` and gradients `dy [tokens, out]`, the three products of a dense layer are

        y  = fp8_matmul(*quantize_tiles(x), values.T, scales.T)               values, scales = quantize_blocks(w)
        dx = fp8_matmul(*quantize_tiles(dy), values, scales)
        dw = fp8_matmul(*quantize_tiles(x.T), *quantize_tiles(dy.T))

    Args:
        x_values: float8_e4m3fn or float8_e5m2; `contraction` must be a multiple of 128.
        x_scales: one per tile of 1 x 128.
        w_values: as `x_values`; the two dtypes may differ.
        w_scales: one per block of 128 x 128 (then `columns` must be a multiple of 128), or per tile of 1 x 128.
        out_dtype: bfloat16 or float32; `reference` can also give float64.
        implementation: `auto`, or the name of one of `IMPLEMENTATIONS`. `mosaic` multiplies 8-bit floats and adds the
            product of every 128 of the contraction, times both scales, in float32. `pallas` does so with the same
            numbers as float16, exactly, for GPUs that lack tensor cores of 8 bits. `dequantized_bf16` is for devices
            with neither: what the numbers stand for is rounded to bfloat16 first, an error of 2.5e-3 where the kernels,
            interpreted, have 5e-8.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    (rows, contraction), columns = x_values.shape, w_values.shape[0]
    if rows == 0 or columns == 0:
        raise ValueError(f"fp8_matmul: x_values {x_values.shape} and w_values {w_values.shape} have an empty dimension")
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"fp8_matmul: out_dtype is {jnp.dtype(out_dtype)}; give bfloat16, float32 or float64")
    for name, scales in (("x_scales", x_scales), ("w_scales", w_scales)):
        if scales.dtype != jnp.float32:
            raise ValueError(f"fp8_matmul: {name} is {scales.dtype}; give float32")
    for name, values in (("x_values", x_values), ("w_values", w_values)):
        if values.dtype not in FP8_DTYPES:
            raise ValueError(
                f"fp8_matmul: {name} is {values.dtype}; quantize it to {' or '.join(map(str, FP8_DTYPES))}"
            )
    if w_values.shape[1] != contraction:
        raise ValueError(
            f"fp8_matmul: x_values and w_values end in {contraction} and {w_values.shape[1]}; both must end in the "
            "contracted dimension"
        )
    if contraction == 0 or contraction % BLOCK_SIZE:
        raise ValueError(f"fp8_matmul: contraction is {contraction}, no multiple of {BLOCK_SIZE}; pad with zeros")
    tiles = contraction // BLOCK_SIZE
    if x_scales.shape != (rows, tiles):
        raise ValueError(f"fp8_matmul: x_scales has shape {x_scales.shape}; x_values need {(rows, tiles)}")
    by_blocks = columns % BLOCK_SIZE == 0 and w_scales.shape == (columns // BLOCK_SIZE, tiles)
    if not by_blocks and w_scales.shape != (columns, tiles):
        raise ValueError(
            f"fp8_matmul: w_scales has shape {w_scales.shape}; w_values need {(columns, tiles)}, or a row per "
            f"{BLOCK_SIZE} columns if those are a multiple"
        )
    case = Fp8MatmulCase(
        rows, columns, contraction, str(x_values.dtype), str(w_values.dtype), str(jnp.dtype(out_dtype))
    )
    chosen = choose_implementation(case, implementation)
    operands = _without_gradient(x_values, x_scales, w_values, w_scales)
    return chosen.run(*operands, out_dtype)


@jax.custom_jvp
def _without_gradient(*operands: Array) -> tuple[Array, ...]:
    return operands


@_without_gradient.defjvp
def _refuse_gradient(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> NoReturn:
    raise ValueError("fp8_matmul: quantized numbers have no gradient; differentiate fp8_dense")
