"""Texts continued with a cache, next to the model without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dseekjax.errors import UserError
from dseekjax.models.batch import Batch
from dseekjax.models.decoder import Decoder
from dseekjax.models.operations import local_operations
from dseekjax.training.program import build_program
from tests.tiny import LLAMA, tiny_config

LENGTHS = np.array([5, 3, 7, 1, 2, 6, 4, 7])
STEPS = 5


def logits_of_everything(config, params):
    """A function from tokens to logits at every position: the whole model on one device, nothing kept."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, local_operations(), nnx.Rngs(0))))
    params = jax.tree.map(jnp.asarray, jax.device_get(params))

    @jax.jit
    def run(tokens):
        shape = tokens.shape
        batch = Batch(
            tokens,
            jnp.zeros_like(tokens),
            jnp.zeros(shape),
            jnp.ones_like(tokens),
            jnp.broadcast_to(jnp.arange(shape[1]), shape),
        )
        model = nnx.merge(graphdef, params)
        x = model.embed(batch)
        block, stacked = nnx.split(model.runs[0])
        for layer in range(config.model.num_layers):
            x, _, _ = nnx.merge(block, jax.tree.map(lambda p, layer=layer: p[layer], stacked)).block(x, batch)
        return model.unembed(x)

    return run


@pytest.mark.parametrize(
    ("overrides", "num_devices"),
    [
        ((), 1),
        (LLAMA, 1),
        ((*LLAMA, "model.biases=qkv", "model.attention.num_kv_heads=1"), 1),
        ((*LLAMA, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), 8),
        (("mesh.fsdp=4", "mesh.tensor=2", "mesh.tensor_overlap=ring", "memory.recompute=full"), 8),
    ],
)
def test_a_cache_changes_nothing(overrides, num_devices):
    config = tiny_config(*overrides)
    program = build_program(config, jax.devices()[:num_devices])
    params = program.init().params
    inference = program.inference()
    weights = inference.prepare(params)
    rng = np.random.default_rng(0)
    tokens = np.zeros((len(LENGTHS), LENGTHS.max()), np.int32)
    whole = np.zeros((len(LENGTHS), LENGTHS.max() + STEPS), np.int32)
    for row, length in enumerate(LENGTHS):
        whole[row, :length] = tokens[row, -length:] = rng.integers(0, config.model.vocabulary_size, length)

    found, chosen = [], []
    logits, cache = inference.prefill(weights, tokens, LENGTHS, 16)
    for step in range(STEPS):
        found.append(np.asarray(logits))
        chosen.append(np.asarray(logits).argmax(-1).astype(np.int32))
        whole[np.arange(len(LENGTHS)), LENGTHS + step] = chosen[-1]
        logits, cache = inference.decode(weights, cache, chosen[-1])
    expected = np.asarray(logits_of_everything(config, params)(jnp.asarray(whole)))
    for step in range(STEPS):
        there = expected[np.arange(len(LENGTHS)), LENGTHS + step - 1]
        np.testing.assert_allclose(found[step], there, atol=3e-6 * np.abs(expected).max())
        # Greedy decoding is the same token by token, too.
        np.testing.assert_array_equal(chosen[step], there.argmax(-1))


def test_weights_are_in_the_compute_dtype_and_rest_where_parameters_do():
    config = tiny_config("precision.compute_dtype=bfloat16", "mesh.fsdp=4", "mesh.tensor=2")
    program = build_program(config, jax.devices())
    params = program.init().params
    inference = program.inference()
    weights = inference.prepare(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(weights)} == {"bfloat16"}

    def on_each_device(tree):
        return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree))

    assert on_each_device(weights) == on_each_device(params)
    logits, cache = inference.prefill(weights, np.ones((4, 8), np.int32), np.full(4, 8), 16)
    assert logits.dtype == jnp.float32
    assert cache.layers[0].keys.dtype == jnp.bfloat16
    # Batches lie over fsdp, heads over tensor.
    assert cache.layers[0].keys.addressable_shards[0].data.shape == (1, 1, 16, 8)


def test_decoding_takes_the_memory_of_the_cache():
    program = build_program(tiny_config(), jax.devices()[:1])
    inference = program.inference()
    weights = inference.prepare(program.init().params)
    _, cache = inference.prefill(weights, np.ones((2, 4), np.int32), np.full(2, 4), 64)
    memory = inference.decode.lower(weights, cache, jnp.zeros(2, jnp.int32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))


def test_meshes_that_split_sequences_are_refused():
    program = build_program(tiny_config("mesh.context=2", "mesh.fsdp=4"), jax.devices())
    with pytest.raises(UserError, match=r"mesh.context 2 splits sequences.*set mesh.context=1"):
        program.inference()
