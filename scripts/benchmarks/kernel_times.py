"""Times of every kernel beside what there is to beat."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bf16_matmul, fp8_matmul
from pallas_kernels.attention import AttentionSpec, attention
from pallas_kernels.gpus import Gpu
from pallas_kernels.testing.timing import seconds_per_call

sys.path.insert(0, str(Path(__file__).parent))
from kernel_numbers import NORMS, compressors, norm_inputs
from kernel_rows import Row, arrays


def time_attention(gpu: Gpu) -> Iterator[Row]:
    """The kernel beside cuDNN and the peak, causal, sequences of 8192."""
    batch, length, heads, head_dim = 2, 8192, 16, 128
    inputs = arrays(jnp.bfloat16, *[(batch, length, heads, head_dim)] * 3)
    pairs = AttentionSpec(causal=True, window=None, scale=1.0, softcap=None).pairs(length, length)
    flops = 4 * batch * heads * head_dim * pairs
    seconds: dict[tuple[str, str], float] = {}
    for name in ("pallas", "cudnn"):

        def attend(*inputs: jax.Array, name: Any = name) -> jax.Array:
            return attention(*inputs, implementation=name)

        def gradients(*inputs: jax.Array, attend: Any = attend) -> Any:
            out, pull_back = jax.vjp(attend, *inputs)
            return pull_back(out)

        seconds[name, "forward"] = seconds_per_call(attend, *inputs)
        seconds[name, "forward and backward"] = seconds_per_call(gradients, *inputs)
    for (name, part), taken in seconds.items():
        speed = flops * (1.0 if part == "forward" else 3.5) / taken
        values = {"ms": 1e3 * taken, "TFLOP/s": speed / 1e12, "of peak": speed / gpu.peak_flops["bfloat16"]}
        yield Row(f"time of attention {name}, {part}", values | {"to cudnn": seconds["cudnn", part] / taken})


SIZES = {
    # rows, contraction, columns; the last are DeepSeek-V3's dense and expert layers
    "4096": (4096, 4096, 4096),
    "8192": (8192, 8192, 8192),
    "tokens to experts": (4096, 7168, 4096),
    "experts to tokens": (4096, 2048, 7168),
    "attention out": (4096, 16384, 7168),
}


def time_fp8(gpu: Gpu, kernel: Any) -> Iterator[Row]:
    """The 8-bit product beside XLA's in bfloat16, and the quantizing of its operands."""
    peak = gpu.peak_flops["float8" if kernel == "mosaic" else "float16"]
    for name, (rows, contraction, columns) in SIZES.items():
        x, w = arrays(jnp.bfloat16, (rows, contraction), (columns, contraction))
        operands = (*fp8_matmul.quantize_tiles(x), *fp8_matmul.quantize_blocks(w))
        taken = seconds_per_call(lambda *q: fp8_matmul.fp8_matmul(*q, implementation=kernel), *operands)
        plain = seconds_per_call(lambda x, w: jnp.einsum("mk,nk->mn", x, w), x, w)
        quantizing = seconds_per_call(fp8_matmul.quantize_tiles, x)
        speed = 2 * rows * contraction * columns / taken
        values = {"ms": 1e3 * taken, "TFLOP/s": speed / 1e12, "of peak": speed / peak}
        values |= {"to bf16": plain / taken, "tiles of x, ms": 1e3 * quantizing}
        yield Row(f"time of fp8_matmul {kernel}, {name}", values)


def time_matmul(gpu: Gpu) -> Iterator[Row]:
    """Kernels beside XLA's products with the same epilogue, and `jax.lax.ragged_dot`."""
    x, w, w_up = arrays(jnp.bfloat16, (8192, 4096), (4096, 8192), (4096, 8192))
    bias = arrays(jnp.bfloat16, (8192,))[0]
    experts = arrays(jnp.bfloat16, (32, 4096, 2048))[0]
    sizes = jnp.full(32, 256, jnp.int32)
    tokens, w_qkv = arrays(jnp.bfloat16, (4, 2048, 4096), (4096, 48 * 128))
    positions = jnp.broadcast_to(jnp.arange(2048), (4, 2048))

    def products(name: Any) -> dict[str, tuple[float, Callable[..., Any], tuple[jax.Array, ...]]]:
        return {
            "matmul with bias and gelu": (
                2 * 8192 * 4096 * 8192,
                lambda x, w, b: bf16_matmul.matmul(x, w, bias=b, activation="gelu", implementation=name),
                (x, w, bias),
            ),
            "swiglu": (
                4 * 8192 * 4096 * 8192,
                lambda *i: bf16_matmul.swiglu(*i, implementation=name),
                (x, w, w_up),
            ),
            "qkv_rotary": (
                2 * 8192 * 4096 * 48 * 128,
                lambda *i: bf16_matmul.qkv_rotary(*i, num_heads=32, num_kv_heads=8, implementation=name),
                (tokens, w_qkv, positions),
            ),
            "grouped_matmul": (
                2 * 8192 * 4096 * 2048,
                lambda *i: bf16_matmul.grouped_matmul(*i, implementation=name),
                (x, experts, sizes),
            ),
        }

    ours, theirs = products("pallas"), products("reference")
    theirs["grouped_matmul"] = (0, jax.lax.ragged_dot, (x, experts, sizes))
    for name, (flops, function, inputs) in ours.items():
        taken = seconds_per_call(function, *inputs)
        plain = seconds_per_call(theirs[name][1], *inputs)
        values = {"ms": 1e3 * taken, "TFLOP/s": flops / taken / 1e12}
        yield Row(
            f"time of {name}",
            values | {"of peak": flops / taken / gpu.peak_flops["bfloat16"], "to XLA": plain / taken},
        )


def time_quantize(gpu: Gpu) -> Iterator[Row]:
    """Bytes per second beside those of a copy."""
    elements = 1 << 27
    gradient, residual = arrays(jnp.float32, (elements,), (elements,))
    copy = 8 * elements / seconds_per_call(lambda x: x + 1.0, gradient)
    yield Row("time of a copy", {"GB/s": copy / 1e9, "of peak": copy / gpu.memory_bandwidth})
    plain = compressors("reference", elements)
    for name, (function, size) in compressors("pallas", elements).items():
        taken = seconds_per_call(function, gradient, residual)
        to_xla = seconds_per_call(plain[name][0], gradient, residual) / taken
        speed = size * elements / taken
        yield Row(f"time of {name}", {"GB/s": speed / 1e9, "of a copy": speed / copy, "to XLA": to_xla})


def time_norms(gpu: Gpu) -> Iterator[Row]:
    """Gradients beside XLA's, and the bytes that they have to read and write per second."""
    rows = 16384
    for name, (function, parameters) in NORMS.items():
        for width in (4096, 12288):
            inputs = norm_inputs(jnp.bfloat16, rows, width, parameters)
            seconds: dict[str, float] = {}
            for implementation in ("pallas", "reference"):

                def gradients(upstream: jax.Array, *x: jax.Array, f: Any = function, i: Any = implementation) -> Any:
                    return jax.vjp(lambda *x: f(*x, epsilon=1e-5, implementation=i), *x)[1](upstream)

                seconds[implementation] = seconds_per_call(gradients, inputs[0], *inputs)
            speed = 6 * rows * width / seconds["pallas"]
            values = {"ms": 1e3 * seconds["pallas"], "GB/s": speed / 1e9, "of peak": speed / gpu.memory_bandwidth}
            yield Row(
                f"time of the gradient of {name}, width {width}",
                values | {"to XLA": seconds["reference"] / seconds["pallas"]},
            )
