"""The door to Hugging Face: what it says to bad input."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from dseekjax import generate
from dseekjax.convert import main
from tests.checkpoint.hugging_face_folders import write_mistral, write_tokenizer
from tests.conftest import REPOSITORY

TRAINING = ("run.compilation_cache_dir=null", "data.sequence_length=16")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_mistral(tmp_path_factory.mktemp("source") / "hf")


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001-of-00002.safetensors"])
def test_files_that_may_not_be_read_are_named_with_the_reason(name, source, tmp_path, capsys, monkeypatch):
    opened = Path.open

    def refuse(path, *arguments, **options):
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert main(["--from-hf", str(source), "--run", str(tmp_path / "run"), *TRAINING]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --from-hf: cannot read {source / name} (Permission denied); make it readable, or ")


@pytest.mark.parametrize(("content", "reason"), [("a: [", "config.yaml is not YAML"), ("old: 1", "unknown key old")])
def test_a_run_whose_config_is_broken_is_named(content, reason, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(content)
    for door, rest in ((main, ["--to-hf", str(tmp_path / "hf")]), (generate.main, ["--prompt", "w3"])):
        assert door(["--run", str(run), *rest]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {run}: its config.yaml does not load, is it of another version? (")
        assert reason in error
        assert "--config" not in error


def remove(name):
    return lambda folder: (folder / name).unlink()


def cut_short(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def pickled(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def with_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "overrides", "message"),
    [
        (
            remove("model-00002-of-00002.safetensors"),
            (),
            "model-00002-of-00002.safetensors of the 2 files that model.saf",
        ),
        (
            remove("model.safetensors.index.json"),
            (),
            "there is no model.safetensors and no model.safetensors.index.json",
        ),
        (text("model.safetensors.index.json", "{}"), (), "model.safetensors.index.json has no weight_map"),
        (cut_short, (), "model-00002-of-00002.safetensors is cut short, or no safetensors file (deserializing header"),
        (pickled, (), "holds its weights as pytorch_model.bin, a pickle, which can run any code"),
        (remove("config.json"), (), "there is no config.json in"),
        (text("config.json", "{"), (), "config.json is not JSON"),
        (with_config(model_type="gemma9"), (), "'gemma9', which is not known here; there are gpt2, llama, mistral, qw"),
        (remove("tokenizer.json"), (), "there is no tokenizer.json in"),
        (
            lambda folder: write_tokenizer(folder / "tokenizer.json", 50),
            (),
            "has 50 tokens, but vocab_size of config.j",
        ),
        (with_config(eos_token_id=None), (), "no eos_token_id in the files of"),
        (
            with_config(head_dim=7),
            (),
            "hf/config.json: it tells of a model that cannot be, by model: attention.head_dim 7",
        ),
        (text("generation_config.json", "{"), (), "error: --from-hf: "),
        (with_config(), ("run.dir=elsewhere",), "run.dir elsewhere: --run "),
        (with_config(eos_token_id=-1), (), "no eos_token_id in the files of"),
        (with_config(eos_token_id=2**40), (), "no eos_token_id in the files of"),
        (with_config(), ("data.end_of_document=<e>",), "data.end_of_document: the tokenizer has no token '<e>'"),
        (with_config(), ("data.sequence_length=25",), "data.sequence_length 25 exceeds the sliding_window of 24"),
        (with_config(), ("model.embed_dim=32",), "model.embed_tokens.weight has the shape (40, 16), and the model"),
        (with_config(vocab_size=41), (), "dimension 'vocab' of 41 is not divisible"),
        (with_config(hidden_act="relu"), (), 'config.json: hidden_act is "relu", of which there is no counterpart'),
        (text("checksums.json", '{"sha256": {"gone.txt": ""}}'), (), "gone.txt is missing, which checksums.json lists"),
    ],
)
def test_bad_input_is_one_sentence(source, damage, overrides, message, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(source, folder)
    (folder / "generation_config.json").unlink()
    damage(folder)
    assert main(["--from-hf", str(folder), "--run", str(tmp_path / "run"), "mesh.tensor=2", *TRAINING, *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "r"], "neither is given"),
        (["--run", "r", "--from-hf", "a", "--to-hf", "b"], "both is given"),
        (["--run", "r", "--from-hf", "a", "--dtype", "bfloat16"], "--dtype bfloat16 is for --to-hf"),
        (["--run", "r", "--to-hf", "a", "--shard-size", "big"], "--shard-size big is no size"),
        (["--run", "r", "--from-hf", "nowhere"], "there is no folder nowhere"),
        (["--run", "r", "--to-hf", "/"], "--to-hf: / is no name for a new folder; give one within it"),
        (["--run", "/", "--from-hf", "nowhere"], "--run: / is no name for a new folder"),
        (["--run", "tests", "--from-hf", "nowhere"], "is there already; choose another folder"),
    ],
)
def test_wrong_options_are_one_sentence(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
