"""The door to evaluation: what a user meets."""

import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dseekjax.convert import main as convert
from dseekjax.evaluate import main
from dseekjax.insight.metrics import read_records
from dseekjax.prepare import main as prepare
from tests.checkpoint.hugging_face_folders import LLAMA_CONFIG, write_folder
from tests.conftest import REPOSITORY


@pytest.fixture
def evaluate(run, capsys):
    def evaluate(*arguments):
        capsys.readouterr()
        status = main(["--run", run.path, *map(str, arguments)])
        return status, capsys.readouterr()

    return evaluate


def figures(evaluate, *arguments):
    status, printed = evaluate(*arguments, "--json")
    assert status == 0, printed.err
    return json.loads(printed.out)


@pytest.mark.parametrize("overrides", [(), ("mesh.tensor=2", "mesh.context=2", "mesh.context_attention=ring")])
def test_held_out_figures_are_those_that_training_showed(run, evaluate, overrides):
    record = list(read_records(run.folder / "run" / "metrics.jsonl"))[-1]
    found = figures(evaluate, *overrides)
    assert (found["run"], found["step"]) == (run.path, 60)
    (text,) = found["texts"]
    assert text["name"] == "the held-out part of data.sources.0"
    assert text["loss"] == pytest.approx(record["eval_loss"], rel=1e-5)
    assert text["bits_per_byte"] == pytest.approx(record["eval_bits_per_byte"], rel=1e-5)
    assert text["perplexity"] == pytest.approx(math.exp(record["eval_loss"]), rel=1e-5)
    # The last 40 of 400 documents, of "360 bottles …" and so on; the first byte of each is not predicted.
    assert (text["num_bytes"], text["num_tokens"], text["num_targets"]) == (40 * 34, 40 * 35, 40 * 34)


def test_given_texts_are_scored_apart_and_together(run, evaluate, tmp_path, plain_log_probabilities):
    texts = ["7 bottles of beer", "8 bottles of rum, as it is called"]
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(json.dumps({"story": text}) + "\n")
    found = figures(evaluate, "--data", *paths, "--text-field", "story", "mesh.data=2")
    assert [text["name"] for text in found["texts"]] == list(map(str, paths))
    tokens = [np.array([*(run_tokens(run, text)), 256]) for text in texts]
    first = -plain_log_probabilities(tokens[0])[0]
    # The second is longer than a sequence, so that it is cut.
    second = -np.concatenate([plain_log_probabilities(part)[0] for part in (tokens[1][:25], tokens[1][24:])])
    for text, losses, length in zip(found["texts"], (first, second), map(len, texts), strict=True):
        assert text["loss"] == pytest.approx(losses.mean(), rel=1e-4)
        assert text["bits_per_byte"] == pytest.approx(losses.mean() / math.log(2) * (length + 1) / length, rel=1e-4)
        assert text["num_targets"] == len(losses) == length
    assert found["all_texts"]["loss"] == pytest.approx(np.concatenate([first, second]).mean(), rel=1e-4)
    status, printed = evaluate("--data", *paths, "--text-field", "story")
    assert status == 0
    assert re.search(rf"second\.jsonl +{found['texts'][1]['loss']:.4f} ", printed.out)
    assert re.search(rf"all +{found['all_texts']['loss']:.4f} ", printed.out)


