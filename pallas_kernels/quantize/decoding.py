"""The inverses: dense gradients from what crossed the wire.

There are no kernels of our own here. XLA compiles each to one kernel, after one that writes zeros for `unpack_sparse`
and some that count bits for `unpack_masked`, and to one that it can fuse with what follows, such as the sum over what
several senders sent.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.quantize.formats import Int8Blocks, Masked, Signs, Sparse, TwoOfFour


def dequantize_int8(packed: Int8Blocks) -> Float[Array, "elements"]:
    """The inverse of `quantize_int8`, in float32; exact products. Blocks that held what is not finite are NaN."""
    elements = packed.values.size
    return packed.values.astype(jnp.float32) * _per_element(packed.scales, packed.block_size, elements)


def unpack_signs(packed: Signs) -> Float[Array, "elements"]:
    """The inverse of `compress_signs`, in float32: plus or minus the scale.

    Blocks that held what is not finite are NaN.
    """
    bits = (packed.words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    scale = _per_element(packed.scales, packed.block_size, packed.elements)
    return jnp.where(bits.reshape(-1)[: packed.elements] == 1, -scale, scale)


def unpack_sparse(packed: Sparse) -> Float[Array, "elements"]:
    """The inverse of `sparsify` and `sparsify_top_k`, in float32: zeros but for what was sent."""
    zeros = jnp.zeros((packed.elements,), jnp.float32)
    return zeros.at[packed.indices].set(packed.values, mode="drop", indices_are_sorted=True)


def mask_indices(packed: Sparse) -> Masked:
    """The same elements with a bit for each in place of the indices; ascending, these are all that bits leave open."""
    # Of what is added to a word each has a bit of its own.
    words = jnp.zeros((-(-packed.elements // 32),), jnp.uint32)
    bits = jnp.uint32(1) << (packed.indices & 31).astype(jnp.uint32)
    used = packed.indices < packed.elements
    words = words.at[packed.indices >> 5].add(jnp.where(used, bits, 0), mode="drop", indices_are_sorted=True)
    return Masked(words, packed.values, packed.elements)


def unpack_masked(packed: Masked) -> Float[Array, "elements"]:
    """The inverse of `sparsify` and `mask_indices` after it, in float32."""
    counts = jax.lax.population_count(packed.words).astype(jnp.int32)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    bit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    lower = jax.lax.population_count(packed.words[:, None] & (bit - 1)).astype(jnp.int32)
    values = packed.values.at[before[:, None] + lower].get(mode="clip")
    return jnp.where(packed.words[:, None] & bit != 0, values, 0.0).reshape(-1)[: packed.elements]


def unpack_two_of_four(packed: TwoOfFour) -> Float[Array, "rows columns"]:
    """The inverse of `prune_two_of_four`, in float32. Tiles that held what is not finite are NaN, all of them."""
    shape = packed.values.shape
    shifts = np.arange(4, dtype=np.uint32)
    # Shifted up and down again as signed numbers, bytes get their signs.
    bytes_ = jax.lax.bitcast_convert_type(packed.values[..., None] << (24 - 8 * shifts), jnp.int32) >> 24
    places = (packed.places.astype(jnp.uint32)[..., None] >> (2 * shifts)) & 3
    integers = bytes_.reshape(*shape, 2, 2)
    here = places.reshape(*shape, 2, 2, 1) == np.arange(4, dtype=np.uint32)
    fours = jnp.where(here, integers[..., None], 0).sum(-2)
    scale = jnp.repeat(packed.scales, 8, axis=0)
    dense = fours.reshape(*shape, 8).astype(jnp.float32) * scale[..., None]
    return dense.reshape(shape[0], -1)[: packed.rows, : packed.columns]


def _per_element(scales: Float[Array, "blocks"], block_size: int, elements: int) -> Float[Array, "elements"]:
    return jnp.broadcast_to(scales[:, None], (scales.size, block_size)).reshape(-1)[:elements]
