"""Pallas-Triton kernels of the gradients, that read each row once and keep nothing from the forward pass.

With n = (x - mean) / deviation (no mean in the RMS norm), g = scale * upstream gradient and means over the row, the
gradient of x is (g - mean(g) - n * mean(g * n)) / deviation (without mean(g) in the RMS norm), that of the scale is the
sum over rows of upstream * n, that of the bias the sum of upstream: what differentiating the definitions gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.norm.tiling import choose_tiling
from pallas_kernels.pallas_triton import load, store, triton_call

WIDEST = 16384
"""A program holds the sums over its rows, one or two as wide as a row, in registers."""
MOST_ELEMENTS = 2**31 - 2**16
"""Places in an array, and those of a last tile that is not full, must be int32."""


@dataclass(frozen=True)
class Tile:
    """Elements of some rows, in float32; zeros where there is none."""

    x: Float[Array, "rows columns"]
    upstream: Float[Array, "rows columns"]
    scaled: Float[Array, "rows columns"]
    """`upstream` times the scale."""
    columns_inside: Array | None
    """Which columns exist; None if all."""


type Means = Callable[[Callable[[Tile], tuple[Array, ...]]], tuple[Array, ...]]
"""Means over each row of functions of its elements; what they are where there is no column counts, so make it zero."""
type TileGradient = Callable[[Tile], tuple[Array, tuple[Array, ...]]]
"""Of elements: the gradient of x, and what each adds to the gradients of its column's parameters."""


def rms_norm_gradient(
    x: Float[Array, "rows width"],
    scale: Float[Array, "width"],
    upstream: Float[Array, "rows width"],
    *,
    epsilon: float,
    cores: int,
    interpret: bool,
) -> tuple[Float[Array, "rows width"], Float[Array, "width"]]:
    """Gradients of x and of the scale, the latter in float32."""

    def of_rows(means: Means) -> TileGradient:
        square, product = means(lambda tile: (tile.x * tile.x, tile.scaled * tile.x))
        inverse = jax.lax.rsqrt(square + epsilon)

        def of_tile(tile: Tile) -> tuple[Array, tuple[Array, ...]]:
            normal = tile.x * inverse
            return inverse * (tile.scaled - normal * (inverse * product)), (tile.upstream * normal,)

        return of_tile

    of_x, of_scale = _gradients(
        "rms_norm_gradient", of_rows, x, scale, upstream, parameters=1, cores=cores, interpret=interpret
    )
    return of_x, of_scale


def layer_norm_gradient(
    x: Float[Array, "rows width"],
    scale: Float[Array, "width"],
    upstream: Float[Array, "rows width"],
    *,
    epsilon: float,
    cores: int,
    interpret: bool,
) -> tuple[Float[Array, "rows width"], Float[Array, "width"], Float[Array, "width"]]:
    """Gradients of x, of the scale and of the bias, the latter two in float32."""

    def of_rows(means: Means) -> TileGradient:
        (mean,) = means(lambda tile: (tile.x,))

        def moments(tile: Tile) -> tuple[Array, ...]:
            centred = tile.x - mean
            square = centred * centred
            if tile.columns_inside is not None:
                square = jnp.where(tile.columns_inside, square, 0.0)
            return square, tile.scaled, tile.scaled * centred

        variance, scaled, product = means(moments)
        inverse = jax.lax.rsqrt(variance + epsilon)

        def of_tile(tile: Tile) -> tuple[Array, tuple[Array, ...]]:
            normal = (tile.x - mean) * inverse
            of_x = inverse * (tile.scaled - scaled - normal * (inverse * product))
            return of_x, (tile.upstream * normal, tile.upstream)

        return of_tile

    of_x, of_scale, of_bias = _gradients(
        "layer_norm_gradient", of_rows, x, scale, upstream, parameters=2, cores=cores, interpret=interpret
    )
    return of_x, of_scale, of_bias


