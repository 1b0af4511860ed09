"""Checks every kernel on the GPU at hand and times it: needs this repository, jax for that GPU, and nothing else.

Numbers are compared with the plain-JAX reference in float32 at full precision. Times are beside what is there to beat:
cuDNN, XLA's products, a copy, and the GPU's peaks. Then block sizes are measured and kept. What no time is left for is
named. --interpret tries all of it but the times on a CPU, with small arrays.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bf16_matmul, fp8_matmul, norm, quantize, tune
from pallas_kernels.attention import AttentionSpec, attention
from pallas_kernels.dispatch import device_at_hand
from pallas_kernels.gpus import Gpu
from pallas_kernels.testing.numerics import relative_error
from pallas_kernels.testing.timing import random_arrays, seconds_per_call


@dataclass(frozen=True)
class Row:
    """One thing found."""

    what: str
    values: dict[str, float] = field(default_factory=dict)
    passed: bool = True

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.3g}" for name, value in self.values.items())
        return f"{'ok  ' if self.passed else 'FAIL'} {self.what}: {values}"


Check = Callable[[], Iterator[Row]]


def arrays(dtype: Any, *shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
    """Normal numbers."""
    return random_arrays([jax.ShapeDtypeStruct(shape, dtype) for shape in shapes], seed)


def compare(what: str, found: Any, exact: Any, tolerance: float) -> Row:
    """The largest relative error among the arrays of two trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    error = max(relative_error(a, b) for a, b in pairs)
    return Row(what, {"error": error, "tolerance": tolerance}, error < tolerance)


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


def check_fp8(kernel: str, size: int) -> Iterator[Row]:
    """The 8-bit product against what its operands stand for, and against the true one."""
    x, w = arrays(jnp.bfloat16, (size, 2 * size), (2 * size, size))
    tiles, blocks = fp8_matmul.quantize_tiles(x), fp8_matmul.quantize_blocks(w)
    operands = (*tiles, blocks.values.T, blocks.scales.T)
    found = fp8_matmul.fp8_matmul(*operands, out_dtype=jnp.float32, implementation=kernel)
    stands_for = fp8_matmul.fp8_matmul(*operands, out_dtype=jnp.float32, implementation="reference")
    yield compare(f"fp8_matmul {kernel} to what it multiplies", found, stands_for, 2e-3)
    with jax.default_matmul_precision("highest"):
        true = x.astype(jnp.float32) @ w.astype(jnp.float32)
    yield compare(f"fp8_matmul {kernel} to the true product", found, true, 4e-2)
    found, exact = (
        with_gradients(lambda x, w, n=name: fp8_matmul.fp8_dense(x, w, implementation=n), x.astype(jnp.float32), w)
        for name in (kernel, "reference")
    )
    yield compare(f"fp8_dense {kernel} with gradients", found, exact, 1e-2)


SIZES = {
    # rows, contraction, columns; the last are DeepSeek-V3's dense and expert layers
    "4096": (4096, 4096, 4096),
    "8192": (8192, 8192, 8192),
    "tokens to experts": (4096, 7168, 4096),
    "experts to tokens": (4096, 2048, 7168),
    "attention out": (4096, 16384, 7168),
}


def time_fp8(gpu: Gpu) -> Iterator[Row]:
    """The 8-bit product beside XLA's in bfloat16, and the quantizing of its operands."""
    for name, (rows, contraction, columns) in SIZES.items():
        x, w = arrays(jnp.bfloat16, (rows, contraction), (columns, contraction))
        operands = (*fp8_matmul.quantize_tiles(x), *fp8_matmul.quantize_blocks(w))
        taken = seconds_per_call(lambda *q: fp8_matmul.fp8_matmul(*q, implementation="mosaic"), *operands)
        plain = seconds_per_call(lambda x, w: jnp.einsum("mk,nk->mn", x, w), x, w)
        quantizing = seconds_per_call(fp8_matmul.quantize_tiles, x)
        speed = 2 * rows * contraction * columns / taken
        values = {"ms": 1e3 * taken, "TFLOP/s": speed / 1e12, "of peak": speed / gpu.peak_flops["float8"]}
        yield Row(f"time of fp8_matmul {name}", values | {"to bf16": plain / taken, "tiles of x, ms": 1e3 * quantizing})


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


