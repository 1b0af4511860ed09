"""Layer normalisation and its root-mean-square form, computed in float32 whatever the dtype of the input."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dseekjax.models.config import DecoderConfig
from dseekjax.models.layers.parameters import parameter


class LayerNorm(nnx.Module):
    """Ba et al. 2016, arXiv:1607.06450."""

    def __init__(self, embed_dim: int, epsilon: float, rngs: nnx.Rngs) -> None:
        self.epsilon = epsilon
        self.scale = parameter(rngs, nnx.initializers.ones, (embed_dim,), ("embed",))
        self.bias = parameter(rngs, nnx.initializers.zeros, (embed_dim,), ("embed",))

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.epsilon)
        return (normal * self.scale[...] + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Zhang and Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, embed_dim: int, epsilon: float, rngs: nnx.Rngs) -> None:
        self.epsilon = epsilon
        self.scale = parameter(rngs, nnx.initializers.ones, (embed_dim,), ("embed",))

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (normal * self.scale[...]).astype(x.dtype)


def build_norm(config: DecoderConfig, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
    """The norm that `config.norm` names."""
    if config.norm == "layer_norm":
        return LayerNorm(config.embed_dim, config.norm_epsilon, rngs)
    return RMSNorm(config.embed_dim, config.norm_epsilon, rngs)
