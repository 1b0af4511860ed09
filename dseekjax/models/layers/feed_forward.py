"""The position-wise feed-forward network, plain or gated."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from dseekjax.models.config import DecoderConfig
from dseekjax.models.layers.projection import Projection, project_in, project_out
from dseekjax.models.operations import Operations

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": jax.nn.silu,
}


class FeedForward(nnx.Module):
    """`down(activation(up(x)))`, or `down(silu(gate(x)) * up(x))` for swiglu (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, operations: Operations, rngs: nnx.Rngs) -> None:
        self.config = config
        self.operations = operations
        embed, hidden = config.embed_dim, config.feed_forward.hidden_dim

        def project(equation: str, into: tuple[int, int], axes: tuple[str, str], scale: float) -> Projection:
            return Projection(
                equation,
                into,
                axes,
                inner_axes=("batch", "sequence", "mlp"),
                bias_dims=1 if config.biases == "all" else 0,
                scale=scale,
                rngs=rngs,
            )

        def widen() -> Projection:
            return project("bse,em->bsm", (embed, hidden), ("embed", "mlp"), config.initializer_scale)

        self.up = widen()
        self.gate = widen() if config.feed_forward.activation == "swiglu" else None
        down_scale = config.initializer_scale / (2 * config.num_layers) ** 0.5
        self.down = project("bsm,me->bse", (hidden, embed), ("mlp", "embed"), down_scale)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        activation = ACTIVATIONS[self.config.feed_forward.activation]
        if self.gate is None:
            (up,) = project_in(self.operations, x, self.up)
            hidden = activation(up)
        else:
            up, gate = project_in(self.operations, x, self.up, self.gate)
            hidden = activation(gate) * up
        hidden = self.operations.constrain(hidden, "batch", "sequence", "mlp")
        return project_out(self.operations, hidden, self.down)
