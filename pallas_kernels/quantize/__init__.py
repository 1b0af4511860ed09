"""Compression of gradients for slow networks: int8 by blocks, signs.

Pure functions that can be jitted; nothing here has a gradient. Under a mesh, call them on what each device has
(`jax.shard_map`): a kernel is not split by XLA.
"""

from pallas_kernels.quantize.api import IMPLEMENTATIONS, QuantizeCase, compress_signs, quantize_int8
from pallas_kernels.quantize.decoding import dequantize_int8, unpack_signs
from pallas_kernels.quantize.formats import Int8Blocks, Signs, wire_bytes

__all__ = [
    "IMPLEMENTATIONS",
    "Int8Blocks",
    "QuantizeCase",
    "Signs",
    "compress_signs",
    "dequantize_int8",
    "quantize_int8",
    "unpack_signs",
    "wire_bytes",
]
