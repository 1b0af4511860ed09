"""The working copy of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from dseekjax.precision.config import PrecisionConfig


def cast_parameters(params: Any, config: PrecisionConfig) -> Any:
    """Float32 master parameters in the compute dtype; done once per step."""
    return jax.tree.map(lambda parameter: parameter.astype(jnp.dtype(config.compute_dtype)), params)
