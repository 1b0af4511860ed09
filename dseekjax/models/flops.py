"""Honest counts of parameters and floating-point operations.

Causal attention is counted once (a query sees half of the keys on average), recomputation is not counted, looking
an embedding up costs nothing. A multiply-add is two operations; the backward pass costs twice the forward pass.
"""

from dseekjax.models.config import DecoderConfig


def _matrix_parameters_per_layer(config: DecoderConfig) -> int:
    embed, hidden = config.embed_dim, config.feed_forward.hidden_dim
    size = config.attention
    attention = embed * size.head_dim * (2 * size.num_heads + 2 * size.num_kv_heads)
    return attention + embed * hidden * (3 if config.feed_forward.activation == "swiglu" else 2)


def _vector_parameters_per_layer(config: DecoderConfig) -> int:
    embed, hidden = config.embed_dim, config.feed_forward.hidden_dim
    size = config.attention
    norms = 2 * embed * (2 if config.norm == "layer_norm" else 1)
    qkv = size.head_dim * (size.num_heads + 2 * size.num_kv_heads)
    ups = 2 if config.feed_forward.activation == "swiglu" else 1
    attention = qkv + embed
    biases = {"none": 0, "qkv": qkv, "attention": attention, "all": attention + ups * hidden + embed}
    return norms + biases[config.biases]


def parameter_count(config: DecoderConfig) -> int:
    """Number of parameters, tied embeddings counted once."""
    tables = config.vocabulary_size * (1 if config.tied_embeddings else 2)
    tables += config.max_positions if config.positions == "learned" else 0
    final_norm = 2 if config.norm == "layer_norm" else 1
    per_layer = _matrix_parameters_per_layer(config) + _vector_parameters_per_layer(config)
    return config.num_layers * per_layer + (tables + final_norm) * config.embed_dim


def forward_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """Floating-point operations of matrix products in one forward pass, per token of a full causal sequence."""
    matrices = config.num_layers * _matrix_parameters_per_layer(config)
    matrices += config.vocabulary_size * config.embed_dim
    keys_seen = (sequence_length + 1) / 2
    scores_and_values = 2 * 2 * keys_seen * config.attention.num_heads * config.attention.head_dim
    return 2 * matrices + config.num_layers * scores_and_values


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """Forward and backward."""
    return 3 * forward_flops_per_token(config, sequence_length)
