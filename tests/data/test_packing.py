"""First-fit packing: what fits, what is wasted, and that nothing is lost."""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data import packing
from dseekjax.data.corpus import Portion, open_corpus
from dseekjax.data.held_out import hold_out
from dseekjax.data.packing import first_fit, index_path, open_index, pieces
from dseekjax.data.records import Packed
from dseekjax.errors import UserError
from tests.data.corpora import portion, prepare, records

lengths_of_pieces = st.lists(st.integers(1, 20), min_size=1, max_size=60)


@given(lengths_of_pieces)
def test_first_fit_is_the_first_bin_that_fits_and_wastes_no_more_than_it_may(lengths):
    room: list[int] = []
    expected = []
    for length in lengths:
        fitting = [i for i, free in enumerate(room) if free >= length]
        if not fitting:
            room.append(20)
            fitting = [len(room) - 1]
        room[fitting[0]] -= length
        expected.append(fitting[0])
    bins = first_fit(np.asarray(lengths), 20)
    assert bins.tolist() == expected
    filled = np.bincount(bins, lengths)
    assert filled.max() <= 20
    # Two bins together always hold more than one could.
    assert len(filled) < 2 or (filled[:-1] + filled[1:] > 20).all()
    assert len(filled) < 2 * sum(lengths) / 20 + 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 9), st.data())
def test_packed_records_hold_every_target_of_every_document_once(lengths, sequence_length, data):
    lengths = [*lengths, 10]
    some = records(lengths, sequence_length, "first_fit")
    fields = some.read(np.arange(len(some)))
    used = fields["loss_weights"] == 1
    ends = np.cumsum(lengths)
    expected = sorted(set(range(ends[-1])) - set((ends - 1).tolist()))
    assert sorted(fields["tokens"][used].tolist()) == expected
    assert (fields["targets"][used] == fields["tokens"][used] + 1).all()
    # Padding comes last, and is no segment.
    assert (used == (fields["segment_ids"] > 0)).all()
    assert (np.diff(used.astype(int), axis=1) <= 0).all()
    for row in range(len(some)):
        for segment in range(1, fields["segment_ids"][row].max() + 1):
            here = fields["segment_ids"][row] == segment
            assert fields["positions"][row][here].tolist() == list(range(here.sum()))
            assert np.diff(fields["tokens"][row][here]).tolist() == [1] * (here.sum() - 1)
            assert len(set(np.searchsorted(ends, fields["tokens"][row][here], side="right"))) == 1
    one = data.draw(st.integers(0, len(some) - 1))
    for name, field in some.read(np.asarray([one])).items():
        assert (field[0] == fields[name][one]).all()


def test_a_portion_that_cuts_a_document_keeps_to_itself():
    whole = portion([10, 10, 10])
    part = Portion(whole.corpus, 5, 17, 12)
    (found,) = pieces(part, 4)
    starts, lengths = found
    # The last token of each document's part is a target only.
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == [(5, 4), (10, 4), (14, 2)]


def test_blocks_are_of_so_many_pieces_whatever_the_documents(monkeypatch):
    monkeypatch.setattr(packing, "PIECES_PER_BLOCK", 10)
    for lengths in ([100] * 30, [1, 2, 3] * 30, [1000, 1] * 5, [5000]):
        some = portion(lengths, tokens_per_shard=999)
        blocks = [len(starts) for starts, _ in pieces(some, 5)]
        # More only where a single document is of more.
        assert max(blocks) <= 20 + max(lengths) // 5
        assert sum(blocks) == sum(-(-(length - 1) // 5) for length in lengths)


def test_an_index_is_built_once_by_blocks_and_guarded(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "PIECES_PER_BLOCK", 7)
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("x" * (i + 1))
    prepare(tmp_path / "corpus", tmp_path / "*.txt")
    told = []
    kept, held_out = hold_out(open_corpus(tmp_path / "corpus"), 0.2)
    for part in (kept, held_out):
        index = open_index(part, 16, told.append)
        fields = Packed.of(part, index, 16)
        read = fields.read(np.arange(len(fields)))
        assert read["loss_weights"].sum() == part.num_tokens - (27 if part is kept else 3)
    assert len(told) == 2
    assert "Packing 405 tokens into records of 16" in told[0]
    again = open_index(kept, 16, told.append)
    assert len(told) == 2
    assert (again.piece_starts == open_index(kept, 16).piece_starts).all()
    path = index_path(kept, 16)
    assert path.stat().st_mode == (tmp_path / "corpus").stat().st_mode
    (path / "piece_starts.bin").write_bytes(b"\0" * (path / "piece_starts.bin").stat().st_size)
    with pytest.raises(UserError, match="is damaged; remove it, and it will be built anew"):
        open_index(kept, 16)
    shutil.rmtree(path)
    assert len(open_index(kept, 16).piece_starts) == len(again.piece_starts)


def test_where_no_index_can_be_kept_it_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    prepare(tmp_path / "corpus", tmp_path / "a.txt")
    (tmp_path / "corpus" / "packing").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write the packing index .* set data.packing to concatenate"):
        open_index(hold_out(open_corpus(tmp_path / "corpus"), 0.0)[0], 16)
