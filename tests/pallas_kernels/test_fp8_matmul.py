import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Device, refusals
from pallas_kernels.fp8_matmul import (
    IMPLEMENTATIONS,
    Fp8MatmulCase,
    choose_implementation,
    dequantize,
    fp8_dense,
    fp8_matmul,
    quantize_blocks,
    quantize_tiles,
    transpose_tiles,
)
from pallas_kernels.gpus import gpu_names, load_gpu
from pallas_kernels.testing.lowering import lower_for
from pallas_kernels.testing.races import has_races
from tests.references.quantized import exact

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
INTERPRETED = ("mosaic_interpreted", "pallas_interpreted")


def error(found, expected):
    """Of the whole, in the Frobenius norm, relative."""
    expected = np.asarray(expected, np.float64)
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


@functools.cache
def layer(tokens, features_in, features_out, seed=0):
    """Activations with outliers among tokens and features, weights, and small gradients of the output."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, features_in)) * np.exp(rng.normal(size=(tokens, 1)))
    x[:, :: max(1, features_in // 3)] *= 20
    w = rng.normal(size=(features_in, features_out)) * 0.02
    dy = rng.normal(size=(tokens, features_out)) * 1e-3
    return tuple(jnp.asarray(array, jnp.float32) for array in (x, w, dy))


@functools.cache
def operands(form, tokens, features_in, features_out, gradient_dtype=E4M3):
    """Arguments of the product of this form, and the product of what was quantized, in float64."""
    x, w, dy = layer(tokens, features_in, features_out)
    values, scales = quantize_blocks(w)
    to_gradient = functools.partial(quantize_tiles, dtype=gradient_dtype)
    true_x, true_w, true_dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    if form == "forward":
        return (*quantize_tiles(x), values.T, scales.T), true_x @ true_w
    if form == "input_gradient":
        return (*to_gradient(dy), values, scales), true_dy @ true_w.T
    return (*quantize_tiles(x.T), *to_gradient(dy.T)), true_x.T @ true_dy


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
@given(
    rows=st.sampled_from([1, 5]),
    tiles=st.sampled_from([1, 3]),
    magnitude=st.integers(-60, 60),
    seed=st.integers(0, 1 << 16),
)
def test_tiles_are_scaled_by_their_largest_magnitude(dtype, power_of_two, rows, tiles, magnitude, seed):
    x = np.random.default_rng(seed).normal(size=(rows, 128 * tiles)).astype(np.float32) * np.float32(2.0**magnitude)
    values, scales = quantize_tiles(jnp.asarray(x), dtype=dtype, power_of_two_scales=power_of_two)
    amax = np.abs(x.reshape(rows, tiles, 128)).max(2)
    expected = np.maximum(amax, np.float32(1e-4)).astype(np.float64) / {E4M3: 448, E5M2: 57344}[dtype]
    if power_of_two:
        expected = 2.0 ** np.ceil(np.log2(expected))
    np.testing.assert_allclose(scales, expected, rtol=0 if power_of_two else 1e-6)
    # Rounded to the nearest: half a step of the mantissa, or of the smallest number.
    smallest = np.repeat(expected, 128, axis=1) * float(jnp.finfo(dtype).smallest_subnormal)
    bound = np.maximum(np.abs(x) * float(jnp.finfo(dtype).eps) / 2, smallest / 2) * 1.00001
    assert (np.abs(exact(values, scales) - x) <= bound).all()


def test_blocks_are_scaled_by_their_largest_magnitude():
    w = np.random.default_rng(0).normal(size=(256, 384)) * np.kron([[1, 1e-7, 1e5], [3, 1, 0]], np.ones((128, 128)))
    values, scales = quantize_blocks(jnp.asarray(w, jnp.float32))
    amax = np.abs(w.reshape(2, 128, 3, 128)).max((1, 3))
    np.testing.assert_allclose(scales, np.maximum(amax, 1e-4) / 448, rtol=1e-6)
    assert error(exact(values, scales), w) < 0.03
    assert (np.asarray(values[128:, 256:], np.float32) == 0).all()
    transposed = quantize_blocks(jnp.asarray(w.T, jnp.float32))
    np.testing.assert_array_equal(transposed.values.view(jnp.uint8), values.T.view(jnp.uint8))
    np.testing.assert_array_equal(transposed.scales, scales.T)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_transposing_between_powers_of_two_loses_what_underflows_alone(dtype):
    x, _, _ = layer(256, 384, 128)
    tiles = quantize_tiles(x, dtype=dtype, power_of_two_scales=True)
    values, scales = transpose_tiles(*tiles, power_of_two_scales=True)
    assert values.shape == (384, 256)
    assert scales.shape == (384, 2)
    smallest = np.repeat(np.asarray(scales, np.float64), 128, axis=1) * float(jnp.finfo(dtype).smallest_subnormal)
    assert (np.abs(exact(values, scales) - exact(*tiles).T) <= smallest / 2).all()
    # With scales of any size the same costs a second rounding.
    tiles = quantize_tiles(x, dtype=dtype)
    assert error(exact(*transpose_tiles(*tiles)), exact(*tiles).T) > 0.01


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_spoils_its_tile_or_block_alone(dtype, bad, power_of_two):
    x = np.ones((256, 384), np.float32)
    x[1, 130] = bad
    of_tiles, of_blocks = np.ones_like(x), np.ones_like(x)
    of_tiles[1, 128:256] = np.nan
    of_blocks[:128, 128:256] = np.nan
    for quantize, expected in ((quantize_tiles, of_tiles), (quantize_blocks, of_blocks)):
        quantized = quantize(jnp.asarray(x), dtype=dtype, power_of_two_scales=power_of_two)
        np.testing.assert_allclose(dequantize(*quantized), expected, rtol=0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", ["reference", "dequantized_bf16", *INTERPRETED])
def test_what_is_not_finite_is_no_plausible_product(implementation, bad):
    x = quantize_tiles(jnp.ones((3, 256)).at[1, 130].set(bad))
    w = quantize_blocks(jnp.zeros((128, 256)))
    product = np.asarray(fp8_matmul(*x, *w, out_dtype=jnp.float32, implementation=implementation))
    assert np.isnan(product[1]).all()
    assert (product[[0, 2]] == 0).all()


@pytest.mark.parametrize(
    ("form", "gradient_dtype"),
    [
        ("forward", E4M3),
        ("input_gradient", E4M3),
        ("input_gradient", E5M2),
        ("weight_gradient", E4M3),
        ("weight_gradient", E5M2),
    ],
)
@pytest.mark.parametrize(
    ("implementation", "bound"),
    # Both operands of the second are rounded to bfloat16.
    [("reference", 2e-6), ("dequantized_bf16", 4e-3), *((name, 1e-6) for name in INTERPRETED)],
)
def test_products_are_those_of_what_is_dequantized_and_near_the_true_ones(implementation, bound, form, gradient_dtype):
    quantized, true = operands(form, 256, 256, 128, gradient_dtype)
    found = fp8_matmul(*quantized, out_dtype=jnp.float32, implementation=implementation)
    to_dequantized = error(found, exact(*quantized[:2]) @ exact(*quantized[2:]).T)
    to_true = error(found, true)
    print(f"{implementation} {form} {jnp.dtype(gradient_dtype)}: {to_dequantized:.1e}, {to_true:.1e}")
    assert to_dequantized < bound
    # E5M2 has one bit of mantissa less.
    assert to_true < (4e-2 if gradient_dtype == E4M3 else 7e-2)


@pytest.mark.parametrize("implementation", ["reference", *INTERPRETED])
def test_results_are_rounded_to_bfloat16_at_the_end(implementation):
    quantized, true = operands("weight_gradient", 256, 256, 128)
    found = fp8_matmul(*quantized, implementation=implementation)
    assert found.dtype == jnp.bfloat16
    assert error(found, exact(*quantized[:2]) @ exact(*quantized[2:]).T) < 2e-3
    assert error(found, true) < 4e-2


def test_dequantizing_by_powers_of_two_is_exact_in_bfloat16():
    x, w, _ = layer(64, 256, 128)
    quantized = (*quantize_tiles(x, power_of_two_scales=True), *quantize_blocks(w.T, power_of_two_scales=True))
    found = fp8_matmul(*quantized, out_dtype=jnp.float32, implementation="dequantized_bf16")
    assert error(found, exact(*quantized[:2]) @ exact(*quantized[2:]).T) < 2e-6


@pytest.mark.parametrize("implementation", ["reference", "dequantized_bf16", *INTERPRETED])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (130, 128), (127, 3)])
def test_any_number_of_rows_and_of_tiled_columns(implementation, rows, columns):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(size, 128)), jnp.float32) for size in (rows, columns))
    quantized = (*quantize_tiles(x), *quantize_tiles(w))
    found = fp8_matmul(*quantized, out_dtype=jnp.float32, implementation=implementation)
    assert found.shape == (rows, columns)
    assert error(found, exact(*quantized[:2]) @ exact(*quantized[2:]).T) < 4e-3


def test_reference_gives_float64():
    quantized, _ = operands("forward", 4, 256, 128)
    with jax.enable_x64(True):
        found = fp8_matmul(*quantized, out_dtype=jnp.float64, implementation="reference")
        assert found.dtype == jnp.float64
        assert error(found, exact(*quantized[:2]) @ exact(*quantized[2:]).T) < 1e-14


@pytest.mark.parametrize(
    ("implementation", "gradient_dtype"),
    [("reference", E4M3), ("reference", E5M2), ("dequantized_bf16", E4M3), *((name, E4M3) for name in INTERPRETED)],
)
def test_dense_and_its_gradients_are_near_the_true_ones(implementation, gradient_dtype):
    x, w, dy = layer(130, 256, 128)
    dense = functools.partial(fp8_dense, gradient_dtype=gradient_dtype, implementation=implementation)
    # Tokens in two dimensions, and not as many as tiles need.
    y, pull = jax.vjp(dense, x.reshape(2, 65, 256), w)
    dx, dw = pull(dy.reshape(2, 65, 128))
    assert (y.shape, dx.shape, dw.shape) == ((2, 65, 128), (2, 65, 256), w.shape)
    x, w, dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    of_gradients = 4e-2 if gradient_dtype == E4M3 else 7e-2
    for found, true, bound in ((y, x @ w, 4e-2), (dx, dy @ w.T, of_gradients), (dw, x.T @ dy, of_gradients)):
        print(f"{implementation} {jnp.dtype(gradient_dtype)}: {error(found.reshape(true.shape), true):.1e}")
        assert error(found.reshape(true.shape), true) < bound


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_dense_has_the_gradients_of_its_dequantized_operands(implementation):
    x, w, dy = layer(256, 256, 128)
    x_tiles, w_blocks = quantize_tiles(x, power_of_two_scales=True), quantize_blocks(w)
    y, pull = jax.vjp(functools.partial(fp8_dense, implementation=implementation), x, w)
    dx, dw = pull(dy)
    assert error(y, exact(*x_tiles) @ exact(*w_blocks)) < 2e-6
    assert error(dx, exact(*quantize_tiles(dy)) @ exact(*w_blocks).T) < 2e-6
    assert error(dw, exact(*x_tiles).T @ exact(*quantize_tiles(dy.T)).T) < 2e-6


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_dense_layers_of_experts_are_mapped_over(implementation):
    layers = [layer(1, 128, 128, seed) for seed in range(2)]
    stacked = (jnp.stack([arrays[i] for arrays in layers]) for i in range(2))
    dense = functools.partial(fp8_dense, implementation=implementation)
    for found, (x, w, _) in zip(jax.vmap(dense)(*stacked), layers, strict=True):
        assert error(found, fp8_dense(x, w, implementation="reference")) < 2e-6


def test_dense_keeps_dtypes_and_8_bits_of_the_activations():
    x, w = jnp.ones((128, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.float32)
    y, pull = jax.vjp(functools.partial(fp8_dense, implementation="reference"), x, w)
    dx, dw = pull(y)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert kept
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(E4M3)}


def test_auto_takes_tensor_cores_of_8_bits_where_there_are_such_and_else_their_sums():
    case = Fp8MatmulCase(128, 128, 128, "float8_e4m3fn", "float8_e4m3fn", "bfloat16")
    chosen = {name: choose_implementation(case, device=Device("gpu", load_gpu(name))).name for name in gpu_names()}
    assert chosen == {"a100_80gb": "pallas", "b200": "dequantized_bf16", "h100_sxm": "mosaic", "h200": "mosaic"}
    assert choose_implementation(case, device=Device("cpu")).name == "dequantized_bf16"
    assert choose_implementation(case, "pallas", Device("gpu", load_gpu("h100_sxm"))).name == "pallas"
    assert "9.0" in refusals(IMPLEMENTATIONS, case, Device("gpu", load_gpu("a100_80gb")))["mosaic"]
    with pytest.raises(ValueError, match=r"mosaic cannot run on cpu.*capability 9\.0"):
        choose_implementation(case, "mosaic", Device("cpu"))
    with pytest.raises(ValueError, match=r"pallas cannot run on NVIDIA B200.*capability 10\.0"):
        choose_implementation(case, "pallas", Device("gpu", load_gpu("b200")))
    with pytest.raises(ValueError, match="on CPUs alone"):
        choose_implementation(case, "mosaic_interpreted", Device("gpu", load_gpu("h200")))


def test_what_cannot_be_is_refused():
    values, scales = quantize_blocks(jnp.ones((256, 128)))
    with pytest.raises(ValueError, match="quantize_tiles: cols is 100, no multiple of 128"):
        quantize_tiles(jnp.ones((2, 100)))
    with pytest.raises(ValueError, match="quantize_blocks: shape is"):
        quantize_blocks(jnp.ones((100, 128)))
    with pytest.raises(ValueError, match="transpose_tiles: rows is 2, no multiple"):
        transpose_tiles(*quantize_tiles(jnp.ones((2, 128))))
    with pytest.raises(ValueError, match="quantize_blocks: dtype is float16"):
        quantize_blocks(jnp.ones((128, 128)), dtype=jnp.float16)
    with pytest.raises(ValueError, match="x_values is float32"):
        fp8_matmul(jnp.ones((2, 128)), jnp.ones((2, 1)), values, scales)
    with pytest.raises(ValueError, match="w_scales is bfloat16; give float32"):
        fp8_matmul(*quantize_tiles(jnp.ones((2, 128))), values, scales.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="end in 256 and 128"):
        fp8_matmul(*quantize_tiles(jnp.ones((2, 256))), values, scales)
    with pytest.raises(ValueError, match="contraction is 64"):
        fp8_matmul(jnp.ones((2, 64), E4M3), jnp.ones((2, 1)), values[:, :64], scales)
    with pytest.raises(ValueError, match=r"x_scales has shape \(1, 1\)"):
        fp8_matmul(jnp.ones((2, 128), E4M3), jnp.ones((1, 1)), values, scales)
    with pytest.raises(ValueError, match=r"w_scales has shape \(1, 1\)"):
        fp8_matmul(*quantize_tiles(jnp.ones((2, 128))), values, scales[:1])
    x = quantize_tiles(jnp.ones((2, 128)))
    for name in INTERPRETED:
        with pytest.raises(ValueError, match="not float64"), jax.enable_x64(True):
            fp8_matmul(*x, values, scales, out_dtype=jnp.float64, implementation=name)
    with pytest.raises(ValueError, match="fp8_dense: x is float16"):
        fp8_dense(jnp.ones((2, 128), jnp.float16), jnp.ones((128, 128)))
    with pytest.raises(ValueError, match="x ends in 64 and w begins with 128"):
        fp8_dense(jnp.ones((2, 64)), jnp.ones((128, 128)))
    with pytest.raises(ValueError, match=r"w has shape \(128, 100\)"):
        fp8_dense(jnp.ones((2, 128)), jnp.ones((128, 100)))
    with pytest.raises(ValueError, match="gradient_dtype is bfloat16"):
        fp8_dense(jnp.ones((2, 128)), jnp.ones((128, 128)), gradient_dtype=jnp.bfloat16)


def step(x, w):
    """A layer with its gradients, of E5M2: all three products."""
    y, pull = jax.vjp(functools.partial(fp8_dense, gradient_dtype=E5M2), x, w)
    return y, pull(y)


@pytest.mark.parametrize("name", gpu_names())
def test_layers_lower_for_every_gpu(name):
    shapes = jax.ShapeDtypeStruct((200, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 384), jnp.float32)
    gpu = load_gpu(name)
    expected = {80: [0, 3], 90: [3, 0]}.get(gpu.compute_capability, [0, 0])
    experts = [jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for x in shapes]
    for function, arguments in ((step, shapes), (jax.vmap(step), experts)):
        text = lower_for(gpu, function, *arguments).as_text()
        assert [text.count(f"@{target}") for target in ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")] == expected


def has_kernel_races(w_by_tiles):
    rng = np.random.default_rng(0)
    # More steps than stages, so that shared memory is used again.
    x, w = (jnp.asarray(rng.normal(size=(128, 640)), jnp.float32) for _ in range(2))
    operands = (*quantize_tiles(x), *(quantize_tiles if w_by_tiles else quantize_blocks)(w))
    return has_races(functools.partial(fp8_matmul, implementation="mosaic_interpreted"), *operands)


@pytest.mark.parametrize("w_by_tiles", [False, True])
def test_the_kernel_has_no_races(w_by_tiles):
    assert not has_kernel_races(w_by_tiles)


def test_the_kernel_has_races_without_its_fence(monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    assert has_kernel_races(w_by_tiles=True)


@pytest.mark.parametrize("implementation", ["reference", *INTERPRETED])
def test_the_product_itself_has_no_gradient(implementation):
    w = quantize_tiles(jnp.ones((128, 128)))

    def loss(x):
        return fp8_matmul(*quantize_tiles(x), *w, out_dtype=jnp.float32, implementation=implementation).sum()

    with pytest.raises(ValueError, match="quantized numbers have no gradient; differentiate fp8_dense"):
        jax.grad(loss)(jnp.ones((128, 128)))


def test_empty_arrays_are_refused():
    x, w = quantize_tiles(jnp.ones((0, 128))), quantize_tiles(jnp.ones((128, 128)))
    with pytest.raises(ValueError, match="empty dimension"):
        fp8_matmul(*x, *w)
    with pytest.raises(ValueError, match="holds no token"):
        fp8_dense(jnp.ones((0, 128)), jnp.ones((128, 128)))


@pytest.mark.cuda_compiler
def test_hopper_multiplies_8_bit_floats_without_spilling(golden_kernels):
    from pallas_kernels.testing.compiling import compile_for

    def compiled(w_scale_rows, out_dtype, x_dtype=E4M3, w_dtype=E4M3, rows=1024, columns=2048, contraction=4096):
        reports = compile_for(
            load_gpu("h100_sxm"),
            functools.partial(fp8_matmul, out_dtype=out_dtype, implementation="mosaic"),
            jax.ShapeDtypeStruct((rows, contraction), x_dtype),
            jax.ShapeDtypeStruct((rows, contraction // 128), jnp.float32),
            jax.ShapeDtypeStruct((columns, contraction), w_dtype),
            jax.ShapeDtypeStruct((w_scale_rows, contraction // 128), jnp.float32),
        )
        (report,) = (report for report in reports if report.name.startswith("fp8_matmul"))
        return {report.name: report}

    signatures = {
        "forward e4m3 bfloat16": compiled(16, jnp.bfloat16),
        "input_gradient e5m2 bfloat16": compiled(16, jnp.bfloat16, x_dtype=E5M2),
        "weight_gradient e4m3 float32": compiled(2048, jnp.float32),
        "weight_gradient e5m2 float32": compiled(2048, jnp.float32, w_dtype=E5M2),
    }
    for signature, kernels in signatures.items():
        (report,) = kernels.values()
        kinds = {"input_gradient e5m2": "e5m2.e4m3", "weight_gradient e5m2": "e4m3.e5m2"}
        kind = kinds.get(signature.rsplit(" ", 1)[0], "e4m3.e4m3")
        assert report.tensor_core_instructions == {f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{kind}": 4}
        assert report.spill_bytes == 0
    golden_kernels("fp8_matmul", "h100_sxm", signatures)
