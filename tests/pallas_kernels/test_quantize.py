"""Integers, signs and entropy of gradients against float64; kernels, interpreted, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quantize import (
    compress_signs,
    dequantize_int8,
    entropy,
    kernels,
    quantize_int8,
    unpack_signs,
    wire_bytes,
)
from pallas_kernels.quantize.arithmetic import integer_scale, magnitude_bits, random_fraction, round_to_scale
from tests.pallas_kernels.gradients import (
    LENGTHS,
    assert_same,
    blocks_of,
    dtypes,
    gradient,
    interpreted,
    jitted,
    plain,
    residual,
    seeds,
)


def check_int8(x, packed, size):
    """Every property of the int8 format, by float64."""
    blocks = blocks_of(x, size)
    scales = np.asarray(packed.scales, np.float64)
    largest = np.abs(blocks).max(1)
    finite = np.isfinite(blocks).all(1)
    zeros = finite & (largest < 2.0**-90)
    normal = finite & ~zeros
    assert np.isnan(scales[~finite]).all()
    assert (scales[zeros] == 0).all()
    assert (scales[normal] * 127 >= largest[normal]).all()
    assert (scales[normal] * 127 <= largest[normal] * (1 + 2.0**-14)).all()
    integers = blocks_of(packed.values, size)
    assert (integers[~normal] == 0).all()
    quotients = blocks[normal] / scales[normal][:, None]
    decoded = blocks_of(jitted(dequantize_int8)(packed), size)
    np.testing.assert_array_equal(decoded[normal], integers[normal] * scales[normal][:, None])
    kept = np.arange(blocks.size).reshape(blocks.shape) < len(x)
    assert np.isnan(decoded[kept & ~finite[:, None]]).all()
    assert (decoded[zeros] == 0).all()
    return integers[normal], quotients


@given(st.sampled_from([(1, 256), (777, 1), (777, 100), (5001, 256)]), dtypes, seeds, st.integers(0, 2))
def test_int8_is_the_rounding_of_exact_arithmetic(sizes, dtype, seed, bad):
    length, size = sizes
    x = gradient((length,), seed, dtype, bad)
    packed = jitted(quantize_int8, block_size=size, **plain)(x)
    integers, quotients = check_int8(x, packed, size)
    np.testing.assert_array_equal(integers, np.rint(quotients))
    assert packed.values.dtype == jnp.int8
    assert wire_bytes(packed) == length + 4 * -(-length // size)


@pytest.mark.parametrize("fraction", [2.0**-24, 0.5, 1 - 2.0**-24])
def test_rounding_is_exact_beside_integers(fraction):
    """Where a quotient in float32 falls on the wrong side of one, and the fraction says how it must not matter."""
    rng = np.random.default_rng(0)
    largest = jnp.asarray(np.exp(20 * rng.normal(size=(500, 1))), jnp.float32)
    scale = integer_scale(magnitude_bits(largest))
    near = jax.lax.bitcast_convert_type(scale * jnp.arange(1, 127, dtype=jnp.float32), jnp.int32)
    x = jax.lax.bitcast_convert_type(near + jnp.asarray(rng.integers(-3, 4, near.shape), jnp.int32), jnp.float32)
    exact, unit = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    floor = np.floor(exact / unit)
    expected = floor + (exact - floor * unit > np.float32(fraction) * np.asarray(scale))
    np.testing.assert_array_equal(round_to_scale(x, scale, fraction), expected)
    np.testing.assert_array_equal(round_to_scale(-x, scale, fraction), -expected)


def test_int8_rounds_ties_to_even():
    x = jnp.asarray([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 0.0], jnp.float32) * 2.0**-20
    packed = quantize_int8(x)
    # 2^-20 has few bits, but its product with the constant 1 / 127 has not: the scale lies a little above.
    scale = float(packed.scales[0])
    assert packed.values.tolist() == [127, 0, 1, 2, 0, -1, -2, 126, 0]
    exact = jnp.asarray([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], jnp.float32)[1:] * scale
    packed = quantize_int8(jnp.concatenate([x[:1], exact]))
    assert float(packed.scales[0]) == scale
    assert packed.values.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@given(st.sampled_from(LENGTHS), dtypes, seeds)
def test_stochastic_int8_is_one_of_the_two_neighbours(length, dtype, seed):
    x = gradient((length,), seed, dtype, bad=1)
    packed = jitted(quantize_int8, **plain)(x, key=jax.random.key(seed))
    integers, quotients = check_int8(x, packed, 256)
    assert ((integers == np.floor(quotients)) | (integers == np.ceil(quotients))).all()


def test_stochastic_int8_has_the_mean_of_what_is_rounded():
    """Of 4096 keys; the standard error of a fraction's mean is at most 0.5 / 64."""
    x = gradient((256,), seed=7)
    x = jnp.where(jnp.abs(x) < 1.0, x, jnp.sign(x)).at[0].set(1.0)
    keys = jax.random.split(jax.random.key(0), 4096)
    packed = jax.jit(jax.vmap(lambda key: quantize_int8(x, key=key, implementation="reference")))(keys)
    quotients = np.asarray(x, np.float64) / float(packed.scales[0, 0])
    errors = np.asarray(packed.values, np.float64).mean(0) - quotients
    fraction = np.abs(quotients) % 1
    deviation = np.sqrt(fraction * (1 - fraction) / 4096) + 1e-6
    assert np.abs(errors / deviation).max() < 4.5
    # Nor is it off towards or away from zero, by the mean of all elements.
    assert abs((errors * np.sign(quotients)).sum()) < 4.5 * np.sqrt((deviation**2).sum())
    # Rounding to nearest is far off by this measure.
    assert np.abs((np.rint(quotients) - quotients) / deviation).max() > 30


