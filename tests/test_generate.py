"""The generate door, from a run to texts."""

import io
import json
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


def test_prompts_come_from_files_and_standard_input(start, capsys, tmp_path, monkeypatch):
    options = ("--temperature", "0", "--max-tokens", "3", "--json")
    assert start("--prompt", "7 bottles", "--prompt", "9 bot", *options) == 0
    expected = capsys.readouterr().out
    plain, structured = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("7 bottles\n9 bot\n")
    structured.write_text('{"prompt": "7 bottles"}\n{"prompt": "9 bot"}\n')
    for path in (plain, structured):
        assert start("--prompts", str(path), *options) == 0
        assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("7 bottles\n\n9 bot\n"))
    assert start("--prompts", "-", *options) == 0
    assert capsys.readouterr().out == expected


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
    refused("mesh.tensor 3", *hi, "mesh.tensor=3", "mesh.fsdp=1")
    refused("mesh.context 2 splits sequences", *hi, "mesh.context=2")
    refused("did you mean model.embed_dim?", *hi, "model.dim=3")
    refused("is of another model", *hi, "model.embed_dim=64")


def test_options_that_do_not_go_together_show_the_usage():
    for wrong in ([], ["--prompt", "a", "--prompts", "b"], ["--prompt", "a", "--top-k", "0"]):
        with pytest.raises(SystemExit) as stop:
            generate.main(["--run", "x", *wrong])
        assert stop.value.code == 2


def test_help_comes_without_jax():
    code = "import sys; sys.argv = ['g', '--help']\nfrom dseekjax import generate\ntry: generate.main()\n"
    code += "except SystemExit: pass\nassert 'jax' not in sys.modules"
    assert (
        "--temperature"
        in subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )
