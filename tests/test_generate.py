"""The generate door, from a run to texts."""

import errno
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from dseekjax import generate
from dseekjax.train import main as train
from dseekjax.training.run_directory import RunDirectory
from tests.tiny import door_arguments


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    overrides = ("train.steps=150", "model.positions=rotary", "model.vocabulary_size=264")
    assert train([*door_arguments(folder), *overrides]) == 0
    return folder / "run"


@pytest.fixture
def start(run):
    return lambda *arguments, run=run: generate.main(["--run", str(run), *arguments])


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_trained_model_continues_texts(start, capsys):
    assert start("--prompt", "7 bottles", "--temperature", "0", "--max-tokens", "8", "--json") == 0
    (found,) = lines(capsys.readouterr().out)
    assert found["text"] == " of beer"
    assert (found["finish_reason"], len(found["tokens"])) == ("length", 8)
    # To the terminal goes the text as it comes.
    assert start("--prompt", "7 bottles", "--temperature", "0", "--stop", " on") == 0
    assert capsys.readouterr().out == "7 bottles of beer\n"


def test_letters_that_the_terminal_lacks_lose_no_text(run):
    command = [sys.executable, "-m", "dseekjax.generate", "--run", str(run), "--max-tokens", "2"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}

    def written(*arguments):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert written("--prompt", "é7").startswith("\\u00e97")
    prompts = ["é7", "😀7"]
    found = written("--json", *(word for prompt in prompts for word in ("--prompt", prompt)))
    assert [line["prompt"] for line in lines(found)] == prompts


def test_prompts_come_from_files_and_standard_input(start, capsys, tmp_path, monkeypatch):
    options = ("--temperature", "0", "--max-tokens", "3", "--json")
    assert start("--prompt", "7 bottles", "--prompt", "9 bot", *options) == 0
    expected = capsys.readouterr().out
    plain, structured = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("\ufeff7 bottles\n\n9 bot\n")
    structured.write_text('{"prompt": "7 bottles"}\n{"prompt": "9 bot", "of": "a\u2028b"}\n', encoding="utf-8")
    for path in (plain, structured):
        assert start("--prompts", str(path), *options) == 0
        assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(f"7 bottles\n\n{'x' * 99}\n9 bot\n"))
    # What cannot be answered is told, and the next line is.
    assert start("-", *options) == 2
    told = capsys.readouterr()
    assert told.out == expected
    assert told.err.startswith("error: prompt 3 has 99 tokens")
    assert told.err.count("\n") == 1


def test_the_same_seed_writes_the_same_on_any_mesh(start, capsys):
    options = ("--prompt", "7 bottles", "--temperature", "2", "--max-tokens", "12", "--json")
    texts = []
    for more in (["--seed", "3"], ["--seed", "3", "mesh.fsdp=4", "mesh.tensor=2"], ["--seed", "4"]):
        assert start(*options, *more) == 0
        texts.append(lines(capsys.readouterr().out)[0]["text"])
    assert texts[0] == texts[1] != texts[2]


def test_a_run_that_is_training_is_used_and_said_to_be(start, run, capsys):
    directory = RunDirectory(run)
    directory.acquire()
    before = set(run.rglob("*"))
    assert start("--prompt", "7", "--max-tokens", "1") == 0
    assert f"{run} is still training; this is its step 150." in capsys.readouterr().err
    assert set(run.rglob("*")) == before


def without(run, tmp_path, *names):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for name in names:
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return copy


def test_mistakes_are_one_sentence_and_exit_2(start, run, capsys, tmp_path):
    def refused(message, *arguments, **options):
        assert start(*arguments, **options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1

    hi = ("--prompt", "hi")
    refused("prompt 1 is empty", "--prompt", "")
    refused("the model's context is 24", "--prompt", "x" * 30)
    refused("no run there (it has no config.yaml)", *hi, run=tmp_path / "nowhere")
    refused("its tokenizer.json is missing", *hi, run=without(run, tmp_path / "a", "tokenizer.json"))
    refused("no run with checkpoints there", *hi, run=without(run, tmp_path / "b", "checkpoints"))
    refused("that run has no checkpoint yet", *hi, run=without(run, tmp_path / "c", "checkpoints/150"))
    refused("--prompts nothing.txt: cannot be read", "--prompts", "nothing.txt")
    empty, wrong = tmp_path / "empty.txt", tmp_path / "wrong.jsonl"
    empty.write_text("")
    wrong.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    refused("is empty; give a prompt per line", "--prompts", str(empty))
    refused("line 2 is not of the form", "--prompts", str(wrong))
    refused("temperature -1.0", *hi, "--temperature", "-1")
    refused("prompt 1 is no Unicode text", "--prompt", "\udcff")
    refused("--max-tokens 0 is no whole number from 1 up", *hi, "--max-tokens", "0")
    refused("--top-k x is no whole number from 1 up", *hi, "--top-k", "x")
    refused("give --prompt TEXT, or --prompts FILE")
    refused("one of the two", *hi, "-")
    refused("mesh.tensor 3", *hi, "mesh.tensor=3", "mesh.fsdp=1")
    refused("mesh.context 2 splits sequences", *hi, "mesh.context=2")
    refused("did you mean model.embed_dim?", *hi, "model.dim=3")
    refused("is of another model", *hi, "model.embed_dim=64")


def test_closed_and_full_streams_are_one_sentence(start, run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert start("--prompts", "-") == 2
    assert "standard input is closed" in capsys.readouterr().err
    code = "import sys\nfrom dseekjax import generate\nsys.exit(generate.main())"
    command = [sys.executable, "-c", code, "--run", str(run), "--prompt", "7", "--max-tokens", "1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot use standard output (No space left on device)" in done.stderr


def test_a_run_that_may_not_be_read_is_one_sentence(start, run, monkeypatch, capsys):
    def forbidden(self):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(pathlib.Path, "is_file", forbidden)
    assert start("--prompt", "7") == 2
    assert f"cannot use {run}/config.yaml (Permission denied)" in capsys.readouterr().err


def test_help_comes_without_jax():
    code = "import sys; sys.argv = ['g', '--help']\nfrom dseekjax import generate\ntry: generate.main()\n"
    code += "except SystemExit: pass\nassert 'jax' not in sys.modules"
    assert (
        "--temperature"
        in subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )
