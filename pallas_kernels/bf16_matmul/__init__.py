"""Products of 16-bit matrices with fused epilogues, and the projection to heads with rotary."""

from pallas_kernels.bf16_matmul.api import (
    IMPLEMENTATIONS,
    MatmulCase,
    matmul,
    qkv_rotary,
    swiglu,
)

__all__ = [
    "IMPLEMENTATIONS",
    "MatmulCase",
    "matmul",
    "qkv_rotary",
    "swiglu",
]
