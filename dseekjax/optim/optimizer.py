"""The direction of an update, before it is multiplied by the learning rate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from dseekjax.optim.config import OptimizerConfig


def decays(params: Any) -> Any:
    """Whether weight decay applies to each parameter: to `kernel` and `embedding`, not to `bias` and `scale`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def build_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) without its learning rate and sign.

    Its `update` takes one argument more, `good`: whether the gradients are to be used. Where they are not, the state
    stays as it is.
    """
    return optax.chain(
        _scale_by_adam_in_place(config),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def _scale_by_adam_in_place(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, whose new moments take the place of the old ones without a copy.

    That takes the choice between old and new as part of the formula: where it is made of optax's result, XLA for CPU
    needs the old moments until the parameters are done, and copies both in every step.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)

    def update(
        gradients: Any, state: optax.ScaleByAdamState, params: Any = None, *, good: Bool[Array, ""], **_: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        def moment(decay: float, order: int, old: Any) -> Any:
            return jax.tree.map(
                lambda moment, gradient: jnp.where(good, (1 - decay) * gradient**order + decay * moment, moment),
                old,
                gradients,
            )

        first, second = moment(config.beta1, 1, state.mu), moment(config.beta2, 2, state.nu)
        count = jnp.where(good, optax.safe_increment(state.count), state.count)
        first_correction, second_correction = 1 - config.beta1**count, 1 - config.beta2**count
        direction = jax.tree.map(
            lambda m, v: m / first_correction / (jnp.sqrt(v / second_correction) + config.epsilon), first, second
        )
        return direction, optax.ScaleByAdamState(count, first, second)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def clip_by_global_norm(gradients: Any, max_norm: float) -> tuple[Any, Float[Array, ""]]:
    """Scales all gradients so that their joint norm is at most `max_norm`; returns them and the norm before."""
    norm = optax.tree.norm(gradients)
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda gradient: gradient * factor, gradients), norm