def measure_blocks(gpu: Gpu) -> Iterator[Row]:
    """Block sizes of attention, timed and kept in `pallas_kernels/gpus/`."""
    status = tune.main(["attention", "--gpu", gpu.name, "--measure", "--shapes", "bfloat16 128 128"])
    yield Row("block sizes of attention", {"exit status": status}, status == 0)


def checks(gpu: Gpu | None, interpret: bool) -> dict[str, Check]:
    """What is to be done, the most wanted first."""
    pallas = "pallas_interpreted" if interpret else "pallas"
    mosaic = "mosaic_interpreted" if interpret else "mosaic"
    numbers: dict[str, Check] = {
        "attention": lambda: check_attention(pallas, 40 if interpret else 1000),
        "quantize": lambda: check_quantize(pallas, 1 << (12 if interpret else 24)),
        "matmul": lambda: check_matmul(pallas, 128 if interpret else 1024),
        "norms": lambda: check_norms(pallas, 5 if interpret else 1000),
    }
    if interpret or (gpu is not None and gpu.compute_capability == 90):
        numbers["fp8_matmul"] = lambda: check_fp8(mosaic, 128 if interpret else 1024)
    if interpret or gpu is None:
        return numbers
    times: dict[str, Check] = {"time of attention": lambda: time_attention(gpu)}
    if gpu.compute_capability == 90:
        times["time of fp8_matmul"] = lambda: time_fp8(gpu)
    times["time of quantize"] = lambda: time_quantize(gpu)
    times["time of norms"] = lambda: time_norms(gpu)
    times["time of matmul"] = lambda: time_matmul(gpu)
    times["block sizes"] = lambda: measure_blocks(gpu)
    return {**numbers, **times}


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("scripts/gpu_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing after these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every figure")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, numbers alone, with small arrays")
    parser.add_argument("--only", metavar="WORD", default="", help="what has this in its name")
    given = parser.parse_args()
    device = device_at_hand()
    if not given.interpret and device.gpu is None:
        print(f"error: the device at hand is {device}, no GPU that is known; --interpret needs none", file=sys.stderr)
        return 2
    print(f"{device}, jax {jax.__version__}", flush=True)
    chosen = {n: check for n, check in checks(device.gpu, given.interpret).items() if given.only in n}
    if not chosen:
        print(f"error: --only: nothing that can be done here has {given.only!r} in its name", file=sys.stderr)
        return 2
    if given.json and not given.json.absolute().parent.is_dir():
        print(f"error: --json: there is no folder {given.json.absolute().parent}", file=sys.stderr)
        return 2
    start, rows, left_out = time.monotonic(), [], []
    for name, check in chosen.items():
        if time.monotonic() - start > 60 * given.minutes:
            left_out.append(name)
            continue
        for row in _guarded(name, check):
            print(row, flush=True)
            rows.append(row)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} found, {failed} failed, in {time.monotonic() - start:.0f} s", flush=True)
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}", flush=True)
    if given.json:
        found = {"device": str(device), "jax": jax.__version__, "left_out": left_out, "rows": [asdict(r) for r in rows]}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed or left_out else 0


def _guarded(name: str, check: Check) -> Iterator[Row]:
    """The rows of a check, and a last one that failed if it breaks off: the others are wanted all the same."""
    try:
        yield from check()
    except Exception as error:
        yield Row(f"{name} broke off: {type(error).__name__}: {' '.join(str(error).split())[:300]}", passed=False)


if __name__ == "__main__":
    sys.exit(main())
