"""The 8-bit product on 16-bit tensor cores: interpreted against float64, and compiled for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.fp8_matmul import fp8_matmul, promoted, quantize_blocks, quantize_tiles
from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.lowering import lower_for
from pallas_kernels.tiles import Span
from tests.references.quantized import exact

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GPUS = ("a100_80gb", "h100_sxm")

interpreted = functools.partial(fp8_matmul, implementation="pallas_interpreted")


def drawn(rng, dtype, rows, contraction, scale_rows):
    """Any finite numbers of a dtype, with scales of any size."""
    bits = rng.integers(0, 256, (rows, contraction), np.uint8)
    values = bits.view(dtype)
    values = np.where(np.isfinite(values.astype(np.float32)), values, dtype(1))
    scales = np.exp2(rng.uniform(-20, 20, (scale_rows, contraction // 128)))
    return jnp.asarray(values), jnp.asarray(scales, jnp.float32)


@given(
    rows=st.sampled_from([1, 31, 33, 65]),
    columns=st.sampled_from([(1, 1), (63, 63), (66, 66), (128, 1), (128, 128), (256, 2)]),
    contraction=st.sampled_from([128, 384]),
    x_dtype=st.sampled_from([E4M3, E5M2]),
    w_dtype=st.sampled_from([E4M3, E5M2]),
    out_dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 1 << 16),
)
def test_products_are_those_of_what_is_dequantized(rows, columns, contraction, x_dtype, w_dtype, out_dtype, seed):
    rng = np.random.default_rng(seed)
    x = drawn(rng, x_dtype, rows, contraction, rows)
    w = drawn(rng, w_dtype, columns[0], contraction, columns[1])
    found = interpreted(*x, *w, out_dtype=out_dtype)
    assert found.dtype == out_dtype
    found, (x, w) = np.asarray(found, np.float64), (exact(*x), exact(*w))
    rounding = 2.0**-8 * np.abs(found) if out_dtype == jnp.bfloat16 else 0
    # Scales differ within a row, so sums cancel, and rows and columns are of very different size: each by its own.
    assert (np.abs(found - x @ w.T) <= rounding + 1e-6 * (np.abs(x) @ np.abs(w.T))).all()


@pytest.mark.parametrize("side", ["x", "w"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_number_is_itself(dtype, side):
    """Each of the 256, in each place of a word, is multiplied by one."""
    bits = np.zeros((4, 256, 128), np.uint8)
    numbers = np.arange(256)
    for place in range(4):
        bits[place, numbers, place + numbers % 32 * 4] = numbers
    values = (jnp.asarray(bits.reshape(-1, 128).view(dtype)), jnp.ones((1024, 1)))
    ones = (jnp.eye(128).astype(E4M3), jnp.ones((128, 1)))
    found = interpreted(*values, *ones, out_dtype=jnp.float32) if side == "x" else None
    if found is None:
        found = interpreted(*ones, *values, out_dtype=jnp.float32).T
    found = np.asarray(found).reshape(4, 256, 128)
    expected = numbers.astype(np.uint8).view(dtype).astype(np.float32)
    for place in range(4):
        np.testing.assert_array_equal(found[place, numbers, place + numbers % 32 * 4], expected)
    # Elsewhere it is multiplied by zero: nothing, if it is finite.
    others = np.abs(found).sum((0, 2)) - 4 * np.abs(expected)
    assert (others[np.isfinite(expected)] == 0).all()
    assert np.isnan(others[~np.isfinite(expected)]).all()


@pytest.mark.parametrize("quantize", [quantize_tiles, quantize_blocks])
def test_sums_are_those_of_8_bit_tensor_cores(quantize):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(rows, 512)), jnp.float32) for rows in (130, 256))
    operands = (*quantize_tiles(x), *quantize(w))
    found, expected = (
        np.asarray(fp8_matmul(*operands, out_dtype=jnp.float32, implementation=name), np.float64)
        for name in ("pallas_interpreted", "mosaic_interpreted")
    )
    print(f"{quantize.__name__}: {np.linalg.norm(found - expected) / np.linalg.norm(expected):.1e}")
    assert np.linalg.norm(found - expected) < 5e-8 * np.linalg.norm(expected)


def test_nothing_beyond_an_array_is_touched(monkeypatch):
    """Interpreted, what lies there is harmless, as it is not on a GPU."""
    touched = []

    def watched(access):
        def watch(ref, *rest):
            spans = [given for given in rest if isinstance(given, Span)]
            for span, length in zip(spans, ref.shape[-len(spans) :], strict=True):
                assert length % span.size == 0 or span.stop == length
            touched.append(ref.shape)
            return access(ref, *rest)

        return watch

    for name in ("load_tile", "load_vector", "store_tile"):
        monkeypatch.setattr(promoted, name, watched(getattr(promoted, name)))
    lower_for(load_gpu("a100_80gb"), product(jnp.float32), *arguments(E4M3, E4M3, 1001, 2001, 256, 2001))
    assert sorted(touched) == [(2, 1001), (2, 2001), (1001, 64), (1001, 2001), (2001, 64)]


def arguments(x_dtype, w_dtype, rows, columns, contraction, w_scale_rows):
    return (
        jax.ShapeDtypeStruct((rows, contraction), x_dtype),
        jax.ShapeDtypeStruct((rows, contraction // 128), jnp.float32),
        jax.ShapeDtypeStruct((columns, contraction), w_dtype),
        jax.ShapeDtypeStruct((w_scale_rows, contraction // 128), jnp.float32),
    )


def product(out_dtype):
    return functools.partial(fp8_matmul, out_dtype=out_dtype, implementation="pallas")


CASES = {
    # words: dtype of the result, dtypes of operands, rows, columns, contraction, rows of scales of w
    "forward e4m3 bfloat16": (jnp.bfloat16, E4M3, E4M3, 1024, 2048, 4096, 16),
    "input_gradient e5m2 bfloat16": (jnp.bfloat16, E5M2, E4M3, 1024, 2048, 4096, 16),
    "weight_gradient e4m3 float32": (jnp.float32, E4M3, E4M3, 1024, 2048, 4096, 2048),
    "weight_gradient e5m2 float32": (jnp.float32, E4M3, E5M2, 1024, 2048, 4096, 2048),
    "e5m2 float32": (jnp.float32, E5M2, E5M2, 1024, 2048, 4096, 2048),
    "rows 1001 blocks": (jnp.bfloat16, E4M3, E4M3, 1001, 2048, 4096, 16),
    "rows 1001 columns 2001": (jnp.float32, E4M3, E4M3, 1001, 2001, 4096, 2001),
}


@pytest.mark.parametrize("gpu", [*GPUS, "h200"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_lower_and_tell_their_flops(case, gpu):
    out_dtype, *sizes = CASES[case]
    text = lower_for(load_gpu(gpu), product(out_dtype), *arguments(*sizes)).as_text()
    _, _, rows, columns, contraction, w_scale_rows = sizes
    assert f'name = "fp8_matmul_{"tiles" if w_scale_rows == columns else "blocks"}_promoted"' in text
    assert str(2 * rows * columns * contraction) in text


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_compile_to_the_golden_ones_without_spilling(gpu, golden_kernels):
    from pallas_kernels.testing.compiling import compile_for

    instruction = {
        "a100_80gb": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "h100_sxm": "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16",
    }[gpu]
    found = {}
    for case, (out_dtype, *sizes) in CASES.items():
        reports = compile_for(load_gpu(gpu), product(out_dtype), *arguments(*sizes))
        kernels = [report for report in reports if report.name.startswith("fp8_matmul")]
        # Beside it only the scales are transposed: the bytes of the operands are read where they lie.
        assert len(reports) <= 3
        found[case] = {report.name: report for report in kernels}
        (report,) = kernels
        assert report.spill_bytes == 0
        assert report.tensor_core_instructions.keys() == {instruction}
        assert report.shared_memory <= load_gpu(gpu).shared_memory_per_block
    golden_kernels("fp8_promoted", gpu, found)
