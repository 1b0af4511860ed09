"""Permutation and mixture: every record exactly once, in the promised shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.mixture import Mixture, assign, counts
from dseekjax.data.permutation import permute

weights_of_sources = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size, key):
    order = permute(np.arange(size), size, key)
    assert (np.sort(order) == np.arange(size)).all()


def test_permutations_differ_by_key_and_look_random():
    orders = [permute(np.arange(500), 500, key) for key in range(40)]
    assert len({order.tobytes() for order in orders}) == 40
    correlations = [abs(np.corrcoef(order, np.arange(500))[0, 1]) for order in orders]
    assert np.mean(correlations) < 0.1
    # Where index 0 goes spreads over the range.
    assert np.std([order[0] for order in orders]) > 80


@pytest.mark.parametrize("size", [1 << 40, (1 << 40) + 12345])
def test_permute_far_out_stays_in_range_and_repeats_nothing(size):
    order = permute(np.arange(size - 1000, size), size, 7)
    assert len(set(order.tolist())) == 1000
    assert (order >= 0).all()
    assert (order < size).all()


@given(weights_of_sources, st.integers(1, 2000))
def test_assign_gives_each_source_its_share_and_each_record_once(weights, count):
    source, running = assign(np.arange(count), weights)
    shares = np.array(weights) / sum(weights)
    assert np.bincount(source, minlength=len(weights)).tolist() == counts(count, weights)
    for i, share in enumerate(shares):
        assert (running[source == i] == np.arange((source == i).sum())).all()
        assert abs((source == i).sum() - count * share) <= i + 1 + count * 1e-5


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=4), st.integers(0, 10**9))
def test_assign_far_out_is_the_same_function(weights, start):
    whole = assign(np.arange(start, start + 64), weights)
    parts = [assign(np.arange(start + i, start + i + 16), weights) for i in range(0, 64, 16)]
    for i in (0, 1):
        assert (whole[i] == np.concatenate([part[i] for part in parts])).all()


def test_shares_are_exact_in_the_long_run():
    for weights, shares in (((0.1, 0.2, 0.7), (1, 2, 7)), ((3, 0, 7, 0), (3, 0, 7, 0))):
        assert counts(10**12, weights) == [share * 10**11 for share in shares]
    # Small shares too, far beyond what fits into a product of 64 bits.
    for weights in ([1e-6, *[1.0] * 8], [2e-6, 1, 1, 1, 1], [0.123456789012345, 3e-7, 0.7]):
        for number in (10**9, 10**12):
            expected = number * np.asarray(weights) / sum(weights)
            found = counts(number, weights)
            assert np.abs(np.asarray(found) - expected).max() <= len(weights) + number * 2**-40
            source, running = assign(np.arange(number, number + 999), weights)
            for i in range(len(weights)):
                mine = running[source == i]
                assert mine.tolist() == list(range(found[i], found[i] + len(mine)))


segments = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)),
                    min_size=1, max_size=4)  # fmt: skip


@given(segments, st.lists(st.none() | st.integers(1, 60), min_size=3, max_size=3))
def test_weights_may_change_and_no_record_is_skipped_or_repeated(stretches, limits):
    history, start = [], 0
    for length, weights in stretches:
        history.append((start, weights))
        start += length
    # One source without end and with weight, so that there is always something to deal.
    limits[0] = None
    history = [(start, [1 + weights[0], *weights[1:]]) for start, weights in history]
    mixture = Mixture.of(history, limits)
    assert mixture.num_records is None
    total = start + 200
    source, running = mixture.assign(np.arange(total))
    for i, limit in enumerate(limits):
        numbers = running[source == i]
        assert numbers.tolist() == list(range(len(numbers)))
        assert limit is None or len(numbers) <= limit
    for number in (0, start // 2, start, total):
        assert mixture.taken(number) == np.bincount(source[:number], minlength=3).tolist()
    # What was dealt before a change of weights stays as it was.
    for count in range(1, len(history)):
        before = Mixture.of(history[:count], limits)
        stop = history[count][0]
        assert (before.assign(np.arange(stop))[0] == source[:stop]).all()
    # Within a stretch, and until a source is used up, each source has its share.
    first_stop = history[1][0] if len(history) > 1 else total
    weights = np.asarray(history[0][1])
    used_up = [i for i, limit in enumerate(limits) if limit is not None and (source[:first_stop] == i).sum() >= limit]
    if not used_up:
        found = np.bincount(source[:first_stop], minlength=3)
        assert np.abs(found - first_stop * weights / weights.sum()).max() <= 3


def test_a_source_that_is_used_up_leaves_its_share_to_the_others():
    mixture = Mixture.of([(0, (1, 1, 2))], (5, None, None))
    source, _ = mixture.assign(np.arange(400))
    assert (source == 0).sum() == 5
    late = np.bincount(source[100:], minlength=3)
    assert late.tolist() == [0, 100, 200]
    finite = Mixture.of([(0, (1, 1))], (5, 9))
    assert finite.num_records == 14
    assert np.bincount(finite.assign(np.arange(14))[0]).tolist() == [5, 9]