def test_random_fractions_are_uniform_and_independent():
    """Across indices, across keys that differ by one, and between the two: chi-square and correlations."""
    index = jnp.arange(1 << 14, dtype=jnp.uint32)
    words = [(a, b) for a in (0, 1, 2, 1 << 31) for b in (0, 1, 0xFFFFFFFF)]
    fractions = np.stack([random_fraction(jnp.uint32(a), jnp.uint32(b), index) for a, b in words]).astype(np.float64)
    assert fractions.min() >= 2.0**-24
    assert fractions.max() < 1.0
    for row in fractions:
        counts = np.bincount((row * 64).astype(int), minlength=64)
        assert ((counts - 256) ** 2 / 256).sum() < 63 + 5 * np.sqrt(2 * 63)
        for lag in (1, 2, 256):
            assert abs(np.corrcoef(row[:-lag], row[lag:])[0, 1]) < 5 / 128
    between = np.corrcoef(fractions) - np.eye(len(words))
    assert np.abs(between).max() < 5 / 128


def test_stochastic_int8_depends_on_neither_blocks_nor_tiles(monkeypatch):
    x = gradient((5001,), seed=3)
    x = (x / (1 + jnp.abs(x))).at[::16].set(1.0)
    key = jax.random.key(1)
    values = [jitted(quantize_int8, block_size=size, **plain)(x, key=key).values for size in (16, 48, 4096)]
    for tile in (128, 1024):
        monkeypatch.setattr(kernels, "TILE", tile)
        quantize = jax.jit(functools.partial(quantize_int8, block_size=64, **interpreted))
        values.append(quantize(x, key=key).values)
    for other in values[1:]:
        np.testing.assert_array_equal(values[0], other)
    other = jitted(quantize_int8, block_size=16, **plain)(x, key=jax.random.key(2)).values
    assert (values[0] != other).mean() > 0.1


