"""The door to preparing data: what a user meets."""

import json
import subprocess
import sys

import pytest

from dseekjax.insight.metrics import read_records
from dseekjax.prepare import main
from dseekjax.train import main as train
from tests.conftest import REPOSITORY
from tests.tiny import OVERRIDES, compared_records


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    texts = [f"{i} bottles of beer on the wall, {i} bottles of beer. " * (1 + i % 5) for i in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, ""]) + "odd\n")
    return path


@pytest.fixture
def corpus(lines, tmp_path, capsys):
    folder = tmp_path / "corpus"
    assert main(["--input", str(lines), "--output", str(folder), "--workers", "1"]) == 0
    capsys.readouterr()
    return folder


def test_prepares_packs_inspects_and_verifies(lines, tmp_path, capsys):
    folder = tmp_path / "made" / "corpus"
    arguments = ["--input", str(lines), "--output", str(folder), "--tokenizer", "train:300", "--workers", "1"]
    assert main([*arguments, "--sequence-length", "64"]) == 0
    output = capsys.readouterr().out
    for words in ("Learning a vocabulary of 300.", "200 documents", "in uint16", "bytes of text per token", "MB/s",
                  "Left out 1 documents of nothing but white space.", "Left out 1 lines that are no document:",
                  f"{lines} line 202 is no JSON", "the text: ", "the held-out part of the text: ", "% filled",
                  "Next:"):  # fmt: skip
        assert words in output
    assert main(arguments) == 0
    assert "holds just this already" in capsys.readouterr().out
    assert main(["--output", str(folder), "--sequence-length", "32", "--held-out-fraction", "0"]) == 0
    assert "records of 32" in capsys.readouterr().out
    assert len(list((folder / "packing").iterdir())) == 3

    assert main(["inspect", str(folder), "--sequence-length", "64"]) == 0
    output = capsys.readouterr().out
    for words in ("documents", "200 of 1 files", "median", "first_fit fills", "most frequent", "' beer'",
                  "document 0, ", "0 bottles of beer", "lengths.png"):  # fmt: skip
        assert words in output
    assert (folder / "lengths.png").stat().st_size > 1000
    assert main(["inspect", str(folder), "--json"]) == 0
    inspection = json.loads(capsys.readouterr().out)
    assert inspection["manifest"]["num_documents"] == 200
    assert inspection["num_counted"] == inspection["manifest"]["num_tokens"]
    assert sum(count for _, count in inspection["frequent"]) <= inspection["num_counted"]
    assert len(inspection["samples"]) == 3

    assert main(["verify", str(folder)]) == 0
    assert "is sound: 5 files" in capsys.readouterr().out
    (folder / "tokens-00000.bin").write_bytes(b"")
    assert main(["verify", str(folder)]) == 2
    assert "is damaged: tokens-00000.bin has 0 bytes" in capsys.readouterr().err


