"""The sizes of the blocks that a kernel works on: a table per kind of GPU, read by signature."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.gpus import load_gpu
from pallas_kernels.tuned import tuned_entries


class Blocks(NamedTuple):
    """How a kernel cuts its work."""

    rows: int
    """Of the output, per block; a power of two, as the others are."""
    cols: int
    """Likewise."""
    inner: int
    """Of the dimension summed over, per step."""
    num_warps: int
    num_stages: int
    """How many steps' operands are in shared memory at a time."""


INTERPRETED = Blocks(rows=16, cols=32, inner=16, num_warps=4, num_stages=1)
"""Small, so that small arrays have edges and more than one block."""


_tried: contextvars.ContextVar[Blocks | None] = contextvars.ContextVar("tried", default=None)


@contextlib.contextmanager
def trying(blocks: Blocks) -> Iterator[None]:
    """Within it every kernel has these, whatever the table says."""
    token = _tried.set(blocks)
    try:
        yield
    finally:
        _tried.reset(token)


def has_blocks(gpu: str) -> bool:
    """Whether there is a table for a kind of GPU."""
    return bool(_table(gpu))


def head_dims(gpu: str) -> list[int]:
    """The sizes of heads that there are blocks for."""
    return [blocks.cols for signature, blocks in _table(gpu).items() if signature.startswith("qkv_rotary ")]


def find_blocks(gpu: str | None, kernel: str, *, rows: int, cols: int, groups: int = 1) -> Blocks:
    """The blocks of a kernel with 16-bit operands and `groups` outputs of `rows` by `cols`.

    They are `large` where one output fills them, and all outputs give every core at least one, else `small`.

    Args:
        gpu: name of its folder; None where kernels are interpreted.
        kernel: its name in the table.
        rows: of an output.
        cols: of an output.
        groups: how many outputs.
    """
    if (tried := _tried.get()) is not None:
        return tried
    if gpu is None:
        return INTERPRETED
    large, small = (_table(gpu)[f"{kernel} 16_bit {size}"] for size in ("large", "small"))
    count = groups * -(-rows // large.rows) * -(-cols // large.cols)
    return large if rows >= large.rows and count >= load_gpu(gpu).num_cores else small


def find_head_blocks(gpu: str | None, head_dim: int) -> Blocks:
    """The blocks of the projection to heads of size `head_dim`: some rows of one head.

    Args:
        gpu: name of its folder; None where kernels are interpreted.
        head_dim: one of `head_dims`, if it is for a GPU.
    """
    if (tried := _tried.get()) is not None:
        return tried
    if gpu is None:
        return INTERPRETED._replace(cols=head_dim)
    return _table(gpu)[f"qkv_rotary 16_bit head_dim_{head_dim}"]


def _table(gpu: str) -> dict[str, Blocks]:
    entries = tuned_entries(load_gpu(gpu), "bf16_matmul")
    return {signature: Blocks(**entry["blocks"]) for signature, entry in entries.items()}
