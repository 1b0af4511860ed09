"""Tables of rows, and the loss and scores of targets over a vocabulary, split over the mesh."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dseekjax.models.layers.cross_entropy import WHOLE, LossSums, Vocabulary, chunked_cross_entropy
from dseekjax.models.layers.lookup import take_rows
from dseekjax.models.layers.target_scores import TargetScores, chunked_target_scores
from dseekjax.models.operations import Dense, Lookup
from dseekjax.parallel.layout import Layout
from dseekjax.parallel.placement import differentiate_together
from dseekjax.parallel.tensor import STREAM


def sharded_lookup(layout: Layout, *lookups: Lookup) -> Float[Array, "batch seq embed"]:
    """See `Operations.embed_lookup`. No table is ever gathered.

    Where their width is split over axes that split tokens, each device looks up its columns for the tokens of the whole
    group, and all-to-alls bring every token's columns home. Where rows are split over `tensor`, each device takes those
    that it has, and the rest are zeros in a sum.
    """
    columns = layout.axes("embed")
    summed = {axis for lookup in lookups for axis in layout.axes(lookup.rows_axis)}
    dimension_of = dict.fromkeys(layout.axes("batch"), 0) | dict.fromkeys(layout.axes("sequence"), 1)
    split_stream = "tensor" in layout.axes("residual_sequence")

    def take(lookup: Lookup, table: jax.Array, indices: jax.Array) -> jax.Array:
        for axis in columns:
            indices = jax.lax.all_gather(indices, axis, axis=dimension_of[axis], tiled=True)
        rows = layout.axes(lookup.rows_axis)
        first = jax.lax.axis_index(rows) * table.shape[0] if rows else 0
        here = (indices >= first) & (indices < first + table.shape[0])
        if summed and not rows:
            here &= jax.lax.axis_index(tuple(summed)) == 0
        x = jnp.where(here[..., None], take_rows(table, jnp.where(here, indices - first, 0)), 0)
        exists = (indices >= 0) & (indices < lookup.table.shape[0])
        return jnp.where(exists[..., None], x, jnp.nan)

    def look_up(tables: tuple[jax.Array, ...], indices: tuple[jax.Array, ...]) -> jax.Array:
        first, *others = map(take, lookups, tables, indices)
        x = functools.reduce(jnp.add, others, first)
        # The last axis splits columns finest, so what it holds has to come together first.
        for axis in reversed(columns):
            x = jax.lax.all_to_all(x, axis, split_axis=dimension_of[axis], concat_axis=2, tiled=True)
        if summed and split_stream:
            return jax.lax.psum_scatter(x, tuple(summed), scatter_dimension=1, tiled=True)
        if summed:
            return jax.lax.psum(x, tuple(summed))
        if split_stream:
            length = x.shape[1] // layout.sizes["tensor"]
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * length, length, axis=1)
        return x

    specs = (
        tuple(layout.spec((lookup.rows_axis, "embed")) for lookup in lookups),
        (layout.spec(("batch", "sequence")),) * len(lookups),
    )
    run = layout.island(look_up, specs, layout.spec(STREAM))
    return run(tuple(lookup.table for lookup in lookups), tuple(lookup.indices for lookup in lookups))


def sharded_cross_entropy(
    layout: Layout,
    dense: Dense,
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    kernel: Float[Array, "vocab embed"],
    chunk: int,
) -> LossSums:
    """See `Operations.cross_entropy`.

    The kernel is gathered inside, so that its gradient is summed locally over all chunks and reduced once:
    left to annotations, every chunk would reduce it.
    """
    replicas = tuple(axis for axis in layout.split_axes if axis in {*layout.rules["batch"], *layout.rules["sequence"]})

    def loss(x: jax.Array, targets: jax.Array, weights: jax.Array, kernel: jax.Array) -> LossSums:
        x, kernel, vocabulary = _gathered(layout, x, kernel)
        sums = chunked_cross_entropy(x, targets, weights, kernel, chunk, dense=dense, vocabulary=vocabulary)
        return jax.lax.psum(sums, replicas) if replicas else sums

    positions = layout.spec(("batch", "sequence"))
    specs = (layout.spec(STREAM), positions, positions, layout.spec(("vocab", "embed")))
    # Else the kernel's whole gradient waits for its reduction until the layers are through.
    x, kernel = differentiate_together((x, kernel))
    return layout.island(loss, specs, (jax.P(), jax.P()))(x, targets, weights, kernel)


def sharded_target_scores(
    layout: Layout,
    dense: Dense,
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    kernel: Float[Array, "vocab embed"],
    chunk: int,
) -> TargetScores:
    """See `Operations.target_scores`."""

    def score(x: jax.Array, targets: jax.Array, kernel: jax.Array) -> TargetScores:
        x, kernel, vocabulary = _gathered(layout, x, kernel)
        return chunked_target_scores(x, targets, kernel, chunk, dense=dense, vocabulary=vocabulary)

    positions = layout.spec(("batch", "sequence"))
    specs = (layout.spec(STREAM), positions, layout.spec(("vocab", "embed")))
    scores: TargetScores = layout.island(score, specs, positions)(x, targets, kernel)
    return scores


def _gathered(layout: Layout, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array, Vocabulary]:
    """Inside an island, whole activations and the part of the kernel that this device's vocabulary is."""
    columns, vocab = layout.axes("embed"), layout.axes("vocab")
    if columns:
        kernel = jax.lax.all_gather(kernel, columns, axis=1, tiled=True)
    if "tensor" in layout.axes("residual_sequence"):
        x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
    if not vocab:
        return x, kernel, WHOLE
    vocabulary = Vocabulary(
        first=jax.lax.axis_index(vocab) * kernel.shape[0],
        largest=lambda x: jax.lax.pmax(x, vocab),
        total=lambda x: jax.lax.psum(x, vocab),
    )
    return x, kernel, vocabulary
