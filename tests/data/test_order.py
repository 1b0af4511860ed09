"""Permutation and mixture: every record exactly once, in the promised shares."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.data.mixture import assign
from dseekjax.data.permutation import permute


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size, key):
    order = permute(np.arange(size), size, np.full(size, key, np.uint64))
    assert (np.sort(order) == np.arange(size)).all()


def test_permutations_differ_by_key_and_look_random():
    orders = [permute(np.arange(500), 500, np.full(500, key, np.uint64)) for key in range(40)]
    assert len({order.tobytes() for order in orders}) == 40
    correlations = [abs(np.corrcoef(order, np.arange(500))[0, 1]) for order in orders]
    assert np.mean(correlations) < 0.1
    # Where index 0 goes spreads over the range.
    assert np.std([order[0] for order in orders]) > 80


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 2000))
def test_assign_gives_each_source_its_share_and_each_record_once(weights, count):
    source, running = assign(np.arange(count), weights)
    shares = np.array(weights) / sum(weights)
    for i, share in enumerate(shares):
        assert (running[source == i] == np.arange((source == i).sum())).all()
        assert abs((source == i).sum() - count * share) <= i + 1 + count * 1e-5


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=4), st.integers(0, 10**9))
def test_assign_far_out_is_the_same_function(weights, start):
    whole = assign(np.arange(start, start + 64), weights)
    parts = [assign(np.arange(start + i, start + i + 16), weights) for i in range(0, 64, 16)]
    for i in (0, 1):
        assert (whole[i] == np.concatenate([part[i] for part in parts])).all()
