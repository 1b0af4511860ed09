"""The loop over layers, and what it keeps for the backward pass."""

from collections.abc import Callable
from typing import Any

import jax

from dseekjax.memory.config import MemoryConfig

Layer = Callable[[Any, Any], tuple[Any, Any]]
"""`(carry, one layer's slice) -> (carry, sums to report)`."""


def scan_layers(layer: Layer, carry: Any, stacked: Any, config: MemoryConfig, unrolled: bool) -> tuple[Any, Any]:
    """Runs `layer` over the leading axis of `stacked`, keeping the activations that `config` asks for.

    `none` keeps all, `full` the input of every layer, `every_k` the input of every k-th layer and, while one group
    of k layers is computed again, those of its layers (Chen et al. 2016, arXiv:1604.06174). `unrolled`, for `none`
    alone, compiles every layer by itself: what is kept of it and its parameters need no copies in and out of stacks.

    Returns:
        The last carry, and the reported sums stacked per layer.
    """
    if config.recompute == "none":
        return jax.lax.scan(layer, carry, stacked, unroll=unrolled)
    # Inside a scan nothing can be merged across iterations, so the barrier that prevents it is only a cost.
    each = jax.checkpoint(layer, prevent_cse=False)
    if config.recompute == "full":
        return jax.lax.scan(each, carry, stacked)
    every = config.recompute_every
    grouped = jax.tree.map(lambda x: x.reshape(x.shape[0] // every, every, *x.shape[1:]), stacked)

    @jax.checkpoint
    def group(carry: Any, layers: Any) -> tuple[Any, Any]:
        return jax.lax.scan(each, carry, layers)

    carry, sums = jax.lax.scan(group, carry, grouped)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sums)
