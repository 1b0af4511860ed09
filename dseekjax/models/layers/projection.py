"""The matrix product that all layers are made of."""

from flax import nnx
from jaxtyping import Array, Float

from dseekjax.models.layers.parameters import parameter
from dseekjax.models.operations import Operations


class Projection(nnx.Module):
    """A kernel with an optional bias, applied by an einsum equation."""

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        bias_dims: int,
        scale: float,
        operations: Operations,
        rngs: nnx.Rngs,
    ) -> None:
        """`bias_dims` is the number of trailing (output) dimensions that a bias covers; 0 is no bias."""
        self.equation = equation
        self.operations = operations
        self.kernel = parameter(rngs, nnx.initializers.normal(scale), shape, axes)
        self.bias = (
            parameter(rngs, nnx.initializers.zeros, shape[-bias_dims:], axes[-bias_dims:]) if bias_dims else None
        )

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        out = self.operations.dense(self.equation, x, self.kernel[...])
        return out if self.bias is None else out + self.bias[...]
