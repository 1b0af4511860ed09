"""The main door: what a user meets."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import yaml

from dseekjax import convert, evaluate, generate
from dseekjax.checkpoint.store import latest_step
from dseekjax.config import recipe_path
from dseekjax.insight.metrics import read_records
from dseekjax.train import main
from tests.tiny import OVERRIDES, compared_records, door_arguments


@pytest.fixture
def start(tmp_path):
    """Runs the door with the tiny model on the eight virtual devices."""
    arguments = [
        *door_arguments(tmp_path),
        *("train.steps=8", "checkpoint.every_steps=3", "evaluation.every_steps=4"),
    ]
    return lambda *more: main([*arguments, *more])


def test_a_run_from_start_to_end_and_again(start, tmp_path, capsys):
    run = tmp_path / "run"
    assert start() == 0
    output = capsys.readouterr().out
    for words in (
        "parameters",
        "FLOPs per token",
        "memory",
        "mesh",
        "versions",
        "held-out loss",
        "bits per byte",
        "Next:",
    ):
        assert words in output
    records = list(read_records(run / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 9))
    assert {"tokens_per_second", "mfu", "step_seconds", "data_wait_seconds", "memory_bytes"} <= set(records[0])
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8]
    assert records[-1]["loss"] < records[0]["loss"]
    for name in ("config.yaml", "tokenizer.json", "report.html", "loss.png", "tensorboard"):
        assert (run / name).exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["6", "8"]
    saved = json.loads((run / "checkpoints" / "8" / "meta" / "metadata").read_text())
    assert saved["config"] == yaml.safe_load((run / "config.yaml").read_text())

    assert start() == 0
    assert "already at step 8" in capsys.readouterr().out

    (run / "report.html").unlink()
    assert start("train.num_microbatches=2", "optimizer.beta1=0.5") == 2
    error = capsys.readouterr().err
    assert "optimizer.beta1: 0.9 then, 0.5 now" in error
    assert "train.num_microbatches: 1 then, 2 now" in error

    assert start("--fresh", "optimizer.beta1=0.5", "train.steps=3") == 0
    assert f"Moved {run} to" in capsys.readouterr().out
    (moved,) = tmp_path.glob("run.before-*")
    assert latest_step(moved / "checkpoints") == 8
    assert len(compared_records(run)) == 3


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dropout=0.1",),
        # With oneDNN, and layers compiled one by one.
        (
            *("precision.compute_dtype=bfloat16", "model.scan_layers=false", "mesh.data=8"),
            *("model.vocabulary_size=1024", "model.embed_dim=128"),
        ),
    ],
)
def test_resuming_from_any_checkpoint_repeats_the_uninterrupted_run_to_the_last_bit(overrides, start, tmp_path, capsys):
    run = tmp_path / "run"
    assert start(*overrides) == 0
    expected = compared_records(run)
    for kept in (6, 3):
        if kept == 3:
            assert start(*overrides, "--fresh", "train.steps=8", "checkpoint.keep_last=9") == 0
            shutil.rmtree(run / "checkpoints" / "6")
        shutil.rmtree(run / "checkpoints" / "8")
        capsys.readouterr()
        assert start(*overrides) == 0
        assert f"Resuming from step {kept}" in capsys.readouterr().out
        assert compared_records(run) == expected


def test_a_run_goes_on_longer_and_on_another_mesh(start, tmp_path):
    run = tmp_path / "run"
    constant = ("optimizer.schedule.kind=constant", "train.steps=10")
    assert start(*constant) == 0
    expected = compared_records(run)
    assert start("--fresh", *constant, "train.steps=5") == 0
    assert start(*constant, "mesh.data=4", "checkpoint.every_steps=2", "evaluation.every_steps=3") == 0
    found = np.array(compared_records(run))
    np.testing.assert_allclose(found[:, :2], np.array(expected)[:, :2], rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    np.testing.assert_array_equal(compared_records(run)[:5], expected[:5])


def test_steps_that_are_never_good_stop_the_run(start, tmp_path, capsys):
    status = start(
        "optimizer.learning_rate=1e30", "train.max_bad_steps=2", "train.steps=20", "checkpoint.every_steps=1"
    )
    assert status == 1
    error = capsys.readouterr().err
    assert "not finite for 2 steps in a row" in error
    assert latest_step(tmp_path / "run" / "checkpoints") is not None
    last = list(read_records(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert (last["loss"], last["bad_steps"]) == (None, 2.0)


def test_a_run_starts_from_the_parameters_of_another(start, tmp_path, capsys):
    assert start() == 0
    other = f"run.dir={tmp_path / 'other'}"
    assert start(other, f"train.initialize_from={tmp_path / 'run'}", "run.seed=9", "optimizer.learning_rate=1e-5") == 0
    assert "Starting from the parameters of" in capsys.readouterr().out
    assert compared_records(tmp_path / "other")[0][1] == pytest.approx(
        compared_records(tmp_path / "run")[-1][1], abs=0.1
    )
    # A mistake leaves nothing behind that the corrected command would stumble over.
    third = f"run.dir={tmp_path / 'third'}"
    assert start(third, "train.initialize_from=nowhere") == 2
    assert start(third, f"train.initialize_from={tmp_path / 'run'}", "train.steps=2") == 0


def test_an_evaluation_that_is_not_finite_is_shown_as_such(start, capsys):
    # The first step, from a learning rate of 1e30, is still finite; what comes of it is not.
    assert start("optimizer.learning_rate=1e30", "evaluation.every_steps=2", "train.max_bad_steps=99") == 0
    assert "held-out loss not finite" in capsys.readouterr().out


def test_a_trace_is_written(start, tmp_path):
    assert start("run.profile_steps=2") == 0
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_dry_run_prints_the_summary_and_touches_nothing(start, tmp_path, capsys):
    assert start("--dry-run") == 0
    assert "parameters" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.sources=[{path: nowhere.txt}]"], "data.sources.0.path: cannot read nowhere.txt"),
        (["model.vocabulary_size=100"], "model.vocabulary_size 100 is smaller than the tokenizer's 257"),
        (["train.global_batch_size=12"], "train.global_batch_size 12 does not divide"),
        (["mesh.data=16"], "mesh.data 16 needs 16 devices, there are 8"),
        (["model.dim=8"], "did you mean model.embed_dim?"),
        (["train.steps=soon"], "train.steps: 'soon' is wrong"),
        (["--batch-size", "12"], "--batch-size 12 and train.global_batch_size=16 are both given"),
        (["run.dir=/proc/nowhere"], "run.dir /proc/nowhere: cannot write there"),
        (
            ["data.sequence_length=20000", "model.max_positions=20000"],
            "longer than data.sources.0, which has",
        ),
        (["run.virtual_devices=4"], "run.virtual_devices 4"),
        (["--model", "gpt2_124m"], "are both given"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(start, arguments, message, capsys, tmp_path):
    assert start(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_directory_that_cannot_be_used_is_one_sentence(start, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder should be")
    assert start() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_run_of_another_version_is_named_as_such(start, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("old: 1\n")
    assert start() == 2
    assert "its config.yaml does not load" in capsys.readouterr().err


DAMAGE = {
    "cut short": lambda step: largest_file(step / "params").write_bytes(b"\0"),
    "a flipped bit": lambda step: flip(largest_file(step / "params")),
    "without parameters": lambda step: shutil.rmtree(step / "params"),
    "without a state": lambda step: shutil.rmtree(step / "state"),
    "empty and newer": lambda step: (step.parent / "900").mkdir(),
}


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of eight steps with checkpoints of steps 6 and 8, and the command that made it."""
    folder = tmp_path_factory.mktemp("finished")
    # Heads as GPT-2 has them, so that it can be written as one.
    more = ("train.steps=8", "checkpoint.every_steps=3", "model.attention.num_kv_heads=4")
    arguments = [*door_arguments(folder), *more]
    assert main(arguments) == 0
    return folder, arguments


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_last_checkpoint_does_not_pass_for_done(damage, finished, tmp_path, capsys):
    folder, arguments = finished
    run, expected = tmp_path / "run", compared_records(folder / "run")
    shutil.copytree(folder / "run", run)
    DAMAGE[damage](run / "checkpoints" / "8")
    capsys.readouterr()
    # These read parameters alone, and train nothing that a state would be needed for.
    needs_state = damage == "without a state"
    initial = [*arguments, f"run.dir={tmp_path / 'other'}", f"train.initialize_from={run}"]
    for door, words in (
        (generate.main, ["--prompt", "7", "--run", str(run)]),
        (evaluate.main, ["--run", str(run)]),
        (convert.main, ["--to-hf", str(tmp_path / "hf"), "--run", str(run)]),
        (main, initial),
    ):
        assert door(words) == (0 if needs_state else 2)
        error = capsys.readouterr().err
        told = re.search(
            r"its checkpoint of step (8|900) is damaged .*; move .* away to use that of step [68]\n", error
        )
        assert needs_state or told, error

    assert main([*arguments, f"run.dir={run}"]) == 0
    output = capsys.readouterr().out
    assert "is damaged" in output
    assert (run / "checkpoints-damaged").is_dir()
    # What was lost is done again, to the last bit.
    assert ("already at step 8" in output) == (damage == "empty and newer")
    assert compared_records(run) == expected
    assert latest_step(run / "checkpoints") == 8
    assert main([*arguments, f"run.dir={run}"]) == 0
    assert "already at step 8" in capsys.readouterr().out


