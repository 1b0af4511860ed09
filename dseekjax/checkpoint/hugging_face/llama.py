"""Llama (Touvron et al. 2023, arXiv:2302.13971) and what has its shape: Mistral and Qwen2."""

import json
import math
from typing import Any, Literal

from pydantic import Field

from dseekjax.checkpoint.hugging_face.config_json import ConfigJson
from dseekjax.checkpoint.hugging_face.mapping import Mapped, per_layer
from dseekjax.errors import UserError
from dseekjax.models.config import DecoderConfig, LinearRotaryScaling, Llama3RotaryScaling, RotaryScalingConfig

LLAMA3_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


def _positive(key: str, value: Any) -> float:
    """What stands in a dictionary of any values, if it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{key} is {json.dumps(value)}, where a number above 0 is needed; fetch it again")
    return value


class LlamaJson(ConfigJson):
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: int = Field(2048, gt=0)
    rms_norm_eps: float = Field(1e-6, gt=0)
    tie_word_embeddings: bool = False
    rope_theta: float | None = Field(None, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = Field(None, gt=0)
    partial_rotary_factor: float | None = None
    rope_interleaved: Literal[False] = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def _biases(self) -> str:
        if self.mlp_bias and not self.attention_bias:
            raise UserError(
                "mlp_bias is true and attention_bias false, of which there is no counterpart here: biases are in both, "
                "in attention alone, or nowhere"
            )
        return "all" if self.mlp_bias else "attention" if self.attention_bias else "none"

    def _rotary(self) -> tuple[float, dict[str, Any]]:
        """Theta and our `rotary_scaling`, from the keys of transformers 5 and of those before it."""
        given = self.rope_scaling or self.rope_parameters or {}
        theta = _positive("rope_theta", given.get("rope_theta", self.rope_theta or 10000.0))
        kind = given.get("rope_type", given.get("type", "default"))
        part = given.get("partial_rotary_factor", self.partial_rotary_factor)
        if part not in (None, 1):
            raise UserError(
                f"partial_rotary_factor is {part}, of which there is no counterpart here: every dimension of a head is "
                "rotated"
            )
        if nested := [key for key, value in given.items() if isinstance(value, dict)]:
            raise UserError(
                f"rope_parameters differ among layers ({', '.join(nested)}), of which there is no counterpart here: "
                "all rotate alike"
            )
        if kind == "default":
            return theta, {"kind": "none"}
        wanted = {"linear": {"factor": "factor"}, "llama3": LLAMA3_KEYS}.get(kind) if isinstance(kind, str) else None
        if wanted is None:
            raise UserError(
                f"the rope type is {kind!r}, of which there is no counterpart here: there are 'default', 'linear' and "
                "'llama3'"
            )
        given = self._with_original_positions(given)
        missing = [theirs for theirs in wanted.values() if theirs not in given]
        if missing:
            raise UserError(f"{missing[0]} of the rope type {kind!r} is missing; put it back")
        return theta, {"kind": kind, **{ours: _positive(theirs, given[theirs]) for ours, theirs in wanted.items()}}

    def _with_original_positions(self, given: dict[str, Any]) -> dict[str, Any]:
        """The keys of a scaling with that which transformers fills in where it is missing, or stands outside."""
        key = LLAMA3_KEYS["original_positions"]
        if self.original_max_position_embeddings is not None:
            return {**given, key: self.original_max_position_embeddings}
        return {key: self.max_position_embeddings, **given}

    def _key_value_heads(self) -> int:
        given = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % given:
            raise UserError(
                f"num_key_value_heads is {given}, which does not divide the num_attention_heads of "
                f"{self.num_attention_heads}; fetch it again"
            )
        return given

    def model_section(self) -> dict[str, Any]:
        theta, scaling = self._rotary()
        if self.window is not None and self.window < 1:
            raise UserError(f"sliding_window is {self.window}, which is no length; null is for none")
        return {
            "vocabulary_size": self.vocab_size,
            "num_layers": self.num_hidden_layers,
            "embed_dim": self.hidden_size,
            "attention": {
                "num_heads": self.num_attention_heads,
                "num_kv_heads": self._key_value_heads(),
                "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            },
            "feed_forward": {"hidden_dim": self.intermediate_size, "activation": "swiglu"},
            "norm": "rms_norm",
            "norm_epsilon": self.rms_norm_eps,
            "positions": "rotary",
            "rotary_theta": theta,
            "rotary_scaling": scaling,
            "biases": self._biases,
            "tied_embeddings": self.tie_word_embeddings,
        }

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    def with_context_length(self, values: dict[str, Any], length: int) -> dict[str, Any]:
        # What was filled in from the old length stays what it was.
        scalings = {
            key: self._with_original_positions(values[key])
            for key in ("rope_scaling", "rope_parameters")
            if isinstance(values.get(key), dict) and "llama3" in (values[key].get("rope_type"), values[key].get("type"))
        }
        return {**values, **scalings, "max_position_embeddings": length}


class MistralJson(LlamaJson):
    """Jiang et al. 2023, arXiv:2310.06825."""

    num_key_value_heads: int | None = Field(8, gt=0)
    max_position_embeddings: int = Field(4096 * 32, gt=0)
    sliding_window: int | None = 4096

    @property
    def _biases(self) -> str:
        return "none"

    @property
    def window(self) -> int | None:
        return self.sliding_window


class Qwen2Json(LlamaJson):
    """Yang et al. 2024, arXiv:2407.10671."""

    num_key_value_heads: int | None = Field(32, gt=0)
    max_position_embeddings: int = Field(32768, gt=0)
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    @property
    def _biases(self) -> str:
        return "qkv"

    @property
    def window(self) -> int | None:
        if self.layer_types is None:
            slides = self.max_window_layers < self.num_hidden_layers
        else:
            slides = "sliding_attention" in self.layer_types
        return self.sliding_window if self.use_sliding_window and slides else None


def llama_config_json(model: DecoderConfig, context_length: int) -> dict[str, Any]:
    """Of a model that `problems` has nothing against."""
    size = model.attention
    return {
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.feed_forward.hidden_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_theta,
        "rope_scaling": _rope_scaling(model.rotary_scaling),
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.initializer_scale,
        "attention_bias": model.biases in ("all", "attention"),
        "mlp_bias": model.biases == "all",
        "attention_dropout": 0.0,
    }


def qwen2_config_json(model: DecoderConfig, context_length: int) -> dict[str, Any]:
    """Of a model that `problems` has nothing against."""
    values = llama_config_json(model, context_length)
    del values["attention_bias"], values["mlp_bias"]
    return {**values, "use_sliding_window": False}


def _rope_scaling(scaling: RotaryScalingConfig) -> dict[str, Any] | None:
    match scaling:
        case LinearRotaryScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3RotaryScaling():
            return {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for ours, theirs in LLAMA3_KEYS.items()}}
    return None


def problems(model: DecoderConfig) -> list[str]:
    """What of a model with rotary positions has no counterpart."""
    found = []
    if model.norm != "rms_norm":
        found.append(f"model.norm {model.norm} (it has rms_norm)")
    if model.feed_forward.activation != "swiglu":
        found.append(f"model.feed_forward.activation {model.feed_forward.activation} (it has swiglu)")
    if model.embed_dim % model.attention.num_heads:
        found.append(f"model.embed_dim {model.embed_dim} (it has a multiple of num_heads)")
    return found


TENSORS = (
    Mapped("token_embedding.embedding", "model.embed_tokens.weight", "v e -> v e"),
    Mapped("final_norm.scale", "model.norm.weight", "e -> e"),
    Mapped("unembedding.embedding", "lm_head.weight", "v e -> v e"),
    *per_layer(
        "model.layers.{layer}.",
        ("attention_norm.scale", "input_layernorm.weight", "e -> e"),
        ("attention.query.kernel", "self_attn.q_proj.weight", "e h d -> (h d) e"),
        ("attention.query.bias", "self_attn.q_proj.bias", "h d -> (h d)"),
        ("attention.key.kernel", "self_attn.k_proj.weight", "e h d -> (h d) e"),
        ("attention.key.bias", "self_attn.k_proj.bias", "h d -> (h d)"),
        ("attention.value.kernel", "self_attn.v_proj.weight", "e h d -> (h d) e"),
        ("attention.value.bias", "self_attn.v_proj.bias", "h d -> (h d)"),
        ("attention.output.kernel", "self_attn.o_proj.weight", "h d e -> e (h d)"),
        ("attention.output.bias", "self_attn.o_proj.bias", "e -> e"),
        ("feed_forward_norm.scale", "post_attention_layernorm.weight", "e -> e"),
        ("feed_forward.gate.kernel", "mlp.gate_proj.weight", "e m -> m e"),
        ("feed_forward.gate.bias", "mlp.gate_proj.bias", "m -> m"),
        ("feed_forward.up.kernel", "mlp.up_proj.weight", "e m -> m e"),
        ("feed_forward.up.bias", "mlp.up_proj.bias", "m -> m"),
        ("feed_forward.down.kernel", "mlp.down_proj.weight", "m e -> e m"),
        ("feed_forward.down.bias", "mlp.down_proj.bias", "e -> e"),
    ),
)
