"""Corpora of which the loss counts a part only: from files to the weights of a batch."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.assembly import evaluation_batches, training_feed, training_sources
from dseekjax.data.config import DataConfig
from dseekjax.data.corpus import open_corpus
from dseekjax.data.held_out import hold_out
from dseekjax.data.inspection import inspect_corpus
from dseekjax.data.manifest import Manifest, write_manifest
from dseekjax.data.mask import Mask
from dseekjax.data.preparation import shards, units
from dseekjax.data.preparation.pipeline import Recipe, prepare_corpus
from dseekjax.data.reading import parts
from dseekjax.data.reading.chat import load_template
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.reading.rows import ChatRow, CompletionRow
from dseekjax.data.sources import open_data
from dseekjax.data.tokenizers import bytes_tokenizer, fingerprint
from dseekjax.errors import UserError
from tests.data.corpora import END, cut, documents_of, prepare

END_ID = 256
COMPLETION = CompletionRow("prompt", "completion")
PAIRS = [(f"{i} + {i} is ", f"{2 * i}, ü") for i in range(200)]


def write_pairs(path, pairs, **more):
    lines = [json.dumps({"prompt": prompt, "completion": completion, **more}) for prompt, completion in pairs]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def prepare_examples(output, *patterns, row=COMPLETION, workers=1, strict=False, watch=lambda progress: None):
    tokenizer = bytes_tokenizer(END)
    format = Format(strict=strict, example=row)
    recipe = Recipe(find_inputs(map(str, patterns)), format, END, fingerprint(tokenizer), lambda: tokenizer)
    return prepare_corpus(recipe, output, workers=workers, watch=watch)


def counted(fields, tokenizer):
    """The texts of targets that count, row by row; each ends where the end of a document is one."""
    ids = fields["targets"][fields["loss_weights"] == 1].tolist()
    return tokenizer.decode(ids, skip_special_tokens=False).split(END)


letters = st.text(max_size=20)
pairs_of_text = st.lists(st.tuples(letters, letters.filter(str.strip)), min_size=1, max_size=12)


@given(pairs_of_text, st.integers(1, 30), st.integers(20, 200))
def test_what_counts_decodes_to_just_the_completions(tmp_path_factory, pairs, short, unit_bytes):
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "a.jsonl", pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_BYTES", unit_bytes)
        prepare_examples(folder / "corpus", folder / "a.jsonl")
    corpus = open_corpus(folder / "corpus")
    assert documents_of(corpus) == [prompt + completion for prompt, completion in pairs]
    assert corpus.counted_bytes.tolist() == [len(completion.encode()) for _, completion in pairs]
    assert corpus.document_bytes.tolist() == [len((prompt + completion).encode()) for prompt, completion in pairs]
    whole, _ = hold_out(corpus, 0.0)
    assert whole.num_bytes == sum(corpus.counted_bytes)
    assert whole.num_counted == whole.num_bytes + len(pairs)

    # Without a prompt, nothing comes before the first byte of a completion that it could be the target of.
    seen = [completion.encode()[not prompt :] for prompt, completion in pairs]
    packed = cut(whole, 400, "first_fit")
    fields = packed.read(np.arange(len(packed)))
    ids = fields["targets"][fields["loss_weights"] == 1]
    assert sorted(counted(fields, corpus.tokenizer)) == sorted(
        [*corpus.tokenizer.decode_batch([list_of_ids(corpus, text) for text in seen]), ""]
    )
    assert len(ids) == sum(map(len, seen)) + len(seen)

    if whole.num_tokens > short:
        records = cut(whole, short, "concatenate")
        fields = records.read(np.arange(len(records)))
        found = fields["targets"][fields["loss_weights"] == 1].tolist()
        expected = [token for text in seen for token in (*list_of_ids(corpus, text), END_ID)]
        assert found == expected[: len(found)]
        left = whole.num_tokens - 1 - len(records) * short
        assert len(expected) - len(found) <= left
        for i in range(len(records)):
            for name, field in records.read(np.asarray([i])).items():
                assert (field[0] == fields[name][i]).all()


def list_of_ids(corpus, text):
    """Bytes that may begin within a letter, as tokens of bytes."""
    symbols = bytes_symbols(corpus.tokenizer)
    return [symbols[byte] for byte in text]


def bytes_symbols(tokenizer):
    """The id of each byte: GPT-2 writes those that print as themselves, and the others as letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: tokenizer.token_to_id(chr(byte)) for byte in printable} | {
        byte: tokenizer.token_to_id(chr(256 + i)) for i, byte in enumerate(others)
    }


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_a_mask_counts_and_is_applied_token_by_token(masked, data):
    masked = np.asarray(masked)
    edges = np.flatnonzero(np.diff(masked.astype(int), prepend=0, append=0))
    # Stretches that touch each other, as those of a long prompt do, are as good as one.
    starts, ends = edges[::2].tolist(), edges[1::2].tolist()
    if starts and ends[0] - starts[0] > 1:
        starts, ends = [starts[0], starts[0] + 1, *starts[1:]], [starts[0] + 1, *ends]
    mask = Mask(np.asarray(starts, np.int64), np.asarray(ends, np.int64), np.empty(0))
    places = np.arange(len(masked) + 1)
    for start in places:
        assert (mask.count(np.full(len(places), start), np.maximum(places, start))).tolist() == [
            masked[start : max(stop, start)].sum() for stop in places
        ]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(masked)), max_size=6)) | {0, len(masked)})
    lengths, first = np.diff(cuts), np.asarray(cuts[:-1])
    order = data.draw(st.permutations(range(len(lengths))))
    lengths, first = lengths[order], first[order]
    weights = np.ones(len(masked), np.float32)
    mask.apply(weights, np.cumsum(lengths) - lengths, first, lengths)
    expected = np.concatenate([masked[start : start + length] for start, length in zip(first, lengths, strict=True)])
    assert (weights == ~expected).all()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "inputs.jsonl"}


