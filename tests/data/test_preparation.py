"""From text files to corpora, and what is wrong with files that are none."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.config import DataConfig, SourceConfig
from dseekjax.data.preparation import prepare
from dseekjax.data.text import hold_out, read_documents
from dseekjax.data.tokenizers import bytes_tokenizer, train_tokenizer
from dseekjax.errors import UserError

LINES = "".join(f"Line {i} of a small text, with an umlaut: ü.\n" for i in range(200))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(LINES)
    return path


def config(path, tmp_path, **changes):
    return DataConfig(sources=(SourceConfig(path=str(path)),), cache_dir=str(tmp_path / "cache"), **changes)


@given(st.text(min_size=1, max_size=60))
def test_byte_tokens_are_bytes_and_decode_back(text):
    tokenizer = bytes_tokenizer("<end>")
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_trained_tokens_decode_back_and_are_fewer():
    tokenizer = train_tokenizer([LINES], 300, "<end>")
    assert tokenizer.get_vocab_size() == 300
    ids = tokenizer.encode(LINES).ids
    assert tokenizer.decode(ids) == LINES
    assert len(ids) < len(LINES.encode()) / 2


def test_corpus_holds_the_text_and_its_held_out_part(text, tmp_path):
    prepared = prepare(config(text, tmp_path), vocabulary_size=257)
    parts = [prepared.tokenizer.decode(corpus.tokens.tolist()) for corpus in (*prepared.training, *prepared.evaluation)]
    assert "".join(parts) == LINES
    assert len(parts[1]) == pytest.approx(0.1 * len(LINES), rel=0.05)
    assert prepared.training[0].manifest["num_bytes"] == len(parts[0].encode())
    assert prepared.training[0].tokens[-1] == prepared.tokenizer.token_to_id("<|endoftext|>")
    assert (tmp_path / "cache" / "corpora").is_dir()
    again = prepare(config(text, tmp_path), vocabulary_size=257)
    assert again.identity == prepared.identity
    assert again.training[0].path == prepared.training[0].path


def test_the_novel_is_split_by_chapter(tmp_path):
    novel = DataConfig(cache_dir=str(tmp_path))
    documents = read_documents(novel.sources[0], "data.sources.0.path")
    assert len(documents) == 56
    assert all(document.startswith("CHAPTER") for document in documents[1:])
    kept, held_out = hold_out(documents, novel.held_out_fraction)
    assert (len(kept), len(held_out)) == (50, 6)


def test_kept_tokenizer_wins(text, tmp_path):
    kept = tmp_path / "tokenizer.json"
    train_tokenizer([LINES], 280, "<|endoftext|>").save(str(kept))
    prepared = prepare(config(text, tmp_path), vocabulary_size=300, kept_tokenizer=kept)
    assert prepared.tokenizer.get_vocab_size() == 280


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"abc\0def", "binary file .* at 3"),
        ("naïve".encode("latin-1"), "not UTF-8 .byte 2 is 0xef"),
    ],
)
def test_files_that_are_no_text_are_refused(content, message, tmp_path):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(config(tmp_path / "bad", tmp_path), vocabulary_size=257)


def test_missing_files_and_misfits_are_refused(text, tmp_path):
    with pytest.raises(UserError, match=r"data.sources.0.path: cannot read .*No such file"):
        prepare(config(tmp_path / "none", tmp_path), vocabulary_size=257)
    with pytest.raises(UserError, match="there is no builtin:ulysses"):
        prepare(config("builtin:ulysses", tmp_path), vocabulary_size=257)
    with pytest.raises(UserError, match=r"model.vocabulary_size 100 is smaller than the tokenizer's 257"):
        prepare(config(text, tmp_path), vocabulary_size=100)
    with pytest.raises(UserError, match="there is no file"):
        prepare(config(text, tmp_path, tokenizer="nowhere.json"), vocabulary_size=257)
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        prepare(config(text, tmp_path, tokenizer=str(text)), vocabulary_size=257)
    kept = tmp_path / "tokenizer.json"
    bytes_tokenizer("</s>").save(str(kept))
    with pytest.raises(UserError, match=r"no token '<\|endoftext\|>'; its special tokens are \['</s>'\]"):
        prepare(config(text, tmp_path, tokenizer=str(kept)), vocabulary_size=257)


def test_a_damaged_corpus_is_found_before_training(text, tmp_path):
    path = prepare(config(text, tmp_path), vocabulary_size=257).training[0].path
    size, offsets = (path / "tokens.bin").stat().st_size, np.load(path / "offsets.npy")
    whole = (path / "tokens.bin").read_bytes()
    os.truncate(path / "tokens.bin", size - 2)
    with pytest.raises(UserError, match=rf"damaged: tokens\.bin has {size - 2} bytes of {size}; remove"):
        prepare(config(text, tmp_path), vocabulary_size=257)
    (path / "tokens.bin").write_bytes(whole)
    np.save(path / "offsets.npy", np.arange(3))
    with pytest.raises(UserError, match=r"its checksum is not that"):
        prepare(config(text, tmp_path), vocabulary_size=257)
    np.save(path / "offsets.npy", np.asarray(offsets))
    flipped = bytearray((path / "tokens.bin").read_bytes())
    flipped[100] ^= 1
    (path / "tokens.bin").write_bytes(flipped)
    with pytest.raises(UserError, match="its checksum is not that"):
        prepare(config(text, tmp_path), vocabulary_size=257)
    (path / "manifest.json").write_text(json.dumps({})[:1])
    with pytest.raises(UserError, match="damaged"):
        prepare(config(text, tmp_path), vocabulary_size=257)


def test_a_file_where_the_cache_should_be_is_refused(text, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        prepare(config(text, tmp_path), vocabulary_size=257)
