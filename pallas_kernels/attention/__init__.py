"""Scaled dot-product attention: one public function, several implementations; and parts of it, over some keys."""

from pallas_kernels.attention.api import attention, choose_implementation
from pallas_kernels.attention.partial import (
    Attended,
    Keys,
    Queries,
    merge_attended,
    partial_attention,
    partial_attention_gradient,
)

__all__ = [
    "Attended",
    "Keys",
    "Queries",
    "attention",
    "choose_implementation",
    "merge_attended",
    "partial_attention",
    "partial_attention_gradient",
]
