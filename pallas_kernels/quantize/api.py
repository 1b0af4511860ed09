"""The public functions that compress, and the implementations among which `auto` picks."""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pallas_kernels.dispatch import Device, Implementation, against_compiling, choose, device_at_hand, only_by_name
from pallas_kernels.quantize import checks, kernels, reference
from pallas_kernels.quantize.formats import Int8Blocks, Signs, Sparse, TwoOfFour

ImplementationName = Literal["auto", "pallas", "reference", "pallas_interpreted"]


@dataclass(frozen=True)
class QuantizeCase:
    """What decides whether an implementation can compress a gradient."""

    elements: int
    dtype: str
    block_size: int | None = None
    """Consecutive elements with one scale; None where there are no such blocks."""

    def __str__(self) -> str:
        blocks = "" if self.block_size is None else f" in blocks of {self.block_size}"
        return f"{self.elements} elements of {self.dtype}{blocks}"


def _block_reasons(case: QuantizeCase) -> list[str]:
    size = case.block_size
    if size is None or (size >= 16 and size & (size - 1) == 0):
        return []
    return [f"its blocks must be a power of two from 16 on, not {size}"]


def _kernel_reasons(case: QuantizeCase, device: Device) -> list[str]:
    return against_compiling(device) + _block_reasons(case)


def _implementations(kernel: Any, plain: Any) -> tuple[Implementation[QuantizeCase], ...]:
    return (
        Implementation("pallas", functools.partial(kernel, interpret=False), _kernel_reasons),
        Implementation("reference", plain, lambda case, device: []),
        Implementation(
            "pallas_interpreted",
            functools.partial(kernel, interpret=True),
            lambda case, device: _block_reasons(case),
            passed_over=only_by_name("interprets kernels, for tests"),
        ),
    )


IMPLEMENTATIONS: dict[str, tuple[Implementation[QuantizeCase], ...]] = {
    "quantize_int8": _implementations(kernels.pallas_quantize_int8, reference.reference_quantize_int8),
    "compress_signs": _implementations(kernels.pallas_compress_signs, reference.reference_compress_signs),
    "sparsify": _implementations(kernels.pallas_sparsify, reference.reference_sparsify),
    "prune_two_of_four": _implementations(kernels.pallas_prune_two_of_four, reference.reference_prune_two_of_four),
}
"""By function. All of one function's give the same bits, but where a sum of a gradient and a residual is subnormal."""


EXAMPLES = (QuantizeCase(1 << 27, "float32", 256),)
"""Cases by which the choice is shown."""


def quantize_int8(
    x: Float[Array, "elements"],
    *,
    block_size: int = 256,
    key: PRNGKeyArray | None = None,
    implementation: ImplementationName = "auto",
) -> Int8Blocks:
    """Integers from -127 to 127 with one float32 scale per block of consecutive elements.

    1 + 4 / block_size bytes per element: with blocks of 256, 1.6 % of them are scales. A block's scale is a 127th of
    its largest magnitude, rounded up to 16 significant bits. The integers are those of exact arithmetic, everywhere.

    A block that holds infinity or NaN gets the scale NaN, and all of it is NaN again when dequantized. A block whose
    largest magnitude is below 2^-90 becomes zeros.

    Args:
        x: float32 or bfloat16; the last block may be shorter than the others.
        block_size: 1 to 4096; kernels need a power of two from 16 on.
        key: of `jax.random`. With it, rounding is stochastic: up with a probability of the fraction, so that the mean
            over keys is x, to 2^-24 of a scale. The random numbers depend on the key and the element's position alone.
            Without it, rounding is to nearest, ties to even.
        implementation: `auto`, or a name in `IMPLEMENTATIONS["quantize_int8"]`.

    Raises:
        ValueError: no flat array of these dtypes, a block size out of range, or an implementation that cannot run.
    """
    checks.check_flat("quantize_int8", "x", x)
    checks.check_block_size("quantize_int8", block_size)
    words = None if key is None else jax.random.bits(key, (2,), jnp.uint32)
    result: Int8Blocks = _chosen("quantize_int8", implementation, x, block_size)(x, words, block_size=block_size)
    return result