def test_any_number_of_workers_and_of_stops_makes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 900)
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    path = write_pairs(tmp_path / "a.jsonl", PAIRS)
    manifest = prepare_examples(tmp_path / "one", path)
    assert (manifest.format, manifest.num_documents) == (3, 200)
    assert {"mask_starts.bin", "mask_ends.bin", "counted_bytes.bin"} < set(manifest.files)
    prepare_examples(tmp_path / "three", path, workers=3)

    class StoppedError(Exception):
        pass

    for stop_after in (1, 2, 3, 2, 99):
        left = stop_after

        def watch(progress):
            nonlocal left
            left -= 1
            if not left:
                raise StoppedError

        try:
            prepare_examples(tmp_path / "stopped", path, watch=watch)
        except StoppedError:
            with open(tmp_path / "stopped.unfinished" / "mask_ends.bin", "ab") as file:
                file.write(b"torn")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "three") == files_of(tmp_path / "stopped")


def test_what_counts_is_part_of_what_a_corpus_is(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", [("ab", "cd")])
    other = write_pairs(tmp_path / "b.jsonl", [("abc", "d")])
    same, differs = (prepare_examples(tmp_path / file.stem, file) for file in (path, other))
    assert same.identity != differs.identity
    with pytest.raises(UserError, match="was prepared from other files, or with another tokenizer or other options"):
        prepare_examples(tmp_path / "a", path, row=CompletionRow("prompt", "prompt"))
    starts = tmp_path / "a" / "mask_starts.bin"
    starts.write_bytes(b"\1" + starts.read_bytes()[1:])
    with pytest.raises(UserError, match=r"the checksum of mask_starts\.bin is not that of the manifest"):
        open_corpus(tmp_path / "a")


def test_corpora_without_a_mask_are_as_they_were(lines, tmp_path):
    manifest = prepare(tmp_path / "corpus", lines)
    assert manifest.format == 2
    assert set(manifest.files) == {
        *("tokens-00000.bin", "document_ends.bin", "document_bytes.bin", "tokenizer.json", "inputs.jsonl")
    }
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.mask is None
    assert hold_out(corpus, 0.0)[0].num_counted == manifest.num_tokens
    write_manifest(tmp_path / "corpus", Manifest(**{**manifest.model_dump(), "format": 4}))
    with pytest.raises(UserError, match="is of format 4 and this version reads 2 and 3"):
        open_corpus(tmp_path / "corpus")


def test_a_long_prompt_is_tokenised_in_parts_of_which_none_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_CHARACTERS", 16)
    monkeypatch.setattr(parts, "SEARCHED", 4)
    long = "a line of it\n" * 20
    prepare_examples(tmp_path / "corpus", write_pairs(tmp_path / "a.jsonl", [(long, "yes " * 30), ("b", "c")]))
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.mask.ends.tolist()[-2:] == [len(long), len(long) + 122]
    assert corpus.mask.count(0, len(long) + 121) == len(long)
    assert corpus.counted_bytes.tolist() == [120, 1]


def config(path, tmp_path, **changes):
    source = {"path": str(path), "format": {"kind": "completion"}}
    return DataConfig(sources=(source,), cache_dir=str(tmp_path / "cache"), **{"held_out_fraction": 0.0, **changes})


def test_files_of_all_kinds_are_read_by_the_config(tmp_path):
    rows = [{"question": prompt, "answer": completion} for prompt, completion in PAIRS]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=70)
    form = {"kind": "completion", "prompt_field": "question", "completion_field": "answer"}
    chats = [{"talk": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in PAIRS]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "e.parquet")
    chat = {"kind": "chat", "messages_field": "talk", "template": "plain"}
    for name, format in (("a.jsonl", form), ("b.jsonl.gz", form), ("c.parquet", form), ("d.jsonl", chat),
                         ("e.parquet", chat)):  # fmt: skip
        some = DataConfig(
            sources=({"path": str(tmp_path / name), "format": format},),
            cache_dir=str(tmp_path / "cache"),
            packing="first_fit",
            sequence_length=64,
        )
        data = open_data(some, model_vocabulary_size=257)
        sources = training_sources(data, some, 0)
        assert [len(portion.corpus.document_ends) for portion in data.training] == [200]
        fields = sources[0].take(np.arange(sources[0].records_per_epoch))
        kept = data.training[0].num_documents
        # Of which the text is nine tenths, as later examples are longer.
        assert kept in (180, 181)
        assert sorted(counted(fields, data.tokenizer)) == sorted([*(completion for _, completion in PAIRS[:kept]), ""])
        (held_out,) = data.evaluation
        assert held_out.num_bytes == sum(len(completion.encode()) for _, completion in PAIRS[kept:])
        assert held_out.num_counted == held_out.num_bytes + 200 - kept


