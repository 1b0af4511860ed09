"""Dense products with epilogues, and the projection to heads with rotary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from dseekjax.models.layers.rotary import rotate
from pallas_kernels.bf16_matmul import grouped_matmul, matmul, qkv_rotary, swiglu
from pallas_kernels.gpus import load_gpu
from pallas_kernels.pallas_triton import triton_call
from pallas_kernels.testing.compiling import compile_for
from pallas_kernels.testing.lowering import lower_for, tracing_for
from pallas_kernels.tiles import Span, store_tile
from tests.references import products
from tests.references.products import relative_error, with_gradients

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""In the Frobenius norm, relative."""
GPUS = ("a100_80gb", "h100_sxm", "h200")
SHAPES = ((1, 1, 1), (16, 16, 32), (17, 40, 33), (35, 16, 65), (160, 33, 3))
"""Rows, inner, cols; blocks that are interpreted are 16 by 32, and bands 128 rows."""


def normal(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.partial(jax.jit, static_argnums=0)
def found(op, arrays, cotangents):
    out, pull = jax.vjp(op, *arrays)
    return out, pull(cotangents)


@functools.cache
def matmul_op(activation, out_dtype, implementation):
    options = {"activation": activation, "out_dtype": out_dtype, "implementation": implementation}
    return lambda x, w, bias, residual: matmul(x, w, bias=bias, residual=residual, **options)


@functools.cache
def swiglu_op(implementation):
    return functools.partial(swiglu, implementation=implementation)


@given(
    implementation=st.sampled_from(["pallas_interpreted", "reference"]),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    activation=st.sampled_from([None, "gelu", "relu", "silu"]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    wide_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_matmul_equals_float64(implementation, shape, dtype, activation, has_bias, has_residual, wide_out, seed):
    rows, inner, cols = shape
    x = normal(seed, (rows, inner), dtype)
    w = normal(seed + 1, (inner, cols), dtype) / inner**0.5
    bias = normal(seed + 2, (cols,), dtype) if has_bias else None
    residual = normal(seed + 3, (rows, cols), "float32") if has_residual else None
    out_dtype = "float32" if wide_out else dtype
    cotangent = normal(seed + 4, (rows, cols), out_dtype)
    arrays = (x, w.astype(dtype), bias, residual)
    out, gradients = found(matmul_op(activation, out_dtype, implementation), arrays, cotangent)
    expected = with_gradients(functools.partial(products.matmul, activation=activation), arrays, cotangent)
    assert out.dtype == out_dtype
    assert [x.dtype for x in jax.tree.leaves(gradients)] == [x.dtype for x in jax.tree.leaves(arrays)]
    assert relative_error((out, gradients), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["pallas_interpreted", "reference"])
@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (1, 1, 1)), ("float32", (17, 40, 33)), ("bfloat16", (160, 33, 3))]
)
def test_swiglu_equals_float64(implementation, dtype, shape):
    rows, inner, cols = shape
    x = normal(0, (rows, inner), dtype)
    w_gate, w_up = ((normal(k, (inner, cols), dtype) / inner**0.5).astype(dtype) for k in (1, 2))
    cotangent = normal(3, (rows, cols), dtype)
    arrays = (x, w_gate, w_up)
    result = found(swiglu_op(implementation), arrays, cotangent)
    assert relative_error(result, with_gradients(products.swiglu, arrays, cotangent)) < TOLERANCE[dtype]


def qkv_inputs(dtype, rows=(2, 9), embed=24, heads=3, kv_heads=1, head_dim=32, last_position=60):
    x = normal(0, (*rows, embed), dtype)
    w = (normal(1, (embed, (heads + 2 * kv_heads) * head_dim), dtype) / embed**0.5).astype(dtype)
    positions = jnp.asarray(np.random.default_rng(2).integers(0, last_position + 1, rows), jnp.int32)
    sizes = [(*rows, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return x, w, positions, tuple(normal(3 + k, size, dtype) for k, size in enumerate(sizes))


@pytest.mark.parametrize("implementation", ["pallas_interpreted", "reference"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("float32", {"rows": (1, 1), "heads": 1}),
        ("bfloat16", {"rows": (3, 43), "heads": 4, "kv_heads": 2, "head_dim": 64, "embed": 16}),
    ],
)
def test_qkv_rotary_equals_float64(implementation, dtype, sizes):
    x, w, positions, cotangents = qkv_inputs(dtype, **sizes)
    heads, kv_heads = cotangents[0].shape[2], cotangents[1].shape[2]
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "theta": 500.0}
    result = found(
        lambda x, w: qkv_rotary(x, w, positions, implementation=implementation, **options), (x, w), cotangents
    )
    definition = functools.partial(products.qkv_rotary, positions=positions, **options)
    # In float32 the angles of large positions are themselves less exact: to 2e-4 at position 3000.
    assert relative_error(result, with_gradients(definition, (x, w), cotangents)) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["pallas_interpreted", "reference"])