def _gradients(
    name: str,
    of_rows: Callable[[Means], TileGradient],
    x: Float[Array, "rows width"],
    scale: Float[Array, "width"],
    upstream: Float[Array, "rows width"],
    *,
    parameters: int,
    cores: int,
    interpret: bool,
) -> tuple[Array, ...]:
    rows, width = x.shape
    tiling = choose_tiling(rows, width, cores)
    parts = tiling.parts

    def kernel(x_ref: Any, scale_ref: Any, upstream_ref: Any, of_x_ref: Any, *sum_refs: Any) -> None:
        program = pl.program_id(0)

        def add(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            tile = program + step * tiling.programs
            rows_inside = tiling.rows_inside(tile)

            def load_part(part: Array | int) -> Tile:
                place, mask = tiling.place(tile, part), tiling.mask(tile, part)
                x, upstream = (_load(ref.at[place], mask) for ref in (x_ref, upstream_ref))
                inside = tiling.columns_inside(part)
                scaled = upstream * _load(scale_ref.at[place[1]], inside)[None, :]
                return Tile(x, upstream, scaled, None if inside is None else inside[None, :])

            last = load_part(parts - 1)

            def means(function: Callable[[Tile], tuple[Array, ...]]) -> tuple[Array, ...]:
                def add_part(part: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
                    return tuple(a + b for a, b in zip(totals, function(load_part(part)), strict=True))

                totals = function(last)
                if parts > 1:
                    totals = jax.lax.fori_loop(0, parts - 1, add_part, totals)
                return tuple(total.sum(1, keepdims=True) / width for total in totals)

            of_tile = of_rows(means)
            all_terms: list[Array] = []
            for part in range(parts):
                # Anew where there are several: they are in cache by now, and all of them would not fit into registers.
                of_x, terms = of_tile(last if parts == 1 else load_part(part))
                store(of_x_ref.at[tiling.place(tile, part)], of_x.astype(x.dtype), mask=tiling.mask(tile, part))
                if rows_inside is not None:
                    # Without epsilon, rows of zeros are divided by zero.
                    terms = tuple(jnp.where(rows_inside[:, None], term, 0.0) for term in terms)
                all_terms += terms
            return tuple(total + term for total, term in zip(sums, all_terms, strict=True))

        steps = pl.cdiv(tiling.tiles - program, tiling.programs)
        zeros = (jnp.zeros((tiling.tile_rows, tiling.columns), jnp.float32),) * (parts * parameters)
        # Element by element until all rows are done: threads need not meet for it before.
        sums = jax.lax.fori_loop(0, steps, add, zeros)
        for index, total in enumerate(sums):
            part, parameter = divmod(index, parameters)
            place = (program, tiling.place(0, part)[1])
            store(sum_refs[parameter].at[place], total.sum(0), mask=tiling.columns_inside(part))

    covered = (tiling.tiles * tiling.tile_rows, parts * tiling.columns)
    partial = jax.ShapeDtypeStruct((tiling.programs, width), jnp.float32)
    of_x, *partials = triton_call(
        kernel,
        name,
        grid=(tiling.programs,),
        in_specs=[_covering(*covered), _covering(covered[1]), _covering(*covered)],
        out_specs=[_covering(*covered), *([_covering(tiling.programs, covered[1])] * parameters)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *([partial] * parameters)],
        num_warps=tiling.num_warps,
        num_stages=1,
        interpret=interpret,
    )(x, scale, upstream)
    return of_x, *(sums.sum(0) for sums in partials)


def _covering(*shape: int) -> pl.BlockSpec:
    """The whole array as one block, which may be larger: tiles at its edges reach beyond it."""
    return pl.BlockSpec(shape, lambda program: (0,) * len(shape))


def _load(ref: Any, mask: Array | None) -> Array:
    return load(ref, mask=mask, other=None if mask is None else 0.0).astype(jnp.float32)
