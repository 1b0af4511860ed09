"""Kernels of gradient compression, lowered and compiled for GPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpus import load_gpu
from pallas_kernels.quantize import (
    Int8Blocks,
    Signs,
    Sparse,
    TwoOfFour,
    compress_signs,
    dequantize_int8,
    prune_two_of_four,
    quantize_int8,
    sparsify,
    unpack_signs,
    unpack_sparse,
    unpack_two_of_four,
)
from pallas_kernels.testing.compiling import compile_for
from pallas_kernels.testing.lowering import lower_for

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
DTYPES = [jnp.float32, jnp.bfloat16]


def shaped(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def cases(dtype, length, rows):
    """What runs each kernel, by the kernel's name: a function and its arguments."""
    flat, residual = shaped(dtype, length), shaped(jnp.float32, length)
    key = jax.eval_shape(jax.random.key, 0)
    return {
        "quantize_int8": (quantize_int8, flat),
        "quantize_int8_stochastic": (lambda x, key: quantize_int8(x, key=key), flat, key),
        "compress_signs": (compress_signs, flat, residual),
        "sparsify": (functools.partial(sparsify, budget=length // 20), flat, residual, shaped(jnp.float32)),
        "prune_two_of_four": (prune_two_of_four, shaped(dtype, rows, length // rows)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm", "h200"])
def test_every_kernel_lowers_and_is_what_auto_picks(gpu, dtype):
    for length in (1 << 20, 5001):
        for name, (function, *arguments) in cases(dtype, length, rows=16).items():
            assert f'name = "{name}"' in lower_for(load_gpu(gpu), function, *arguments).as_text()


@pytest.mark.parametrize("block_size", [16, 4096])
@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm", "h200"])
def test_the_smallest_and_largest_blocks_lower(gpu, block_size):
    x = shaped(jnp.float32, 5001)
    text = lower_for(load_gpu(gpu), functools.partial(quantize_int8, block_size=block_size), x).as_text()
    assert 'name = "quantize_int8"' in text
    text = lower_for(load_gpu(gpu), functools.partial(compress_signs, block_size=block_size), x, x).as_text()
    assert 'name = "compress_signs"' in text


def test_gpus_that_kernels_were_not_compiled_for_are_left_to_xla():
    for function, *arguments in cases(jnp.float32, 5001, rows=3).values():
        assert "triton" not in lower_for(load_gpu("b200"), function, *arguments).as_text()


def test_blocks_of_other_sizes_are_left_to_xla():
    text = lower_for(load_gpu("h100_sxm"), functools.partial(quantize_int8, block_size=100), shaped(jnp.float32, 500))
    assert "triton" not in text.as_text()


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm"])
def test_what_the_compiler_makes_of_kernels_is_golden_and_spills_nothing(gpu, golden_kernels):
    found = {}
    for dtype in DTYPES:
        for name, (function, *arguments) in cases(dtype, 1 << 20, rows=1 << 10).items():
            reports = {report.name: report for report in compile_for(load_gpu(gpu), function, *arguments)}
            report = reports[name]
            assert report.spill_bytes == 0
            signature = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arguments)
            found.setdefault(signature, {})[name] = report
    golden_kernels("quantize", gpu, found)


@pytest.mark.cuda_compiler
def test_xla_makes_one_kernel_of_each_inverse():
    """That is why they have none of our own; the sparse one has zeros to write first."""
    length = 1 << 20
    words, scales = shaped(jnp.uint32, length // 32), shaped(jnp.float32, length // 1024)
    halves, places = shaped(jnp.uint32, 1024, 128), shaped(jnp.uint8, 1024, 128)
    integers = Int8Blocks(shaped(jnp.int8, length), shaped(jnp.float32, length // 256), 256)
    some = Sparse(shaped(jnp.int32, length // 20), shaped(jnp.float32, length // 20), length)
    for kernels, function, packed in (
        (1, dequantize_int8, integers),
        (1, unpack_signs, Signs(words, scales, length, 1024)),
        (2, unpack_sparse, some),
        (1, unpack_two_of_four, TwoOfFour(halves, places, shaped(jnp.float32, 128, 128), 1024, 1024)),
    ):
        leaves, structure = jax.tree.flatten(packed)
        reports = compile_for(
            load_gpu("h100_sxm"), lambda *x, f=function, s=structure: f(jax.tree.unflatten(s, x)), *leaves
        )
        assert len(reports) == kernels, [report.name for report in reports]
