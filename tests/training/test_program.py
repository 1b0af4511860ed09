"""What a Program promises before and while it runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dseekjax.errors import UserError
from dseekjax.parallel.sharding import bytes_per_device
from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from tests.tiny import random_fields, tiny_config


def lower(program):
    return program.train_step.trace(program.state_shape, program.batch_shape).lower(lowering_platforms=("cuda", "cpu"))


@pytest.mark.parametrize("devices", [8, 64])
def test_lowers_for_any_number_of_devices_without_allocating(devices):
    config = tiny_config(
        "mesh.data=2", "train.global_batch_size=64", "model.embed_dim=64", "model.attention.head_dim=16"
    )
    before = len(jax.live_arrays())
    program = build_program(config, jax.devices() if devices == 8 else devices)
    text = lower(program).as_text()
    assert len(jax.live_arrays()) == before
    assert re.search(rf'"data"=2, "fsdp"={devices // 2}', text)


def test_a_175b_program_lowers_for_64_devices():
    from dseekjax.config import load_config, recipe_path

    program = build_program(load_config(recipe_path("gpt3_175b")), 64)
    # Float32 parameters and two moments, over 64 devices; biases of heads and
    # feed-forward layers, which are copied to all of them, are another 0.3 %.
    assert bytes_per_device(program.state_shape) == pytest.approx(174_604_259_328 * 12 / 64, rel=4e-3)
    assert "fsdp" in lower(program).as_text()


def test_state_is_sharded_over_fsdp_and_donated():
    program = build_program(tiny_config(), jax.devices())
    kernel = program.state_shape.params["runs"][0]["feed_forward"]["up"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, "fsdp", None)
    moment = program.state_shape.optimizer_state[0].mu["runs"][0]["feed_forward"]["up"]["kernel"]
    assert moment.sharding == kernel.sharding
    compiled = program.train_step.lower(program.state_shape, program.batch_shape).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_per_device(program.state_shape)


def test_gradients_are_exchanged_once_and_parameters_gathered():
    config = tiny_config("mesh.data=2", "mesh.fsdp=4", "train.num_microbatches=2")
    program = build_program(config, jax.devices())
    text = program.train_step.lower(program.state_shape, program.batch_shape).compile().as_text()
    pattern = r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    collectives = [line for line in text.splitlines() if re.search(pattern, line)]
    in_loops = [line for line in collectives if "while" in line.partition("op_name")[2]]
    assert any("all-gather" in line for line in in_loops)
    # Groups of neighbours are the fsdp axis: inside the loops over microbatches and layers nothing crosses data.
    assert all("replica_groups=[2,4]<=[8]," in line for line in in_loops)
    assert sum("shard_map/psum" in line for line in collectives) == 1


def test_init_is_the_same_on_every_mesh():
    one = build_program(tiny_config(), jax.devices()[:1]).init()
    eight = build_program(tiny_config("mesh.data=2"), jax.devices()).init()
    # Compiled for other shards, float32 may round otherwise in the last bit.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one.params, eight.params)
    other = build_program(tiny_config("run.seed=1"), jax.devices()[:1]).init()
    assert (
        np.asarray(one.params["token_embedding"]["embedding"]) != other.params["token_embedding"]["embedding"]
    ).all()


def test_a_bad_step_changes_nothing_and_is_counted():
    program = build_program(tiny_config(), jax.devices()[:1])
    rows = rows_of_process(program.batch_shape)
    good = to_devices(random_fields(program.config), rows, program.batch_shape)
    bad = random_fields(program.config)
    bad["tokens"] = bad["tokens"] + 10_000  # beyond the vocabulary: the lookup gives NaN
    bad = to_devices(bad, rows, program.batch_shape)

    state, metrics = program.train_step(program.init(), good)
    assert metrics["bad_steps"] == 0
    kept = jax.tree.map(jnp.copy, (state.params, state.optimizer_state))
    for count in (1, 2):
        state, metrics = program.train_step(state, bad)
        assert not np.isfinite(metrics["loss"])
        assert metrics["bad_steps"] == state.bad_steps == count
    jax.tree.map(np.testing.assert_array_equal, kept, (state.params, state.optimizer_state))
    assert state.step == 3
    state, metrics = program.train_step(state, good)
    assert metrics["bad_steps"] == state.bad_steps == 0


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"train.global_batch_size 16 does not divide into 8 replicas x 4 microbatches"):
        build_program(tiny_config("train.num_microbatches=4"), jax.devices())
    with pytest.raises(UserError, match=r"embed' of 36 is not divisible by the 8 parts"):
        build_program(tiny_config("model.embed_dim=36"), jax.devices())
