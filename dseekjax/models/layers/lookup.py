"""Rows of a table by their numbers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def take_rows(table: Float[Array, "rows embed"], indices: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
    """Looks `indices` up in `table`; an index out of range gives NaN rather than a wrong row.

    The gradient is summed in float32 whatever the dtype of the table: that of a frequent row is a sum of thousands.
    """
    shape, dtype = table.shape, table.dtype

    @jax.custom_vjp
    def take(table: jax.Array, indices: jax.Array) -> jax.Array:
        return table.at[indices].get(mode="fill", fill_value=jnp.nan)

    def backward(indices: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
        total = jnp.zeros(shape, jnp.float32).at[indices].add(gradient.astype(jnp.float32), mode="drop")
        return total.astype(dtype), None

    take.defvjp(lambda table, indices: (take(table, indices), indices), backward)
    return take(table, indices)
