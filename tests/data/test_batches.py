"""Batches as pure functions of corpora, seed and number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.batches import EvaluationBatches, TrainingBatches, prefetched
from dseekjax.data.mixture import Mixture
from dseekjax.errors import UserError
from tests.data.corpora import records, shuffled

documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)
packings = st.sampled_from(["concatenate", "first_fit"])


def batches_of(sources, weights, size, rows, count):
    mixture = Mixture.of([(0, weights)], [None] * len(weights))
    return TrainingBatches(sources, mixture, size, rows, count)


@given(
    st.lists(documents, min_size=1, max_size=3),
    st.integers(0, 1 << 30),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    packings,
)
def test_any_number_of_hosts_reads_slices_of_the_same_batch(lengths, seed, hosts, number, packing):
    mixed = shuffled([[*each, 10] for each in lengths], 8, packing, seed)
    weights = [1.0 + i for i in range(len(mixed))]
    whole = batches_of(mixed, weights, 8, np.arange(8), 100)[number]
    parts = [batches_of(mixed, weights, 8, np.arange(8).reshape(hosts, -1)[host], 100)[number] for host in range(hosts)]
    for name, field in whole.items():
        assert (field == np.concatenate([part[name] for part in parts])).all()


@given(documents, st.integers(0, 1 << 30), packings)
def test_an_epoch_reads_every_record_once(lengths, seed, packing):
    (source,) = shuffled([[*lengths, 30]], 5, packing, seed)
    count = source.records_per_epoch
    batches = batches_of([source], [1.0], count, np.arange(count), 3)
    in_order = source.records.read(np.arange(count))["tokens"]
    for number in range(3):
        tokens = batches[number]["tokens"]
        assert sorted(map(tuple, tokens.tolist())) == sorted(map(tuple, in_order.tolist()))


@given(documents, st.integers(1, 9))
def test_fields_tell_documents_apart(lengths, sequence_length):
    some = records([*lengths, 10], sequence_length)
    fields = some.read(np.arange(len(some)))
    document = np.searchsorted(some.document_ends, fields["tokens"], side="right")
    next_document = np.searchsorted(some.document_ends, fields["targets"], side="right")
    assert fields["tokens"].ravel().tolist() == list(range(len(some) * sequence_length))
    assert (fields["targets"] == fields["tokens"] + 1).all()
    assert (fields["loss_weights"] == (document == next_document)).all()
    assert (fields["segment_ids"] == document - document[:, :1] + 1).all()
    # Positions count up within a document and begin at 0 where a row or a document begins.
    begins = np.diff(document, axis=1, prepend=-1) != 0
    assert (fields["positions"][begins] == 0).all()
    assert (np.diff(fields["positions"], axis=1)[~begins[:, 1:]] == 1).all()


def test_evaluation_reads_everything_once_and_fills_up_with_rows_that_do_not_count():
    two = [records([23, 14], 5), records([45], 5, first_token=100_000)]
    batches = EvaluationBatches(two, 8, np.arange(8))
    seen = [
        batch["tokens"][batch["segment_ids"][:, 0] > 0][:, 0] for batch in (batches[i] for i in range(len(batches)))
    ]
    expected = [i * 5 for i in range(len(two[0]))] + [100_000 + i * 5 for i in range(len(two[1]))]
    assert np.concatenate(seen).tolist() == expected
    assert batches[len(batches) - 1]["loss_weights"][-1].sum() == 0
    assert len(list(batches)) == len(batches)


def test_prefetched_batches_start_anywhere():
    batches = batches_of(shuffled([[300]], 8), [1.0], 4, np.arange(4), 20)
    for start in (0, 7):
        read = list(prefetched(batches, start, 3))
        assert len(read) == 20 - start
        for i, fields in enumerate(read):
            assert all((fields[name] == batches[start + i][name]).all() for name in fields)


def test_a_source_shorter_than_a_sequence_is_refused():
    with pytest.raises(UserError, match=r"data.sequence_length 64 is longer than a source, which has 10 tokens"):
        records([10], 64)
    with pytest.raises(UserError, match="has no document of two tokens or more"):
        records([1, 1], 64, "first_fit")
