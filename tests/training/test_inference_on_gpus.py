"""Reading and continuing texts, compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
import pytest

from dseekjax.training.program import build_program
from pallas_kernels.compile_only import compile_only_devices
from pallas_kernels.gpus import load_gpu
from tests.tiny import LLAMA, tiny_config

pytestmark = pytest.mark.cuda_compiler

ROWS, LENGTH, SLOTS = 8, 64, 128


@pytest.fixture(scope="module")
def devices():
    return compile_only_devices(load_gpu("h100_sxm").target_config, hosts=1, gpus_per_host=8)


def test_texts_are_continued_with_two_sums_to_a_layer_and_the_cache_in_place(devices):
    heads = ("model.attention.num_heads=8", "model.attention.num_kv_heads=8", "model.attention.head_dim=64")
    config = tiny_config(*LLAMA, *heads, "precision.compute_dtype=bfloat16", "mesh.tensor=8", "mesh.fsdp=1")
    program = build_program(config, devices)
    inference = program.inference()
    weights = jax.eval_shape(inference.prepare, program.state_shape.params)
    texts = (jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.int32))
    read = inference.prefill.lower(weights, *texts, SLOTS)
    assert "attention_forward" in read.compile().as_text()

    cache = jax.eval_shape(lambda *arguments: inference.prefill(*arguments, SLOTS), weights, *texts)[1]
    compiled = inference.decode.lower(weights, cache, jax.ShapeDtypeStruct((ROWS,), jnp.int32)).compile()
    text = compiled.as_text()
    # Of attention and of the feed-forward part; and of the embedding, whose rows are split.
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 2 * config.model.num_layers + 1
    # That of the logits.
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == 1
    of_a_device = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers)) // 8
    assert compiled.memory_analysis().alias_size_in_bytes >= of_a_device