def test_all_texts_together_weigh_what_was_scored(evaluate, tmp_path):
    """Of a long text of short tokens and a short one of long tokens, a batch each."""
    paths = [tmp_path / "long.txt", tmp_path / "short.txt"]
    paths[0].write_text("9 bottles of beer on the wall.\n" * 200)
    paths[1].write_text("<end>" + "été à la plage " * 4)
    found = figures(evaluate, "--data", *paths, "--max-batches", "1")
    parts, together = found["texts"], found["all_texts"]
    assert parts[0]["num_targets"] < parts[0]["num_tokens"] / 2
    scored_bytes = [part["num_targets"] * part["num_bytes"] / part["num_tokens"] for part in parts]
    expected = np.average([part["bits_per_byte"] for part in parts], weights=scored_bytes)
    assert together["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    nats = sum(part["bits_per_byte"] * part_bytes for part, part_bytes in zip(parts, scored_bytes, strict=True))
    assert together["loss"] == pytest.approx(nats * math.log(2) / together["num_targets"], rel=1e-6)


def run_tokens(run, text):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{run.path}/tokenizer.json")
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_a_prepared_corpus_is_the_same_as_its_files(run, evaluate, tmp_path):
    text, corpus = run.folder / "text.txt", tmp_path / "corpus"
    separator = ("--document-separator", r"(?<=\n\n)")
    own, other = (f"{run.path}/tokenizer.json", "train:270")
    assert prepare(["--input", str(text), "--output", str(corpus), "--tokenizer", own, *separator]) == 0
    options = ("--max-batches", "3")
    (whole,) = figures(evaluate, "--data", corpus, *options)["texts"]
    (files,) = figures(evaluate, "--data", text, *options, *separator)["texts"]
    assert {**whole, "name": ""} == {**files, "name": ""}
    # A document of 34 tokens with the end takes two pieces, of 24 and 9 or 10 tokens.
    assert 2 * 16 * 24 < whole["num_targets"] <= 3 * 16 * 24
    foreign = tmp_path / "foreign"
    assert prepare(["--input", str(text), "--output", str(foreign), "--tokenizer", other]) == 0
    status, printed = evaluate("--data", foreign)
    assert status == 2
    assert f"--data: {foreign} was prepared with another tokenizer than the run's" in printed.err


def test_completions_are_prepared_first_and_count_alone(run, evaluate, tmp_path):
    rows, corpus = tmp_path / "sums.jsonl", tmp_path / "sums"
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", "completion": str(a + 1)}) + "\n" for a in range(8)))
    tokenizer = ("--tokenizer", f"{run.path}/tokenizer.json")
    assert prepare(["--input", str(rows), "--output", str(corpus), "--format", "completion", *tokenizer]) == 0
    (text,) = figures(evaluate, "--data", corpus)["texts"]
    # A digit and the end of each.
    assert (text["num_targets"], text["num_tokens"], text["num_bytes"]) == (16, 16, 8)


def test_choices_and_continuations(run, evaluate, tmp_path, trained):
    from dseekjax.evaluation.likelihood import log_likelihood

    choices, continuations, scores = (tmp_path / name for name in ("choices.jsonl", "after.jsonl", "scores.jsonl"))
    items = [
        {"context": f"{300 + i} bottles of beer", "choices": [" zzz qqq.", " on the", "!"][: 2 + i % 2], "answer": 1}
        for i in range(9)
    ]
    items[0]["answer"] = 0
    choices.write_text("\n" + "".join(json.dumps(item) + "\n" for item in items))
    after = [{"context": f"{300 + i} bottles o", "continuation": "f b" if i else "zq"} for i in range(5)]
    continuations.write_text("".join(json.dumps(item) + "\n" for item in after))
    found = figures(evaluate, "--tasks", choices, continuations, "--output", scores)
    assert found["texts"] == []
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    assert [line["line"] for line in lines] == [*range(2, 11), *range(1, 6)]

    likelihoods = {
        (item["context"], choice): log_likelihood(trained, [(item["context"], choice)])[0].log_probability
        for item in items
        for choice in item["choices"]
    }
    right = right_per_byte = 0
    for item, line in zip(items, lines, strict=False):
        expected = [likelihoods[item["context"], choice] for choice in item["choices"]]
        np.testing.assert_allclose(line["log_probabilities"], expected, rtol=1e-5)
        right += int(np.argmax(expected)) == item["answer"]
        right_per_byte += int(np.argmax(np.divide(expected, line["num_bytes"]))) == item["answer"]
    chosen, followed = found["tasks"]
    assert chosen["accuracy"]["value"] == right / 9
    assert chosen["accuracy_per_byte"]["value"] == right_per_byte / 9 >= 8 / 9
    holds = np.array([line["chosen_per_byte"] == line["answer"] for line in lines[:9]])
    assert chosen["accuracy_per_byte"]["standard_error"] == pytest.approx(holds.std(ddof=1) / 3)
    assert chosen["chance"] == pytest.approx((5 / 2 + 4 / 3) / 9)

    alone = [log_likelihood(trained, [(item["context"], item["continuation"])])[0] for item in after]
    totals = [likelihood.log_probability for likelihood in alone]
    num_bytes = sum(len(item["continuation"]) for item in after)
    assert followed["log_probability"] == pytest.approx(sum(totals), rel=1e-5)
    assert followed["perplexity"] == pytest.approx(math.exp(-sum(totals) / num_bytes), rel=1e-5)
    assert followed["bits_per_byte"] == pytest.approx(-sum(totals) / num_bytes / math.log(2), rel=1e-5)
    assert followed["greedy"]["value"] == sum(likelihood.is_greedy for likelihood in alone) / 5 == 4 / 5
    status, printed = evaluate("--tasks", choices, continuations)
    assert status == 0
    assert re.search(rf"choices\.jsonl +{right / 9:.1%} ± ", printed.out)
    assert re.search(rf"after\.jsonl +{sum(totals):.2f} ", printed.out)


def test_the_scores_are_not_written_over_a_task(evaluate, tmp_path):
    task, link = tmp_path / "task.jsonl", tmp_path / "link.jsonl"
    text = json.dumps({"context": "a", "choices": ["b", "c"], "answer": 0})
    task.write_text(text)
    link.symlink_to(task)
    status, printed = evaluate("--tasks", task, "--output", link)
    assert status == 2
    assert printed.err == f"error: --output {link} is a file of --tasks, which it would replace; choose another\n"
    assert task.read_text() == text
    assert evaluate("--tasks", task, "--output", tmp_path / "scores.jsonl")[0] == 0


def test_long_contexts_are_told_once_and_long_choices_refused(evaluate, tmp_path):
    task = tmp_path / "task.jsonl"
    task.write_text(2 * (json.dumps({"context": "x" * 50, "choices": ["a", "b"], "answer": 0}) + "\n"))
    status, printed = evaluate("--tasks", task)
    assert status == 0
    assert printed.err.count("task.jsonl: 4 of 4 requests are longer than data.sequence_length 24") == 1
    task.write_text("\n" + json.dumps({"context": "x", "choices": ["a", "b" * 50], "answer": 0}))
    status, printed = evaluate("--tasks", task)
    assert status == 2
    assert "task.jsonl line 2 has a continuation of 50 tokens, and data.sequence_length is 24;" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.txt"), "--data: cannot read nowhere.txt (No such file or directory)"),
        (("--data", "builtin:persuasion"), "there is no builtin:persuasion"),
        (("--tasks", "nowhere.jsonl"), "--tasks: cannot read nowhere.jsonl"),
        (("--tasks", "builtin:nothing"), "there is no task builtin:nothing; built in is builtin:emma_endings"),
        (("--max-batches", "0"), "--max-batches 0 is no number from 1 on; give one"),
        (("--output", "x.jsonl"), "--output x.jsonl is for the items of --tasks, and there are none"),
        (("--text-field", "body"), "--text-field is for --data, and there is none"),
        (("--data", "builtin:emma", "--document-separator", "("), "--document-separator '(' is not a regular"),
        (("--data", "builtin:emma", "--text-field", "body"), "--data: the text field 'body' is not for text files"),
        (("--tasks", "builtin:emma_endings", "--output", "/nowhere/x"), "--output /nowhere/x cannot be written"),
        (("mesh.data=64",), "mesh.data 64 needs 64 devices"),
        (("model.embed_dim=64",), "checkpoint"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(evaluate, arguments, message):
    status, printed = evaluate(*arguments)
    assert status == 2
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_text_shorter_than_a_sequence_names_the_way_out(evaluate, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("7 bottles")
    status, printed = evaluate("--data", text, "data.packing=concatenate")
    assert status == 2
    assert "short.txt has 10 tokens, less than a sequence of data.sequence_length 24; add data.packing" in printed.err
    assert figures(evaluate, "--data", text)["texts"][0]["num_targets"] == 9


def test_runs_that_cannot_be_evaluated(run, tmp_path, capsys):
    too_long = "x" * 300
    assert main(["--run", too_long]) == 2
    assert capsys.readouterr().err == (
        f"error: cannot use {too_long}/config.yaml (File name too long); mend that and run again\n"
    )
    assert main(["--run", str(tmp_path)]) == 2
    assert "no run there (it has no config.yaml); give the run.dir of one" in capsys.readouterr().err
    shutil.copytree(run.path, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("held_out_fraction: 0.1", "held_out_fraction: 0"))
    assert main(["--run", str(tmp_path / "run")]) == 2
    assert "that run holds nothing out to evaluate; give --data, or --tasks" in capsys.readouterr().err
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    assert main(["--run", str(tmp_path / "run"), "--data", "builtin:emma"]) == 2
    assert "that run has no checkpoint yet, wait for one" in capsys.readouterr().err


CHANGES = {
    "cut to its first half": lambda text: text[: text.index("200 bottles")],
    "its last part moved to the front": lambda text: text[text.index("390 ") :] + text[: text.index("390 ")],
    "longer": lambda text: text + "400 bottles of beer on the wall.\n\n",
    "one letter changed": lambda text: text.replace("7 bottles", "7 Bottles", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_text_that_was_trained_on_is_not_called_held_out(change, run, evaluate):
    path = run.folder / "text.txt"
    text = path.read_text()
    path.write_text(CHANGES[change](text))
    try:
        status, printed = evaluate()
        assert (status, printed.out) == (2, "")
        error = printed.err.splitlines()[-1]
        assert error.startswith(f"error: {run.path}: what is held out is not what it was in training: data.sources, ")
        # What is given is no matter of what was trained on.
        assert evaluate("--data", path)[0] == 0
    finally:
        path.write_text(text)
    assert evaluate()[0] == 0


def test_another_held_out_part_is_not_evaluated(run, evaluate):
    status, printed = evaluate("data.held_out_fraction=0.5")
    assert status == 2
    assert "or how they are split, changed, and the model may have read it" in printed.err
    # How it is cut into sequences is another matter.
    assert evaluate("data.sequence_length=12", "data.packing=concatenate")[0] == 0


def test_an_interrupt_ends_it_even_where_a_library_swallows_exceptions():
    code = """
import os, signal, sys
from dseekjax.evaluate import main

class Library:
    def find_spec(self, name, *rest):
        if name == "jax":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Library())
sys.exit(main(["--run", "nowhere"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_little_is_loaded_before_an_interrupt_is_minded():
    code = "import sys, dseekjax.evaluate; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_imported_model_is_not_evaluated_on_data_that_it_never_saw(tmp_path, capsys):
    source = write_folder(tmp_path / "hf", LLAMA_CONFIG)
    made = tmp_path / "made"
    assert convert(["--from-hf", str(source), "--run", str(made), "run.compilation_cache_dir=null"]) == 0
    capsys.readouterr()
    assert main(["--run", str(made), f"data.cache_dir={tmp_path / 'cache'}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"error: {made}: that run is at step 0 and has held out nothing of what its model read;" in printed.err
    assert "give --data, or --tasks" in printed.err
    text = tmp_path / "text.txt"
    text.write_text("w3 w4 w5\n" * 20)
    options = (f"data.cache_dir={tmp_path / 'cache'}", "data.packing=first_fit")
    assert main(["--run", str(made), "--data", str(text), *options]) == 0


def test_help_loads_no_jax():
    code = """
import sys
from dseekjax.evaluate import main
try:
    main(["--help"])
except SystemExit:
    print("jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "--run DIR" in done.stdout
    assert "Completions and chats are prepared first" in " ".join(done.stdout.split())
