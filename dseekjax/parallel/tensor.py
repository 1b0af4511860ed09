"""Tensor parallelism: matrix products from the residual stream into a layer's inner width, and back.

Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053) with sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198): the way in gathers the sequence, the way out sums and splits it again. Written as annotations; the
compiler makes one gather, and one scatter of gradients, for all products that share an input.
"""

from jaxtyping import Array, Float

from dseekjax.models.operations import Dense, Product
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.placement import move

STREAM = ("batch", "residual_sequence", "residual")
GATHERED = ("batch", "sequence", "residual")


def project_in(
    layout: Layout, dense: Dense, x: Float[Array, "batch seq embed"], products: tuple[Product, ...]
) -> tuple[Float[Array, "batch seq ..."], ...]:
    """See `Operations.project_in`."""
    x = move(x, layout.spec(STREAM), layout.spec(GATHERED))
    return tuple(layout.constrain(dense(p.equation, x, p.kernel), *p.inner_axes) for p in products)


def project_out(
    layout: Layout, dense: Dense, x: Float[Array, "batch seq ..."], product: Product
) -> Float[Array, "batch seq embed"]:
    """See `Operations.project_out`."""
    return layout.constrain(dense(product.equation, x, product.kernel), *STREAM)
