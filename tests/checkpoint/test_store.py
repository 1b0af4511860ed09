"""Checkpoints: onto other meshes, damaged, of another model."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dseekjax.checkpoint.config import CheckpointConfig
from dseekjax.checkpoint.fingerprint import checksums, placed_checksums
from dseekjax.checkpoint.hook import CheckpointHook, InitializeHook
from dseekjax.checkpoint.layout import split
from dseekjax.checkpoint.parameters import read_parameters, write_parameters
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


def damage(step_directory, item="params"):
    """Flips one byte in the middle of the largest file."""
    path = max((p for p in (step_directory / item).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
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
    assert latest_step(saved) == 1


def edit(step_directory, change):
    path = step_directory / "meta" / "metadata"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: edit(folder, lambda meta: meta["data"].update(batch=2)),
        lambda folder: edit(folder, lambda meta: meta["data"].update(identity=["y"])),
        lambda folder: edit(folder, lambda meta: meta.update({"dat`": meta.pop("data")})),
        lambda folder: edit(folder, lambda meta: meta.update(data=None)),
        lambda folder: edit(folder, lambda meta: meta.pop("config")),
        lambda folder: edit(folder, lambda meta: meta["config"].update(train={})),
        lambda folder: edit(folder, lambda meta: meta["checksums"].pop("params")),
        lambda folder: edit(folder, lambda meta: meta.pop("checksums")),
        lambda folder: (folder / "meta" / "metadata").write_text("[1]"),
        lambda folder: (folder / "meta" / "metadata").write_text('{"data": '),
        lambda folder: folder.rename(folder.with_name("4")),
    ],
)
def test_what_is_kept_beside_the_arrays_is_checked_as_well(saved, program, break_it):
    break_it(saved / "3")
    with pytest.raises(UserError, match=r"its checkpoint of step [34] is damaged"):
        read_parameters(saved, program.state_shape)
    told = []
    assert start(hook(saved, program, told.append)).step == 2
    assert re.match(r"The checkpoint of step [34] is damaged", told[0])


def test_a_flipped_bit_of_the_state_is_damage_too(saved, program):
    damage(saved / "3", "state")
    assert start(hook(saved, program)).step == 2


def test_when_all_are_damaged_nothing_is_moved_or_begun_anew(saved, program):
    for step in (1, 2, 3):
        damage(saved / str(step))
    with pytest.raises(UserError, match=r"none of the 3 checkpoints of this run can be read \(step 3: .*--fresh"):
        start(hook(saved, program))
    assert latest_step(saved) == 3


@pytest.mark.parametrize(
    "error", [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), PermissionError("Permission denied")]
)
def test_what_the_machine_lacks_is_no_damage(saved, program, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.restore", fail)
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*mend that and run again"):
        start(hook(saved, program))
    assert latest_step(saved) == 3


def test_another_model_is_refused_by_its_first_array(saved, capfd):
    other = build_program(tiny_config("model.feed_forward.hidden_dim=80"), jax.devices()[:4])
    with pytest.raises(UserError, match=r"runs.0.feed_forward.down.kernel is \(4, 64, 32\) there.*needs \(4, 80, 32\)"):
        start(hook(saved, other))
    assert latest_step(saved) == 3
    output = "".join(capfd.readouterr())
    assert output.count("\n") < 5


def test_other_data_is_refused(saved, program):
    with pytest.raises(UserError, match=r"data.evaluation_sources: what they hold, or how it is cut, changed"):
        start(hook(saved, program), identity=["y"])


names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0\\") | st.sampled_from("[]*?{}!%~$#: "), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 100)


@given(names)
@example("w[1]")
@example("**")
@example("a*b")
@example("s3")
@example("[!x]")
def test_a_folder_of_any_name_holds_checkpoints(tmp_path_factory, state, name):
    folder = tmp_path_factory.mktemp("names")
    directory = folder / name / "checkpoints"
    # What the name would match as a pattern.
    for other in ("w1", "axb", "y"):
        (folder / other / "checkpoints" / "1").mkdir(parents=True)
    params = {"a": jax.numpy.arange(6.0), "b": jax.numpy.ones((2, 3))}
    if re.search(r"gs:\Z", name):
        with pytest.raises(UserError, match="cannot be written below a name that ends in gs:"):
            CheckpointStore(directory, CheckpointConfig())
        return
    write_parameters(directory, params, CheckpointConfig(), {"x": 1})
    assert latest_step(directory) == 0
    shape = dataclasses.replace(state, params=jax.tree.map(jax.numpy.asarray, params))
    found = read_parameters(directory, jax.eval_shape(lambda: shape))
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
    assert sorted(path.name for path in folder.iterdir()) == sorted({name, "w1", "axb", "y"})
    assert [path.name for path in directory.iterdir()] == ["0"]


@pytest.mark.parametrize(
    ("name", "reason"), [("a\\b", "a backslash"), ("bucket.gs:", "gs:, which stands"), ("\udcff", "is not UTF-8")]
)
def test_names_that_checkpoints_cannot_be_below_are_refused(name, reason, tmp_path):
    directory = tmp_path / name / "checkpoints"
    for look in (latest_step, lambda place: CheckpointStore(place, CheckpointConfig()), CheckpointStore.read_only):
        directory.mkdir(parents=True, exist_ok=True)
        with pytest.raises(UserError, match=f"checkpoints cannot be written below a name .*{reason}"):
            look(directory)
        assert not list(directory.iterdir())


def test_old_checkpoints_go_and_every_kth_stays(tmp_path, state):
    store = CheckpointStore(tmp_path / "c", CheckpointConfig(keep_last=2, keep_every=3))
    for step in range(1, 8):
        store.save(step, state, {}, {})
    store.wait()
    assert store.steps() == [3, 6, 7]
    store.close()


def test_a_new_run_starts_from_the_parameters_of_another(saved, state):
    other = build_program(tiny_config("run.seed=5"), jax.devices()[:2])
    told = []

    def initialize(directory):
        model = {**other.config.model.model_dump(mode="json"), "norm_epsilon": 0.5}
        hook = InitializeHook(directory, other.init, other.state_shape, model, told.append)
        return hook.on_start(Context(0, 20, {}))

    store = CheckpointStore(saved, CheckpointConfig(keep_last=9))
    store.save(4, state, {}, tiny_config().model_dump(mode="json"))
    store.wait()
    store.close()
    context = initialize(saved)
    assert (context.step, int(context.state.step)) == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, context.state.params, state.params)
    assert (np.asarray(context.state.rng) != state.rng).any()
    assert told[0] == "Note: model.norm_epsilon was 1e-05 there and is 0.5 here."
    assert len(told) == 2
    with pytest.raises(UserError, match=r"no run with checkpoints there"):
        initialize(saved / "none")


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: shutil.rmtree(folder / "params"), "there is no params in it"),
        (lambda folder: shutil.rmtree(folder / "meta"), "there is no meta in it"),
        (lambda folder: (folder / "params" / "_METADATA").unlink(), "files of it are missing, cut short or changed"),
        (
            lambda folder: (folder / "params" / "manifest.ocdbt").unlink(),
            "files of it are missing, cut short or changed",
        ),
    ],
)
def test_readers_are_told_how_to_use_the_checkpoint_before(saved, program, break_it, reason):
    break_it(saved / "3")
    with pytest.raises(UserError) as caught:
        read_parameters(saved, program.state_shape)
    assert str(caught.value) == (
        f"{saved.parent}: its checkpoint of step 3 is damaged ({reason}); move {saved}/3 away to use that of step 2"
    )
    shutil.move(saved / "3", saved.parent / "away")
    assert read_parameters(saved, program.state_shape).step == 2
    shutil.rmtree(saved / "1")
    break_it(saved / "2")
    with pytest.raises(UserError, match=r"step 2 is damaged \(.*\); it has no other, so put a sound one back"):
        read_parameters(saved, program.state_shape)


def test_checksums_see_every_bit_place_and_sign():
    array = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    original = checksums({"a": array})
    for i in range(64):
        flipped = array.copy()
        flipped.view(np.uint32).reshape(-1)[i] ^= 1 << (i % 32)
        assert checksums({"a": flipped}) != original
    pairs = np.random.default_rng(1).permutation(64).reshape(-1, 2)
    for pair in pairs:
        swapped, negated = array.copy().reshape(-1), array.copy().reshape(-1)
        swapped[pair] = swapped[pair[::-1]]
        negated[pair] = -negated[pair]
        assert checksums({"a": swapped.reshape(4, 16)}) != original
        assert checksums({"a": negated.reshape(4, 16)}) != original


def test_checksums_gather_nothing(program):
    text = placed_checksums.lower(split(program.state_shape)["params"]).compile().as_text()
    assert "all-reduce" in text
    assert not {"all-gather", "all-to-all", "collective-permute"} & set(re.findall(r"[a-z-]+(?=\()", text))
