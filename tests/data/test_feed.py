"""What training is fed survives stops, other hosts and other weights."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dseekjax.data.feed import TrainingFeed
from dseekjax.errors import UserError
from tests.data.corpora import shuffled

BATCH = 8
documents = st.lists(st.integers(2, 30), min_size=4, max_size=12)
weights_of_two = st.tuples(st.integers(0, 5), st.integers(1, 5))


def feeds(lengths, weights, packing, seed, hosts=1, max_epochs=(None, None), num_batches=40):
    """One feed to a host."""
    rows = np.arange(BATCH).reshape(hosts, -1)
    return [
        TrainingFeed(
            shuffled(lengths, 6, packing, seed),
            weights,
            max_epochs,
            global_batch_size=BATCH,
            rows=rows[host],
            num_batches=num_batches,
            prefetch=2,
        )
        for host in range(hosts)
    ]


def read(several, state, count):
    """Global batches from the slices of all hosts."""
    streams = [feed.start(json.loads(json.dumps(state))) for feed in several]
    for _ in range(count):
        parts = [next(stream) for stream in streams]
        yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@settings(max_examples=20)
@given(
    st.tuples(documents, documents),
    st.sampled_from(["concatenate", "first_fit"]),
    st.integers(0, 999),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 4]), weights_of_two), min_size=1, max_size=4),
)
def test_stops_other_hosts_and_other_weights_lose_and_repeat_nothing(lengths, packing, seed, stretches):
    # As it is lived: stopped after some batches, gone on with by other hosts and by other weights.
    state, lived = None, []
    for count, hosts, weights in stretches:
        several = feeds(lengths, weights, packing, seed, hosts)
        state = state or several[0].state(0)
        lived += read(several, state, count)
        state = several[0].state(len(lived))
        assert all(feed.state(len(lived)) == state for feed in several)
    # As it is told afterwards by one host that has only the last state's history, and begins anew.
    (teller,) = feeds(lengths, stretches[-1][2], packing, seed)
    history = state["mixture"]
    for i, fields in enumerate(lived):
        known = [entry for entry in history if entry[0] <= i * BATCH]
        (again,) = feeds(lengths, known[-1][1], packing, seed)
        (told,) = read([again], {**state, "batch": i, "mixture": known}, 1)
        assert all((told[name] == fields[name]).all() for name in fields)
    # Every source was read in the order that it has by itself.
    tokens = np.concatenate([fields["tokens"] for fields in lived]) if lived else np.empty((0, 6), int)
    for i, source in enumerate(shuffled(lengths, 6, packing, seed)):
        mine = tokens[tokens[:, 0] // 100_000 == i]
        assert (mine == source.take(np.arange(len(mine)))["tokens"]).all() if len(mine) else True
    assert teller.identity == state["identity"]


def test_a_state_is_small_and_plain():
    (feed,) = feeds(([50], [60]), (1.0, 3.0), "concatenate", 0)
    next(feed.start(feed.state(0)))
    state = feed.state(7)
    assert state["batch"] == 7
    assert state["mixture"] == [[0, [1.0, 3.0]]]
    assert state["positions"] == [None, None]


def test_sources_that_may_not_be_read_often_enough_are_refused():
    allowed = feeds(([13], [13]), (1, 1), "concatenate", 0, max_epochs=(2, 6), num_batches=2)
    assert allowed[0].epochs() == [2.0, 6.0]
    (short,) = feeds(([13], [13]), (1, 1), "concatenate", 0, max_epochs=(2, 6), num_batches=3)
    for refuse in (short.refuse_too_few, lambda: short.start(short.state(0))):
        with pytest.raises(UserError, match=r"train\.steps 3 needs 24 sequences.*allow is 16; choose at most 2 steps"):
            refuse()
    batches = list(islice(allowed[0].start(allowed[0].state(0)), 2))
    counts = np.bincount(np.concatenate([fields["tokens"][:, 0] // 100_000 for fields in batches]))
    assert counts.tolist() == [4, 12]


def test_with_other_weights_what_was_read_before_counts():
    (before,) = feeds(([13], [13]), (1, 1), "concatenate", 0, max_epochs=(8, 20), num_batches=4)
    list(before.start(before.state(0)))
    (after,) = feeds(([13], [13]), (0, 1), "concatenate", 0, max_epochs=(8, 20), num_batches=6)
    assert len(list(after.start(before.state(4)))) == 2
    assert after.epochs() == [8.0, 16.0]


def test_sources_with_the_same_records_have_orders_of_their_own():
    one, two = shuffled(([99], [99]), 6)
    places = [source.take(np.arange(16))["tokens"][:, 0] % 100_000 for source in (one, two)]
    assert (places[0] != places[1]).any()


def test_sources_are_told_where_they_were():
    class Recorded:
        identity, records_per_epoch = "recorded", None

        def __init__(self):
            self.sought = []

        def take(self, numbers):
            return {"number": numbers}

        def position(self, number):
            return ["at", number]

        def seek(self, position):
            self.sought.append(position)

    def feed(source):
        return TrainingFeed([source], [1.0], [None], global_batch_size=4, rows=np.arange(4), num_batches=9, prefetch=1)

    first, later = Recorded(), Recorded()
    state = json.loads(json.dumps(feed(first).state(3)))
    batch = next(feed(later).start(state))
    assert later.sought == [["at", 12]]
    assert batch["number"].tolist() == [12, 13, 14, 15]
