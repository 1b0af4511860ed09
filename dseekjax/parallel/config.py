"""The shape of the device mesh."""

from typing import Self

from pydantic import Field, model_validator

from dseekjax.section import Section

AXES = ("data", "fsdp", "expert", "context", "tensor", "pipe")
SUPPORTED_AXES = ("data", "fsdp")


class MeshConfig(Section):
    data: int = Field(1, ge=-1, description="Pure replicas: batch is split, parameters are copied; -1 fills.")
    fsdp: int = Field(-1, ge=-1, description="Replicas that shard parameters and optimizer state; -1 fills.")
    expert: int = Field(1, ge=-1, description="Expert parallelism; only 1 so far.")
    context: int = Field(1, ge=-1, description="Context parallelism; only 1 so far.")
    tensor: int = Field(1, ge=-1, description="Tensor parallelism; only 1 so far.")
    pipe: int = Field(1, ge=-1, description="Pipeline stages; only 1 so far.")

    @model_validator(mode="after")
    def _sizes_make_sense(self) -> Self:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in sizes.items():
            if size == 0:
                raise ValueError(f"{axis} 0 is no size; use a positive number, or -1 to fill")
            if size != 1 and axis not in SUPPORTED_AXES:
                raise ValueError(f"{axis} {size} is not supported yet; set {axis} to 1 and use data or fsdp")
        filling = [axis for axis, size in sizes.items() if size == -1]
        if len(filling) > 1:
            raise ValueError(
                f"{' and '.join(filling)} are both -1 (fsdp is, unless it is set); only one axis "
                "can fill, give the others a size"
            )
        return self
