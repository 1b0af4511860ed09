"""Scaled dot-product attention: one public function, several implementations; and parts of it, over some keys."""

from pallas_kernels.attention.api import (
    ImplementationName,
    attention,
    attention_with_log_sum_exp,
    choose_implementation,
    describe,
)
from pallas_kernels.attention.implementations import EXAMPLES, IMPLEMENTATIONS, WITH_LOG_SUM_EXP, AttentionCase
from pallas_kernels.attention.partial import (
    Attended,
    Keys,
    Queries,
    merge_attended,
    partial_attention,
    partial_attention_gradient,
)
from pallas_kernels.attention.spec import AttentionSpec

__all__ = [
    "EXAMPLES",
    "IMPLEMENTATIONS",
    "WITH_LOG_SUM_EXP",
    "Attended",
    "AttentionCase",
    "AttentionSpec",
    "ImplementationName",
    "Keys",
    "Queries",
    "attention",
    "attention_with_log_sum_exp",
    "choose_implementation",
    "describe",
    "merge_attended",
    "partial_attention",
    "partial_attention_gradient",
]
