"""How likely each target is: on every mesh what a page of plain JAX says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_step
import pytest
from plain_layout import plain_parameters

from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from tests.tiny import random_fields, tiny_config

MODEL = ("model.attention.num_kv_heads=4", "model.num_layers=2", "train.global_batch_size=8")
# Far from uniform, so that a target that is looked up in the wrong place shows.
SCALE = "model.initializer_scale=0.3"


@functools.cache
def random_params():
    return jax.tree.map(np.asarray, build_program(tiny_config(*MODEL, SCALE), jax.devices()[:1]).init().params)


def fields():
    found = random_fields(tiny_config(*MODEL))
    # The most likely token for every other position, so that greediness is not the rare case.
    found["targets"] = found["targets"].copy()
    found["targets"][:, ::2] = np.asarray(plain_logits(jnp.float32)).argmax(-1)[:, ::2]
    return found


@functools.cache
def plain_logits(dtype):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), plain_parameters(random_params()))
    return np.asarray(plain_step.forward(params, random_fields(tiny_config(*MODEL))), np.float64)


def scores(*overrides, devices=8):
    program = build_program(tiny_config(*MODEL, SCALE, *overrides), jax.devices()[:devices])
    params = jax.tree.map(
        lambda leaf, at: jax.device_put(leaf, at.sharding), random_params(), program.state_shape.params
    )
    batch = to_devices(fields(), rows_of_process(program.batch_shape), program.batch_shape)
    found = program.score_step(params, batch)
    assert found.log_probabilities.dtype == jnp.float32
    return np.asarray(found.log_probabilities), np.asarray(found.are_greedy)


def expected(dtype=jnp.float32):
    logits, targets = plain_logits(dtype), fields()["targets"][..., None]
    labels = np.take_along_axis(logits, targets, -1)[..., 0]
    return labels - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) - logits.max(-1)


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (1, ()),
        (8, ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")),
        (8, ("mesh.fsdp=2", "mesh.context=4", "mesh.context_attention=all_gather")),
        (4, ("mesh.data=2", "mesh.context=2", "mesh.context_attention=all_to_all")),
        (8, ("mesh.tensor=2", "mesh.context=2", "mesh.fsdp=2", "mesh.context_attention=ring")),
        (2, ("mesh.tensor=2", "mesh.tensor_overlap=ring", "mesh.rules={vocab: []}")),
    ],
)
def test_scores_are_those_of_plain_jax_on_every_mesh(devices, overrides):
    log_probabilities, are_greedy = scores(*overrides, devices=devices)
    np.testing.assert_allclose(log_probabilities, expected(), atol=2e-4)
    greedy = plain_logits(jnp.float32).argmax(-1) == fields()["targets"]
    assert greedy.mean() >= 0.5
    np.testing.assert_array_equal(are_greedy, greedy)


def test_bfloat16_scores_to_its_own_precision():
    log_probabilities, _ = scores("precision.compute_dtype=bfloat16", "mesh.data=2", "mesh.tensor=2", devices=4)
    reference, spread = expected(), expected().std()
    assert np.abs(log_probabilities - reference).mean() < 0.02 * spread
    # And it is bfloat16, as far off as the page is in it.
    assert np.abs(log_probabilities - reference).mean() > 0.3 * np.abs(expected(jnp.bfloat16) - reference).mean()


def test_logits_exist_a_chunk_at_a_time():
    """The largest array of the compiled step is that of a chunk's logits, not of all."""
    program = build_program(
        tiny_config("model.vocabulary_size=4096", "model.loss_chunk=32", "model.num_layers=1"), jax.devices()[:1]
    )
    lowered = program.score_step.lower(program.state_shape.params, program.batch_shape)
    text = lowered.as_text()
    assert "tensor<32x4096xf32>" in text
    assert "tensor<384x4096xf32>" not in text
    assert "tensor<16x24x4096xf32>" not in text
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * 384 * 4096
