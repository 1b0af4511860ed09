"""What a model asks of its surroundings. The defaults are local; `training.program` fills in the others."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import attention as dot_product_attention


def keep(x: jax.Array, *axes: str) -> jax.Array:
    """Names the logical axes of `x` and leaves its placement alone."""
    return x


def contract(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."], *, dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """The matrix product of activations and a kernel; `dtype` asks for a wider result."""
    return jnp.einsum(equation, x, kernel, preferred_element_type=dtype)


def take_rows(table: Float[Array, "rows embed"], indices: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
    """Looks `indices` up in `table`; an index out of range gives NaN rather than a wrong row."""
    return table.at[indices].get(mode="fill", fill_value=jnp.nan)


@dataclass(frozen=True)
class Operations:
    """A frozen bundle of functions: how mesh, precision and kernels reach a model that knows none of them."""

    constrain: Callable[..., jax.Array] = keep
    attention: Callable[..., jax.Array] = dot_product_attention
    dense: Callable[..., jax.Array] = contract
    embed_lookup: Callable[[jax.Array, jax.Array], jax.Array] = take_rows
