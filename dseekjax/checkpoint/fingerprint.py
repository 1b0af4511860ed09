"""Checksums of arrays that do not depend on how they are placed."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32


@jax.jit
def _checksums(arrays: dict[str, jax.Array]) -> dict[str, UInt32[Array, ""]]:
    return {name: _checksum(array) for name, array in arrays.items()}


def _checksum(array: jax.Array) -> UInt32[Array, ""]:
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, width).astype(jnp.uint32).reshape(-1)
    # Odd factors that differ by place: every changed bit and every exchange of two elements shows.
    factors = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435762) + jnp.uint32(1)
    return jnp.sum(bits * factors, dtype=jnp.uint32)


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """A 32-bit checksum per array, of its bits: equal for equal values on any mesh and any number of processes."""
    return {name: int(value) for name, value in _checksums(dict(arrays)).items()}
