"""Which dtype each part computes in."""

from typing import Literal

from pydantic import Field

from dseekjax.section import Section


class PrecisionConfig(Section):
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype of activations and of the parameters' working copy; masters and sums stay float32.",
    )
