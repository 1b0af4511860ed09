"""Checkpoints: onto other meshes, damaged, of another model."""

import dataclasses

import jax
import numpy as np
import pytest

from dseekjax.checkpoint.config import CheckpointConfig
from dseekjax.checkpoint.fingerprint import checksums
from dseekjax.checkpoint.hook import CheckpointHook, InitializeHook
from dseekjax.checkpoint.store import CheckpointStore, latest_step
from dseekjax.errors import UserError
from dseekjax.training.hooks import Context
from dseekjax.training.program import build_program
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def program():
    return build_program(tiny_config(), jax.devices()[:4])


@pytest.fixture(scope="module")
def state(program):
    return program.init()


@pytest.fixture
def saved(tmp_path, state):
    """A directory with checkpoints of steps 1, 2, 3."""
    directory = tmp_path / "run" / "checkpoints"
    store = CheckpointStore(directory, CheckpointConfig(keep_last=3))
    for step in (1, 2, 3):
        store.save(step, dataclasses.replace(state, step=state.step + step), {"batch": step, "identity": ["x"]}, {})
    store.wait()
    store.close()
    return directory


def hook(directory, program, tell=lambda sentence: None):
    return CheckpointHook(directory, CheckpointConfig(keep_last=3), program.state_shape, {}, tell)


def start(hook, identity=("x",)):
    try:
        return hook.on_start(Context(0, 20, {"batch": 0, "identity": list(identity)}))
    finally:
        hook.close()


def damage(step_directory):
    """Flips one byte in the middle of the largest file."""
    path = max((p for p in (step_directory / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(("overrides", "devices"), [((), 2), (("mesh.data=2",), 8)])
def test_restores_onto_another_mesh_bit_by_bit(saved, state, overrides, devices):
    other = build_program(tiny_config(*overrides), jax.devices()[:devices])
    context = start(hook(saved, other))
    assert (context.step, context.data["batch"]) == (3, 3)
    jax.tree.map(np.testing.assert_array_equal, context.state.params, state.params)
    jax.tree.map(
        lambda array, shape: shape.sharding == array.sharding or pytest.fail("elsewhere"),
        context.state,
        other.state_shape,
    )


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(saved, program):
    damage(saved / "3")
    told = []
    context = start(hook(saved, program, told.append))
    assert context.step == 2
    assert "The checkpoint of step 3 is damaged" in told[0]
    assert latest_step(saved) == 2
    assert (saved.with_name("checkpoints-damaged") / "3").is_dir()


def test_missing_files_count_as_damage(saved, program):
    (saved / "3" / "state" / "manifest.ocdbt").unlink()
    for path in (saved / "2" / "params").rglob("_METADATA"):
        path.write_text("{")
    told = []
    assert start(hook(saved, program, told.append)).step == 1
    assert len(told) == 3


def test_when_all_are_damaged_training_starts_anew(saved, program):
    for step in (1, 2, 3):
        damage(saved / str(step))
    assert start(hook(saved, program)) is None


def test_another_model_is_refused_by_its_first_array(saved, capfd):
    other = build_program(tiny_config("model.feed_forward.hidden_dim=80"), jax.devices()[:4])
    with pytest.raises(UserError, match=r"runs.0.feed_forward.down.kernel is \(4, 64, 32\) there.*needs \(4, 80, 32\)"):
        start(hook(saved, other))
    assert latest_step(saved) == 3
    output = "".join(capfd.readouterr())
    assert output.count("\n") < 5


def test_other_data_is_refused(saved, program):
    with pytest.raises(UserError, match=r"data.sources: the text or its tokens changed"):
        start(hook(saved, program), identity=["y"])


def test_old_checkpoints_go_and_every_kth_stays(tmp_path, state):
    store = CheckpointStore(tmp_path / "c", CheckpointConfig(keep_last=2, keep_every=3))
    for step in range(1, 8):
        store.save(step, state, {}, {})
    store.wait()
    assert store.steps() == [3, 6, 7]
    store.close()


def test_a_new_run_starts_from_the_parameters_of_another(saved, state):
    other = build_program(tiny_config("run.seed=5"), jax.devices()[:2])
    initialize = InitializeHook(saved, other.init, other.state_shape, lambda sentence: None)
    context = initialize.on_start(Context(0, 20, {}))
    assert (context.step, int(context.state.step)) == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, context.state.params, state.params)
    assert (np.asarray(context.state.rng) != state.rng).any()
    with pytest.raises(UserError, match=r"no run with checkpoints there"):
        InitializeHook(saved / "none", other.init, other.state_shape, print).on_start(Context(0, 20, {}))


def test_checksums_see_every_bit_and_place():
    array = np.random.default_rng(0).normal(size=64).astype(np.float32)
    original = checksums({"a": array})
    for i in (0, 31, 63):
        flipped = array.copy()
        flipped.view(np.uint32)[i] ^= 1 << (i % 32)
        assert checksums({"a": flipped}) != original
    swapped = array.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    assert checksums({"a": swapped}) != original