def test_what_does_not_fit_is_told_and_left_out_or_cut(tmp_path):
    pairs = [("a", "b" * 5), ("a" * 4, "b" * 9), ("a" * 12, "b")]
    path = write_pairs(tmp_path / "a.jsonl", pairs)
    some = config(path, tmp_path, packing="first_fit", sequence_length=8)
    data, told = open_data(some, model_vocabulary_size=257), []
    (source,) = training_sources(data, some, 0, told.append)
    assert told[0] == (
        "2 of 3 examples of data.sources.0 are longer than data.sequence_length 8: what is beyond it is left out, and "
        "1 of them altogether, for their prompts fill it."
    )
    fields = source.take(np.arange(source.records_per_epoch))
    # All of the first with its end, and what of the second fits behind its prompt.
    assert fields["targets"][fields["loss_weights"] == 1].size == 6 + 5
    assert sorted(counted(fields, data.tokenizer)) in (["", "b" * 10], ["b" * 5] * 2)
    whole = some.model_copy(update={"sequence_length": 13})
    told.clear()
    training_sources(data, whole, 0, told.append)
    assert not [sentence for sentence in told if "examples" in sentence]
    cut_up = some.model_copy(update={"packing": "concatenate"})
    training_sources(data, cut_up, 0, told.append)
    assert told[-1].startswith("2 of 3 examples of data.sources.0 are cut where a sequence ends, and what follows does")


