"""Dropout whose mask depends on the token alone, not on how the batch is cut, ordered or placed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def dropout(
    x: Float[Array, "batch seq embed"], rate: float, keys: Key[Array, "batch seq"] | None, site: int
) -> Float[Array, "batch seq embed"]:
    """Zeroes a share `rate` of `x` and scales up the rest (Srivastava et al. 2014).

    Args:
        x: activations.
        rate: probability of zeroing an element.
        keys: one key per token; None (evaluation) leaves `x` as it is.
        site: number of the place of use among those that share the keys.

    Returns:
        The masked activations. One key per token makes the mask the same for every number of microbatches and
        every mesh.
    """
    if keys is None or rate == 0.0:
        return x

    def kept(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x.shape[2:])

    draw = jax.vmap(jax.vmap(kept))
    return jnp.where(draw(keys), x / (1.0 - rate), 0).astype(x.dtype)
