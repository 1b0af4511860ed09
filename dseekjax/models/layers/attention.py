"""Multi-head self-attention with grouped keys and values."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from dseekjax.models.batch import Batch
from dseekjax.models.cache import KeysValues, LayerCache
from dseekjax.models.config import DecoderConfig
from dseekjax.models.layers.projection import Projection, project_in, project_out
from dseekjax.models.layers.rotary import rotate
from dseekjax.models.operations import Operations


class SelfAttention(nnx.Module):
    """Causal self-attention within documents."""

    def __init__(self, config: DecoderConfig, operations: Operations, rngs: nnx.Rngs) -> None:
        self.config = config
        self.operations = operations
        size = config.attention

        def into(heads: int, axis: str) -> Projection:
            return Projection(
                "bse,ehd->bshd",
                (config.embed_dim, heads, size.head_dim),
                ("embed", axis, "head_dim"),
                inner_axes=("batch", "sequence", axis, "head_dim"),
                bias_dims=0 if config.biases == "none" else 2,
                scale=config.initializer_scale,
                rngs=rngs,
            )

        self.query = into(size.num_heads, "heads")
        self.key = into(size.num_kv_heads, "kv_heads")
        self.value = into(size.num_kv_heads, "kv_heads")
        self.output = Projection(
            "bshd,hde->bse",
            (size.num_heads, size.head_dim, config.embed_dim),
            ("heads", "head_dim", "embed"),
            inner_axes=("batch", "sequence", "heads", "head_dim"),
            bias_dims=1 if config.biases in ("all", "attention") else 0,
            scale=config.initializer_scale / (2 * config.num_layers) ** 0.5,
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "batch seq embed"], batch: Batch, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "batch seq embed"], KeysValues]:
        """Attends among the tokens of `batch`; or, with a `cache`, from the one token of each row to those before it.

        Returns:
            What is added to the residual stream; and the keys and values of the batch, or of the cache with them.
        """
        query, key, value = project_in(self.operations, x, self.query, self.key, self.value)
        if self.config.positions == "rotary":
            theta, scaling = self.config.rotary_theta, self.config.rotary_scaling
            query = rotate(query, batch.positions, theta, scaling)
            key = rotate(key, batch.positions, theta, scaling)
        constrain = self.operations.constrain
        query = constrain(query, "batch", "sequence", "heads", "head_dim")
        key = constrain(key, "batch", "sequence", "kv_heads", "head_dim")
        value = constrain(value, "batch", "sequence", "kv_heads", "head_dim")
        seen = KeysValues.of(key, value)
        if cache is not None:
            seen = cache.past.write(seen, cache.slot)
            key, value = seen.for_attention()
        mixed: jax.Array = self.operations.attention(
            query,
            key,
            value,
            query_segment_ids=batch.segment_ids,
            key_segment_ids=batch.segment_ids if cache is None else cache.segment_ids,
            # What a cache holds comes before.
            causal=cache is None,
        )
        mixed = constrain(mixed, "batch", "sequence", "heads", "head_dim")
        return project_out(self.operations, mixed, self.output), seen
