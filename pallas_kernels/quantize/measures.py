"""What a gradient is like, from a sample of it: plain JAX, as a sample is small."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantize import arithmetic
from pallas_kernels.quantize.checks import check_flat, check_pair


def sampled_threshold(
    gradient: Float[Array, "elements"],
    residual: Float[Array, "elements"],
    *,
    density: float,
    sample_size: int = 16384,
) -> Float[Array, ""]:
    """The magnitude that about `density` of the elements of gradient + residual reach.

    It is the quantile of a sample (Lin et al. 2017, arXiv:1712.01887) at scattered positions, the same ones for each
    number of elements. The share that really reaches it differs from `density` with a standard deviation of
    sqrt(density (1 - density) / sample_size): 3.4 % of a density of 0.05. With a sample as large as the whole it is the
    exact quantile.

    Args:
        gradient: float32 or bfloat16.
        residual: float32, what was not sent before.
        density: in (0, 1].
        sample_size: how many elements are looked at.

    Raises:
        ValueError: no flat arrays of these dtypes, or a density or a sample size out of range.
    """
    check_pair("sampled_threshold", gradient, residual)
    if not 0.0 < density <= 1.0:
        raise ValueError(f"sampled_threshold: density {density} is not in (0, 1]; give a share of the elements")
    positions = _sample(gradient.size, sample_size, "sampled_threshold")
    corrected = gradient[positions].astype(jnp.float32) + residual[positions]
    ordered = jnp.sort(arithmetic.magnitude_bits(corrected))
    reaching = max(1, round(density * ordered.size))
    return jax.lax.bitcast_convert_type(ordered[ordered.size - reaching], jnp.float32)


def entropy(x: Float[Array, "elements"], *, bins: int = 255, sample_size: int = 65536) -> Float[Array, ""]:
    """Shannon entropy of a gradient that is rounded to `bins` levels, in bits per element.

    The levels are -m to m, m = (bins - 1) / 2, of x m / max |x|: with 255 of them, the integers that one int8 scale for
    the whole sample gives. It is 0 for zeros (as in
    `quantize_int8`, all below 2^-90) and at most log2(bins).

    Args:
        x: float32 or bfloat16.
        bins: an odd number from 15 on, so that zero is a level.
        sample_size: how many elements are looked at, at scattered positions; all if there are no more.

    Returns:
        The entropy of the sample's histogram (less than that of the whole by about bins / (2 ln 2 sample_size)), or NaN
        if an element of the sample is not finite.

    Raises:
        ValueError: no flat array of these dtypes, or a number of bins or a sample size out of range.
    """
    check_flat("entropy", "x", x)
    if bins < 15 or bins % 2 == 0:
        raise ValueError(f"entropy: bins {bins} is no odd number of at least 15, as zero must be a level; give 255")
    sample = x[_sample(x.size, sample_size, "entropy")].astype(jnp.float32)
    middle = (bins - 1) // 2
    largest = jnp.abs(sample).max()
    finite = jnp.isfinite(largest)
    # So that neither overflows, and with 15 bins this quotient is normal, which a reciprocal would not be.
    per_unit = jnp.where(finite & (largest >= arithmetic.SMALLEST), middle / largest, 0.0)
    levels = jnp.round(jnp.where(finite, sample, 0.0) * per_unit).astype(jnp.int32) + middle
    counts = jnp.zeros((bins,), jnp.int32).at[levels].add(1)
    bits = (counts / sample.size * jnp.log2(sample.size / jnp.maximum(counts, 1))).sum()
    return jnp.where(finite, bits, jnp.nan)


def _sample(elements: int, sample_size: int, op: str) -> Int[Array, "sample"]:
    if sample_size < 1:
        raise ValueError(f"{op}: sample_size {sample_size} is no positive number; give how many elements to look at")
    if sample_size >= elements:
        return jnp.arange(elements)
    # Scattered, so that rows and columns of matrices have no part in which elements are seen.
    return (arithmetic.mixed(jnp.arange(sample_size, dtype=jnp.uint32)) % elements).astype(jnp.int32)
