"""Matrix products of 8-bit floats with a scale per tile or block: the recipe of DeepSeek-V3 (arXiv:2412.19437)."""

from pallas_kernels.fp8_matmul.api import EXAMPLES, IMPLEMENTATIONS, Fp8MatmulCase, choose_implementation, fp8_matmul
from pallas_kernels.fp8_matmul.dense import fp8_dense
from pallas_kernels.fp8_matmul.quantize import (
    BLOCK_SIZE,
    Quantized,
    dequantize,
    quantize_blocks,
    quantize_tiles,
    transpose_tiles,
)

__all__ = [
    "BLOCK_SIZE",
    "EXAMPLES",
    "IMPLEMENTATIONS",
    "Fp8MatmulCase",
    "Quantized",
    "choose_implementation",
    "dequantize",
    "fp8_dense",
    "fp8_matmul",
    "quantize_blocks",
    "quantize_tiles",
    "transpose_tiles",
]
