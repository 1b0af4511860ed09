"""The door to Hugging Face: what a user meets."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from dseekjax import conversion, generate, train
from dseekjax.convert import main
from dseekjax.data.reading.chat import Template
from dseekjax.errors import UserError
from dseekjax.files import WholeFolder, discard_begun
from dseekjax.trained import open_trained
from tests.checkpoint.hugging_face_folders import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    gpt2_tensors,
    llama_tensors,
    write_folder,
    write_mistral,
)
from tests.conftest import REPOSITORY
from tests.test_processes import together
from tests.tiny import door_arguments

TRAINING = ("run.compilation_cache_dir=null", "data.sequence_length=16")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_mistral(tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "imported"
    assert main(["--from-hf", str(source), "--run", str(run), *TRAINING]) == 0
    return run


def test_a_run_is_made_and_opens(source, run, tmp_path, capsys):
    again = tmp_path / "again"
    assert main(["--from-hf", str(source), "--run", str(again), "run.compilation_cache_dir=null", "mesh.tensor=2"]) == 0
    output = capsys.readouterr().out
    assert "new_key" in output
    assert "attention slides a window of 24 tokens" in output
    count = sum(array.size for array in llama_tensors().values())
    assert f"MistralForCausalLM, {count:,} parameters, with sequences of 24 tokens that end in </s>" in output
    assert f"train.initialize_from={again}" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"]
    written = yaml.safe_load((again / "config.yaml").read_text())
    assert written["run"]["dir"] == str(again)
    assert written["data"]["tokenizer"] == str(again / "tokenizer.json")
    assert (written["data"]["sequence_length"], written["mesh"]["tensor"]) == (24, 2)
    assert (again / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()

    trained = open_trained(again, ("mesh.tensor=1",))
    assert (trained.step, trained.end_token) == (0, 2)
    np.testing.assert_array_equal(
        trained.params["token_embedding"]["embedding"], llama_tensors()["model.embed_tokens.weight"]
    )
    assert trained.params["token_embedding"]["embedding"].sharding.mesh.shape["fsdp"] == 8


def test_what_is_written_back_is_what_was_read(source, run, tmp_path):
    back = tmp_path / "back"
    assert main(["--run", str(run), "--to-hf", str(back), "--shard-size", "10KB"]) == 0
    for path in source.iterdir():
        if path.name == "config.json":
            assert json.loads((back / path.name).read_text()) == json.loads(path.read_text())
        elif path.suffix == ".json" and "index" not in path.name:
            assert (back / path.name).read_bytes() == path.read_bytes(), path.name
    written = {}
    for path in back.glob("model-*.safetensors"):
        written |= load_file(path)
    assert set(written) == set(llama_tensors())
    for name, array in written.items():
        np.testing.assert_array_equal(array, llama_tensors()[name], err_msg=name)
    assert {path.stat().st_mode & 0o777 for path in back.iterdir()} == {(back / "config.json").stat().st_mode & 0o777}
    listed = json.loads((back / "checksums.json").read_text())["sha256"]
    assert set(listed) == {path.name for path in back.iterdir()} - {"checksums.json"}


def test_a_window_outlives_the_import(run, tmp_path, capsys):
    """Also over a run between whose config no longer loads."""
    between = tmp_path / "between"
    between.mkdir()
    (between / "config.yaml").write_text(f"train: {{initialize_from: {run}, key_of_old: 1}}")
    training = ["--config", str(run / "config.yaml"), f"run.dir={tmp_path / 'tuned'}", "data.sequence_length=25"]
    for door, arguments in (
        (generate.main, ["--run", str(run), "--prompt", "w3", "data.sequence_length=25"]),
        (main, ["--run", str(run), "--to-hf", str(tmp_path / "hf"), "data.sequence_length=25"]),
        (train.main, [*training, f"train.initialize_from={run}"]),
        (train.main, [*training, f"train.initialize_from={between}"]),
    ):
        assert door(arguments) == 2
        assert capsys.readouterr().err == (
            f"error: data.sequence_length 25 exceeds the sliding_window of 24 in {run}/hugging_face/config.json; make "
            "it 24 at most\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["between"]


def test_the_tokenizer_of_a_moved_import_is_named(run, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(config.replace(f"tokenizer: {run}/", f"tokenizer: {tmp_path}/old/"))
    tuned = f"run.dir={tmp_path / 'tuned'}"
    arguments = ["--config", str(moved / "config.yaml"), f"train.initialize_from={moved}", tuned]
    assert train.main(arguments) == 2
    assert capsys.readouterr().err == (
        f"error: data.tokenizer {tmp_path}/old/tokenizer.json: there is no such file; if it went with "
        f"train.initialize_from {moved}, set data.tokenizer to {moved}/tokenizer.json\n"
    )


def test_more_positions_than_the_model_was_made_for_are_told(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf")
    arguments = ["--from-hf", str(folder), "--run", str(tmp_path / "run"), *TRAINING, "data.sequence_length=33"]
    assert main(arguments) == 0
    assert "Note: data.sequence_length 33 exceeds the 32 positions that the model was made for" in (
        capsys.readouterr().out
    )


def test_training_starts_from_an_import_and_is_written_back(source, run, tmp_path, capsys):
    text, tuned, back = tmp_path / "text.txt", tmp_path / "tuned", tmp_path / "back"
    text.write_text("w3 w4 w5 w6 w7 w8\n" * 400)
    changes = [
        *("--config", str(run / "config.yaml"), f"data.sources=[{{path: {text}, document_separator: '\\n'}}]"),
        *(f"data.cache_dir={tmp_path / 'cache'}", "train.steps=2", "data.held_out_fraction=0"),
    ]
    # The folder of the import itself has nothing to go on from.
    before = (run / "config.yaml").read_text()
    assert train.main(["--config", str(run / "config.yaml"), f"data.cache_dir={tmp_path / 'cache'}"]) == 2
    error = capsys.readouterr().err
    assert f"{run}/checkpoints/0 holds parameters alone" in error
    assert f"train.initialize_from={run} and another run.dir" in error
    assert (run / "config.yaml").read_text() == before

    assert train.main([*changes, f"train.initialize_from={run}", f"run.dir={tuned}"]) == 0
    output = capsys.readouterr().out
    assert f"Starting from the parameters of {run} at step 0." in output
    assert "Note: model" not in output
    assert main(["--run", str(tuned), "--to-hf", str(back), "--dtype", "bfloat16"]) == 0
    config = json.loads((back / "config.json").read_text())
    assert config == {**json.loads((source / "config.json").read_text()), "torch_dtype": "bfloat16"}
    assert (back / "tokenizer_config.json").read_text() == (source / "tokenizer_config.json").read_text()
    written = load_file(back / "model.safetensors")
    assert (written["model.norm.weight"] != llama_tensors()["model.norm.weight"].astype("bfloat16")).any()

    # And once more, from what was written: a file that is not what it was is found.
    assert main(["--from-hf", str(back), "--run", str(tmp_path / "once_more"), *TRAINING]) == 0
    tensors = load_file(back / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, back / "model.safetensors", {"format": "pt"})
    assert main(["--from-hf", str(back), "--run", str(tmp_path / "wrong"), *TRAINING]) == 2
    assert "model.safetensors is not what it was: its SHA-256 differs from checksums.json" in capsys.readouterr().err
    assert not list(tmp_path.glob("*wrong*"))


def tuned_with_end(run, end, tmp_path, name):
    """A run of two steps that starts from an import and ends documents with another token."""
    text = tmp_path / "text.txt"
    text.write_text("w3 w4 w5 w6 w7 w8\n" * 400)
    arguments = [
        *("--config", str(run / "config.yaml"), f"train.initialize_from={run}", f"run.dir={tmp_path / name}"),
        *(f"data.sources=[{{path: {text}}}]", f"data.cache_dir={tmp_path / 'cache'}", "train.steps=2"),
    ]
    assert train.main([*arguments, f"data.end_of_document={end}", "data.held_out_fraction=0"]) == 0
    return tmp_path / name


ENDS = {"config.json": "eos_token_id", "generation_config.json": "eos_token_id"}
WORDS = {"tokenizer_config.json": "eos_token", "special_tokens_map.json": "eos_token"}


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("shape", ["string", "object"])
def test_a_model_that_was_tuned_with_another_end_has_that_in_all_files(shape, tmp_path):
    source = write_mistral(tmp_path / "hf")
    word = "</s>" if shape == "string" else {"content": "</s>", "lstrip": False}
    template = "\n{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": word, "chat_template": template}))
    imported, back = tmp_path / "imported", tmp_path / "back"
    assert main(["--from-hf", str(source), "--run", str(imported), *TRAINING]) == 0
    tuned = tuned_with_end(imported, "w9", tmp_path, "tuned")
    assert open_trained(tuned).end_tokens == (9,)
    assert main(["--run", str(tuned), "--to-hf", str(back)]) == 0
    assert {name: read(back, name)[key] for name, key in ENDS.items()} == dict.fromkeys(ENDS, 9)
    assert {name: read(back, name)[key] for name, key in WORDS.items()} == dict.fromkeys(WORDS, "w9")
    # What the template wrote for the old one in training it goes on writing.
    written = Template(read(back, "tokenizer_config.json")["chat_template"], "", "w9", "w9")
    assert written._render([{"role": "user", "content": "w3"}], False) == "\nw3</s>"


def test_any_of_several_end_tokens_ends_a_text_and_goes_with_the_model(tmp_path, capsys):
    tensors = llama_tensors()
    source = write_folder(tmp_path / "hf", {**LLAMA_CONFIG, "eos_token_id": [2, 8]}, tensors)
    (source / "generation_config.json").write_text('{"eos_token_id": [8, 9, -1, 99]}')
    (source / "tokenizer_config.json").write_text('{"eos_token": "w9"}')
    imported = tmp_path / "imported"
    assert main(["--from-hf", str(source), "--run", str(imported), *TRAINING]) == 0
    assert open_trained(imported).end_tokens == (2, 8, 9)
    # Each of them, whichever of them ends its documents; of a token of its own, that alone.
    tuned = {end: tuned_with_end(imported, end, tmp_path, end.strip("</>")) for end in ("w9", "w10")}
    for run, ends in ((imported, [2, 8, 9]), (tuned["w9"], [9, 2, 8]), (tuned["w10"], 10)):
        back = tmp_path / f"back-{run.name}"
        assert main(["--run", str(run), "--to-hf", str(back)]) == 0
        assert {name: read(back, name)[key] for name, key in ENDS.items()} == dict.fromkeys(ENDS, ends)
        # Its own word stays where it is one of them.
        assert read(back, "tokenizer_config.json")["eos_token"] == ("w10" if ends == 10 else "w9")
    assert open_trained(tuned["w9"]).end_tokens == (9, 2, 8)


@pytest.mark.parametrize(("token", "reason"), [(8, "end"), (9, "end"), (10, "length")])
def test_generation_ends_with_any_end_token(token, reason, tmp_path, capsys):
    # A model that writes one token whatever comes before: every hidden state is the same.
    tensors = {name: np.zeros_like(array) for name, array in llama_tensors().items()}
    tensors["model.embed_tokens.weight"][:] = tensors["model.norm.weight"][:] = tensors["lm_head.weight"][token] = 1
    source = write_folder(tmp_path / "hf", {**LLAMA_CONFIG, "eos_token_id": [2, 8]}, tensors)
    (source / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    run = tmp_path / "run"
    assert main(["--from-hf", str(source), "--run", str(run), *TRAINING]) == 0
    capsys.readouterr()
    assert generate.main(["--run", str(run), "--prompt", "w3", "--temperature=0", "--max-tokens=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["finish_reason"], found["tokens"]) == (reason, [] if reason == "end" else [token] * 3)


def test_a_run_from_scratch_is_written(tmp_path, capsys):
    arguments = [*door_arguments(tmp_path), "train.steps=1", "model.attention.num_kv_heads=4", "model.dropout=0.1"]
    arguments.append("data.held_out_fraction=0")
    assert train.main(arguments) == 0
    assert main(["--run", str(tmp_path / "run"), "--to-hf", str(tmp_path / "hf")]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key, value in (
        ("model_type", "gpt2"),
        ("architectures", ["GPT2LMHeadModel"]),
        ("n_positions", 24),
        ("eos_token_id", 256),
        ("resid_pdrop", 0.1),
    ):
        assert config[key] == value
    assert (config["torch_dtype"], config["bos_token_id"]) == ("float32", None)
    told = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (told["eos_token"], told["model_max_length"]) == ("<|endoftext|>", 24)
    # It is as it was, imported again.
    again = ["--from-hf", str(tmp_path / "hf"), "--run", str(tmp_path / "again")]
    assert main([*again, "run.compilation_cache_dir=null"]) == 0
    jax.tree.map(
        np.testing.assert_array_equal,
        open_trained(tmp_path / "run").params,
        open_trained(tmp_path / "again").params,
    )
    capsys.readouterr()
    assert main(["--run", str(tmp_path / "run"), "--to-hf", str(tmp_path / "hf")]) == 2
    assert f"--to-hf: {tmp_path / 'hf'} is there already" in capsys.readouterr().err
    assert main(["--run", str(tmp_path / "run"), "--to-hf", str(tmp_path / "hf2"), "model.biases=none"]) == 2
    assert "GPT2LMHeadModel, in which there is no counterpart of model.biases none" in capsys.readouterr().err
    assert main(["--run", str(tmp_path / "nothing"), "--to-hf", str(tmp_path / "hf2")]) == 2
    assert "no run there" in capsys.readouterr().err
    assert not (tmp_path / "hf2").exists()


def test_help_loads_no_jax():
    code = "import sys; from dseekjax.convert import main\ntry: main(['--help'])\nfinally: print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "--from-hf DIR --run OUT" in done.stdout
    assert done.stdout.endswith("False\n")


def test_what_fails_in_the_middle_leaves_nothing(source, run, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "keep_companions", fail)
    monkeypatch.setattr(conversion, "write_digests", fail)
    for arguments in (["--from-hf", str(source), "--run"], ["--run", str(run), "--to-hf"]):
        with pytest.raises(KeyboardInterrupt):
            main([*arguments, str(tmp_path / "out"), "run.compilation_cache_dir=null"])
        assert not list(tmp_path.iterdir())


def test_an_interrupted_process_removes_what_it_began(source, tmp_path):
    code = (
        "import os, signal, sys; from dseekjax import conversion, convert\n"
        "conversion.keep_companions = lambda *arguments: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(convert.main(sys.argv[1:]))"
    )
    arguments = ["--from-hf", str(source), "--run", str(tmp_path / "out"), *TRAINING]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("interrupted\n")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_process_is_never_removed(tmp_path):
    mine, other = WholeFolder(tmp_path / "out"), WholeFolder(tmp_path / "out")
    mine.begin()
    with pytest.raises(UserError, match="another process is making"):
        other.begin()
    other.discard()
    assert mine.hidden.is_dir()
    assert discard_begun() == []
    assert not mine.hidden.exists()


def test_a_killed_process_leaves_what_the_next_removes(tmp_path):
    out = tmp_path / "out"
    code = (
        "import os, pathlib, signal; from dseekjax.files import WholeFolder\n"
        f"folder = WholeFolder(pathlib.Path({str(out)!r})); folder.begin()\n"
        "(folder.hidden / 'left').mkdir(); (folder.hidden / 'config.yaml').write_text('')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    folder = WholeFolder(out)
    folder.begin()
    assert not list(folder.hidden.iterdir())
    with pytest.raises(Exception, match=r"another process is making"):
        WholeFolder(out).begin()
    (folder.hidden / "a").write_text("a")
    folder.finish()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["a"]


def test_gpt2_comes_without_its_prefix(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", GPT2_CONFIG, gpt2_tensors(prefix=""))
    assert main(["--from-hf", str(folder), "--run", str(tmp_path / "run"), *TRAINING]) == 0
    assert main(["--run", str(tmp_path / "run"), "--to-hf", str(tmp_path / "back")]) == 0
    assert set(load_file(tmp_path / "back" / "model.safetensors")) == set(gpt2_tensors())


def test_two_processes_read_and_write_together(source, tmp_path):
    """Each its own devices' slices; the first alone makes folders and speaks."""

    def both(*arguments):
        command = [sys.executable, "-m", "dseekjax.convert", *arguments, "run.virtual_devices=2", "mesh.tensor=2"]
        done = together(command)
        assert [status for status, _ in done] == [0, 0], done
        assert [" holds " in output for _, output in done] == [True, False]

    both("--from-hf", str(source), "--run", str(tmp_path / "run"), *TRAINING)
    both("--run", str(tmp_path / "run"), "--to-hf", str(tmp_path / "hf"))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for name, array in llama_tensors().items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
