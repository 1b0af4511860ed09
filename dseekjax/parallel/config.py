"""The shape of the device mesh, and how each axis does its work."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dseekjax.section import Section

AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")


class MeshConfig(Section):
    data: int = Field(1, ge=-1, description="Pure replicas: batch is split, parameters are copied; -1 fills.")
    fsdp: int = Field(-1, ge=-1, description="Replicas that shard parameters and optimizer state; -1 fills.")
    expert: int = Field(
        1, ge=-1, description="Splits the batch and, as no layer has experts yet, shards parameters like fsdp."
    )
    context: int = Field(1, ge=-1, description="Splits every sequence, and shards parameters like fsdp.")
    tensor: int = Field(1, ge=-1, description="Splits heads, feed-forward width and vocabulary.")
    pipe: int = Field(1, ge=-1, description="Pipeline stages; only 1 so far.")
    sequence_parallel: bool = Field(
        True, description="Whether tensor splits the sequence of norms and residuals too, which saves their memory."
    )
    fsdp_prefetch: Literal["auto", "compiler", "carry", "none"] = Field(
        "auto",
        description="How the next layer's parameters are gathered while a layer computes: compiler pipelines the loop, "
        "on GPU, without tensor and context; carry is a loop written for it, with memory.recompute full; none gathers "
        "within each layer. auto takes what hides most for at most a seventh more memory.",
    )
    tensor_overlap: Literal["none", "xla", "ring"] = Field(
        "none",
        description="How tensor communication hides behind matrix products: not; by XLA's windowed einsum, on "
        "GPU, without context; by an explicit ring of sub-blocks.",
    )
    context_attention: Literal["all_to_all", "all_gather", "ring"] = Field(
        "all_to_all",
        description="How attention sees sequences that context splits: heads are split instead, "
        "which have to divide; keys and values are gathered; or they go round a ring, hidden behind the work. The "
        "last two compute in blocks of their own, whatever model.attention.implementation.",
    )
    rules: dict[str, tuple[str, ...]] = Field(
        {}, description="Mesh axes of a logical axis, instead of the usual ones, as in {mlp: [tensor], embed: []}."
    )

    # Stated before what holds only until there are pipelines.
    @model_validator(mode="after")
    def _rings_need_all_stages(self) -> Self:
        if self.context_attention == "ring" and self.context != 1 and self.pipe != 1:
            raise ValueError(
                f"context_attention ring sends keys round in steps that all devices must take together, which pipe "
                f"{self.pipe} keeps them from; set context_attention to all_to_all or all_gather"
            )
        return self

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
                f"{' and mesh.'.join(filling)} are both -1 (fsdp is, unless it is set); only one axis "
                "can fill, give the others a size"
            )
        return self

    @model_validator(mode="after")
    def _rules_name_axes(self) -> Self:
        for name, axes in self.rules.items():
            for axis in axes:
                if axis not in AXES:
                    raise ValueError(f"rules.{name} names the mesh axis {axis!r}; there are {', '.join(AXES)}")
                if axes.count(axis) > 1:
                    raise ValueError(f"rules.{name} names the mesh axis {axis!r} twice; once is enough")
            if name == "batch" and "data" not in axes:
                raise ValueError("rules.batch leaves out 'data', which splits every batch; put it first")
            if name != "batch" and "data" in axes:
                raise ValueError(f"rules.{name} names the mesh axis 'data', which splits the batch alone; leave it out")
        return self

    @model_validator(mode="after")
    def _overlap_needs_split_sequences(self) -> Self:
        if self.tensor_overlap == "ring" and not self.sequence_parallel:
            raise ValueError("tensor_overlap ring moves parts of sequences; set sequence_parallel to true")
        return self
