"""Compression of gradients for slow networks: int8 by blocks, signs, the largest elements, 2 of every 4; and measures.

Pure functions that can be jitted; nothing here has a gradient. Under a mesh, call them on what each device has, in
`jax.shard_map` over all axes with `check_vma=False`: XLA does not split kernels, and they do not say across which axes
their results vary. What they give is a pytree of what is sent, which collectives take as it is.
"""

from pallas_kernels.quantize.api import (
    EXAMPLES,
    IMPLEMENTATIONS,
    QuantizeCase,
    compress_signs,
    prune_two_of_four,
    quantize_int8,
    sparsify,
    sparsify_top_k,
)
from pallas_kernels.quantize.decoding import (
    dequantize_int8,
    mask_indices,
    unpack_masked,
    unpack_signs,
    unpack_sparse,
    unpack_two_of_four,
)
from pallas_kernels.quantize.formats import Int8Blocks, Masked, Signs, Sparse, TwoOfFour, wire_bytes
from pallas_kernels.quantize.measures import entropy, sampled_threshold

__all__ = [
    "EXAMPLES",
    "IMPLEMENTATIONS",
    "Int8Blocks",
    "Masked",
    "QuantizeCase",
    "Signs",
    "Sparse",
    "TwoOfFour",
    "compress_signs",
    "dequantize_int8",
    "entropy",
    "mask_indices",
    "prune_two_of_four",
    "quantize_int8",
    "sampled_threshold",
    "sparsify",
    "sparsify_top_k",
    "unpack_masked",
    "unpack_signs",
    "unpack_sparse",
    "unpack_two_of_four",
    "wire_bytes",
]
