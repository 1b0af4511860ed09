"""The position-wise feed-forward network, plain or gated."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from dseekjax.models.config import DecoderConfig
from dseekjax.models.layers.projection import Projection
from dseekjax.models.operations import Operations

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
}


class FeedForward(nnx.Module):
    """`down(activation(up(x)))`, or `down(silu(gate(x)) * up(x))` for swiglu (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, operations: Operations, rngs: nnx.Rngs) -> None:
        self.config = config
        self.operations = operations
        embed, hidden = config.embed_dim, config.feed_forward.hidden_dim

        def project(into: tuple[int, int], axes: tuple[str, str], scale: float) -> Projection:
            return Projection(
                "bsi,io->bso",
                into,
                axes,
                bias_dims=1 if config.biases == "all" else 0,
                scale=scale,
                operations=operations,
                rngs=rngs,
            )

        self.up = project((embed, hidden), ("embed", "mlp"), config.initializer_scale)
        gated = config.feed_forward.activation == "swiglu"
        self.gate = project((embed, hidden), ("embed", "mlp"), config.initializer_scale) if gated else None
        self.down = project(
            (hidden, embed), ("mlp", "embed"), config.initializer_scale / (2 * config.num_layers) ** 0.5
        )

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        activation = ACTIVATIONS[self.config.feed_forward.activation]
        up = self.up(x)
        hidden = activation(up) if self.gate is None else activation(self.gate(x)) * up
        return self.down(self.operations.constrain(hidden, "batch", "sequence", "mlp"))