def test_one_and_several_workers_through_the_door(lines, corpus, tmp_path, capsys):
    assert main(["--input", str(lines), "--output", str(tmp_path / "two"), "--workers", "2"]) == 0
    for path in corpus.iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--input is missing"),
        (["--input", "none.txt"], "--input: cannot read none.txt"),
        (["--input", "*.none"], "--input: no file is named by *.none"),
        (["--input", "{lines}", "--tokenizer", "none.json"], "--tokenizer: there is no file none.json"),
        (["--input", "{lines}", "--tokenizer", "train:5"], "--tokenizer train:5: train: needs a vocabulary"),
        (["--input", "{lines}", "--document-separator", "("], "--document-separator '(' is not a regular expression"),
        (["--input", "{lines}", "--document-separator", "x"], "a document separator is for text files"),
        (["--input", "{lines}", "--end-of-document", "a"], "'a' cannot end documents: it is text"),
        (["--input", "{lines}", "--tokenizer", "train:99999999999999999999"], "train: needs a vocabulary"),
        (["--input", "{lines}", "--workers", "0"], "--workers 0 is no number"),
        (["--input", "{lines}", "--workers", "99999999999999999999"], "is no number from 1 to 2^31"),
        (["verify", "{lines}"], "lines.jsonl is no corpus: it has no manifest.json"),
        (["--input", "{lines}", "--sequence-length", "x"], "--sequence-length x is no number"),
        (["--input", "{lines}", "--held-out-fraction", "1"], "--held-out-fraction is no number from 0"),
        (["--input", "{lines}", "--text-field", "body"], "line 1 has no field 'body', only 'text'"),
        (["--input", "{lines}", "--strict"], "line 202 is no JSON"),
        (["--input", "{folder}"], "is a folder; name its files"),
        (["--sequence-length", "32"], "is no corpus: it has no manifest.json"),
        (["inspect", "{folder}"], "is no corpus: it has no manifest.json"),
        (["verify", "nowhere"], "nowhere is no corpus"),
        (["inspect", "{corpus}", "--picture", "{folder}/none/a.png"], "--picture"),
        (["inspect", "{corpus}", "--picture", "a.nothing"], "give a file ending in .png or .svg"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(arguments, message, lines, corpus, tmp_path, capsys):
    places = {"lines": lines, "folder": tmp_path, "corpus": corpus}
    filled = [word.format(**places) for word in arguments]
    output = [] if filled[:1] and filled[0] in ("inspect", "verify") else ["--output", str(tmp_path / "out")]
    assert main([*filled, *output]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(lines, corpus, capsys):
    assert main(["--input", str(lines), "--output", str(corpus), "--tokenizer", "train:300"]) == 2
    assert (
        "a corpus holds one kind only; choose another folder, and give both as data.sources" in capsys.readouterr().err
    )


def test_help_is_quick():
    command = [sys.executable, "-X", "importtime", "-m", "dseekjax.prepare", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "--held-out-fraction" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"jax", "numpy", "tokenizers", "matplotlib"} & loaded


def test_a_run_goes_on_with_other_weights_and_repeats_to_the_last_bit(corpus, tmp_path, capsys):
    (tmp_path / "stream.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} green bottles. " * 9}) + "\n" for i in range(90))
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data:\n  cache_dir: {tmp_path / 'cache'}\n  sources:\n  - {{path: {corpus}, max_epochs: 40}}\n"
        f"  - {{path: {tmp_path / 'stream.jsonl'}, streaming: true}}\n"
    )

    def start(run, steps, weights, *more):
        return train(
            ["--config", str(config), *OVERRIDES, "model.vocabulary_size=257", f"run.dir={tmp_path / run}",
             f"train.steps={steps}", "checkpoint.every_steps=2", "evaluation.every_steps=100",
             "optimizer.schedule.kind=constant",
             *(f"data.sources.{i}.weight={weight}" for i, weight in enumerate(weights)), *more]
        )  # fmt: skip

    for run in ("one", "two"):
        assert start(run, 4, (1, 1)) == 0
    assert start("one", 8, (1, 9)) == 0
    assert "read" in capsys.readouterr().out
    for steps in (5, 6, 8):
        assert start("two", steps, (1, 9)) == 0
    assert compared_records(tmp_path / "one") == compared_records(tmp_path / "two")
    meta = tmp_path / "two" / "checkpoints" / "8" / "meta" / "metadata"
    data = json.loads(meta.read_text())["data"]
    assert data["batch"] == 8
    assert data["mixture"] == [[0, [1.0, 1.0]], [64, [1.0, 9.0]]]
    # A corpus may be moved, but not be another.
    corpus.rename(tmp_path / "moved")
    assert start("two", 9, (1, 9), f"data.sources.0.path={tmp_path / 'moved'}") == 0
    capsys.readouterr()
    assert start("two", 10, (1, 9), f"data.sources.0.path={tmp_path / 'moved'}", "data.sources.0.max_epochs=50") == 2
    assert "data.sources.0.max_epochs: 40 then, 50 now" in capsys.readouterr().err
    manifest = json.loads((tmp_path / "moved" / "manifest.json").read_text())
    assert manifest["num_documents"] == 200
    (tmp_path / "other.jsonl").write_text('{"text": "something else, long enough to be cut"}\n' * 50)
    assert main(["--input", str(tmp_path / "other.jsonl"), "--output", str(tmp_path / "other")]) == 0
    assert start("two", 10, (1, 9), f"data.sources.0.path={tmp_path / 'other'}") == 2
    assert "what they hold, or how it is cut, changed since this run began" in capsys.readouterr().err
    assert len(list(read_records(tmp_path / "two" / "metrics.jsonl"))) == 9


def test_memory_does_not_grow_with_the_text(tmp_path):
    """Far less than the library needs to tokenise all of it at once."""
    (tmp_path / "a.txt").write_text("".join(f"Line {i} of a text that is one document.\n" for i in range(250_000)))
    command = [sys.executable, "-m", "dseekjax.prepare", "--input", str(tmp_path / "a.txt"), "--workers", "1"]
    limited = ["bash", "-c", f'ulimit -d {400 << 10}; exec "$@"', "limited", *command]
    done = subprocess.run(
        [*limited, "--output", str(tmp_path / "corpus")], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "1 documents" in done.stdout


def test_examples_are_prepared_inspected_and_trained_on(tmp_path, capsys):
    chats = [[{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": str(i + 1)}] for i in range(40)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"talk": chat}) + "\n" for chat in [*chats, []]))
    folder = tmp_path / "corpus"
    arguments = ["--input", str(path), "--output", str(folder), "--workers", "1"]
    form = ["--format", "chat", "--messages-field", "talk", "--chat-template", "plain"]
    assert main([*arguments, *form, "--sequence-length", "24"]) == 0
    output = capsys.readouterr().out
    assert "Left out 1 lines that are no document:" in output
    assert f"{path} line 41 has no messages in 'talk'" in output
    # The ten shortest are 25 tokens, of which the last is a target only, or with 9+1? one more.
    assert "27 of 36 examples of the text are longer than data.sequence_length 24" in output
    assert main([*arguments, *form]) == 0
    assert "holds just this already" in capsys.readouterr().out
    for options, message in (
        (["--prompt-field", "a"], "--prompt-field a is for --format completion, and that is text; leave it out"),
        (
            ["--format", "completion", "--messages-field", "a"],
            "--messages-field a is for --format chat, and that is com",
        ),
        (["--format", "chat"], "--chat-template is missing; give the one that the tokenizer came with, or chatml or"),
        (["--format", "chat", "--chat-template", "x"], "--chat-template: cannot read the chat template x (No such"),
        (["--format", "completion", "--text-field", "a"], "the text field 'a' is for documents that are one text"),
        (["--format", "completion", "--strict"], f"{path} line 1 has no field 'prompt', only 'talk'; mend it"),
    ):
        assert main([*arguments[:3], str(tmp_path / "other"), *options]) == 2
        assert message in capsys.readouterr().err
    assert main(["inspect", str(folder)]) == 0
    assert "of concatenate" in capsys.readouterr().out
