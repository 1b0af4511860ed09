"""What is wrong with a corpus is found when it is opened, and its last part can be held out."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.config import DataConfig
from dseekjax.data.corpus import open_corpus, verify_corpus
from dseekjax.data.held_out import hold_out
from dseekjax.data.preparation import shards
from dseekjax.data.preparation.learning import sample
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.sources import open_data
from dseekjax.errors import UserError
from tests.data.corpora import prepare


def damaged(corpus, change, message):
    before = {path: path.read_bytes() for path in corpus.iterdir()}
    change()
    for look in (open_corpus, verify_corpus):
        with pytest.raises(UserError, match=message):
            look(corpus)
    for path, content in before.items():
        path.write_bytes(content)
    open_corpus(corpus)


def test_damage_is_found(lines, tmp_path):
    corpus = tmp_path / "corpus"
    prepare(corpus, lines)
    tokens, ends, manifest = (corpus / name for name in ("tokens-00000.bin", "document_ends.bin", "manifest.json"))
    size = tokens.stat().st_size
    damaged(corpus, lambda: os.truncate(tokens, size - 2), rf"tokens-00000\.bin has {size - 2} bytes of {size}; remove")
    damaged(corpus, tokens.unlink, r"tokens-00000\.bin cannot be read \(No such file")
    flipped = bytearray(ends.read_bytes())
    flipped[3] ^= 1
    damaged(corpus, lambda: ends.write_bytes(flipped), r"the checksum of document_ends\.bin is not that")
    edited = json.loads(manifest.read_text())
    edited["num_tokens"] += 1
    damaged(corpus, lambda: manifest.write_text(json.dumps(edited)), r"manifest\.json was changed")
    damaged(corpus, lambda: manifest.write_text("{"), r"manifest\.json cannot be read \(it is no manifest\)")
    damaged(corpus, lambda: manifest.write_text("{}"), r"is of format None and this version reads")
    damaged(corpus, manifest.unlink, "is no corpus: it has no manifest.json")


def test_large_corpora_are_opened_by_size_alone(lines, tmp_path, monkeypatch):
    prepare(tmp_path / "corpus", lines)
    monkeypatch.setattr("dseekjax.data.corpus.VERIFIED_AT_OPEN", 100)
    tokens = tmp_path / "corpus" / "tokens-00000.bin"
    tokens.write_bytes(b"\1" * tokens.stat().st_size)
    open_corpus(tmp_path / "corpus")
    with pytest.raises(UserError, match=r"the checksum of tokens-00000\.bin"):
        verify_corpus(tmp_path / "corpus")
    os.truncate(tokens, 2)
    with pytest.raises(UserError, match="has 2 bytes of"):
        open_corpus(tmp_path / "corpus")


sizes = st.lists(st.integers(1, 9) | st.integers(50, 900), min_size=1, max_size=30)


@given(sizes, st.sampled_from([0.01, 0.1, 0.5, 0.99]), st.booleans())
def test_about_that_fraction_of_the_text_is_held_out(tmp_path_factory, sizes, fraction, with_lines):
    folder = tmp_path_factory.mktemp("texts")
    letters = "abcdefgh\n" if with_lines else "abcdefghi"
    texts = [("".join(letters[i % 9] for i in range(size)).strip() + "x\n") for size in sizes]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(folder / "corpus", folder / "a.jsonl")
    corpus = open_corpus(folder / "corpus")
    kept, rest = hold_out(corpus, fraction)
    assert (kept.start, kept.stop, rest.stop) == (0, rest.start, corpus.manifest.num_tokens)
    assert kept.num_tokens >= 1
    assert rest.num_tokens >= 2

    def size_of(portion):
        ids = corpus.tokens.read(portion.start, portion.num_tokens)
        return int((ids != corpus.manifest.end_token).sum())

    # A byte is a token here, and the ends of documents are no bytes.
    assert (kept.num_bytes, rest.num_bytes) == (size_of(kept), size_of(rest))
    total, wanted = sum(map(len, texts)), fraction * sum(map(len, texts))
    # Within a document, as much as half of what is held out of it may be kept to end at a line, and bytes are whole.
    assert wanted / 2 - 2 <= rest.num_bytes <= 2 * wanted + 2
    assert (total - wanted) / 2 - 2 <= kept.num_bytes <= 2 * (total - wanted) + wanted / 2 + 2
    ends = np.cumsum([len(text) + 1 for text in texts])
    near = [total - (end - number) for number, end in enumerate(ends[:-1], start=1)]
    if any(
        wanted / 2 <= left <= 2 * wanted and (total - wanted) / 2 <= total - left <= 2 * (total - wanted)
        for left in near
    ):
        assert kept.stop in ends
    assert kept.num_documents + rest.num_documents == len(texts) + (kept.stop not in ends)
    # What a vocabulary is learned from is what is trained on.
    learned = "".join(sample(find_inputs([str(folder / "a.jsonl")]), Format(), fraction))
    assert "".join(texts).startswith(learned)
    assert abs(len(learned) - kept.num_bytes) <= (0 if kept.stop in ends else max(map(len, texts)) / 2 + 2)


@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.5, 0.6, 0.9])
def test_two_files_of_unlike_sizes_are_split_by_their_text(fraction, tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 86)
    (tmp_path / "b.txt").write_text("another line\n" * 30_000)
    source = {"path": str(tmp_path / "*.txt")}
    config = DataConfig(sources=(source,), cache_dir=str(tmp_path / "cache"), held_out_fraction=fraction)
    data = open_data(config, model_vocabulary_size=257)
    (kept,), (rest,) = data.training, data.evaluation
    assert rest.num_bytes / (kept.num_bytes + rest.num_bytes) == pytest.approx(fraction, abs=0.001)


def test_a_small_file_beside_a_large_one_is_not_all_that_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 86)
    (tmp_path / "b.txt").write_text("another line\n" * 30_000)
    config = DataConfig(sources=({"path": str(tmp_path / "*.txt")},), cache_dir=str(tmp_path / "cache"))
    told = []
    data = open_data(config, model_vocabulary_size=257, tell=told.append)
    (kept,), (rest,) = data.training, data.evaluation
    assert rest.num_bytes / (kept.num_bytes + rest.num_bytes) == pytest.approx(0.1, abs=0.001)
    assert told[1:] == [
        "data.sources.0: 2 documents, 0.352 MB, are trained on; 1 document, 0.039 MB, 10.0%, is held out."
    ]


def test_a_run_that_trains_on_less_than_half_says_so(tmp_path):
    pairs = [{"prompt": "a" * 90, "completion": "b"}, {"prompt": "c" * 900, "completion": "d"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    source = {"path": str(tmp_path / "a.jsonl"), "format": {"kind": "completion"}}
    told = []
    open_data(
        DataConfig(sources=(source,), cache_dir=str(tmp_path / "cache")), model_vocabulary_size=257, tell=told.append
    )
    assert told[1].startswith("data.sources.0: 1 document, 91 bytes, is trained on; 1 document, 901 bytes, 90.8%, is h")
    assert told[2].startswith("Note: less than half of data.sources.0 is trained on; ")


@pytest.mark.parametrize("size", [9_990, 9_999, 10_000, 10_010])
def test_a_single_document_about_as_long_as_a_shard_is_cut(size, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    (tmp_path / "a.txt").write_text("x" * (size - 1))
    prepare(tmp_path / "corpus", tmp_path / "a.txt")
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.manifest.num_tokens == size
    kept, rest = hold_out(corpus, 0.1)
    assert kept.num_bytes + rest.num_bytes == size - 1
    assert rest.num_bytes == pytest.approx(0.1 * size, abs=2)
