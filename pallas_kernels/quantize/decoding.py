"""The inverses: dense gradients from what crossed the wire.

There are no kernels of our own here. XLA compiles each to one kernel, and to one that it can fuse with what follows,
such as the sum over what several senders sent.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.quantize.formats import Int8Blocks, Signs


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


def _per_element(scales: Float[Array, "blocks"], block_size: int, elements: int) -> Float[Array, "elements"]:
    return jnp.broadcast_to(scales[:, None], (scales.size, block_size)).reshape(-1)[:elements]
