"""Numbers of every kernel against its reference, in float32 at full precision."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bf16_matmul, fp8_matmul, norm, quantize
from pallas_kernels.attention import attention

sys.path.insert(0, str(Path(__file__).parent))
from kernel_rows import Row, arrays, compare


def with_gradients(function: Callable[..., jax.Array], *inputs: jax.Array) -> Any:
    """What a function gives, and its gradients with its own result for cotangent."""

    @jax.jit
    def run(*inputs: jax.Array) -> Any:
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(out)

    return run(*inputs)


ATTENTION = {
    "causal": (128, 128, {}),
    "causal, documents": (128, 128, {"documents": True}),
    "window 100": (128, 128, {"window": 100}),
    "window 100, documents, softcap": (128, 128, {"documents": True, "window": 100, "softcap": 30.0}),
    "both ways, heads of 64": (64, 64, {"causal": False}),
    "heads of 192, values of 128": (192, 128, {"documents": True}),
    "heads of 80": (80, 80, {}),
}


TAKEN_BY_CUDNN = ("causal", "window 100", "both ways, heads of 64", "heads of 80")


def check_attention(kernel: str, length: int) -> Iterator[Row]:
    """The kernel of attention, and cuDNN, against the reference, forward and backward."""
    for name, (head_dim, value_dim, masks) in ATTENTION.items():
        options = {key: value for key, value in masks.items() if key != "documents"}
        if "documents" in masks:
            ids = jnp.broadcast_to(jnp.arange(length) // (length // 3), (2, length))
            options |= {"query_segment_ids": ids, "key_segment_ids": ids}
        for dtype, tolerance in ((jnp.bfloat16, 1e-2), (jnp.float16, 2e-3), (jnp.float32, 1e-4)):
            if dtype == jnp.float32 and head_dim > 128:
                continue
            kernels = [kernel]
            if kernel == "pallas" and name in TAKEN_BY_CUDNN and dtype != jnp.float32:
                kernels.append("cudnn")
            shapes = ((2, length, 4, head_dim), (2, length, 2, head_dim), (2, length, 2, value_dim))
            inputs = arrays(dtype, *shapes)
            with jax.default_matmul_precision("highest"):
                wide = [x.astype(jnp.float32) for x in inputs]
                exact = with_gradients(lambda *x, o=options: attention(*x, implementation="reference", **o), *wide)
            for each in kernels:
                found = with_gradients(lambda *x, e=each, o=options: attention(*x, implementation=e, **o), *inputs)
                yield compare(f"attention {each}, {name}, {jnp.dtype(dtype).name}", found, exact, tolerance)


def check_fp8(kernel: Any, size: int) -> Iterator[Row]:
    """The 8-bit product against what its operands stand for, and against the true one."""
    x, w = arrays(jnp.bfloat16, (size, 2 * size), (2 * size, size))
    tiles, blocks = fp8_matmul.quantize_tiles(x), fp8_matmul.quantize_blocks(w)
    operands = (*tiles, blocks.values.T, blocks.scales.T)
    found = fp8_matmul.fp8_matmul(*operands, out_dtype=jnp.float32, implementation=kernel)
    stands_for = fp8_matmul.fp8_matmul(*operands, out_dtype=jnp.float32, implementation="reference")
    # Tensor cores of 8 bits keep few bits of their sums.
    tolerance = 2e-3 if kernel.startswith("mosaic") else 1e-5
    yield compare(f"fp8_matmul {kernel} to what it multiplies", found, stands_for, tolerance)
    with jax.default_matmul_precision("highest"):
        true = x.astype(jnp.float32) @ w.astype(jnp.float32)
    yield compare(f"fp8_matmul {kernel} to the true product", found, true, 4e-2)
    found, exact = (
        with_gradients(lambda x, w, n=name: fp8_matmul.fp8_dense(x, w, implementation=n), x.astype(jnp.float32), w)
        for name in (kernel, "reference")
    )
    yield compare(f"fp8_dense {kernel} with gradients", found, exact, 1e-2)


def check_matmul(kernel: str, size: int) -> Iterator[Row]:
    """Products with epilogues, of groups, and with rotary heads, forward and backward, against the references."""

    def both(what: str, function: Callable[..., Any], *inputs: jax.Array) -> Row:
        wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in inputs]
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(lambda *x: function(*x, implementation="reference"))(*wide)
        found = jax.jit(lambda *x: function(*x, implementation=kernel))(*inputs)
        return compare(f"{what} {kernel}", found, exact, 1e-2)

    def gradients(function: Callable[..., jax.Array], *inputs: jax.Array, **options: Any) -> Any:
        out, pull_back = jax.vjp(lambda *x: function(*x, **options), *inputs)
        return out, pull_back(out)

    x, w, bias, residual = arrays(jnp.bfloat16, (size, size), (size, size), (size,), (size, size))

    def fused(x: Any, w: Any, bias: Any, residual: Any, **options: Any) -> Any:
        return bf16_matmul.matmul(x, w, bias=bias, activation="gelu", residual=residual, **options)

    yield both("matmul", lambda *i, **o: gradients(fused, *i, **o), x, w / 16, bias, residual)
    yield both("swiglu", lambda *i, **o: gradients(bf16_matmul.swiglu, *i, **o), x, w / 16, residual / 16)
    experts = arrays(jnp.bfloat16, (4, size, size))[0]
    sizes = jnp.array([size // 2, 0, size // 4 - 1, 1], jnp.int32)

    def grouped(x: Any, experts: Any, **options: Any) -> Any:
        return bf16_matmul.grouped_matmul(x, experts, sizes, **options)

    yield both("grouped_matmul", lambda *i, **o: gradients(grouped, *i, **o), x, experts)
    tokens, w_qkv = arrays(jnp.bfloat16, (2, size // 2, size), (size, 4 * 64))
    positions = jnp.broadcast_to(jnp.arange(size // 2), (2, size // 2))

    def heads(tokens: Any, w_qkv: Any, **options: Any) -> Any:
        parts = bf16_matmul.qkv_rotary(tokens, w_qkv, positions, num_heads=2, num_kv_heads=1, **options)
        return jnp.concatenate(parts, axis=2)

    yield both("qkv_rotary", lambda *i, **o: gradients(heads, *i, **o), tokens, w_qkv)


def compressors(kernel: Any, elements: int) -> dict[str, tuple[Callable[..., Any], int]]:
    """Each as a function of a gradient and a residual, and the bytes that it has to read and write per element."""
    budget = elements // 20
    key = jax.random.key(0)
    named = {"implementation": kernel}
    return {
        "quantize_int8": (lambda g, r: quantize.quantize_int8(g, **named), 5),
        "quantize_int8, stochastic": (lambda g, r: quantize.quantize_int8(g, key=key, **named), 5),
        "compress_signs": (lambda g, r: quantize.compress_signs(g, r, **named), 12),
        "sparsify": (lambda g, r: quantize.sparsify(g, r, jnp.float32(2.0), budget=budget, **named), 20),
        "prune_two_of_four": (lambda g, r: quantize.prune_two_of_four(g.reshape(-1, 1024), **named), 5),
    }


def check_quantize(kernel: str, elements: int) -> Iterator[Row]:
    """Kernels and references give the same bits."""
    gradient, residual = arrays(jnp.float32, (elements,), (elements,))
    for name, (function, _) in compressors(kernel, elements).items():
        found, exact = (
            jax.jit(run)(gradient, residual) for run in (function, compressors("reference", elements)[name][0])
        )
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
        unlike = sum(int((a != b).sum()) for a, b in pairs)
        yield Row(f"{name} {kernel}", {"elements that differ": unlike}, unlike == 0)


NORMS = {"rms_norm": (norm.rms_norm, 1), "layer_norm": (norm.layer_norm, 2)}
"""Functions, and how many parameters they have."""


def norm_inputs(dtype: Any, rows: int, width: int, parameters: int) -> list[jax.Array]:
    """x, and parameters in float32."""
    return arrays(dtype, (rows, width)) + arrays(jnp.float32, *[(width,)] * parameters, seed=1)


def check_norms(kernel: Any, rows: int) -> Iterator[Row]:
    """The kernels of the gradients of norms against the reference, for rows that fill a tile and that do not."""
    for name, (function, parameters) in NORMS.items():
        for width in (128, 4096, 5001, 12288):
            for dtype, tolerance in ((jnp.bfloat16, 1e-2), (jnp.float32, 1e-5)):
                inputs = norm_inputs(dtype, rows, width, parameters)
                found, exact = (
                    with_gradients(lambda *x, i=i, f=function: f(*x, epsilon=1e-5, implementation=i), *inputs)
                    for i in (kernel, "reference")
                )
                yield compare(f"{name} {kernel}, width {width}, {jnp.dtype(dtype).name}", found, exact, tolerance)
