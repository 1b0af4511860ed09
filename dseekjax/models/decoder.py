"""Decoder-only transformers: GPT-2, GPT-3 and Llama by config.

A model comes in parts, so that training, pipelining and cached decoding need no second model:
`embed(batch) -> x`; `runs`, one stacked module per homogeneous run of layers (leading logical axis `layer`), each with
`block(x, batch, cache, keys) -> (x, keys and values, auxiliary)`; `unembed(x) -> logits`;
`loss(x, batch) -> (loss_sum, weight_sum, metrics)`, `score(x, batch) -> scores of each target`. Losses are sums with
weights: whoever calls normalises once.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from dseekjax.models.batch import Batch
from dseekjax.models.cache import KeysValues, LayerCache
from dseekjax.models.config import DecoderConfig
from dseekjax.models.layers.attention import SelfAttention
from dseekjax.models.layers.dropout import dropout
from dseekjax.models.layers.feed_forward import FeedForward
from dseekjax.models.layers.norms import build_norm
from dseekjax.models.layers.parameters import parameter
from dseekjax.models.layers.target_scores import TargetScores
from dseekjax.models.operations import Lookup, Operations, vocabulary_logits


class Embedding(nnx.Module):
    """A table of rows."""

    def __init__(self, rows: int, config: DecoderConfig, axis: str, rngs: nnx.Rngs) -> None:
        initializer = nnx.initializers.normal(config.initializer_scale)
        self.embedding = parameter(rngs, initializer, (rows, config.embed_dim), (axis, "embed"))


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, operations: Operations, rngs: nnx.Rngs) -> None:
        self.config = config
        self.operations = operations
        self.attention_norm = build_norm(config, rngs)
        self.attention = SelfAttention(config, operations, rngs)
        self.feed_forward_norm = build_norm(config, rngs)
        self.feed_forward = FeedForward(config, operations, rngs)

    def block(
        self,
        x: Float[Array, "batch seq embed"],
        batch: Batch,
        cache: LayerCache | None = None,
        keys: Key[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], KeysValues, dict[str, jax.Array]]:
        """Runs the layer.

        Args:
            x: the residual stream.
            batch: what it is of; with a `cache`, one token to a row.
            cache: the tokens before.
            keys: one per token; they turn dropout on.

        Returns:
            The residual stream, keys and values as `SelfAttention` has them, and sums to report.
        """
        rate, constrain = self.config.dropout, self.operations.constrain
        mixed, seen = self.attention(self.attention_norm(x), batch, cache)
        x = constrain(x + dropout(mixed, rate, keys, 0), "batch", "residual_sequence", "residual")
        mapped = self.feed_forward(self.feed_forward_norm(x))
        x = constrain(x + dropout(mapped, rate, keys, 1), "batch", "residual_sequence", "residual")
        return x, seen, {}


class Decoder(nnx.Module):
    """A stack of blocks between an embedding and an output projection."""

    def __init__(self, config: DecoderConfig, operations: Operations, rngs: nnx.Rngs) -> None:
        self.config = config
        self.operations = operations
        self.token_embedding = Embedding(config.vocabulary_size, config, "vocab", rngs)
        learned = config.positions == "learned"
        self.position_embedding = Embedding(config.max_positions, config, "positions", rngs) if learned else None
        stack = nnx.vmap(
            lambda layer_rngs: Block(config, operations, layer_rngs),
            transform_metadata={nnx.PARTITION_NAME: "layer"},
        )
        self.runs = nnx.List([stack(rngs.split(config.num_layers))])
        self.final_norm = build_norm(config, rngs)
        self.unembedding = None if config.tied_embeddings else Embedding(config.vocabulary_size, config, "vocab", rngs)

    def embed(self, batch: Batch, keys: Key[Array, "batch seq"] | None = None) -> Float[Array, "batch seq embed"]:
        """Looks up tokens (and learned positions); `keys` (one per token) turn dropout on."""
        lookups = [Lookup(self.token_embedding.embedding[...], batch.tokens, "vocab")]
        if self.position_embedding is not None:
            lookups.append(Lookup(self.position_embedding.embedding[...], batch.positions, "positions"))
        x = self.operations.embed_lookup(*lookups)
        x = dropout(x, self.config.dropout, keys, 0)
        return self.operations.constrain(x, "batch", "residual_sequence", "residual")

    @property
    def _output_kernel(self) -> jax.Array:
        table = self.token_embedding if self.unembedding is None else self.unembedding
        return table.embedding[...]

    def unembed(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Logits, in float32."""
        logits = vocabulary_logits(self.operations.dense, self.final_norm(x), self._output_kernel)
        return self.operations.constrain(logits, "batch", "sequence", "vocab")

    def loss(
        self, x: Float[Array, "batch seq embed"], batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, jax.Array]]:
        """Sum of weighted cross-entropies (nats), sum of weights, and sums to report."""
        loss_sum, weight_sum = self.operations.cross_entropy(
            self.final_norm(x), batch.targets, batch.loss_weights, self._output_kernel, self.config.loss_chunk
        )
        return loss_sum, weight_sum, {}

    def score(self, x: Float[Array, "batch seq embed"], batch: Batch) -> TargetScores:
        """How likely each target is."""
        return self.operations.target_scores(
            self.final_norm(x), batch.targets, self._output_kernel, self.config.loss_chunk
        )
