"""Some elements of gradients, and two of every four, against their definition; kernels against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quantize import (
    mask_indices,
    prune_two_of_four,
    sampled_threshold,
    sparsify,
    sparsify_top_k,
    unpack_masked,
    unpack_sparse,
    unpack_two_of_four,
    wire_bytes,
)
from tests.pallas_kernels.gradients import (
    LENGTHS,
    assert_same,
    dtypes,
    gradient,
    interpreted,
    jitted,
    plain,
    residual,
    seeds,
)

MATRICES = [(1, 1), (16, 24), (19, 531)]


def sparse_by_definition(corrected, threshold, budget):
    passing = np.flatnonzero((np.abs(corrected) >= threshold) & (np.abs(corrected) >= 2.0**-90))[:budget]
    indices = np.full(budget, len(corrected))
    indices[: len(passing)] = passing
    return indices, passing


@given(st.sampled_from(LENGTHS), st.sampled_from([0.05, 1.0]), dtypes, seeds)
def test_sparsify_sends_what_reaches_the_threshold_in_order(length, density, dtype, seed):
    x, before = gradient((length,), seed, dtype), residual(length, seed)
    budget = max(1, length // 10)
    corrected = np.asarray(x.astype(jnp.float32) + before)
    threshold = jitted(sampled_threshold, density=density)(x, before)
    packed, left = jitted(sparsify, budget=budget, **plain)(x, before, threshold)
    indices, sent = sparse_by_definition(corrected, float(threshold), budget)
    np.testing.assert_array_equal(packed.indices, indices)
    np.testing.assert_array_equal(packed.values[: len(sent)], corrected[sent])
    assert (packed.values[len(sent) :] == 0).all()
    np.testing.assert_array_equal(np.asarray(jitted(unpack_sparse)(packed)) + np.asarray(left), corrected)
    assert (np.asarray(left)[sent] == 0).all()
    assert wire_bytes(packed) == 8 * budget

    masked = jitted(mask_indices)(packed)
    bits = np.unpackbits(np.asarray(masked.words).view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(np.flatnonzero(bits), sent)
    np.testing.assert_array_equal(jitted(unpack_masked)(masked), jitted(unpack_sparse)(packed))
    assert wire_bytes(masked) == 4 * -(-length // 32) + 4 * budget


@given(st.sampled_from(LENGTHS), dtypes, seeds)
def test_top_k_sends_the_largest(length, dtype, seed):
    x, before = gradient((length,), seed, dtype), residual(length, seed)
    budget = -(-length // 20)
    packed, left = jitted(sparsify_top_k, budget=budget)(x, before)
    corrected = np.asarray(x.astype(jnp.float32) + before)
    largest = np.sort(np.argsort(-np.abs(corrected), kind="stable")[:budget])
    np.testing.assert_array_equal(packed.indices, largest)
    np.testing.assert_array_equal(packed.values, corrected[largest])
    np.testing.assert_array_equal(np.asarray(jitted(unpack_sparse)(packed)) + np.asarray(left), corrected)


def test_an_exact_threshold_sends_the_top_k():
    x, before = jnp.asarray(np.random.default_rng(0).normal(size=5001), jnp.float32), residual(5001, 5)
    threshold = sampled_threshold(x, before, density=250 / 5001)
    assert_same(sparsify(x, before, threshold, budget=250), sparsify_top_k(x, before, budget=250))


@pytest.mark.parametrize("structure", ["none", "columns"])
def test_a_sample_finds_the_density(structure):
    """Within four standard deviations, also where every 64th column is large."""
    x = np.random.default_rng(0).normal(size=(512, 512))
    if structure == "columns":
        x[:, ::64] *= 100
    x = jnp.asarray(x.reshape(-1), jnp.float32)
    threshold = sampled_threshold(x, jnp.zeros_like(x), density=0.05, sample_size=4096)
    found = float((jnp.abs(x) >= threshold).mean())
    assert abs(found - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 4096)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", ["reference", "pallas_interpreted", "top_k"])
def test_what_is_not_finite_makes_all_that_is_sent_nan(bad, implementation):
    """Though it comes last and the slots are full before."""
    x, before = gradient((777,), 0).at[776].set(bad), residual(777, 0)
    if implementation == "top_k":
        packed, left = sparsify_top_k(x, before, budget=10)
    else:
        packed, left = sparsify(x, before, jnp.float32(1e-3), budget=10, implementation=implementation)
    assert np.isnan(packed.values).all()
    np.testing.assert_array_equal(left, before)


@given(st.sampled_from([(1, jnp.float32), (777, jnp.bfloat16), (5001, jnp.float32)]), seeds, st.integers(0, 2))
def test_sparsifying_kernel_has_the_bits_of_the_reference(case, seed, bad):
    length, dtype = case
    x, before = gradient((length,), seed, dtype, bad), residual(length, seed)
    # From nearly none to more than the budget.
    threshold = jnp.float32(10.0 ** (seed % 5 - 2))
    budget = max(1, length // 10)
    assert_same(*(jitted(sparsify, budget=budget, **which)(x, before, threshold) for which in (interpreted, plain)))


def test_what_sparsifying_cannot_do_is_refused():
    x = jnp.ones(64)
    with pytest.raises(ValueError, match=r"sparsify: residual is float32 \(32,\)"):
        sparsify(x, x[:32], jnp.float32(0), budget=1)
    for budget in (0, 65):
        with pytest.raises(ValueError, match=f"sparsify: budget {budget} is out of range; give 1 to 64"):
            sparsify(x, x, jnp.float32(0), budget=budget)
        with pytest.raises(ValueError, match=f"sparsify_top_k: budget {budget} is out of range; give 1 to 64"):
            sparsify_top_k(x, x, budget=budget)
    with pytest.raises(ValueError, match="density 5 is not in"):
        sampled_threshold(x, x, density=5)
    with pytest.raises(ValueError, match="sampled_threshold: sample_size 0 is no positive number"):
        sampled_threshold(x, x, density=0.5, sample_size=0)


def two_of_four_by_definition(x):
    rows, columns = x.shape
    x = np.pad(np.asarray(x, np.float64), ((0, -rows % 8), (0, -columns % 8)))
    fours = x.reshape(x.shape[0], -1, 4)
    keep = np.sort(np.argsort(-np.abs(fours), axis=-1, kind="stable")[..., :2], axis=-1)
    return x, fours, keep


@given(st.sampled_from(MATRICES), dtypes, seeds)
def test_two_of_four_keeps_the_largest_as_int8_by_tiles(shape, dtype, seed):
    x = gradient(shape, seed, dtype)
    packed = jitted(prune_two_of_four, **plain)(x)
    padded, fours, keep = two_of_four_by_definition(x)
    tiles = padded.reshape(padded.shape[0] // 8, 8, -1, 8)
    largest, scales = np.abs(tiles).max((1, 3)), np.asarray(packed.scales, np.float64)
    normal = largest >= 2.0**-90
    assert (scales[~normal] == 0).all()
    assert (scales >= largest / 127)[normal].all()
    assert (scales <= largest / 127 * (1 + 2.0**-14))[normal].all()

    places = np.asarray(packed.places)[..., None] >> (2 * np.arange(4)) & 3
    np.testing.assert_array_equal(places.reshape(keep.shape), keep)
    per_four = np.repeat(np.repeat(scales, 8, axis=0), 2, axis=1)[..., None]
    kept = np.take_along_axis(fours, keep, -1)
    integers = np.rint(np.divide(kept, per_four, out=np.zeros_like(kept), where=per_four > 0))
    stored = np.asarray(packed.values)[..., None].view(np.int8).reshape(keep.shape)
    np.testing.assert_array_equal(stored, integers)

    dense = np.zeros_like(fours)
    np.put_along_axis(dense, keep, integers * per_four, -1)
    np.testing.assert_array_equal(
        jitted(unpack_two_of_four)(packed), dense.reshape(padded.shape)[: shape[0], : shape[1]]
    )
    assert wire_bytes(packed) == 44 * largest.size


def test_two_of_four_keeps_the_first_of_equals():
    packed = jitted(prune_two_of_four)(jnp.asarray([[1.0, -1.0, 1.0, 1.0, 0.0, 2.0, 1.0, -2.0]]))
    assert (unpack_two_of_four(packed) != 0).tolist() == [[True, True, False, False, False, True, False, True]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tile_that_is_not_finite_is_nan(bad):
    x = gradient((16, 24), 5).at[9, 3].set(bad)
    dense = np.asarray(jitted(unpack_two_of_four)(jitted(prune_two_of_four, **plain)(x)))
    expected = np.zeros((16, 24), bool)
    expected[8:, :8] = True
    np.testing.assert_array_equal(np.isnan(dense), expected)


@given(st.sampled_from([((1, 1), jnp.bfloat16), ((19, 1031), jnp.float32)]), seeds, st.integers(0, 2))
def test_pruning_kernel_has_the_bits_of_the_reference(case, seed, bad):
    shape, dtype = case
    x = gradient(shape, seed, dtype, bad)
    assert_same(*(jitted(prune_two_of_four, **which)(x) for which in (interpreted, plain)))


def test_what_pruning_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"prune_two_of_four: x has the shape \(64,\); give a matrix"):
        prune_two_of_four(jnp.ones(64))
