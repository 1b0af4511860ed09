"""Products of 16-bit matrices with fused epilogues, dense and grouped, and the projection to heads with rotary."""

from pallas_kernels.bf16_matmul.api import (
    EXAMPLES,
    GROUPS_THAT_PAY,
    IMPLEMENTATIONS,
    MatmulCase,
    grouped_matmul,
    matmul,
    qkv_rotary,
    swiglu,
)

__all__ = [
    "EXAMPLES",
    "GROUPS_THAT_PAY",
    "IMPLEMENTATIONS",
    "MatmulCase",
    "grouped_matmul",
    "matmul",
    "qkv_rotary",
    "swiglu",
]
