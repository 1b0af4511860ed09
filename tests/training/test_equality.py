"""Every mesh, every number of microbatches and every way to save memory gives the losses of one device."""

import functools

import jax
import numpy as np
import pytest

from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from tests.tiny import LLAMA, random_fields, tiny_config

STEPS = 20
DROPOUT = "model.dropout=0.1"
TABLE = [
    # overrides, devices
    (("mesh.fsdp=8",), 8),
    (("mesh.data=8",), 8),
    (("mesh.data=2", "train.num_microbatches=2"), 8),
    (("train.num_microbatches=4", "memory.recompute=full"), 1),
    (("memory.recompute=every_k", "memory.recompute_every=2", "mesh.data=2"), 4),
    (("mesh.fsdp=4", "mesh.tensor=2", "memory.recompute=full"), 8),
    (("mesh.fsdp_prefetch=carry", "memory.recompute=full", "mesh.data=2", "train.num_microbatches=2"), 8),
    (("model.attention.implementation=blocked", "model.loss_chunk=384"), 1),
]


def losses(config, devices):
    program = build_program(config, jax.devices()[:devices])
    rows = rows_of_process(program.batch_shape)
    state = program.init()
    out = []
    for step in range(STEPS):
        # Rows of unequal weight, so that a mean of means would show.
        state, metrics = program.train_step(
            state, to_devices(random_fields(config, step % 2), rows, program.batch_shape)
        )
        out.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    sums = program.eval_step(state, to_devices(random_fields(config, 99), rows, program.batch_shape))
    return np.array(out), float(sums["loss"] / sums["weight"])


@functools.cache
def on_one_device(family):
    return losses(tiny_config(*family), 1)


@pytest.mark.parametrize(("overrides", "devices"), TABLE, ids=lambda value: str(value))
def test_gpt_with_dropout(overrides, devices):
    compare((DROPOUT,), overrides, devices)


def test_llama():
    compare(LLAMA, ("mesh.data=2", "train.num_microbatches=2"), 4)


def compare(family, overrides, devices):
    expected, expected_evaluation = on_one_device(family)
    found, evaluation = losses(tiny_config(*family, *overrides), devices)
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-5)
    # Adam divides by gradients near zero, so that rounding shows in later norms sooner than in losses.
    np.testing.assert_allclose(found[0, 1], expected[0, 1], rtol=1e-5)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-2)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
    assert expected[-1, 0] < expected[0, 0] - 0.02


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [((), 2), (("mesh.tensor=2", "mesh.context=2", "mesh.context_attention=ring", "mesh.tensor_overlap=ring"), 8)],
)
def test_bfloat16_stays_close_and_keeps_float32_masters(overrides, devices):
    expected, _ = on_one_device((DROPOUT,))
    config = tiny_config(DROPOUT, "precision.compute_dtype=bfloat16", *overrides)
    found, _ = losses(config, devices)
    assert (found != expected).any()
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=5e-3)
    program = build_program(config, jax.devices()[:devices])
    kept = jax.tree.leaves((program.state_shape.params, program.state_shape.optimizer_state))
    assert {str(leaf.dtype) for leaf in kept} == {"float32", "int32"}