def test_other_data_is_told_before_a_finished_run_passes_for_done(finished, tmp_path, capsys):
    folder, arguments = finished
    text = (folder / "text.txt").read_text()
    for content in (None, text[: len(text) // 2], "x" * len(text)):
        other = tmp_path / "other.txt"
        if content is not None:
            other.write_text(content)
        assert main([*arguments, f"data.sources.0.path={other}"]) == 2
        message = "what they hold, or how it is cut, changed" if content else f"cannot read {other}"
        assert message in capsys.readouterr().err
    # The same elsewhere is the same.
    other.write_text(text)
    assert main([*arguments, f"data.sources.0.path={other}"]) == 0


def test_a_folder_that_is_worked_in_is_not_renamed(finished, tmp_path, capsys, monkeypatch):
    _, arguments = finished
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for place in (".", "..", "/", str(tmp_path / "in")):
        assert main([*arguments, f"run.dir={place}", "--fresh"]) == 2
        assert capsys.readouterr().err == (
            f"error: run.dir {place}: --fresh cannot rename it, for this command was started in it; start it in "
            "another folder, or choose another run.dir\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (jax.enable_x64(True), "JAX_ENABLE_X64 is True, but parameters and token ids have 32 bits"),
        (jax.numpy_dtype_promotion("strict"), "JAX_NUMPY_DTYPE_PROMOTION is strict, but arrays of several dtypes are"),
        (jax.numpy_rank_promotion("raise"), "JAX_NUMPY_RANK_PROMOTION is raise, but arrays of several ranks are"),
    ],
)
def test_settings_of_jax_that_no_run_survives_are_refused_at_once(setting, message, finished, tmp_path, capsys):
    _, arguments = finished
    with setting:
        assert main([*arguments, f"run.dir={tmp_path / 'new'}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "new").exists()


def test_next_commands_repeat_what_was_typed(start, tmp_path, capsys):
    assert start("train.steps=2") == 0
    output = capsys.readouterr().out
    assert f"run.dir={tmp_path / 'run'}" in output
    assert "train.steps=4   # train on" in output
    assert "train.steps=2 " in output.partition("# train on")[2].partition("\n")[2]
    assert "'data.sources=[{path: YOUR.txt}]' run.dir=runs/mine" in output


def test_batch_size_and_model_are_other_words_for_keys(capsys):
    assert main(["--model", "gpt2_124m", "--batch-size", "16", "train.num_microbatches=1", "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["train"]["global_batch_size"] == 16
    assert config["model"]["embed_dim"] == 768
    for name, recipe in (
        ("gpt3", "gpt3_175b"),
        ("gpt2", "gpt2_124m"),
        ("llama3", "llama3_8b"),
        ("quick", "quickstart"),
    ):
        assert recipe_path(name) == recipe_path(recipe)
    assert main(["--model=gpt3", "--batch-size=512", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["global_batch_size"] == 512
    for name, message in (
        ("gpt", "gpt may be gpt2_124m or gpt3_175b; give one of them"),
        ("bloom", "there is no recipe bloom; there are gpt2_124m, gpt3_175b, llama3_8b, quickstart"),
    ):
        assert main(["--model", name]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    assert main([]) == 2
    assert "give --config FILE or --model NAME" in capsys.readouterr().err


def test_only_one_process_trains_in_a_directory(start, tmp_path, capsys):
    from dseekjax.training.run_directory import RunDirectory

    other = RunDirectory(tmp_path / "run")
    other.acquire()
    assert start() == 2
    assert "another process is training in it" in capsys.readouterr().err


def test_the_library_is_small_and_lazy():
    import dseekjax

    for name in dseekjax.__all__:
        assert getattr(dseekjax, name).__doc__
    with pytest.raises(AttributeError, match="it has"):
        dseekjax.nothing  # noqa: B018
    program = dseekjax.build_program(dseekjax.load_config(overrides=OVERRIDES), jax.devices()[:1])
    assert isinstance(program, dseekjax.Program)
