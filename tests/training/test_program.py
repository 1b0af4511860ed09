"""What a Program promises before and while it runs."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import plain_step
import pytest
from jax.sharding import PartitionSpec
from plain_layout import plain_parameters

from dseekjax.data.records import Concatenated
from dseekjax.data.tokens import Tokens
from dseekjax.errors import UserError
from dseekjax.parallel.sharding import PARAMETER_AXES, bytes_per_device
from dseekjax.training.evaluation import build_evaluation
from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import build_program
from tests.conftest import REPOSITORY
from tests.tiny import LLAMA, random_fields, tiny_config


def lower(program):
    return program.train_step.trace(program.state_shape, program.batch_shape).lower(lowering_platforms=("cuda", "cpu"))


def test_lowers_on_eight_virtual_devices():
    text = lower(build_program(tiny_config("mesh.data=2"), jax.devices())).as_text()
    assert '"data"=2, "fsdp"=4' in text


def test_builds_and_lowers_for_64_devices_that_are_not_there():
    """Builds in a process in which JAX can start no backend, so that nothing can be allocated on any device."""
    code = """
import jax
jax.config.update("jax_platforms", "none_such")
from dseekjax.training.program import build_program
from tests.tiny import tiny_config
config = tiny_config("mesh.data=2", "train.global_batch_size=64", "model.embed_dim=64", "model.attention.head_dim=16")
program = build_program(config, 64)

jax.config.update("jax_platforms", "cpu")  # lowering asks for one, but not for 64
lowered = program.train_step.trace(program.state_shape, program.batch_shape).lower(lowering_platforms=("cuda",))
assert '"data"=2, "fsdp"=32' in lowered.as_text()
assert jax.device_count() == 1 and not jax.live_arrays()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_175b_program_lowers_for_64_devices():
    from dseekjax.config import load_config, recipe_path

    program = build_program(load_config(recipe_path("gpt3_175b")), 64)
    # Float32 parameters and two moments, over 64 devices; biases of heads and
    # feed-forward layers, which are copied to all of them, are another 0.3 %.
    assert bytes_per_device(program.state_shape) == pytest.approx(174_604_836_864 * 12 / 64, rel=4e-3)
    assert "fsdp" in lower(program).as_text()


def test_state_is_sharded_over_fsdp_and_donated():
    program = build_program(tiny_config(), jax.devices())
    kernel = program.state_shape.params["runs"][0]["feed_forward"]["up"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, PARAMETER_AXES, "tensor")
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
    groups = r"replica_groups=(\[2,4\]<=\[8\]|mesh\[.*\] \{'fsdp'\})"
    assert all(re.search(groups, line) for line in in_loops), in_loops
    assert sum("jit(train)/shard_map/psum" in line for line in collectives) == 1


@pytest.mark.parametrize("family", [(), LLAMA])
def test_on_a_mesh_a_document_is_not_changed_by_its_neighbours(family):
    """From records as the data room cuts them, through a sharded evaluation step."""
    config = tiny_config(*family, "mesh.data=2")
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 15, 60)
    tokens, offsets = rng.integers(0, 96, lengths.sum()).astype(np.uint16), np.cumsum([0, *lengths])
    program = build_program(config, jax.devices())
    rows = rows_of_process(program.batch_shape)
    state = program.init()

    def loss_of_odd_documents(tokens):
        records = Concatenated(Tokens((tokens,), len(tokens)), offsets[1:], 0, len(tokens), 24, "")
        fields = records.read(np.arange(16))
        document = np.searchsorted(offsets, np.arange(16)[:, None] * 24 + np.arange(24), side="right") - 1
        fields["loss_weights"] = fields["loss_weights"] * (document % 2)
        sums = program.eval_step(state, to_devices(fields, rows, program.batch_shape))
        return float(sums["loss"]), float(sums["weight"])

    even = np.repeat(np.arange(60) % 2 == 0, lengths)
    before, weight = loss_of_odd_documents(tokens)
    after, _ = loss_of_odd_documents(np.where(even, 95 - tokens, tokens))
    assert weight > 100
    assert before == after
    assert loss_of_odd_documents(np.where(~even, 95 - tokens, tokens))[0] != before


def test_steps_equal_those_of_plain_jax():
    config = tiny_config(
        "model.attention.num_kv_heads=4", "optimizer.schedule.warmup_steps=3", "optimizer.learning_rate=0.002"
    )
    program = build_program(config, jax.devices()[:1])
    rows = rows_of_process(program.batch_shape)
    state = program.init()
    params = jax.tree.map(jnp.copy, plain_parameters(state.params))
    moments = jax.tree.map(jnp.zeros_like, (params, params))
    for step in range(10):
        fields = random_fields(config, step % 2)
        state, metrics = program.train_step(state, to_devices(fields, rows, program.batch_shape))
        params, moments, loss = plain_step.train_step(params, moments, step, fields, 0.002, 3, config.train.steps)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    for ours, plain in zip(jax.tree.leaves(plain_parameters(state.params)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-4)


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


def test_a_batch_of_which_nothing_counts_changes_nothing_and_is_not_bad():
    config = tiny_config("train.num_microbatches=2")
    program = build_program(config, jax.devices()[:1])
    rows = rows_of_process(program.batch_shape)
    fields = random_fields(config)
    state, _ = program.train_step(program.init(), to_devices(fields, rows, program.batch_shape))
    before = jax.device_get((state.params, state.optimizer_state))
    nothing = {**fields, "loss_weights": np.zeros_like(fields["loss_weights"])}
    state, metrics = program.train_step(state, to_devices(nothing, rows, program.batch_shape))
    after = jax.device_get((state.params, state.optimizer_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert {name: float(metrics[name]) for name in ("loss", "grad_norm", "target_tokens", "bad_steps")} == {
        **{"loss": 0.0, "grad_norm": 0.0, "target_tokens": 0.0, "bad_steps": 0.0}
    }
    assert int(state.step) == 2
    sums = program.eval_step(state, to_devices(nothing, rows, program.batch_shape))
    assert (float(sums["loss"]), float(sums["weight"])) == (0.0, 0.0)
    evaluate = build_evaluation(program, [nothing], bytes_per_token=1.0, max_batches=None)
    assert evaluate(state) == {"eval_loss": None, "eval_bits_per_byte": None}
    # Half a batch, which is one of the two microbatches: the mean is over what counts.
    half = {**fields, "loss_weights": fields["loss_weights"] * (np.arange(16) % 2)[:, None].astype(np.float32)}
    evaluate_half, whole = (
        build_evaluation(program, [some], bytes_per_token=1.0, max_batches=None)(state)["eval_loss"]
        for some in (half, fields)
    )
    _, metrics = program.train_step(state, to_devices(half, rows, program.batch_shape))
    assert float(metrics["loss"]) == pytest.approx(evaluate_half, rel=1e-5)
    assert evaluate_half != pytest.approx(whole, rel=1e-5)


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"train.global_batch_size 16 does not divide into 8 replicas x 4 microbatches"):
        build_program(tiny_config("train.num_microbatches=4"), jax.devices())
    with pytest.raises(UserError, match=r"embed' of 36 is not divisible by the 8 parts"):
        build_program(tiny_config("model.embed_dim=36"), jax.devices())
