"""Arithmetic with the same bits on every device and in any order of work; kernels and references share it.

Orders of floats are compared as integers, sums are taken in fixed point, quotients are corrected by exact remainders,
and scales have few enough bits that a product with an integer is exact, so that it does not matter whether a compiler
fuses it into the addition that follows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

SMALLEST = 2.0**-90
"""Blocks whose largest magnitude is below this count as zeros: their scales and remainders would be subnormal numbers,
which devices flush to zero or not."""
SMALLEST_BITS = 37 << 23

LARGEST_INTEGER = 127

_INFINITY_BITS = 0x7F800000
_SCALE_BITS_DROPPED = 8


def magnitude_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The bits of |x| in float32: ordered as magnitudes are, above them infinity, above it every NaN."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF


def is_usable(largest: Int[Array, "*shape"]) -> Array:
    """Whether blocks with these largest magnitudes (bits) are finite and not zeros."""
    return (largest >= SMALLEST_BITS) & (largest < _INFINITY_BITS)


def is_nonfinite(bits: Int[Array, "*shape"]) -> Array:
    """Whether these are the bits of infinity or NaN."""
    return bits >= _INFINITY_BITS


def marked(scale: Float[Array, "*shape"], largest: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`scale` for blocks that are usable, 0 for blocks of zeros, and NaN for those that hold what is not finite."""
    return jnp.where(is_usable(largest), scale, jnp.where(is_nonfinite(largest), jnp.nan, 0.0))


def integer_scale(largest: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The scale by which a block's magnitudes become integers of at most 127.

    A 127th of the largest, rounded up to 16 significant bits.

    Args:
        largest: bits of each block's largest magnitude.
    """
    scale = jax.lax.bitcast_convert_type(jnp.where(is_usable(largest), largest, SMALLEST_BITS), jnp.float32)
    bits = jax.lax.bitcast_convert_type(scale * (1 / LARGEST_INTEGER), jnp.int32)
    # The constant and the product are each rounded: less than 4 units too small.
    dropped = (1 << _SCALE_BITS_DROPPED) - 1
    return jax.lax.bitcast_convert_type((bits + dropped + 4) & ~dropped, jnp.float32)


def round_to_scale(
    x: Float[Array, "*shape"], scale: Float[Array, "*#shape"], fraction: Float[Array, "*shape"] | float
) -> Int[Array, "*shape"]:
    """x / scale as integers, away from zero where the fraction of the magnitude is above `fraction`.

    A fraction of 0.5 rounds to nearest, ties to even. The result is that of exact arithmetic.

    Args:
        x: finite numbers, no larger than 127 scales.
        scale: from `integer_scale`.
        fraction: in (0, 1), with at most 24 bits.
    """
    magnitude = jnp.abs(x)
    # The quotient may be off by one, as devices divide differently; the remainder is exact and says so.
    quotient = (magnitude * (1.0 / scale)).astype(jnp.int32).astype(jnp.float32)
    remainder = magnitude - quotient * scale
    quotient += jnp.where(remainder < 0.0, -1.0, jnp.where(remainder >= scale, 1.0, 0.0))
    remainder = magnitude - quotient * scale
    limit = fraction * scale
    integer = quotient.astype(jnp.int32)
    up = (remainder > limit) | ((remainder == limit) & ((integer & 1) == 1))
    integer += jnp.where(up, 1, 0)
    return jnp.where(x < 0.0, -integer, integer)


def mean_magnitude(
    x: Float[Array, "blocks block_size"], counts: Int[Array, "blocks"], largest: Int[Array, "blocks"]
) -> Float[Array, "blocks"]:
    """Mean magnitude of each block, summed in fixed point.

    It is too small by less than 2^-(28 - log2(block_size)) of the largest, the logarithm rounded up.

    Args:
        x: zeros in blocks that are not usable and beyond `counts`.
        counts: how many elements of each block there are.
        largest: bits of each block's largest magnitude.
    """
    digits = 30 - (x.shape[1] - 1).bit_length()
    exponent = jnp.where(is_usable(largest), largest, SMALLEST_BITS) >> 23
    unit = jax.lax.bitcast_convert_type((exponent + 1 - digits) << 23, jnp.float32)
    per_unit = jax.lax.bitcast_convert_type((253 + digits - exponent) << 23, jnp.float32)
    total = (jnp.abs(x) * per_unit[:, None]).astype(jnp.int32).sum(1, dtype=jnp.int32)
    return jax.lax.div(total, counts).astype(jnp.float32) * unit


def random_fraction(
    first: UInt[Array, ""], second: UInt[Array, ""], index: UInt[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Uniform numbers in (0, 1), of 23 random bits, that depend on the two words of a key and on each element's index.

    Twice the mixing function `lowbias32` (Chris Wellons, "Prospecting for Hash Functions", 2018), of the index with one
    word of the key and then with the other.
    """
    bits = mixed(mixed(index ^ first) ^ second)
    return (bits >> 9).astype(jnp.int32).astype(jnp.float32) * 2.0**-23 + 2.0**-24


def mixed(x: UInt[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """`lowbias32` of each 32-bit number: a permutation in which each bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
