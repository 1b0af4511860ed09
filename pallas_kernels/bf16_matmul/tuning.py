"""What `tune` needs to know of products: which block sizes there are to choose from, and what to run with them."""

import functools
from collections.abc import Callable, Iterator
from itertools import product as combinations
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bf16_matmul.blocks import Blocks, trying
from pallas_kernels.bf16_matmul.grouped import grouped_outer_product, grouped_product
from pallas_kernels.bf16_matmul.product import Epilogue, Tiles, first_sum, product
from pallas_kernels.bf16_matmul.rotary import qkv_product
from pallas_kernels.dispatch import COMPILED_FOR, device_at_hand

KERNELS = ("product", "product_with_matrix", "two_products", "grouped_product", "grouped_outer_product")
HEAD_DIMS = (32, 64, 128, 256)
SHAPES = (
    *(f"{kernel} {size}" for kernel in KERNELS for size in ("large", "small")),
    *(f"qkv_rotary head_dim_{size}" for size in HEAD_DIMS),
)
SHAPE = "one of " + ", ".join(SHAPES)
CAPABILITIES = COMPILED_FOR
PARTS = ("blocks",)

SIZE, GROUPS, HEADS, KV_HEADS = 4096, 8, 32, 8
FEW_ROWS = 64
"""Of a product that is small: no more than a block of it has."""


def is_shape(shape: str) -> bool:
    """Whether it is one."""
    return shape in SHAPES


def candidates(shape: str) -> Iterator[Blocks]:
    """Sizes to choose from: rows of a small product are few, columns of a head are its own."""
    kernel, size = shape.split()
    rows = (32, FEW_ROWS) if size == "small" else (64, 128)
    cols = (int(size.removeprefix("head_dim_")),) if kernel == "qkv_rotary" else (64, 128, 256)
    for sides in combinations(rows, cols, (64,), (4, 8), (3, 4)):
        yield Blocks(*sides)


def intensity(blocks: Blocks) -> float:
    """The heuristic: multiplications per element loaded from memory. Of equals, more stages hide more latency."""
    return blocks.rows * blocks.cols / (blocks.rows + blocks.cols) + blocks.num_stages / 100


def entry(shape: str, blocks: dict[str, dict[str, int]]) -> tuple[str, dict[str, Any]]:
    """The signature that sizes are kept by, and what is kept."""
    kernel, size = shape.split()
    return f"{kernel} 16_bit {size}", {"blocks": blocks["blocks"]}


def workload(shape: str, part: str, blocks: Blocks) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct], str]:
    """A product that is computed with these sizes, what it takes, and the name of its kernel."""
    kernel, size = shape.split()
    function, inputs = _workload(kernel, size)

    def run(*arrays: Any) -> Any:
        gpu = device_at_hand().gpu
        assert gpu
        with trying(blocks):
            return function(gpu.name, *arrays)

    return run, inputs, kernel


def _workload(kernel: str, size: str) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = FEW_ROWS if size == "small" else SIZE
    x, w, result = array(rows, SIZE), array(SIZE, SIZE), array(rows, SIZE)
    sizes = array(GROUPS, dtype=jnp.int32)

    def gated(sums: Tiles, vectors: Tiles, matrices: Tiles) -> Tiles:
        return [jax.nn.silu(sums[0]) * sums[1]]

    def added(sums: Tiles, vectors: Tiles, matrices: Tiles) -> Tiles:
        return [jax.nn.gelu(sums[0]) + matrices[0]]

    def products(gpu: str, x: Any, *others: Any, count: int, epilogue: Epilogue) -> Any:
        """Of `x` with the first `count` others; the rest are for the epilogue."""
        rights, matrices = others[:count], others[count:]
        dtypes = [jnp.dtype(jnp.bfloat16)]
        return product(kernel, gpu, x, rights, out_dtypes=dtypes, matrices=matrices, epilogue=epilogue)

    match kernel:
        case "product":
            return functools.partial(products, count=1, epilogue=first_sum), [x, w]
        case "product_with_matrix":
            return functools.partial(products, count=1, epilogue=added), [x, w, result]
        case "two_products":
            return functools.partial(products, count=2, epilogue=gated), [x, w, w]
        case "grouped_product":
            return lambda gpu, *inputs: grouped_product(kernel, gpu, *inputs), [x, array(GROUPS, SIZE, SIZE), sizes]
        case "grouped_outer_product":
            return lambda gpu, *inputs: grouped_outer_product(kernel, gpu, *inputs), [x, result, sizes]
    head_dim = int(size.removeprefix("head_dim_"))
    angles = array(rows, head_dim // 2, dtype=jnp.float32)

    def to_heads(gpu: str, x: Any, w: Any, cosine: Any, sine: Any) -> Any:
        return qkv_product(kernel, gpu, x, w, (cosine, sine), num_heads=HEADS, num_kv_heads=KV_HEADS)

    return to_heads, [x, array(SIZE, (HEADS + 2 * KV_HEADS) * head_dim), angles, angles]
