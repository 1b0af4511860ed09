"""Batches as pure functions of corpora, seed and number."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.batches import EvaluationBatches, TrainingBatches, prefetched
from dseekjax.data.corpus import Corpus
from dseekjax.data.records import Records
from dseekjax.errors import UserError


def corpus(lengths, first_token=0):
    """Documents whose tokens all differ."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(first_token, first_token + offsets[-1]).astype(np.uint32)
    return Corpus(Path("nowhere"), tokens, offsets, {"sha256": ""})


def sources(lengths_of_each, sequence_length):
    return [Records(corpus(lengths, i * 100_000), sequence_length) for i, lengths in enumerate(lengths_of_each)]


documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(
    st.lists(documents, min_size=1, max_size=3), st.integers(0, 1 << 30), st.sampled_from([1, 2, 4]), st.integers(1, 3)
)
def test_any_number_of_hosts_reads_slices_of_the_same_batch(lengths, seed, hosts, number):
    mixed = sources([[*each, 10] for each in lengths], 8)
    weights = [1.0 + i for i in range(len(mixed))]
    whole = TrainingBatches(mixed, weights, seed, 8, np.arange(8), 100)[number]
    parts = [
        TrainingBatches(mixed, weights, seed, 8, np.arange(8).reshape(hosts, -1)[host], 100)[number]
        for host in range(hosts)
    ]
    for name, field in whole.items():
        assert (field == np.concatenate([part[name] for part in parts])).all()


@given(documents, st.integers(0, 1 << 30))
def test_an_epoch_reads_every_record_once(lengths, seed):
    (records,) = sources([[*lengths, 30]], 5)
    count = len(records)
    batches = TrainingBatches([records], [1.0], seed, count, np.arange(count), 3)
    for number in range(3):
        firsts = batches[number]["tokens"][:, 0]
        assert sorted(firsts) == [i * 5 for i in range(count)]


@given(documents, st.integers(1, 9))
def test_fields_tell_documents_apart(lengths, sequence_length):
    (records,) = sources([[*lengths, 10]], sequence_length)
    fields = records.read(np.arange(len(records)))
    offsets = records.corpus.offsets
    document = np.searchsorted(offsets, fields["tokens"], side="right")
    next_document = np.searchsorted(offsets, fields["targets"], side="right")
    assert (fields["targets"] == fields["tokens"] + 1).all()
    assert (fields["loss_weights"] == (document == next_document)).all()
    assert (fields["segment_ids"] == document - document[:, :1] + 1).all()
    # Positions count up within a document and begin at 0 where a row or a document begins.
    begins = np.diff(document, axis=1, prepend=-1) != 0
    assert (fields["positions"][begins] == 0).all()
    assert (np.diff(fields["positions"], axis=1)[~begins[:, 1:]] == 1).all()


def test_evaluation_reads_everything_once_and_fills_up_with_rows_that_do_not_count():
    two = sources([[23, 14], [45]], 5)
    batches = EvaluationBatches(two, 8, np.arange(8))
    seen = [
        batch["tokens"][batch["segment_ids"][:, 0] > 0][:, 0] for batch in (batches[i] for i in range(len(batches)))
    ]
    expected = [i * 5 for i in range(len(two[0]))] + [100_000 + i * 5 for i in range(len(two[1]))]
    assert np.concatenate(seen).tolist() == expected
    assert batches[len(batches) - 1]["loss_weights"][-1].sum() == 0
    assert len(list(batches)) == len(batches)


def test_prefetched_batches_start_anywhere():
    batches = TrainingBatches(sources([[300]], 8), [1.0], 0, 4, np.arange(4), 20)
    for start in (0, 7):
        read = list(prefetched(batches, start, 3))
        assert len(read) == 20 - start
        for i, fields in enumerate(read):
            assert all((fields[name] == batches[start + i][name]).all() for name in fields)


def test_a_source_shorter_than_a_sequence_is_refused():
    with pytest.raises(UserError, match=r"data.sequence_length 64 is longer than a source, which has 10 tokens"):
        Records(corpus([10]), 64)
