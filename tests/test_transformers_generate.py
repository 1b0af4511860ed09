"""A model of Hugging Face's, fine-tuned here and given back, writes the same there as here."""

import dataclasses
import json

import numpy as np
import pytest

from dseekjax.convert import main as convert
from dseekjax.generation.complete import Writer
from dseekjax.generation.sampling import Sampling
from dseekjax.insight.metrics import read_records
from dseekjax.train import main as train
from dseekjax.trained import open_trained
from tests.test_transformers import reference

pytestmark = pytest.mark.transformers

LENGTHS, NEW_TOKENS = np.array([9, 3, 14, 1]), 50


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_texts_of_a_fine_tuned_model_are_the_same(family, tmp_path):
    theirs, base, tuned, back = (tmp_path / name for name in ("theirs", "base", "tuned", "back"))
    reference(("make", "--family", family, "--out", theirs))
    assert convert(["--from-hf", str(theirs), "--run", str(base), "data.sequence_length=64"]) == 0

    examples = tmp_path / "examples.jsonl"
    words = np.random.default_rng(1).integers(3, 90, (80, 14))
    texts = [[f"w{word}" for word in row] for row in words]
    lines = [{"prompt": " ".join(text[:2]), "completion": " ".join(text[2:])} for text in texts]
    examples.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--config", str(base / "config.yaml"), f"run.dir={tuned}", f"train.initialize_from={base}"]
    source = f"data.sources=[{{path: {examples}, format: {{kind: completion}}}}]"
    arguments += [source, "data.packing=first_fit", f"data.cache_dir={tmp_path}", "run.compilation_cache_dir=null"]
    arguments += ["train.steps=5", "train.global_batch_size=8", "model.loss_chunk=100", "optimizer.learning_rate=0.01"]
    arguments += ["optimizer.schedule={kind: constant, warmup_steps: 0}"]
    assert train(arguments) == 0
    losses = [record["loss"] for record in read_records(tuned / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    assert convert(["--run", str(tuned), "--to-hf", str(back)]) == 0

    tokens = np.random.default_rng(0).integers(3, 96, (len(LENGTHS), LENGTHS.max())).astype(np.int32)
    np.savez(tmp_path / "prompts.npz", tokens=tokens, lengths=LENGTHS)
    options = ("--prompts", tmp_path / "prompts.npz", "--new-tokens", NEW_TOKENS, "--out", tmp_path / "texts.npz")
    reference(("generate", "--model", back, *options))
    # Nothing ends a text before its time, there as here.
    writer = Writer(dataclasses.replace(open_trained(tuned), end_token=-1))
    prompts = [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]
    found = [list(text.tokens) for text in writer.complete(prompts, max_tokens=NEW_TOKENS, sampling=Sampling(0.0))]
    np.testing.assert_array_equal(found, np.load(tmp_path / "texts.npz")["tokens"])
    assert len({tuple(text) for text in found}) > 1
