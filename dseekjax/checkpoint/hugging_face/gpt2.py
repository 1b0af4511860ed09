"""GPT-2 (Radford et al. 2019), as `GPT2LMHeadModel`."""

from typing import Any, Literal

from pydantic import Field

from dseekjax.checkpoint.hugging_face.config_json import ConfigJson
from dseekjax.checkpoint.hugging_face.mapping import Mapped, per_layer
from dseekjax.models.config import DecoderConfig

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}


class GPT2Json(ConfigJson):
    vocab_size: int = Field(50257, gt=0)
    n_positions: int = Field(1024, gt=0)
    n_embd: int = Field(768, gt=0)
    n_layer: int = Field(12, gt=0)
    n_head: int = Field(12, gt=0)
    n_inner: int | None = Field(None, gt=0)
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "relu"] = "gelu_new"
    layer_norm_epsilon: float = Field(1e-5, gt=0)
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True

    def model_section(self) -> dict[str, Any]:
        return {
            "vocabulary_size": self.vocab_size,
            "num_layers": self.n_layer,
            "embed_dim": self.n_embd,
            "attention": {
                "num_heads": self.n_head,
                "num_kv_heads": self.n_head,
                "head_dim": self.n_embd // self.n_head,
            },
            "feed_forward": {
                "hidden_dim": self.n_inner or 4 * self.n_embd,
                "activation": ACTIVATIONS[self.activation_function],
            },
            "norm": "layer_norm",
            "norm_epsilon": self.layer_norm_epsilon,
            "positions": "learned",
            "max_positions": self.n_positions,
            "biases": "all",
            "tied_embeddings": self.tie_word_embeddings,
        }

    @property
    def context_length(self) -> int:
        return self.n_positions


def config_json(model: DecoderConfig, context_length: int) -> dict[str, Any]:
    """Of a model that `problems` has nothing against."""
    return {
        "vocab_size": model.vocabulary_size,
        "n_positions": model.max_positions,
        "n_embd": model.embed_dim,
        "n_layer": model.num_layers,
        "n_head": model.attention.num_heads,
        "n_inner": model.feed_forward.hidden_dim,
        "activation_function": {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[
            model.feed_forward.activation
        ],
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.initializer_scale,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), model.dropout),
    }


def problems(model: DecoderConfig) -> list[str]:
    """What of a model with learned positions has no counterpart."""
    size = model.attention
    found = []
    if model.norm != "layer_norm":
        found.append(f"model.norm {model.norm} (it has layer_norm)")
    if model.biases != "all":
        found.append(f"model.biases {model.biases} (it has all)")
    if model.feed_forward.activation not in ACTIVATIONS.values():
        found.append(f"model.feed_forward.activation {model.feed_forward.activation} (it has gelu or relu)")
    if size.num_kv_heads != size.num_heads:
        found.append(f"model.attention.num_kv_heads {size.num_kv_heads} (it has as many as num_heads)")
    if size.num_heads * size.head_dim != model.embed_dim:
        found.append(f"model.attention.head_dim {size.head_dim} (it has model.embed_dim / num_heads)")
    return found


TENSORS = (
    Mapped("token_embedding.embedding", "transformer.wte.weight", "v e -> v e"),
    Mapped("position_embedding.embedding", "transformer.wpe.weight", "p e -> p e"),
    Mapped("final_norm.scale", "transformer.ln_f.weight", "e -> e"),
    Mapped("final_norm.bias", "transformer.ln_f.bias", "e -> e"),
    Mapped("unembedding.embedding", "lm_head.weight", "v e -> v e"),
    *per_layer(
        "transformer.h.{layer}.",
        ("attention_norm.scale", "ln_1.weight", "e -> e"),
        ("attention_norm.bias", "ln_1.bias", "e -> e"),
        ("attention.query.kernel", "attn.c_attn.weight", "e h d -> e (h d)", 0, 3),
        ("attention.key.kernel", "attn.c_attn.weight", "e h d -> e (h d)", 1, 3),
        ("attention.value.kernel", "attn.c_attn.weight", "e h d -> e (h d)", 2, 3),
        ("attention.query.bias", "attn.c_attn.bias", "h d -> (h d)", 0, 3),
        ("attention.key.bias", "attn.c_attn.bias", "h d -> (h d)", 1, 3),
        ("attention.value.bias", "attn.c_attn.bias", "h d -> (h d)", 2, 3),
        ("attention.output.kernel", "attn.c_proj.weight", "h d e -> (h d) e"),
        ("attention.output.bias", "attn.c_proj.bias", "e -> e"),
        ("feed_forward_norm.scale", "ln_2.weight", "e -> e"),
        ("feed_forward_norm.bias", "ln_2.bias", "e -> e"),
        ("feed_forward.up.kernel", "mlp.c_fc.weight", "e m -> e m"),
        ("feed_forward.up.bias", "mlp.c_fc.bias", "m -> m"),
        ("feed_forward.down.kernel", "mlp.c_proj.weight", "m e -> m e"),
        ("feed_forward.down.bias", "mlp.c_proj.bias", "e -> e"),
    ),
)
