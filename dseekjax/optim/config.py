"""The optimizer and its schedule."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dseekjax.section import Section


class _Warmup(Section):
    warmup_steps: int = Field(0, ge=0, description="Steps of linear rise to the peak, from its warmup_steps-th part.")


class ConstantSchedule(_Warmup):
    kind: Literal["constant"] = Field("constant", description="Warm-up, then the peak.")


class CosineSchedule(_Warmup):
    kind: Literal["cosine"] = Field(
        "cosine",
        description="Shape after the warm-up: half a cosine or a line down to the end, the peak and "
        "a line down over the last decay_steps (wsd), or the peak.",
    )
    final_fraction: float = Field(0.1, ge=0, le=1, description="Last learning rate as a part of the peak.")


class LinearSchedule(_Warmup):
    kind: Literal["linear"] = Field("linear", description="Warm-up, then a line down to the end of training.")
    final_fraction: float = Field(0.0, ge=0, le=1, description="Last learning rate as a part of the peak.")


class WarmupStableDecaySchedule(_Warmup):
    kind: Literal["wsd"] = Field("wsd", description="Warm-up, the peak, and a line down over the last decay_steps.")
    decay_steps: int = Field(100, ge=0, description="Steps of the final decay of wsd.")
    final_fraction: float = Field(0.0, ge=0, le=1, description="Last learning rate as a part of the peak.")


def _kind(value: Any) -> str:
    return value.get("kind", "cosine") if isinstance(value, dict) else getattr(value, "kind", "cosine")


ScheduleConfig = Annotated[
    Annotated[CosineSchedule, Tag("cosine")]
    | Annotated[LinearSchedule, Tag("linear")]
    | Annotated[WarmupStableDecaySchedule, Tag("wsd")]
    | Annotated[ConstantSchedule, Tag("constant")],
    Discriminator(_kind),
]


class AdamWConfig(Section):
    """Adam with decoupled weight decay on matrices (kernels and embeddings); biases and norms do not decay."""

    kind: Literal["adamw"] = Field("adamw", description="The optimizer.")
    learning_rate: float = Field(3e-4, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decay per step, times the learning rate.")
    clip_norm: float = Field(1.0, gt=0, description="Largest global norm of the gradient; a larger one is scaled down.")
    schedule: ScheduleConfig = CosineSchedule()


OptimizerConfig = AdamWConfig
