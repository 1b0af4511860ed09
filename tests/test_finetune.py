"""Fine-tuning: the loss of answers only, through the whole of a config, and a run that goes on from another."""

import json
import math

import jax
import numpy as np
import pytest

from dseekjax.data.assembly import evaluation_batches
from dseekjax.data.sources import open_data
from dseekjax.insight.metrics import read_records
from dseekjax.train import main
from dseekjax.training.evaluation import build_evaluation
from dseekjax.training.feed import rows_of_process
from dseekjax.training.program import build_program
from tests.references.llama import logits
from tests.tiny import LLAMA, door_arguments, tiny_config

PAIRS = [("2+3=", "5"), ("reverse abc: ", "cba"), ("", "no prompt"), ("ü?", "ja, ü"), ("10*10=", "100")]
END_ID = 256


def by_hand(params, pairs, theta):
    """-log p of each token of each completion and its end, from logits of the example alone; its first has none."""
    found = []
    for prompt, completion in pairs:
        ids = [*byte_ids(prompt + completion), END_ID]
        first = max(1, len(prompt.encode()))
        out = logits(params, np.asarray([ids]), np.arange(len(ids))[None], np.ones((1, len(ids)), int), theta)[0]
        log_p = out - out.max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        found += [-log_p[place - 1, ids[place]] for place in range(first, len(ids))]
    return np.asarray(found)


def byte_ids(text):
    """GPT-2's order of bytes: those that print come first, by value, then the others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = sorted(printable) + [byte for byte in range(256) if byte not in printable]
    return [order.index(byte) for byte in text.encode()]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_loss_is_that_of_the_completions_alone(kind, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    form, pairs = "{kind: completion}", PAIRS
    if kind == "chat":
        rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in PAIRS]
        (tmp_path / "short.jinja").write_text(
            "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else eos_token }}{% endfor %}"
        )
        form = f"{{kind: chat, template: {tmp_path / 'short.jinja'}}}"
        pairs = [(f"{prompt}>", completion) for prompt, completion in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(
        *(*LLAMA, "model.vocabulary_size=257", "train.global_batch_size=2", "data.packing=first_fit"),
        *(f"data.sources=[{{path: {path}, format: {form}}}]", f"data.cache_dir={tmp_path / 'cache'}"),
        f"data.evaluation_sources=[{{path: {path}, format: {form}}}]",
    )
    program = build_program(config, jax.devices()[:1])
    data = open_data(config.data, model_vocabulary_size=257)
    batches = evaluation_batches(
        data.evaluation, config.data, global_batch_size=2, rows=rows_of_process(program.batch_shape)
    )
    (portion,) = data.evaluation
    evaluate = build_evaluation(
        program, batches, bytes_per_token=portion.num_bytes / portion.num_counted, max_batches=None
    )
    state = program.init()
    expected = by_hand(jax.device_get(state.params), pairs, config.model.rotary_theta)
    num_bytes = sum(len(completion.encode()) for _, completion in pairs)
    # In "no prompt" as a completion without a prompt, nothing comes before the first byte.
    assert len(expected) == num_bytes + len(pairs) - (kind == "completion")
    found = evaluate(state)
    assert found["eval_loss"] == pytest.approx(expected.mean(), rel=1e-5)
    counted = num_bytes + len(pairs)
    assert found["eval_bits_per_byte"] == pytest.approx(expected.mean() * counted / num_bytes / math.log(2), rel=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a run on text, and the arguments of its door."""
    folder = tmp_path_factory.mktemp("base")
    arguments = door_arguments(folder)
    assert main([*arguments, "train.steps=4"]) == 0
    return folder, arguments


@pytest.fixture
def tune(base, tmp_path):
    """The door to a run that goes on from there with sums."""
    folder, arguments = base
    lines = [{"prompt": f"{i}+{j}=", "completion": str(i + j)} for i in range(10) for j in range(10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"data.sources=[{{path: {tmp_path / 'sums.jsonl'}, format: {{kind: completion}}}}]"
    changes = (source, f"train.initialize_from={folder / 'run'}", f"run.dir={tmp_path / 'tuned'}")
    return lambda *more: main([*arguments, *changes, "data.packing=first_fit", *more])


def test_a_run_is_tuned_on_completions_from_another(tune, tmp_path, capsys):
    capsys.readouterr()
    assert tune("train.steps=12", "evaluation.every_steps=6", "optimizer.schedule.kind=constant") == 0
    output = capsys.readouterr().out
    assert "Starting from the parameters of" in output
    records = list(read_records(tmp_path / "tuned" / "metrics.jsonl"))
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    # Of sums like 3+4=7 the digits and the end count: 2 or 3 of 6 or 7 tokens.
    assert 0.2 < records[0]["target_tokens"] / (16 * 24) < 0.5
    evaluated = [record for record in records if "eval_loss" in record]
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    # Held out is a tenth of the text, which are the last nine, 9+1 to 9+9: two digits each, and an end.
    ratio = evaluated[0]["eval_bits_per_byte"] / evaluated[0]["eval_loss"]
    assert ratio == pytest.approx((18 + 9) / 18 / math.log(2))


def test_a_tokenizer_that_the_model_did_not_learn_is_refused(base, tune, tmp_path, capsys):
    kept = base[0] / "run" / "tokenizer.json"
    other = json.loads(kept.read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert tune(f"data.tokenizer={tmp_path / 'other.json'}") == 2
    error = capsys.readouterr().err
    assert "its tokens are not those that the model of train.initialize_from" in error
    assert f"set data.tokenizer to {kept}" in error
    assert not (tmp_path / "tuned" / "config.yaml").exists()
