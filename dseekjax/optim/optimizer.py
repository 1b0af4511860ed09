"""The direction of an update, before it is multiplied by the learning rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dseekjax.optim.config import OptimizerConfig


def decays(params: Any) -> Any:
    """Whether weight decay applies to each parameter: to `kernel` and `embedding`, not to `bias` and `scale`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def build_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) without its learning rate and sign."""
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def clip_by_global_norm(gradients: Any, max_norm: float) -> tuple[Any, Float[Array, ""]]:
    """Scales all gradients so that their joint norm is at most `max_norm`; returns them and the norm before."""
    norm = optax.tree.norm(gradients)
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda gradient: gradient * factor, gradients), norm
