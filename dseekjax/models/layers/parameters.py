"""Parameters that carry logical axis names."""

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(
    rngs: nnx.Rngs, initializer: nnx.Initializer, shape: tuple[int, ...], axes: tuple[str, ...]
) -> nnx.Param[jax.Array]:
    """A float32 parameter of `shape` whose dimensions are named `axes`.

    The last word of a parameter's path tells its role: `kernel` and `embedding` are matrices that weight decay
    applies to, `bias` and `scale` are not.
    """
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32), out_sharding=axes, eager_sharding=False)
