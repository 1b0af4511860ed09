"""Matrix products of few tokens, which take as long as their kernels take to be read.

Kernels lie with the dimensions that are contracted last, and come first in the product. So XLA for CPU (jax 0.12.0.1,
two cores) reads kernels of 768 x 3072 for 8 tokens at 13 GB/s; in the order of training at 9, and those that lie like
this and come second, as the output table does, at 6. For one token it is 20 GB/s either way.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dseekjax.models.operations import Operations, Product


def turned_order(equation: str) -> tuple[int, ...]:
    """The dimensions of a product's kernel, what is contracted last; from its `equation` as in `Product`."""
    _, kernel, kept, contracted = _names(equation)
    return tuple(kernel.index(name) for name in kept + contracted)


def with_turned_kernels(operations: Operations) -> Operations:
    """`operations` for a model that states its products as ever, and whose kernels are in `turned_order`."""

    def restated(product: Product) -> Product:
        tokens, _, kept, contracted = _names(product.equation)
        out = product.equation.partition("->")[2]
        axes = tuple(product.kernel_axes[place] for place in turned_order(product.equation))
        return dataclasses.replace(product, equation=f"{tokens},{kept}{contracted}->{out}", kernel_axes=axes)

    return dataclasses.replace(
        operations,
        project_in=lambda x, products: operations.project_in(x, tuple(map(restated, products))),
        project_out=lambda x, product: operations.project_out(x, restated(product)),
    )


def contract_kernel_first(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."], *, dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """As `models.operations.contract`."""
    tokens, names, kept, contracted = _names(equation)
    out, rows = equation.partition("->")[2], "".join(name for name in tokens if name not in contracted)
    # Not `einsum`, which takes several contracted dimensions in another order and so turns the kernel in memory.
    of_kernel, of_tokens = ([operand.index(name) for name in contracted] for operand in (names, tokens))
    product = jax.lax.dot_general(kernel, x, ((of_kernel, of_tokens), ((), ())), preferred_element_type=dtype)
    return jax.lax.transpose(product, [(kept + rows).index(name) for name in out])


def _names(equation: str) -> tuple[str, str, str, str]:
    """The dimensions of tokens and of kernel, and of those which are kept and which are contracted."""
    tokens, kernel = equation.partition("->")[0].split(",")
    kept = "".join(name for name in kernel if name not in tokens)
    return tokens, kernel, kept, "".join(name for name in kernel if name in tokens)
