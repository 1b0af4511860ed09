"""What a model asks of its surroundings. The defaults are local; `parallel.operations` has those for a mesh."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dseekjax.models.layers.cross_entropy import LossSums, chunked_cross_entropy
from dseekjax.models.layers.lookup import take_rows
from dseekjax.models.layers.target_scores import TargetScores, chunked_target_scores
from pallas_kernels.attention import attention as dot_product_attention

Dense = Callable[..., jax.Array]
"""`(equation, x, kernel, *, dtype=None) -> product`; `dtype` asks for a wider result."""
Attention = Callable[..., jax.Array]
"""As `pallas_kernels.attention.attention`."""


@dataclass(frozen=True)
class Product:
    """A matrix product between the residual stream `[batch, seq, embed]` and a layer's inner width."""

    equation: str
    kernel: Float[Array, "..."]
    kernel_axes: tuple[str, ...]
    """Logical axes of the kernel."""
    inner_axes: tuple[str, ...]
    """Logical axes of the activations on the inner side."""


@dataclass(frozen=True)
class Lookup:
    """Rows to be taken from a table."""

    table: Float[Array, "rows embed"]
    indices: Int[Array, "batch seq"]
    rows_axis: str
    """Logical axis of the table's rows."""


@dataclass(frozen=True)
class Operations:
    """A frozen bundle of functions: how mesh, precision and kernels reach a model that knows none of them."""

    constrain: Callable[..., jax.Array]
    """`(x, *axes) -> x`: names the logical axes of `x`, which may place it."""
    attention: Attention
    dense: Dense
    project_in: Callable[[jax.Array, tuple[Product, ...]], tuple[jax.Array, ...]]
    """Several products with the same `x`, from the residual stream to inner widths."""
    project_out: Callable[[jax.Array, Product], jax.Array]
    """A product back to the residual stream."""
    embed_lookup: Callable[..., jax.Array]
    """`(*lookups) -> sum of their rows`; NaN for an index out of range."""
    cross_entropy: Callable[..., LossSums]
    """`(x, targets, weights, kernel, chunk) -> (loss_sum, weight_sum)`; see `layers.cross_entropy`."""
    target_scores: Callable[..., TargetScores]
    """`(x, targets, kernel, chunk) -> scores`; see `layers.target_scores`."""


def contract(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."], *, dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """The matrix product of activations and a kernel; `dtype` asks for a wider result."""
    return jnp.einsum(equation, x, kernel, preferred_element_type=dtype)


def local_operations(attention: Attention = dot_product_attention, dense: Dense = contract) -> Operations:
    """Everything on one device."""
    return Operations(
        constrain=lambda x, *axes: x,
        attention=attention,
        dense=dense,
        project_in=lambda x, products: tuple(dense(p.equation, x, p.kernel) for p in products),
        project_out=lambda x, product: dense(product.equation, x, product.kernel),
        embed_lookup=lambda *lookups: functools.reduce(jnp.add, (take_rows(x.table, x.indices) for x in lookups)),
        cross_entropy=functools.partial(chunked_cross_entropy, dense=dense),
        target_scores=functools.partial(chunked_target_scores, dense=dense),
    )


def vocabulary_logits(
    dense: Dense, x: Float[Array, "batch seq embed"], kernel: Float[Array, "vocab embed"]
) -> Float[Array, "batch seq vocab"]:
    """Logits in float32."""
    return dense("bse,ve->bsv", x, kernel, dtype=jnp.float32)
