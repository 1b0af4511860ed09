"""From the data config to what batches are made of, and what is wrong with files that are no data."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.assembly import evaluation_batches, training_sources
from dseekjax.data.config import DataConfig, SourceConfig
from dseekjax.data.corpus import open_corpus
from dseekjax.data.preparation import units
from dseekjax.data.sources import open_data
from dseekjax.data.streaming import Stream
from dseekjax.data.tokenizers import bytes_tokenizer, train_tokenizer
from dseekjax.errors import UserError
from tests.data.corpora import END, documents_of, prepare

LINES = "".join(f"Line {i} of a small text, with an umlaut: ü.\n" for i in range(200))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(LINES)
    return path


def config(path, tmp_path, **changes):
    return several([{"path": str(path)}], tmp_path, **changes)


def several(sources, tmp_path, **changes):
    named = tuple(SourceConfig(**source) for source in sources)
    return DataConfig(sources=named, cache_dir=str(tmp_path / "cache"), **changes)


def opened(some, vocabulary=257, **options):
    return open_data(some, model_vocabulary_size=vocabulary, **options)


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


@pytest.mark.parametrize("decoded_at_a_time", [50, 1 << 16])
def test_a_single_document_is_cut_at_a_line(text, decoded_at_a_time, tmp_path, monkeypatch):
    monkeypatch.setattr("dseekjax.data.held_out.DECODED_TOKENS", decoded_at_a_time)
    data = opened(config(text, tmp_path))
    portions = [*data.training, *data.evaluation]
    ids = [portion.corpus.tokens.read(portion.start, portion.num_tokens).tolist() for portion in portions]
    parts = [data.tokenizer.decode(some) for some in ids]
    assert "".join(parts) == LINES
    assert parts[0].endswith("\n")
    assert len(parts[1]) == pytest.approx(0.1 * len(LINES), rel=0.05)
    assert [portion.num_bytes for portion in portions] == [len(part.encode()) for part in parts]
    assert ids[1][-1] == data.tokenizer.token_to_id(END)
    again = opened(config(text, tmp_path))
    assert again.training[0].identity == data.training[0].identity
    assert again.training[0].corpus.path == data.training[0].corpus.path
    assert again.training[0].corpus.path.parent == tmp_path / "cache" / "corpora"


def test_a_source_of_no_weight_changes_no_loss(text, tmp_path):
    (tmp_path / "b.txt").write_text("something else\n" * 99)
    a, b = {"path": str(text)}, {"path": str(tmp_path / "b.txt")}
    alone, beside, both = (
        opened(several(sources, tmp_path)) for sources in ([a], [a, {**b, "weight": 0}], [a, {**b, "weight": 2}])
    )
    assert [len(data.evaluation) for data in (alone, beside, both)] == [1, 1, 2]
    assert beside.evaluation[0].identity == alone.evaluation[0].identity == both.evaluation[0].identity
    # With a weight again it is the same part that was kept from training all along.
    assert beside.held_out == both.held_out
    assert len(both.held_out) == 2


def test_other_content_of_the_same_size_and_time_is_tokenised_anew(text, tmp_path):
    status = text.stat()
    before = opened(config(text, tmp_path))
    text.write_text(LINES.replace("umlaut", "UMLAUT"))
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = opened(config(text, tmp_path))
    found = ["".join(documents_of(data.training[0].corpus)) for data in (before, after)]
    assert found == [LINES, LINES.replace("umlaut", "UMLAUT")]


def test_a_line_too_long_to_end_nearby_is_cut_anywhere(tmp_path):
    (tmp_path / "a.txt").write_text("ü" * 20_000)
    data = opened(config(tmp_path / "a.txt", tmp_path))
    assert data.training[0].num_tokens == pytest.approx(36_000, abs=2)


def test_the_novel_is_split_by_chapter_and_a_tokenizer_does_not_see_what_is_held_out(tmp_path):
    novel = DataConfig(cache_dir=str(tmp_path), tokenizer="train:500")
    data = opened(novel, 500)
    (training,), (held_out,) = data.training, data.evaluation
    documents = documents_of(training.corpus)
    assert len(documents) == 56
    assert all(document.startswith("CHAPTER") for document in documents[1:])
    ends = training.corpus.document_ends
    assert ((ends <= training.stop).sum(), (ends > held_out.start).sum()) == (50, 6)
    expected = train_tokenizer(documents[:50], 500, END)
    assert data.tokenizer.to_str() == expected.to_str()


def test_kept_tokenizer_wins(text, tmp_path):
    kept = tmp_path / "tokenizer.json"
    train_tokenizer([LINES], 280, END).save(str(kept))
    assert opened(config(text, tmp_path), 300, kept_tokenizer=kept).tokenizer.get_vocab_size() == 280


def test_prepared_and_unprepared_sources_mix_with_the_tokenizer_of_the_prepared(text, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 30}) + "\n" for i in range(50)))
    prepare(tmp_path / "corpus", tmp_path / "a.jsonl")
    mixed = several([{"path": str(tmp_path / "corpus")}, {"path": str(text), "weight": 3}], tmp_path)
    data = opened(mixed)
    assert data.training[0].corpus.path == tmp_path / "corpus"
    sources = training_sources(data, mixed.model_copy(update={"sequence_length": 16}), seed=0)
    assert [source.take(np.arange(3))["tokens"].shape for source in sources] == [(3, 16), (3, 16)]
    both = several([{"path": str(tmp_path / "corpus")}], tmp_path, evaluation_sources=({"path": str(text)},))
    data = opened(both)
    assert data.training[0].stop == open_corpus(tmp_path / "corpus").manifest.num_tokens
    assert data.evaluation[0].num_bytes == len(LINES.encode())


def test_the_same_file_twice_has_two_orders(text, tmp_path):
    twice = several([{"path": str(text)}] * 2, tmp_path, sequence_length=16)
    one, two = (source.take(np.arange(20))["tokens"] for source in training_sources(opened(twice), twice, seed=0))
    assert (one != two).any()
    (same, _) = training_sources(opened(twice), twice, seed=0)
    (other, _) = training_sources(opened(twice), twice, seed=1)
    assert (same.take(np.arange(20))["tokens"] == one).all()
    assert (other.take(np.arange(20))["tokens"] != one).any()


def test_packing_is_told_and_built_for_training_and_what_is_held_out(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 5}) + "\n" for i in range(90)))
    some = config(tmp_path / "a.jsonl", tmp_path, packing="first_fit", sequence_length=64)
    data, told = opened(some), []
    sources = training_sources(data, some, 0, told.append)
    assert sources[0].records_per_epoch > 10
    held_out = evaluation_batches(data.evaluation, some, global_batch_size=4, rows=np.arange(4), tell=told.append)
    assert len(told) == 2
    assert sum(batch["loss_weights"].sum() for batch in held_out) == 9 * 15


def test_several_workers_tokenise_for_training_and_tell_how_far_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 10_000)
    (tmp_path / "big.txt").write_text("Some line of text, again and again.\n" * 2000)
    watched = []
    data = opened(config(tmp_path / "big.txt", tmp_path), workers=2, watch=watched.append)
    assert [progress.num_tokens for progress in watched][-1] == data.training[0].corpus.manifest.num_tokens
    assert len(watched) > 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"abc\0def", "binary file .* at 3"),
        ("naïve".encode("latin-1"), "not UTF-8 .byte 2 is 0xef"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "train:257"])
def test_files_that_are_no_text_are_refused(content, message, tokenizer, tmp_path):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(UserError, match=rf"^data\.sources\.0: .*{message}"):
        opened(config(tmp_path / "bad", tmp_path, tokenizer=tokenizer))


def test_missing_files_and_misfits_are_refused(text, tmp_path):
    def refused(message, some, vocabulary=257, **options):
        with pytest.raises(UserError, match=message):
            opened(some, vocabulary, **options)

    refused(r"data.sources.0.path: cannot read .*No such file", config(tmp_path / "none", tmp_path))
    refused("there is no builtin:ulysses", config("builtin:ulysses", tmp_path))
    refused(r"model.vocabulary_size 100 is smaller than the tokenizer's 257", config(text, tmp_path), 100)
    refused("data.tokenizer: there is no file", config(text, tmp_path, tokenizer="nowhere.json"))
    refused(r"data.tokenizer: .*not a tokenizer\.json", config(text, tmp_path, tokenizer=str(text)))
    kept = tmp_path / "tokenizer.json"
    bytes_tokenizer("</s>").save(str(kept))
    refused(
        r"data.end_of_document: .*no token '<\|endoftext\|>' .* its special tokens are \['</s>'\]",
        config(text, tmp_path, tokenizer=str(kept)),
    )
    kept.write_text("{}")
    refused(r"run\.dir: .*is damaged; remove it", config(text, tmp_path), kept_tokenizer=kept)


def test_sources_that_do_not_go_together_are_refused(text, tmp_path):
    (tmp_path / "folder").mkdir()
    prepare(tmp_path / "corpus", text)
    corpus = {"path": str(tmp_path / "corpus")}

    def sources_of(some):
        return training_sources(opened(some, 999), some, 0)

    def refused(message, sources, **changes):
        with pytest.raises(UserError, match=message):
            sources_of(several(sources, tmp_path, **changes))

    refused("data.sources.0.path: .*is no corpus: it has no manifest", [{"path": str(tmp_path / "folder")}])
    refused("sources.0.streaming is for files", [{**corpus, "streaming": True}])
    refused("data.sources.0: the text field 'body' is not for text files", [{"path": str(text), "text_field": "body"}])
    refused("sources.0.text_field is for files", [{**corpus, "text_field": "body"}])
    refused("sources.0.document_separator is for files", [{**corpus, "document_separator": "x"}])
    refused("data.sources.0 has its tokenizer already; set data.tokenizer to null", [corpus], tokenizer="train:300")
    other = tmp_path / "other.json"
    train_tokenizer([LINES], 280, END).save(str(other))
    refused("data.sources.0 was prepared with another tokenizer than data.tokenizer", [corpus], tokenizer=str(other))
    refused(
        "data.sources.0 ends documents with '<.endoftext.>', and data.end_of_document", [corpus], end_of_document="x"
    )
    streamed = [{"path": str(text), "streaming": True}]
    refused("data.packing first_fit needs to know all documents", streamed, packing="first_fit")


def test_streams_hold_nothing_out(text, tmp_path):
    data = opened(several([{"path": str(text), "streaming": True}], tmp_path))
    assert isinstance(data.training[0], Stream)
    assert data.evaluation == ()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": [{"path": "a", "weight": 0}]}, "sources all have the weight 0"),
        ({"sources": [{"path": "a", "weight": 1e-9}, {"path": "b"}]}, "is less than a billionth of all"),
        ({"sources": [{"path": "a", "streaming": True, "max_epochs": 2}]}, "max_epochs 2 is not known to a source"),
        ({"sources": [{"path": "a", "streaming": True, "format": {}}]}, "format completion is not known to a source"),
        ({"evaluation_sources": [{"path": "a", "streaming": True}]}, r"evaluation_sources\.0\.streaming is true"),
        ({"evaluation_sources": [{"path": "a", "max_epochs": 2}]}, r"evaluation_sources\.0\.max_epochs is 2"),
        ({"evaluation_sources": [{"path": "a", "weight": 2}]}, r"evaluation_sources\.0\.weight is 2.0"),
        ({"sources": [{"path": "a", "document_separator": ""}]}, "matches everywhere"),
        ({"tokenizer": "train:9999999999999"}, "train: needs a vocabulary size"),
        ({"tokenizer": "train:3"}, "train: needs a vocabulary size of at least 257"),
        ({"sources": [{"path": "a", "document_separator": "("}]}, "is not a regular expression"),
    ],
)
def test_configs_that_cannot_be_meant_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(changes)


def test_a_damaged_corpus_is_found_before_training(text, tmp_path):
    path = opened(config(text, tmp_path)).training[0].corpus.path
    flipped = bytearray((path / "tokens-00000.bin").read_bytes())
    flipped[100] ^= 1
    (path / "tokens-00000.bin").write_bytes(flipped)
    with pytest.raises(UserError, match=r"data\.sources\.0: the corpus .* the checksum of .*; remove"):
        opened(config(text, tmp_path))


def test_a_file_where_the_cache_should_be_is_refused(text, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        opened(config(text, tmp_path))
