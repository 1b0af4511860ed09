"""The matrix products that all layers are made of."""

from flax import nnx
from jaxtyping import Array, Float

from dseekjax.models.layers.parameters import parameter
from dseekjax.models.operations import Operations, Product


class Projection(nnx.Module):
    """A kernel with an optional bias, between the residual stream and a layer's inner width."""

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        inner_axes: tuple[str, ...],
        bias_dims: int,
        scale: float,
        rngs: nnx.Rngs,
    ) -> None:
        """`axes` name the kernel's dimensions and `inner_axes` those of the activations on the inner side.

        `bias_dims` is the number of trailing (output) dimensions that a bias covers; 0 is no bias.
        """
        self.equation = equation
        self.axes = axes
        self.inner_axes = inner_axes
        self.kernel = parameter(rngs, nnx.initializers.normal(scale), shape, axes)
        self.bias = (
            parameter(rngs, nnx.initializers.zeros, shape[-bias_dims:], axes[-bias_dims:]) if bias_dims else None
        )

    @property
    def product(self) -> Product:
        return Product(self.equation, self.kernel[...], self.axes, self.inner_axes)

    def add_bias(self, out: Float[Array, "..."]) -> Float[Array, "..."]:
        return out if self.bias is None else out + self.bias[...]


def project_in(
    operations: Operations, x: Float[Array, "batch seq embed"], *projections: Projection
) -> tuple[Float[Array, "batch seq ..."], ...]:
    """Applies projections that share their input."""
    outs = operations.project_in(x, tuple(projection.product for projection in projections))
    return tuple(projection.add_bias(out) for projection, out in zip(projections, outs, strict=True))


def project_out(
    operations: Operations, x: Float[Array, "batch seq ..."], projection: Projection
) -> Float[Array, "batch seq embed"]:
    """Applies a projection back to the residual stream."""
    return projection.add_bias(operations.project_out(x, projection.product))
