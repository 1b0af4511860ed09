"""What a decoder-only transformer looks like."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from dseekjax.section import Section


def _as_many_as_heads(data: dict[str, Any]) -> int:
    """Same as `num_heads`."""
    return data.get("num_heads", 1)


class AttentionConfig(Section):
    num_heads: int = Field(8, gt=0, lt=2**31, description="Query heads.")
    num_kv_heads: int = Field(
        default_factory=_as_many_as_heads,
        gt=0,
        description="Key and value heads; fewer than num_heads is grouped-query attention.",
    )
    head_dim: int = Field(64, gt=0, lt=2**31, description="Width of one head.")
    implementation: Literal["auto", "reference", "blocked", "pallas", "pallas_interpreted"] = Field(
        "auto",
        description="Which attention runs; all give the same numbers. pallas is a kernel for NVIDIA GPUs, "
        "pallas_interpreted the same one on any device, slowly, for tests.",
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "choose a divisor, or leave it out for as many as num_heads"
            )
        return self


class FeedForwardConfig(Section):
    hidden_dim: int = Field(2048, gt=0, lt=2**31, description="Width between the two projections.")
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu"] = Field(
        "gelu",
        description="gelu (tanh form), gelu_exact (by the error function), relu, or swiglu, which has a third "
        "projection as gate.",
    )


class NoRotaryScaling(Section):
    kind: Literal["none"] = Field(
        "none",
        description="How a model that was trained on short sequences takes longer ones: none is not at all, linear "
        "slows every rotation down, llama3 only the slow ones.",
    )


class LinearRotaryScaling(Section):
    """Chen et al. 2023, arXiv:2306.15595."""

    kind: Literal["linear"] = Field("linear", description="Every rotation is slower by factor.")
    factor: float = Field(gt=0, description="By how much rotations are slowed down.")


class Llama3RotaryScaling(Section):
    """That of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783)."""

    kind: Literal["llama3"] = Field("llama3", description="Slow rotations are slower by factor, fast ones stay.")
    factor: float = Field(8.0, gt=0, description="By how much slow rotations are slowed down.")
    low_frequency_factor: float = Field(
        1.0, gt=0, description="Rotations of fewer turns than this in original_positions are slow."
    )
    high_frequency_factor: float = Field(
        4.0, gt=0, description="Rotations of more turns than this in original_positions are fast."
    )
    original_positions: int = Field(
        8192, gt=0, lt=2**31, description="Length of sequences that the model was trained on before."
    )

    @model_validator(mode="after")
    def _slow_is_below_fast(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor {self.low_frequency_factor} is not below high_frequency_factor "
                f"{self.high_frequency_factor}; lower the one or raise the other"
            )
        return self


def _kind(value: Any) -> str:
    return value.get("kind", "none") if isinstance(value, dict) else getattr(value, "kind", "none")


RotaryScalingConfig = Annotated[
    Annotated[NoRotaryScaling, Tag("none")]
    | Annotated[LinearRotaryScaling, Tag("linear")]
    | Annotated[Llama3RotaryScaling, Tag("llama3")],
    Discriminator(_kind),
]


class DecoderConfig(Section):
    """A decoder-only transformer: the GPT-2, GPT-3 and Llama families differ only in these keys."""

    kind: Literal["decoder"] = Field("decoder", description="The model family.")
    vocabulary_size: int = Field(
        32768, gt=1, lt=2**31, description="Rows of the embedding; at least the tokenizer's size."
    )
    num_layers: int = Field(8, gt=0, lt=2**31, description="Transformer layers.")
    embed_dim: int = Field(512, gt=0, lt=2**31, description="Width of the residual stream.")
    attention: AttentionConfig = AttentionConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    norm: Literal["layer_norm", "rms_norm"] = Field("layer_norm", description="Normalisation before each part.")
    norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance inside the norms.")
    positions: Literal["learned", "rotary"] = Field("learned", description="How a token knows its position.")
    max_positions: int = Field(
        1024, gt=0, lt=2**31, description="Rows of the learned position table; unused by rotary."
    )
    rotary_theta: float = Field(10000.0, gt=0, description="Base of the rotary wavelengths; unused by learned.")
    rotary_scaling: RotaryScalingConfig = NoRotaryScaling()
    biases: Literal["all", "attention", "qkv", "none"] = Field(
        "all", description="Which projections have a bias; attention is qkv and that of its output."
    )
    tied_embeddings: bool = Field(True, description="Whether the output projection is the embedding itself.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Probability of dropping an activation after the embedding and each part."
    )
    initializer_scale: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    scan_layers: bool | Literal["auto"] = Field(
        "auto",
        description="Whether layers are compiled once and looped over, or one by one, which on CPU is faster to run "
        "and slower to compile; auto is by what was measured.",
    )
    loss_chunk: int = Field(1024, gt=0, description="Tokens per device whose logits exist at one time in the loss.")

    @model_validator(mode="after")
    def _rotary_needs_even_heads(self) -> Self:
        if self.positions == "rotary" and self.attention.head_dim % 2:
            raise ValueError(f"attention.head_dim {self.attention.head_dim} is odd; rotary positions need it even")
        return self

    @model_validator(mode="after")
    def _only_rotations_are_scaled(self) -> Self:
        if self.positions != "rotary" and self.rotary_scaling.kind != "none":
            raise ValueError(
                f"rotary_scaling.kind {self.rotary_scaling.kind} needs positions to be rotary, not {self.positions}; "
                "set positions to rotary, or rotary_scaling.kind to none"
            )
        return self


ModelConfig = DecoderConfig
