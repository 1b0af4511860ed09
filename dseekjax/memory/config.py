"""Which activations are kept and which are computed again."""

from typing import Literal

from pydantic import Field

from dseekjax.section import Section


class MemoryConfig(Section):
    recompute: Literal["none", "full", "every_k"] = Field(
        "none",
        description="Activations kept for the backward pass: all; each layer's input; every k-th layer's input.",
    )
    recompute_every: int = Field(8, gt=0, description="The k of every_k; must divide model.num_layers.")
