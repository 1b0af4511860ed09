"""Kernels where JAX has 64-bit numbers."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bf16_matmul, fp8_matmul, quantize
from pallas_kernels.attention import attention
from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.lowering import lower_for


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def attend(query, key, value, ids):
    def loss(*arrays):
        out = attention(*arrays, query_segment_ids=ids, key_segment_ids=ids, window=99, implementation="pallas")
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(query, key, value)


def multiply_groups(x, w, sizes):
    return jax.grad(lambda x: bf16_matmul.grouped_matmul(x, w, sizes, implementation="pallas").sum())(x)


def heads(x, w, positions):
    return bf16_matmul.qkv_rotary(x, w, positions, num_heads=2, num_kv_heads=1, implementation="pallas")


def dense_of_8_bits(x, w):
    return jax.grad(lambda x: fp8_matmul.fp8_dense(x, w, implementation="pallas").astype(jnp.float32).sum())(x)


HEADS, MATRIX, FLAT = array(1, 100, 4, 64), array(512, 512), array(5000, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (attend, (HEADS, HEADS, HEADS, array(1, 100, dtype=jnp.int64))),
        (lambda x, w: bf16_matmul.matmul(x, w, implementation="pallas"), (MATRIX, MATRIX)),
        (dense_of_8_bits, (array(99, 512), MATRIX)),
        (multiply_groups, (MATRIX, array(8, 512, 512), array(8, dtype=jnp.int64))),
        (heads, (array(2, 99, 512), array(512, 256), array(2, 99, dtype=jnp.int64))),
        (lambda x: quantize.quantize_int8(x, implementation="pallas"), (FLAT,)),
        (lambda x, r: quantize.sparsify(x, r, 1.0, budget=100, implementation="pallas"), (FLAT, FLAT)),
        (lambda x: quantize.prune_two_of_four(x, implementation="pallas"), (array(500, 128),)),
    ],
)
def test_kernels_lower(function, arguments):
    with jax.enable_x64(True):
        assert "triton" in lower_for(load_gpu("h100_sxm"), function, *arguments).as_text()
