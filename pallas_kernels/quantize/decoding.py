"""The inverses: dense gradients from what crossed the wire.

There are no kernels of our own here. XLA compiles each to one kernel, and to one that it can fuse with what follows,
such as the sum over what several senders sent.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantize.formats import Int8Blocks


def dequantize_int8(packed: Int8Blocks) -> Float[Array, "elements"]:
    """The inverse of `quantize_int8`, in float32; exact products. Blocks that held what is not finite are NaN."""
    elements = packed.values.size
    return packed.values.astype(jnp.float32) * _per_element(packed.scales, packed.block_size, elements)


def _per_element(scales: Float[Array, "blocks"], block_size: int, elements: int) -> Float[Array, "elements"]:
    return jnp.broadcast_to(scales[:, None], (scales.size, block_size)).reshape(-1)[:elements]
