"""What is wrong with a corpus is found when it is opened, and its last part can be held out."""

import json
import os

import numpy as np
import pytest

from dseekjax.data.corpus import hold_out, open_corpus, verify_corpus
from dseekjax.data.preparation import shards
from dseekjax.errors import UserError
from tests.data.corpora import TEXTS, prepare


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


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
def test_the_last_documents_are_held_out(fraction, lines, tmp_path):
    prepare(tmp_path / "corpus", lines)
    corpus = open_corpus(tmp_path / "corpus")
    kept, rest = hold_out(corpus, fraction)
    count = int((np.asarray(corpus.document_ends) <= kept.stop).sum())
    assert count == max(1, round(len(TEXTS) * (1 - fraction)))
    assert (kept.start, kept.stop, rest.stop) == (0, rest.start, corpus.manifest.num_tokens)
    assert kept.num_bytes == sum(len(text.encode()) for text in TEXTS[:count])
    assert rest.num_bytes == sum(len(text.encode()) for text in TEXTS[count:])


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