def test_prompts_that_fill_every_sequence_are_refused(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", [("a" * 30, "b")] * 3)
    some = config(path, tmp_path, packing="first_fit", sequence_length=16)
    with pytest.raises(UserError, match=r"data\.sequence_length 16 is too short for data\.sources\.0: every prompt"):
        training_sources(open_data(some, model_vocabulary_size=257), some, 0)


def test_a_single_example_is_not_cut_to_hold_some_of_it_out(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", [("a", "b")])
    with pytest.raises(UserError, match=r"data\.sources\.0 is a single example, and none can be held out"):
        open_data(config(path, tmp_path, held_out_fraction=0.5), model_vocabulary_size=257)


def test_batches_of_training_and_evaluation_carry_the_weights(tmp_path):
    some = config(
        write_pairs(tmp_path / "a.jsonl", PAIRS),
        tmp_path,
        held_out_fraction=0.1,
        packing="first_fit",
        sequence_length=48,
    )
    data = open_data(some, model_vocabulary_size=257)
    feed = training_feed(data, some, seed=0, global_batch_size=4, rows=np.arange(4), num_batches=9)
    batch = next(feed.start(feed.state(0)))
    assert 0 < batch["loss_weights"].sum() < (batch["segment_ids"] > 0).sum() / 2
    held_out = evaluation_batches(data.evaluation, some, global_batch_size=4, rows=np.arange(4))
    assert sum(batch["loss_weights"].sum() for batch in held_out) == data.evaluation[0].num_counted


def test_inspection_tells_what_counts(tmp_path):
    prepare_examples(tmp_path / "corpus", write_pairs(tmp_path / "a.jsonl", [("abc", "d"), ("", "ef")]))
    found = inspect_corpus(open_corpus(tmp_path / "corpus"), 16, 1)
    # Of "abcd", "d" and the end; of "ef", "f" and the end.
    assert found.packing.concatenate_counted == pytest.approx(4 / 8)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": "a"}, "has no field 'completion', only 'prompt'"),
        ({"completion": "a"}, "has no field 'prompt', only 'completion'"),
        ({"prompt": "a", "completion": 5}, "has a int for 'completion', where a string is needed"),
        ({"prompt": None, "completion": "a"}, "has null for 'prompt', where a string is needed"),
        ({"prompt": "a", "completion": " "}, "has nothing but white space for 'completion'"),
        ({"prompt": "a", "completion": ""}, "has nothing but white space for 'completion'"),
    ],
)
def test_odd_pairs_are_left_out_counted_and_named(line, reason, tmp_path):
    good = json.dumps({"prompt": "a", "completion": "b"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{json.dumps(line)}\n\n{good}")
    manifest = prepare_examples(tmp_path / "corpus", tmp_path / "a.jsonl")
    assert manifest.num_documents == 2
    assert (manifest.left_out.num_malformed, manifest.left_out.num_empty) == (1, 1)
    assert manifest.left_out.examples == [f"{tmp_path}/a.jsonl line 2 {reason}"]
    with pytest.raises(UserError, match=r"a\.jsonl line 2 has .*; mend it, or do without strictness"):
        prepare_examples(tmp_path / "strict", tmp_path / "a.jsonl", strict=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_odd_messages_are_left_out_counted_and_named(name, tmp_path):
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    odd = [[], [user], [{"role": "robot", "content": "a"}], [user, {"role": "assistant", "content": ""}]]
    rows = [{"messages": some} for some in [[user, assistant], *odd]]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = ChatRow("messages", load_template("plain", END))
    manifest = prepare_examples(tmp_path / "corpus", tmp_path / name, row=row)
    assert manifest.num_documents == 1
    assert [example.partition(f"{name} ")[2] for example in manifest.left_out.examples] == [
        "line 2 has no messages in 'messages'",
        "line 3 has no message of the assistant in 'messages'",
        "line 4 has 'robot' as message 0, where its role is one of system, developer, user, assistant, tool, in "
        "'messages'",
        "line 5 has nothing but white space as message 1, which is the assistant's, in 'messages'",
    ]


def test_files_and_formats_that_do_not_go_together_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    path = write_pairs(tmp_path / "a.jsonl", PAIRS)
    table = pyarrow.Table.from_pylist([{"prompt": "a", "completion": "b", "messages": "c"}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    prepare_examples(tmp_path / "corpus", path)

    def refused(message, file, format=None, **more):
        source = {"path": str(tmp_path / file), "format": format or {"kind": "completion"}, **more}
        with pytest.raises(UserError, match=message):
            open_data(DataConfig(sources=(source,), cache_dir=str(tmp_path / "cache")), model_vocabulary_size=999)

    refused(r"data\.sources\.0: .*a\.txt is a text, and prompts and answers are read from \.jsonl and", "a.txt")
    refused("the text field 'body' is for documents that are one text", "a.jsonl", text_field="body")
    refused(r"data\.sources\.0\.format is for files", "corpus")
    chat = {"kind": "chat", "template": "plain"}
    refused("column 'messages' is of type string; give one of lists of messages", "a.parquet", chat)
    refused(r"a\.jsonl holds no document: .* line 1 has no field 'messages', only 'completion', 'prompt'", path, chat)
    refused(r"data\.sources\.0\.format: cannot read the chat template none", "a.jsonl", {**chat, "template": "none"})
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": []}))
    refused(
        r"data\.sources\.0: the chat template writes '<\|im_start\|>', which is no token of the tokenizer",
        "b.jsonl",
        {**chat, "template": "chatml"},
    )
