"""The shape of the device mesh, and how each axis does its work."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dseekjax.section import Section

AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")


class MeshConfig(Section):
    data: int = Field(1, ge=-1, description="Pure replicas: batch is split, parameters are copied; -1 fills.")
    fsdp: int = Field(-1, ge=-1, description="Replicas that shard parameters and optimizer state; -1 fills.")
    expert: int = Field(1, ge=-1, description="Splits the batch; parameters are copied, as no layer has experts yet.")
    context: int = Field(1, ge=-1, description="Splits every sequence.")
    tensor: int = Field(1, ge=-1, description="Splits heads, feed-forward width and vocabulary.")
    pipe: int = Field(1, ge=-1, description="Pipeline stages; only 1 so far.")
    sequence_parallel: bool = Field(
        True, description="Whether tensor splits the sequence of norms and residuals too, which saves their memory."
    )
    fsdp_prefetch: Literal["auto", "compiler", "carry", "none"] = Field(
        "auto",
        description="How the next layer's parameters are gathered while a layer computes: compiler pipelines the loop, "
        "on GPU, without tensor and context; carry is a loop written for it, with memory.recompute full; none gathers "
        "within each layer. auto takes the first that fits.",
    )
    tensor_overlap: Literal["none", "xla", "ring"] = Field(
        "none",
        description="How tensor communication hides behind matrix products: not; by XLA's windowed einsum, on GPU; "
        "by an explicit ring of sub-blocks.",
    )
    context_attention: Literal["all_to_all", "all_gather", "ring"] = Field(
        "all_to_all",
        description="How attention sees the whole sequence: heads are split instead; keys and values are gathered; "
        "they go round a ring.",
    )
    rules: dict[str, tuple[str, ...]] = Field(
        {}, description="Mesh axes of a logical axis, instead of the usual ones, as in {mlp: [tensor], embed: []}."
    )

    @model_validator(mode="after")
    def _sizes_make_sense(self) -> Self:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in sizes.items():
            if size == 0:
                raise ValueError(f"{axis} 0 is no size; use a positive number, or -1 to fill")
        if self.pipe != 1:
            raise ValueError(f"pipe {self.pipe} is not supported yet; set pipe to 1 and use the other axes")
        filling = [axis for axis, size in sizes.items() if size == -1]
        if len(filling) > 1:
            raise ValueError(
                f"{' and '.join(filling)} are both -1 (fsdp is, unless it is set); only one axis "
                "can fill, give the others a size"
            )
        return self

    @model_validator(mode="after")
    def _rules_name_axes(self) -> Self:
        for name, axes in self.rules.items():
            for axis in axes:
                if axis not in AXES:
                    raise ValueError(f"rules.{name} names the mesh axis {axis!r}; there are {', '.join(AXES)}")
        return self

    @model_validator(mode="after")
    def _overlap_needs_split_sequences(self) -> Self:
        if self.tensor_overlap == "ring" and not self.sequence_parallel:
            raise ValueError("tensor_overlap ring moves parts of sequences; set sequence_parallel to true")
        return self
