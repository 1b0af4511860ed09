"""Files that are tokenised while they are read: the same records in every process, from every position."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dseekjax.data.feed import TrainingFeed
from dseekjax.data.reading.inputs import Format, find_inputs
from dseekjax.data.reading.open_bytes import zstd
from dseekjax.data.streaming import Stream, Streamed
from dseekjax.data.tokenizers import bytes_tokenizer
from dseekjax.errors import UserError
from tests.data.corpora import END

TEXTS = [f"document {i} " + ",".join(str(1000 * i + j) for j in range(i * 7 % 23)) for i in range(80)]
LENGTH, BLOCK = 13, 16


@pytest.fixture(scope="module", params=["jsonl", "parquet", "jsonl.zst"])
def files(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("streamed")
    for name, texts in (("a", TEXTS[:30]), ("b", TEXTS[30:])):
        path = folder / f"{name}.{request.param}"
        if request.param == "parquet":
            column = pyarrow.array([*texts[:9], None, "", *texts[9:]])
            pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=7)
            continue
        lines = [json.dumps({"text": text}) for text in texts]
        content = "\n".join([*lines[:9], "odd", "", *lines[9:]]).encode()
        path.write_bytes(content if path.suffix == ".jsonl" else zstd.compress(content))
    return folder


def streamed(folder, told=None):
    tokenizer = bytes_tokenizer(END)
    inputs = find_inputs([f"{folder}/*"])
    tell = (lambda sentence: None) if told is None else told.append
    stream = Stream(inputs, Format(), tokenizer, tokenizer.token_to_id(END), tell)
    return Streamed(stream, LENGTH, key=5, block_records=BLOCK)


def expected_tokens(count):
    """The stream, plainly."""
    once = [token for text in TEXTS for token in [*bytes_tokenizer(END).encode(text).ids, 256]]
    return np.asarray((once * (1 + count // len(once)))[:count])


def test_a_block_holds_its_records_shuffled_with_their_documents(files):
    told = []
    source = streamed(files, told)
    for block in range(60):
        fields = source.take(np.arange(block * BLOCK, (block + 1) * BLOCK))
        tokens = expected_tokens((block + 1) * BLOCK * LENGTH + 1)[block * BLOCK * LENGTH :]
        order = [tuple(row) for row in fields["tokens"].tolist()]
        in_order = [tuple(row) for row in tokens[:-1].reshape(BLOCK, LENGTH).tolist()]
        assert sorted(order) == sorted(in_order)
        assert order != in_order
        for row in range(BLOCK):
            place = in_order.index(order[row]) * LENGTH
            assert fields["targets"][row].tolist() == tokens[place + 1 : place + 1 + LENGTH].tolist()
            ends = tokens[place : place + LENGTH] == 256
            assert (fields["loss_weights"][row] == ~ends).all()
            assert fields["segment_ids"][row].tolist() == (1 + np.cumsum(ends) - ends).tolist()
    assert len(told) >= 2
    assert "; line 10 " in told[0]


def same(one, other):
    return all((one[name] == other[name]).all() for name in one)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_any_record_can_be_taken_at_any_time(files, numbers):
    source, in_order = streamed(files), streamed(files)
    everything = in_order.take(np.arange(301))
    for number in numbers:
        found = source.take(np.arange(number, number + 1))
        assert all((found[name][0] == everything[name][number]).all() for name in found)


@settings(max_examples=20)
@given(st.integers(0, 500), st.integers(1, 40))
def test_a_position_is_enough_to_go_on(files, number, count):
    source = streamed(files)
    if number:
        source.take(np.arange(number - 1, number))
    position = json.loads(json.dumps(source.position(number)))
    later = streamed(files)
    later.seek(position)
    numbers = np.arange(number, number + count)
    assert same(source.take(numbers), later.take(numbers))
    assert position[0] >= number // BLOCK - 1


def test_going_on_does_not_read_what_came_before(files, tmp_path):
    for path in files.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = streamed(tmp_path)
    numbers = np.arange(15 * BLOCK, 16 * BLOCK)
    expected = source.take(numbers)
    position = source.position(15 * BLOCK)
    assert position[:2] == [15, 1]
    later = streamed(tmp_path)
    next(tmp_path.glob("a.*")).unlink()
    later.seek(position)
    assert same(later.take(numbers), expected)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4])), min_size=2, max_size=4))
def test_a_run_goes_on_with_other_hosts(files, stretches):
    def feeds(hosts):
        rows = np.arange(8).reshape(hosts, -1)
        return [
            TrainingFeed(
                [streamed(files)], [1.0], [None], global_batch_size=8, rows=rows[i], num_batches=99, prefetch=2
            )
            for i in range(hosts)
        ]

    state, lived = feeds(1)[0].state(0), []
    for count, hosts in stretches:
        several = feeds(hosts)
        streams = [feed.start(state) for feed in several]
        for _ in range(count):
            parts = [next(stream) for stream in streams]
            lived.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        state = json.loads(json.dumps(several[0].state(len(lived))))
    plain = streamed(files)
    for i, fields in enumerate(lived):
        assert same(fields, plain.take(np.arange(8 * i, 8 * i + 8)))


def test_what_holds_nothing_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("odd\n\n")
    with pytest.raises(UserError, match=r"a\.jsonl, and what is named with it, holds no document to stream"):
        streamed(tmp_path).take(np.arange(1))


def test_a_document_longer_than_blocks_can_be_gone_on_with_anywhere(tmp_path):
    text = ",".join(map(str, range(1000)))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    stream = [*bytes_tokenizer(END).encode(text).ids, 256] * 3
    position = streamed(tmp_path).position(0)
    for block in range(6):
        source = streamed(tmp_path)
        source.seek(position)
        tokens = source.take(np.arange(block * BLOCK, (block + 1) * BLOCK))["tokens"]
        expected = np.asarray(stream[block * BLOCK * LENGTH :][: BLOCK * LENGTH]).reshape(BLOCK, LENGTH)
        assert sorted(map(tuple, tokens.tolist())) == sorted(map(tuple, expected.tolist()))
        position = source.position((block + 1) * BLOCK)
        assert position[0] == block + 1


def test_other_files_have_another_identity(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the"}')
    before = streamed(tmp_path).identity
    assert streamed(tmp_path).identity == before
    (tmp_path / "a.jsonl").write_text('{"text": "THE"}')
    assert streamed(tmp_path).identity != before
    other = tmp_path / "moved"
    other.mkdir()
    (other / "a.jsonl").write_text('{"text": "the"}')
    assert streamed(other).identity == before