@given(
    st.sampled_from([(1, 32, jnp.float32), (777, 32, jnp.bfloat16), (5001, 256, jnp.float32)]),
    seeds,
    st.integers(0, 2),
)
def test_int8_kernel_has_the_bits_of_the_reference(case, seed, bad):
    length, size, dtype = case
    x = gradient((length,), seed, dtype, bad)
    key = jax.random.key(seed) if size == 32 else None
    assert_same(*(jitted(quantize_int8, block_size=size, **which)(x, key=key) for which in (interpreted, plain)))


def test_what_int8_cannot_do_is_refused():
    x, matrix = jnp.ones(64), jnp.ones((8, 8))
    with pytest.raises(ValueError, match=r"quantize_int8: x has the shape \(8, 8\); give a flat array"):
        quantize_int8(matrix)
    with pytest.raises(ValueError, match="x is float16; give float32 or bfloat16"):
        quantize_int8(x.astype(jnp.float16))
    with pytest.raises(ValueError, match="x has 0 elements"):
        quantize_int8(x[:0])
    with pytest.raises(ValueError, match="block_size 8192 is out of range; give 1 to 4096"):
        quantize_int8(x, block_size=8192)
    with pytest.raises(ValueError, match="implementation pallas cannot run on cpu: needs an NVIDIA GPU"):
        quantize_int8(x, implementation="pallas")
    with pytest.raises(ValueError, match="blocks must be a power of two from 16 on, not 48"):
        quantize_int8(x, block_size=48, implementation="pallas_interpreted")
    with pytest.raises(ValueError, match="no implementation 'mosaic'"):
        quantize_int8(x, implementation="mosaic")


@given(st.sampled_from([(1, 1024), (777, 1), (777, 100), (5001, 1024)]), dtypes, seeds, st.integers(0, 2))
def test_signs_and_residual_are_gradient_and_residual(sizes, dtype, seed, bad):
    length, size = sizes
    x, before = gradient((length,), seed, dtype, bad), residual(length, seed)
    packed, left = jitted(compress_signs, block_size=size, **plain)(x, before)
    assert wire_bytes(packed) == 4 * -(-length // 32) + 4 * -(-length // size)

    corrected = np.asarray(x.astype(jnp.float32) + before)
    bits = np.unpackbits(np.asarray(packed.words).view(np.uint8), bitorder="little")
    np.testing.assert_array_equal(bits[:length], corrected < 0)
    assert (bits[length:] == 0).all()

    blocks, decoded = blocks_of(corrected, size), np.asarray(jitted(unpack_signs)(packed))
    finite, largest = np.isfinite(blocks).all(1), np.abs(blocks).max(1)
    counts = np.minimum(size, length - size * np.arange(len(blocks)))
    means, scales = np.abs(blocks).sum(1) / counts, np.asarray(packed.scales, np.float64)
    assert np.isnan(scales[~finite]).all()
    normal = finite & (largest >= 2.0**-90)
    assert (scales[finite & ~normal] == 0).all()
    # Cut to fixed point of 28 - log2(size) digits, at most.
    bound = largest * 2.0 ** ((size - 1).bit_length() - 28)
    assert (np.abs(scales - means) <= bound + 1e-7 * means)[normal].all()

    of = np.repeat(finite, size)[:length]
    assert np.isnan(decoded[~of]).all()
    np.testing.assert_array_equal(np.asarray(left)[~of], np.asarray(before)[~of])
    magnitude = np.abs(decoded[of]) + np.abs(corrected[of])
    assert (np.abs(decoded[of].astype(np.float64) + np.asarray(left)[of] - corrected[of]) <= 2.0**-23 * magnitude).all()


def test_sums_of_what_is_sent_as_signs_follow_the_sums_of_gradients():
    """What is sent in 200 steps differs from what was to be by the last residual alone, and that does not grow."""
    step = jitted(compress_signs, **plain)
    left, sent, whole = jnp.zeros(2000), 0.0, 0.0
    sizes = []
    for seed in range(200):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=2000) + 0.2, jnp.float32)
        packed, left = step(x, left)
        sent, whole = sent + np.asarray(jitted(unpack_signs)(packed), np.float64), whole + np.asarray(x, np.float64)
        sizes.append(float(jnp.abs(left).mean()))
    np.testing.assert_allclose(sent + left, whole, atol=1e-3)
    assert np.mean(sizes[-50:]) < 1.5 * np.mean(sizes[50:100])


