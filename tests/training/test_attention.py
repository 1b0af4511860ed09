"""Training with the kernel of attention, interpreted."""

import jax
import pytest

from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from dseekjax.training.summary import summarise
from tests.tiny import random_fields, tiny_config


def losses(implementation, *overrides):
    config = tiny_config(f"model.attention.implementation={implementation}", *overrides)
    program = build_program(config, jax.devices()[:1])
    state, found = program.init(), []
    for step in range(3):
        batch = to_devices(random_fields(config, step), rows_of_process(program.batch_shape), program.batch_shape)
        state, metrics = program.train_step(state, batch)
        found.append(float(metrics["loss"]))
    assert f"{implementation} attention" in summarise(program)
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_the_interpreted_kernel_trains_to_the_losses_of_reference(dtype, tolerance):
    overrides = ("model.num_layers=2", "train.global_batch_size=2", f"precision.compute_dtype={dtype}")
    found = losses("pallas_interpreted", *overrides)
    assert found == pytest.approx(losses("reference", *overrides), rel=tolerance)
    assert found[0] != found[-1]


def test_the_summary_says_how_split_sequences_attend():
    config = tiny_config("mesh.context=2", "mesh.context_attention=ring", "model.attention.implementation=blocked")
    assert "ring attention" in summarise(build_program(config, jax.devices()[:2]))
