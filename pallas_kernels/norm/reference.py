"""The norms as their definitions, in plain JAX: any device, any float dtype."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def reference_rms_norm(
    x: Float[Array, "*batch width"], scale: Float[Array, "width"], epsilon: float
) -> Float[Array, "*batch width"]:
    """See `pallas_kernels.norm.rms_norm`."""
    wide = _widened(x)
    normal = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (normal * scale).astype(x.dtype)


def reference_layer_norm(
    x: Float[Array, "*batch width"], scale: Float[Array, "width"], bias: Float[Array, "width"], epsilon: float
) -> Float[Array, "*batch width"]:
    """See `pallas_kernels.norm.layer_norm`."""
    wide = _widened(x)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return (normal * scale + bias).astype(x.dtype)


def _widened(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
