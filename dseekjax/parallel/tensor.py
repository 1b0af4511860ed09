"""Tensor parallelism: matrix products from the residual stream into a layer's inner width, and back.

Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053) with sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198): the way in gathers the sequence, the way out sums and splits it again. Both have their backward pass
written out, so that all products that share an input share one gather and one scatter, and so that what is kept for the
backward pass is the split input.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dseekjax.models.operations import Dense, Product
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.placement import move
from dseekjax.parallel.transport import Arrays, Start, Transport

STREAM = ("batch", "residual_sequence", "residual")
GATHERED = ("batch", "sequence", "residual")


def project_in(
    layout: Layout,
    transport: Transport,
    dense: Dense,
    x: Float[Array, "batch seq embed"],
    products: tuple[Product, ...],
) -> tuple[Float[Array, "batch seq ..."], ...]:
    """See `Operations.project_in`; every product must be split over `tensor`."""
    kernel_specs = tuple(layout.gathered(p.kernel_axes) for p in products)
    inner_specs = tuple(layout.spec(p.inner_axes) for p in products)
    resting_specs = tuple(layout.spec(p.kernel_axes) for p in products)
    stream = layout.spec(STREAM)

    def forward(x: jax.Array, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def work(start: Start, part: jax.Array) -> tuple[Arrays, Arrays]:
            return tuple(dense(p.equation, part, kernel) for p, kernel in zip(products, kernels, strict=True)), ()

        return transport.gather(x, work)[0]

    def backward(x: jax.Array, kernels: tuple[jax.Array, ...], gradients: tuple[jax.Array, ...]) -> Any:
        def input_gradient(start: Start, size: int) -> jax.Array:
            shape = (x.shape[0], size, x.shape[2])
            terms = (
                _input_gradient(dense, p, shape, kernel, _cut(gradient, start, size))
                for p, kernel, gradient in zip(products, kernels, gradients, strict=True)
            )
            return functools.reduce(jnp.add, terms)

        def work(start: Start, part: jax.Array) -> tuple[Arrays, Arrays]:
            return (), tuple(
                _kernel_gradient(dense, p, part, kernel, _cut(gradient, start, part.shape[1]))
                for p, kernel, gradient in zip(products, kernels, gradients, strict=True)
            )

        _, totals = transport.gather(x, work)
        reduced = tuple(layout.reduce_to(total, p.kernel_axes) for p, total in zip(products, totals, strict=True))
        return transport.scatter(input_gradient, gradients[0].shape[1]), reduced

    run = layout.island(forward, (stream, kernel_specs), inner_specs)
    run_backward = layout.island(backward, (stream, kernel_specs, inner_specs), (stream, resting_specs))
    return _with_backward(run, run_backward)(x, tuple(p.kernel for p in products))


def project_out(
    layout: Layout, transport: Transport, dense: Dense, x: Float[Array, "batch seq ..."], product: Product
) -> Float[Array, "batch seq embed"]:
    """See `Operations.project_out`; the product must be split over `tensor`."""
    kernel_spec, inner_spec = layout.gathered(product.kernel_axes), layout.spec(product.inner_axes)
    resting_spec, stream = layout.spec(product.kernel_axes), layout.spec(STREAM)

    def forward(x: jax.Array, kernel: jax.Array) -> jax.Array:
        def term(start: Start, size: int) -> jax.Array:
            return dense(product.equation, _cut(x, start, size), kernel)

        return transport.scatter(term, x.shape[1])

    def backward(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> Any:
        def work(start: Start, part: jax.Array) -> tuple[Arrays, Arrays]:
            inputs = _cut(x, start, part.shape[1])
            input_gradient = _input_gradient(dense, product, inputs.shape, kernel, part)
            return (input_gradient,), (_kernel_gradient(dense, product, inputs, kernel, part),)

        (input_gradient,), (total,) = transport.gather(gradient, work)
        return input_gradient, layout.reduce_to(total, product.kernel_axes)

    run = layout.island(forward, (inner_spec, kernel_spec), stream)
    run_backward = layout.island(backward, (inner_spec, kernel_spec, stream), (inner_spec, resting_spec))
    return _with_backward(run, run_backward)(x, product.kernel)


def annotated_in(
    layout: Layout, dense: Dense, x: Float[Array, "batch seq embed"], products: tuple[Product, ...]
) -> tuple[Float[Array, "batch seq ..."], ...]:
    """The way in by annotations alone: the compiler chooses the communication."""
    x = move(x, layout.spec(STREAM), layout.spec(GATHERED))
    return tuple(layout.constrain(dense(p.equation, x, p.kernel), *p.inner_axes) for p in products)


def annotated_out(
    layout: Layout, dense: Dense, x: Float[Array, "batch seq ..."], product: Product
) -> Float[Array, "batch seq embed"]:
    """The way out by annotations alone."""
    return layout.constrain(dense(product.equation, x, product.kernel), *STREAM)


def _with_backward(run: Callable[..., Any], run_backward: Callable[..., Any]) -> Callable[..., Any]:
    function = jax.custom_vjp(run)
    function.defvjp(lambda *inputs: (run(*inputs), inputs), lambda inputs, gradient: run_backward(*inputs, gradient))
    return function


def _input_gradient(
    dense: Dense, product: Product, shape: tuple[int, ...], kernel: jax.Array, gradient: jax.Array
) -> jax.Array:
    # A product is linear: its gradient does not depend on the input that it is taken at.
    at = jnp.zeros(shape, gradient.dtype)
    return jax.vjp(lambda x: dense(product.equation, x, kernel), at)[1](gradient)[0]


def _kernel_gradient(dense: Dense, product: Product, x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.vjp(lambda kernel: dense(product.equation, x, kernel), kernel)[1](gradient)[0]


def _cut(x: jax.Array, start: Start, size: int) -> jax.Array:
    return x if x.shape[1] == size else jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