def test_rotary_is_that_of_the_models(implementation):
    x, w, positions, _ = qkv_inputs("float32", last_position=100_000)
    query, key, value = qkv_rotary(
        x, w, positions, num_heads=3, num_kv_heads=1, theta=500.0, implementation=implementation
    )
    heads = (x @ w).reshape(2, 9, 5, 32)
    np.testing.assert_allclose(query, rotate(heads[:, :, :3], positions, 500.0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(key, rotate(heads[:, :, 3:4], positions, 500.0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value, heads[:, :, 4:], rtol=1e-5, atol=1e-5)


def test_reference_is_exact_in_float64():
    with jax.enable_x64(True):
        x, w, v = (normal(k, (5, 5), "float64") for k in range(3))
        bias, positions = normal(3, (5,), "float64"), jnp.arange(5)[None]
        arrays, definition = (x, w, bias, v), functools.partial(products.matmul, activation="gelu")
        out = found(matmul_op("gelu", "float64", "auto"), arrays, v)
        assert relative_error(out, with_gradients(definition, arrays, v)) < 1e-12
        out = found(swiglu_op("auto"), (x, w, v), v)
        assert relative_error(out, with_gradients(products.swiglu, (x, w, v), v)) < 1e-12
        w = normal(4, (5, 12), "float64")
        heads = qkv_rotary(x[None], w, positions, num_heads=1, num_kv_heads=1)
        expected = products.qkv_rotary(x[None], w, positions, 1, 1, 10000.0)
        assert relative_error(heads, expected) < 1e-12


def test_the_cast_is_the_last_step():
    """A sum that 16 bits cannot hold survives until the residual brings it back."""
    x, w = jnp.full((1, 16), 256.0, jnp.float16), jnp.full((16, 1), 256.0, jnp.float16)
    residual = jnp.full((1, 1), -(2.0**20) + 3.0, jnp.float32)
    for implementation in ("reference", "pallas_interpreted"):
        assert matmul(x, w, residual=residual, implementation=implementation) == 3.0
        assert matmul(x, w, out_dtype="float32", implementation=implementation) == 2.0**20


def test_what_does_not_count_of_a_tile_is_not_written():
    """Interpreted, a kernel may write where a GPU's would harm another's rows."""

    def kernel(ref):
        store_tile(ref, jnp.full((16, 16), 7.0), Span(0, 16, None), Span(0, 16, None))
        store_tile(ref, jnp.ones((8, 8)), Span(4, 8, 9), Span(2, 8, 5))

    (out,) = triton_call(
        kernel,
        "store",
        grid=(1,),
        in_specs=[],
        out_specs=[pl.BlockSpec()],
        out_shape=[jax.ShapeDtypeStruct((16, 16), jnp.float32)],
        num_warps=4,
        num_stages=1,
        interpret=True,
    )()
    expected = np.full((16, 16), 7.0)
    expected[4:9, 2:5] = 1.0
    np.testing.assert_array_equal(out, expected)


FORWARD_AND_GRADIENT = {
    "matmul": (
        lambda x, w, b, r: matmul(x, w, bias=b, activation="gelu", residual=r, implementation="pallas"),
        ((100, 72), (72, 136), (136,), (100, 136)),
        ["matmul", "matmul_sum_gradient", "matmul_w_gradient", "matmul_x_gradient"],
    ),
    "matmul_alone": (
        lambda x, w: matmul(x, w, implementation="pallas"),
        ((1, 72), (72, 1)),
        ["matmul", "matmul_w_gradient", "matmul_x_gradient"],
    ),
    "swiglu": (
        lambda x, w, v: swiglu(x, w, v, implementation="pallas"),
        ((4096, 72), (72, 4096), (72, 4096)),
        ["swiglu", "swiglu_sums_gradient", "matmul_w_gradient", "matmul_x_gradient"],
    ),
    "qkv_rotary": (
        lambda x, w: qkv_rotary(
            x, w, jnp.zeros((2, 50), jnp.int32), num_heads=2, num_kv_heads=1, implementation="pallas"
        ),
        ((2, 50, 72), (72, 4 * 64)),
        ["qkv_rotary", "matmul_w_gradient", "matmul_x_gradient"],
    ),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", FORWARD_AND_GRADIENT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_lower(name, gpu, dtype):
    function, shapes, kernels = FORWARD_AND_GRADIENT[name]

    def both(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(out)

    text = lower_for(load_gpu(gpu), both, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).as_text()
    for kernel in kernels:
        assert f'name = "{kernel}"' in text


def test_auto_is_the_reference_until_measured():
    x, w = normal(0, (64, 64), "bfloat16"), normal(1, (64, 64), "bfloat16")
    with tracing_for(load_gpu("h100_sxm")):
        assert "pallas_call" not in str(jax.make_jaxpr(matmul)(x, w))
        assert "pallas_call" in str(jax.make_jaxpr(functools.partial(matmul, implementation="pallas"))(x, w))


def test_what_cannot_run_is_refused():
    x, w = normal(0, (4, 8), "bfloat16"), normal(1, (8, 4), "bfloat16")
    h100, b200 = load_gpu("h100_sxm"), load_gpu("b200")
    pallas = {"implementation": "pallas"}
    with pytest.raises(ValueError, match="matmul: implementation pallas cannot run on cpu: kernels are for GPUs"):
        matmul(x, w, **pallas)
    with tracing_for(h100), pytest.raises(ValueError, match="cast them to bfloat16"):
        matmul(x.astype(jnp.float32), w.astype(jnp.float32), **pallas)
    with tracing_for(b200), pytest.raises(ValueError, match="no block sizes are known for this kind of GPU"):
        matmul(x, w, **pallas)
    with tracing_for(h100), pytest.raises(ValueError, match="no block sizes are known for head_dim 512"):
        qkv_rotary(
            x[None], jnp.zeros((8, 1536), x.dtype), jnp.zeros((1, 4), int), num_heads=1, num_kv_heads=1, **pallas
        )
    with pytest.raises(ValueError, match="head_dim 48 is no power of two"):
        qkv_rotary(
            x[None],
            jnp.zeros((8, 144), x.dtype),
            jnp.zeros((1, 4), int),
            num_heads=1,
            num_kv_heads=1,
            implementation="pallas_interpreted",
        )
    with pytest.raises(ValueError, match="an array is empty"):
        matmul(x[:0], w, implementation="pallas_interpreted")
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match="float16 and float32, not float64"),
    ):
        matmul(x.astype("float64"), w.astype("float64"), implementation="pallas_interpreted")


def test_what_does_not_fit_is_refused():
    x, w = normal(0, (4, 8), "bfloat16"), normal(1, (8, 4), "bfloat16")
    with pytest.raises(ValueError, match=r"matmul: shapes \(4, 8\) and \(4, 8\) do not multiply"):
        matmul(x, x)
    with pytest.raises(ValueError, match="matmul: operands are bfloat16 and float32; cast"):
        matmul(x, w.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"matmul: bias has shape \(3,\); it must be \(4,\)"):
        matmul(x, w, bias=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"matmul: residual has shape \(4, 8\); it must be \(4, 4\)"):
        matmul(x, w, residual=x)
    with pytest.raises(ValueError, match="matmul: no activation 'tanh'; there are gelu, relu, silu"):
        matmul(x, w, activation="tanh")
    with pytest.raises(ValueError, match="matmul: no implementation 'cublas'"):
        matmul(x, w, implementation="cublas")
    with pytest.raises(ValueError, match=r"swiglu: w_up has shape \(8, 3\)"):
        swiglu(x, w, w[:, :3])
    with pytest.raises(ValueError, match="qkv_rotary: w_qkv has 4 columns"):
        qkv_rotary(x[None], w, jnp.zeros((1, 4), jnp.int32), num_heads=1, num_kv_heads=1)
    with pytest.raises(ValueError, match="qkv_rotary: x has shape"):
        qkv_rotary(x, w, jnp.zeros(4, jnp.int32), num_heads=1, num_kv_heads=1)


def compiled_cases():
    """Signatures, functions and arguments: sizes that blocks divide forward and backward, and some that they do not."""

    def bfloat16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def int32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def dense(x, w, bias, residual):
        return matmul(x, w, bias=bias, activation="gelu", residual=residual, implementation="pallas")

    def alone(x, w):
        return matmul(x, w, implementation="pallas")

    gated = functools.partial(swiglu, implementation="pallas")
    grouped = functools.partial(grouped_matmul, implementation="pallas")
    heads = functools.partial(qkv_rotary, num_heads=32, num_kv_heads=8, implementation="pallas")
    n, w, odd = 4096, bfloat16(4096, 4096), bfloat16(1000, 1000)
    return {
        "matmul gelu 4096": (with_gradient(dense), (w, w, bfloat16(n), w)),
        "swiglu 4096": (with_gradient(gated), (w, w, w)),
        "grouped_matmul 4096": (with_gradient(grouped), (w, bfloat16(8, n, n), int32(8))),
        "qkv_rotary 4096": (heads, (bfloat16(2, 2048, n), bfloat16(n, 48 * 128), int32(2, 2048))),
        "matmul 4096": (alone, (w, w)),
        "matmul 128": (alone, (bfloat16(128, 128), bfloat16(128, 128))),
        "matmul gelu 4094": (dense, (bfloat16(4094, 1000), odd, bfloat16(1000), bfloat16(4094, 1000))),
        "swiglu 4094": (gated, (bfloat16(4094, 1000), odd, odd)),
        "grouped_matmul 300": (grouped, (bfloat16(300, 1000), bfloat16(8, 1000, 1000), int32(8))),
        "qkv_rotary head_dim 64": (heads, (bfloat16(2, 99, 1000), bfloat16(1000, 48 * 64), int32(2, 99))),
        "qkv_rotary head_dim 256": (heads, (bfloat16(2, 99, 1000), bfloat16(1000, 48 * 256), int32(2, 99))),
    }


def with_gradient(function):
    """What goes in as floats is differentiated."""

    def both(*arguments):
        floats = [k for k, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*values):
            given = dict(zip(floats, values, strict=True))
            return function(*(given.get(k, x) for k, x in enumerate(arguments)))

        out, pull = jax.vjp(of_floats, *(arguments[k] for k in floats))
        return out, pull(out)

    return both


@pytest.fixture(scope="module")
def compiled():
    """Of each kernel, by GPU and signature."""
    return {
        name: {
            signature: {
                report.name: report
                for report in compile_for(load_gpu(name), function, *arguments)
                if report.tensor_core_instructions
            }
            for signature, (function, arguments) in compiled_cases().items()
        }
        for name in ("a100_80gb", "h100_sxm")
    }


@pytest.mark.cuda_compiler
def test_kernels_compile_to_the_golden_ones(compiled, golden_kernels):
    for gpu, reports in compiled.items():
        golden_kernels("bf16_matmul", gpu, reports)


@pytest.mark.cuda_compiler
def test_kernels_keep_their_sums_in_registers_and_use_tensor_cores(compiled):
    kernels = {"matmul", "swiglu", "grouped_matmul", "qkv_rotary"}
    kernels |= {"matmul_sum_gradient", "swiglu_sums_gradient", "matmul_x_gradient", "matmul_x_gradient__1"}
    kernels |= {"matmul_w_gradient", "grouped_matmul_x_gradient", "grouped_matmul_w_gradient"}
    for gpu, instruction in (("a100_80gb", "mma.sync"), ("h100_sxm", "wgmma")):
        reports = [(name, report) for found in compiled[gpu].values() for name, report in found.items()]
        assert {name for name, _ in reports} == kernels
        for name, report in reports:
            assert report.spill_bytes == 0, name
            assert all(used.startswith(instruction) for used in report.tensor_core_instructions), name
            assert report.shared_memory <= load_gpu(gpu).shared_memory_per_block
