"""What `tune` needs to know of attention: which block sizes there are to choose from, and what to run with them."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.pallas.backward import key_value_gradient, query_gradient
from pallas_kernels.attention.pallas.blocks import Blocks, KernelBlocks, signature
from pallas_kernels.attention.pallas.forward import forward
from pallas_kernels.attention.pallas.tiles import SMALLEST_TILE
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.dispatch import COMPILED_FOR

SHAPES = ("bfloat16 64 64", "bfloat16 128 128", "bfloat16 192 128", "bfloat16 256 256")
"""Dtype, head size and value size of what is tuned if nothing else is said."""
SHAPE = "a dtype, a head size and a value size from 1 to 256"
CAPABILITIES = COMPILED_FOR
"""Of the GPUs that have kernels."""
PARTS = KernelBlocks._fields
"""Kernels that have sizes of their own."""


def candidates(shape: str) -> Iterator[Blocks]:
    """Sizes to choose from, the same for all shapes."""
    for queries, keys, num_warps in product((128, 64, 32), (128, 64, 32), (8, 4)):
        yield Blocks(queries, keys, num_warps, num_stages=2)


def intensity(blocks: Blocks) -> float:
    """The heuristic: multiplications per element loaded from memory. Of equals, more warps hide more latency."""
    return blocks.queries * blocks.keys / (blocks.queries + blocks.keys) + blocks.num_warps / 100


def is_shape(shape: str) -> bool:
    """Whether it can be read."""
    words = shape.split()
    if len(words) != 3 or words[0] not in ("bfloat16", "float16", "float32"):
        return False
    return all(word.isdecimal() and 1 <= int(word) <= 256 for word in words[1:])


def entry(shape: str, blocks: dict[str, dict[str, int]]) -> tuple[str, dict[str, Any]]:
    """The signature that sizes are kept by, and what is kept."""
    dtype, head_dim, value_dim = shape.split()
    sizes = {"head_dim": int(head_dim), "value_dim": int(value_dim)}
    return signature(dtype, **sizes), {**sizes, "blocks": blocks}


def workload(shape: str, part: str, blocks: Blocks) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct], str]:
    """One kernel with these sizes, for causal attention within documents; what it takes, and its name."""
    dtype, head_dim, value_dim = shape.split()
    batch, length, heads, kv_heads = 2, 4096, 16, 4
    spec = AttentionSpec(causal=True, window=None, scale=int(head_dim) ** -0.5, softcap=None)

    def array(heads: int, dim: str) -> jax.ShapeDtypeStruct:
        whole_tiles = -(-int(dim) // SMALLEST_TILE) * SMALLEST_TILE
        return jax.ShapeDtypeStruct((batch, length, heads, whole_tiles), jnp.dtype(dtype))

    inputs = [
        array(heads, head_dim),
        array(kv_heads, head_dim),
        array(kv_heads, value_dim),
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
    ]
    per_query = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)

    def run_forward(query: Any, key: Any, value: Any, ids: Any) -> Any:
        return forward(query, key, value, (ids, ids), spec, blocks, False)

    def run_gradient(
        query: Any, key: Any, value: Any, ids: Any, gradient: Any, log_sum_exp: Any, correction: Any
    ) -> Any:
        gradient_of: Callable[..., Any] = query_gradient if part == "query_gradient" else key_value_gradient
        return gradient_of(query, key, value, (ids, ids), gradient, log_sum_exp, correction, spec, blocks, False)

    if part == "forward":
        return run_forward, inputs, "attention_forward"
    return run_gradient, [*inputs, array(heads, value_dim), per_query, per_query], f"attention_{part}"
