"""The norms in plain JAX, with the kernels as their gradients."""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import device_at_hand
from pallas_kernels.norm.kernels import layer_norm_gradient, rms_norm_gradient
from pallas_kernels.norm.reference import reference_layer_norm, reference_rms_norm

_INTERPRETED_CORES = 1


def pallas_rms_norm(
    x: Float[Array, "*batch width"], scale: Float[Array, "width"], epsilon: float, *, interpret: bool
) -> Float[Array, "*batch width"]:
    """See `pallas_kernels.norm.rms_norm`."""
    return _rms_norm(x, scale, epsilon, _cores(), interpret)


def pallas_layer_norm(
    x: Float[Array, "*batch width"],
    scale: Float[Array, "width"],
    bias: Float[Array, "width"],
    epsilon: float,
    *,
    interpret: bool,
) -> Float[Array, "*batch width"]:
    """See `pallas_kernels.norm.layer_norm`."""
    return _layer_norm(x, scale, bias, epsilon, _cores(), interpret)


def _cores() -> int:
    gpu = device_at_hand().gpu
    return gpu.num_cores if gpu else _INTERPRETED_CORES


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm(x: Array, scale: Array, epsilon: float, cores: int, interpret: bool) -> Array:
    return reference_rms_norm(x, scale, epsilon)


def _rms_norm_forward(
    x: Array, scale: Array, epsilon: float, cores: int, interpret: bool
) -> tuple[Array, tuple[Array, Array]]:
    return reference_rms_norm(x, scale, epsilon), (x, scale)


def _rms_norm_backward(
    epsilon: float, cores: int, interpret: bool, kept: tuple[Array, Array], upstream: Array
) -> tuple[Array, Array]:
    x, scale = kept
    of_x, of_scale = rms_norm_gradient(
        _in_rows(x), scale, _in_rows(upstream), epsilon=epsilon, cores=cores, interpret=interpret
    )
    return of_x.reshape(x.shape), of_scale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _layer_norm(x: Array, scale: Array, bias: Array, epsilon: float, cores: int, interpret: bool) -> Array:
    return reference_layer_norm(x, scale, bias, epsilon)


def _layer_norm_forward(
    x: Array, scale: Array, bias: Array, epsilon: float, cores: int, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    # Of the bias its dtype alone is needed, but only arrays can be kept.
    return reference_layer_norm(x, scale, bias, epsilon), (x, scale, bias)


def _layer_norm_backward(
    epsilon: float, cores: int, interpret: bool, kept: tuple[Array, Array, Array], upstream: Array
) -> tuple[Array, Array, Array]:
    x, scale, bias = kept
    of_x, of_scale, of_bias = layer_norm_gradient(
        _in_rows(x), scale, _in_rows(upstream), epsilon=epsilon, cores=cores, interpret=interpret
    )
    return of_x.reshape(x.shape), of_scale.astype(scale.dtype), of_bias.astype(bias.dtype)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _in_rows(x: Float[Array, "*batch width"]) -> Float[Array, "rows width"]:
    return x.reshape(-1, x.shape[-1])