def compress_signs(
    gradient: Float[Array, "elements"],
    residual: Float[Array, "elements"],
    *,
    block_size: int = 1024,
    implementation: ImplementationName = "auto",
) -> tuple[Signs, Float[Array, "elements"]]:
    """Signs of gradient + residual, a mean magnitude per block, and what they leave over, in one pass.

    1 / 8 + 4 / block_size bytes per element: with blocks of 1024, a 31st of float32. Signs with error feedback are by
    Seide et al. 2014 (1-bit SGD), the mean magnitude as scale by Karimireddy et al. 2019 (arXiv:1901.09847).
    `unpack_signs` of the result plus the new residual is gradient + residual, up to the rounding of the residual.

    The mean is summed in fixed point of 2^-(28 - log2(block_size)) of the block's largest magnitude, so that its bits
    depend on no order; the residual makes up for it. Zero counts as positive. A block that holds infinity or NaN gets
    the scale NaN, and its residual stays as it was, so that a step that is skipped leaves nothing behind. A block whose
    largest magnitude is below 2^-90 gets the scale 0 and stays in the residual.

    Args:
        gradient: float32 or bfloat16; the last block may be shorter than the others.
        residual: float32, what was not sent before; zeros at first.
        block_size: 1 to 4096; kernels need a power of two from 16 on.
        implementation: `auto`, or a name in `IMPLEMENTATIONS["compress_signs"]`.

    Returns:
        What is sent, and the new residual.

    Raises:
        ValueError: no flat arrays of these dtypes, a block size out of range, or an implementation that cannot run.
    """
    checks.check_pair("compress_signs", gradient, residual)
    checks.check_block_size("compress_signs", block_size)
    run = _chosen("compress_signs", implementation, gradient, block_size)
    result: tuple[Signs, Array] = run(gradient, residual, block_size=block_size)
    return result


def sparsify(
    gradient: Float[Array, "elements"],
    residual: Float[Array, "elements"],
    threshold: Float[Array, ""],
    *,
    budget: int,
    implementation: ImplementationName = "auto",
) -> tuple[Sparse, Float[Array, "elements"]]:
    """The elements of gradient + residual whose magnitude reaches `threshold`, and the others as residual.

    8 bytes per slot: 0.4 bytes per element for a budget of 5 %; 0.325 after `mask_indices`. If more elements reach the
    threshold than the budget has slots, those of the lowest indices are sent and the others stay in the residual; if
    fewer, slots stay unused. What is below 2^-90 is never sent. If anything is not finite, all values that are sent are
    NaN and the residual stays as it was. The values may be sent as `quantize_int8(packed.values)`; what that loses is
    then to be added to the residual at `packed.indices`.

    On a GPU, XLA counts what passes in each tile, in one kernel that reads both arrays and writes no other; a kernel
    of our own reads them again to pack and to write the residual, as where a tile's elements go depends on all tiles
    before it.

    Args:
        gradient: float32 or bfloat16.
        residual: float32, what was not sent before; zeros at first.
        threshold: a magnitude, as from `sampled_threshold`.
        budget: how many elements can be sent.
        implementation: `auto`, or a name in `IMPLEMENTATIONS["sparsify"]`.

    Returns:
        What is sent, and the new residual.

    Raises:
        ValueError: no flat arrays of these dtypes, a budget out of range, or an implementation that cannot run.
    """
    checks.check_pair("sparsify", gradient, residual)
    checks.check_budget("sparsify", budget, gradient.size)
    run = _chosen("sparsify", implementation, gradient, None)
    result: tuple[Sparse, Array] = run(gradient, residual, jnp.asarray(threshold, jnp.float32), budget=budget)
    return result


def sparsify_top_k(
    gradient: Float[Array, "elements"], residual: Float[Array, "elements"], *, budget: int
) -> tuple[Sparse, Float[Array, "elements"]]:
    """The `budget` largest magnitudes of gradient + residual, exactly; as `sparsify` otherwise.

    It sorts, in plain JAX: what `sparsify` is measured by. Of equals those of the lowest indices are sent. All slots
    are used.

    Args:
        gradient: float32 or bfloat16.
        residual: float32, what was not sent before; zeros at first.
        budget: how many elements are sent.

    Returns:
        What is sent, and the new residual.

    Raises:
        ValueError: no flat arrays of these dtypes, or a budget out of range.
    """
    checks.check_pair("sparsify_top_k", gradient, residual)
    checks.check_budget("sparsify_top_k", budget, gradient.size)
    return reference.reference_sparsify_top_k(gradient, residual, budget=budget)


def prune_two_of_four(x: Float[Array, "rows columns"], *, implementation: ImplementationName = "auto") -> TwoOfFour:
    """The two largest magnitudes of every four consecutive elements of a row, as int8 with a scale per 8 x 8 tile.

    44 bytes per tile, 0.6875 per element: 32 integers, their places of 2 bits, a float32. Of equals the first is kept.
    Scales and integers are as in `quantize_int8`, rounded to nearest; zeros fill up rows and columns to whole tiles. A
    tile that holds infinity or NaN gets the scale NaN, and all of it is NaN again when unpacked.

    Args:
        x: float32 or bfloat16.
        implementation: `auto`, or a name in `IMPLEMENTATIONS["prune_two_of_four"]`.

    Raises:
        ValueError: no matrix of these dtypes, or an implementation that cannot run.
    """
    checks.check_matrix("prune_two_of_four", "x", x)
    result: TwoOfFour = _chosen("prune_two_of_four", implementation, x, None)(x)
    return result


def _chosen(op: str, requested: str, x: Array, block_size: int | None) -> Any:
    case = QuantizeCase(x.size, str(x.dtype), block_size)
    return choose(op, IMPLEMENTATIONS[op], requested, case, device_at_hand()).run
