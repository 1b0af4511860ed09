"""Checksums of arrays that do not depend on how they are placed."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32


@jax.jit
def placed_checksums(arrays: dict[str, jax.Array]) -> dict[str, UInt32[Array, ""]]:
    """A checksum per array, still on the devices; only scalars cross between them."""
    return {name: _checksum(array) for name, array in arrays.items()}


def _checksum(array: jax.Array) -> UInt32[Array, ""]:
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, width).astype(jnp.uint32)
    # The running number of each element, from its coordinates: to flatten would gather a sharded array.
    place = jnp.zeros(array.shape, jnp.uint32)
    for dimension in range(array.ndim):
        stride = jnp.uint32(math.prod(array.shape[dimension + 1 :]) % 2**32)
        place = place + jax.lax.broadcasted_iota(jnp.uint32, array.shape, dimension) * stride
    return jnp.sum(_scramble(bits ^ _scramble(place)), dtype=jnp.uint32)


def _scramble(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finaliser of MurmurHash3, a bijection in which every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A 32-bit checksum per array, of its bits and their places: the same on any mesh and number of processes."""
    return {name: int(value) for name, value in placed_checksums(dict(arrays)).items()}