@given(
    st.sampled_from([(1, 32, jnp.float32), (777, 32, jnp.bfloat16), (5001, 1024, jnp.float32)]),
    seeds,
    st.integers(0, 2),
)
def test_sign_kernel_has_the_bits_of_the_reference(case, seed, bad):
    length, size, dtype = case
    x, before = gradient((length,), seed, dtype, bad), residual(length, seed)
    assert_same(*(jitted(compress_signs, block_size=size, **which)(x, before) for which in (interpreted, plain)))


def test_what_every_device_sends_is_what_every_device_gets():
    """Signs of a part of a gradient on each of two devices, gathered on both, and the parts left over."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, before = gradient((1554,), 0), residual(1554, 0)

    def exchange(x, before):
        packed, left = compress_signs(x, before, **interpreted)
        return jax.vmap(unpack_signs)(jax.lax.all_gather(packed, "data"))[None], left

    specs = (jax.P("data"), jax.P("data"))
    run = jax.shard_map(exchange, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    gathered, left = jax.jit(run)(x, before)
    for part in range(2):
        of = slice(777 * part, 777 * (part + 1))
        packed, expected = jitted(compress_signs, **plain)(x[of], before[of])
        np.testing.assert_array_equal(left[of], expected)
        for device in range(2):
            np.testing.assert_array_equal(gathered[device, part], unpack_signs(packed))


def test_what_signs_cannot_do_is_refused():
    x = jnp.ones(64)
    with pytest.raises(ValueError, match=r"residual is float32 \(32,\); give float32 \(64,\)"):
        compress_signs(x, x[:32])
    with pytest.raises(ValueError, match="residual is bfloat16"):
        compress_signs(x, x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="compress_signs: block_size 0 is out of range"):
        compress_signs(x, x, block_size=0)


@given(st.sampled_from(LENGTHS), st.sampled_from([15, 255]), dtypes, seeds)
def test_entropy_is_that_of_the_histogram(length, bins, dtype, seed):
    x = jnp.asarray(np.random.default_rng(seed).normal(size=length), dtype)
    exact = np.asarray(x, np.float64)
    levels = np.rint(exact / np.abs(exact).max() * (bins - 1) / 2)
    share = np.unique(levels, return_counts=True)[1] / length
    # A level on the border between two may be on the other side in float32.
    found = float(jitted(entropy, bins=bins)(x))
    assert found == pytest.approx(-(share * np.log2(share)).sum(), abs=2e-3)


def test_entropy_of_extremes():
    assert float(entropy(jnp.zeros(100))) == 0.0
    assert float(entropy(jnp.linspace(-1.0, 1.0, 25500))) == pytest.approx(np.log2(255), abs=0.01)
    assert float(entropy(3.4e38 * jnp.linspace(-1.0, 1.0, 25500))) == pytest.approx(np.log2(255), abs=0.01)
    assert np.isnan(entropy(jnp.zeros(100).at[3].set(jnp.inf)))
    # A sample of many normal numbers, against all of them.
    x = jnp.clip(jnp.asarray(np.random.default_rng(0).normal(size=200_000), jnp.float32), -4, 4)
    assert float(entropy(x)) == pytest.approx(float(entropy(x, sample_size=200_000)), abs=0.02)


def test_what_entropy_cannot_do_is_refused():
    x = jnp.ones(64)
    with pytest.raises(ValueError, match="entropy: sample_size 0 is no positive number"):
        entropy(x, sample_size=0)
    for bins in (256, 13):
        with pytest.raises(ValueError, match=f"bins {bins} is no odd number of at least 15"):
            entropy(x, bins=bins)
