"""Compression of gradients for slow networks: int8 by blocks.

Pure functions that can be jitted; nothing here has a gradient. Under a mesh, call them on what each device has
(`jax.shard_map`): a kernel is not split by XLA.
"""

from pallas_kernels.quantize.api import IMPLEMENTATIONS, QuantizeCase, quantize_int8
from pallas_kernels.quantize.decoding import dequantize_int8
from pallas_kernels.quantize.formats import Int8Blocks, wire_bytes

__all__ = [
    "IMPLEMENTATIONS",
    "Int8Blocks",
    "QuantizeCase",
    "dequantize_int8",
    "quantize_int8",
    "wire_bytes",
]
