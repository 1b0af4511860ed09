"""Sizes of the kernels' blocks."""

from typing import Any, NamedTuple

import jax

from pallas_kernels.attention.pallas.tiles import SMALLEST_TILE
from pallas_kernels.gpus import Gpu
from pallas_kernels.tuned import tuned_entries


class Blocks(NamedTuple):
    """How one kernel cuts queries and keys, and what it runs with."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    """How many blocks are on their way from memory at a time."""


class KernelBlocks(NamedTuple):
    """Those of the three kernels."""

    forward: Blocks
    query_gradient: Blocks
    key_value_gradient: Blocks


UNTUNED = KernelBlocks(*[Blocks(queries=32, keys=32, num_warps=8, num_stages=1)] * 3)
"""What every GPU has room for."""


def signature(dtype: Any, head_dim: int, value_dim: int) -> str:
    """What block sizes are kept by."""
    return f"{jax.numpy.dtype(dtype).name} head_dim={head_dim} value_dim={value_dim}"


def choose_blocks(gpu: Gpu | None, query: jax.Array, key: jax.Array, value: jax.Array) -> KernelBlocks:
    """The sizes for these arguments: those found for their signature, else for the next larger heads; never more than
    the sequences have.

    Args:
        gpu: what the kernels will run on; None if it is not known.
        query: `[batch, query_length, heads, head_dim]`.
        key: `[batch, key_length, kv_heads, head_dim]`.
        value: `[batch, key_length, kv_heads, value_dim]`.
    """
    blocks = _found(gpu, query.dtype, query.shape[-1], value.shape[-1])

    def fit(kernel: Blocks) -> Blocks:
        return kernel._replace(
            queries=min(kernel.queries, _power_of_two(query.shape[1])),
            keys=min(kernel.keys, _power_of_two(key.shape[1])),
        )

    return KernelBlocks(*map(fit, blocks))


def _found(gpu: Gpu | None, dtype: Any, head_dim: int, value_dim: int) -> KernelBlocks:
    # Kernels for float16 are those for bfloat16.
    dtype = "bfloat16" if dtype == "float16" else dtype
    entries = {} if gpu is None else tuned_entries(gpu, "attention")
    larger = [
        entry
        for name, entry in entries.items()
        if entry["head_dim"] >= head_dim
        and entry["value_dim"] >= value_dim
        and name == signature(dtype, entry["head_dim"], entry["value_dim"])
    ]
    if not larger:
        return UNTUNED
    nearest = min(larger, key=lambda entry: entry["head_dim"] + entry["value_dim"])
    return KernelBlocks(*(Blocks(**nearest["blocks"][kernel]) for kernel in KernelBlocks._fields))


def _power_of_two(length: int) -> int:
    """The least that holds `length`, and that a tile's side can be."""
    return max(SMALLEST_TILE, 1 << (length - 1).bit_length())
