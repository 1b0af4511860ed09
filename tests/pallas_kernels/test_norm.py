"""Norms and their gradients against float64; their kernels, lowered and compiled for GPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from dseekjax.models.layers.norms import LayerNorm, RMSNorm
from dseekjax.plan.hlo import parse_hlo
from pallas_kernels.compile_only import compile_only_devices
from pallas_kernels.dispatch import Device, choose
from pallas_kernels.gpus import gpu_names, load_gpu
from pallas_kernels.norm import IMPLEMENTATIONS, NormCase, layer_norm, rms_norm
from pallas_kernels.testing.compiling import compile_for
from pallas_kernels.testing.lowering import lower_for, tracing_for
from pallas_kernels.testing.numerics import relative_error

NORMS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
KERNEL_GPUS = ["a100_80gb", "h100_sxm", "h200"]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""In the Frobenius norm, relative; of float16, its rounding is 2e-4."""
# Few, so that few programs are compiled. One element; tiles of several rows, full and not; programs with several tiles;
# a tile that lacks columns; one that does not; rows in parts, the last of which is full or not.
SHAPES = [(1, 1), (300, 20), (2, 3, 100), (7, 768), (5, 4096), (3, 5120), (3, 8193), (2, 12288)]
EPSILON = 1e-5

names, implementations = st.sampled_from(sorted(NORMS)), st.sampled_from(["pallas_interpreted", "reference"])
dtypes, seeds = st.sampled_from(sorted(TOLERANCE)), st.integers(0, 1 << 20)


def inputs(name, shape, dtype, seed=0, parameter_dtype="float32"):
    """x, parameters, and what its gradient is multiplied with; rows of many sizes, with means far from zero."""
    rng = np.random.default_rng(seed)
    row_sizes = np.exp(2 * rng.normal(size=(*shape[:-1], 1)))
    x = row_sizes * (rng.normal(size=shape) + 2 * rng.normal(size=(*shape[:-1], 1)))
    parameters = rng.normal(size=(2 if name == "layer_norm" else 1, shape[-1]))
    return (
        jnp.asarray(x, dtype),
        *(jnp.asarray(parameter, parameter_dtype) for parameter in parameters),
        jnp.asarray(rng.normal(size=shape), dtype),
    )


def exact(name, x, scale, *rest, epsilon=EPSILON):
    """The norm and its gradients in float64, by the derivatives of mean and deviation, a row's matrix at a time."""
    bias, upstream = (rest[0] if len(rest) == 2 else None), rest[-1]
    x, scale, upstream = (np.asarray(array).astype(np.float64) for array in (x, scale, upstream))
    mean = x.mean(-1, keepdims=True) if name == "layer_norm" else 0.0
    deviation = np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    normal = (x - mean) / deviation
    out = normal * scale + (0.0 if bias is None else np.asarray(bias).astype(np.float64))
    # d deviation / d x is normal / width, and the mean of normal is zero where there is a mean.
    width = x.shape[-1]
    of_normal = upstream * scale
    of_deviation = -(of_normal * normal).sum(-1, keepdims=True) / deviation
    of_x = of_normal / deviation + of_deviation * normal / width
    if name == "layer_norm":
        of_x -= of_x.sum(-1, keepdims=True) / width
    rows = tuple(range(x.ndim - 1))
    of_parameters = [(upstream * normal).sum(rows), *([] if bias is None else [upstream.sum(rows)])]
    return out, (of_x, *of_parameters)


def with_gradient(name, implementation, epsilon=EPSILON):
    def run(*arguments):
        norm = functools.partial(NORMS[name], epsilon=epsilon, implementation=implementation)
        out, pull = jax.vjp(norm, *arguments[:-1])
        return out, pull(arguments[-1])

    return run


def gradient_alone(name, implementation):
    return lambda *arguments: with_gradient(name, implementation)(*arguments)[1]


@functools.cache
def jitted(name, implementation, epsilon=EPSILON):
    return jax.jit(with_gradient(name, implementation, epsilon))


@given(names, implementations, st.sampled_from(SHAPES), dtypes, seeds)
def test_norms_and_gradients_equal_float64(name, implementation, shape, dtype, seed):
    arguments = inputs(name, shape, dtype, seed, dtype if seed % 2 else "float32")
    out, gradients = jitted(name, implementation)(*arguments)
    expected, expected_gradients = exact(name, *arguments)
    assert (out.shape, out.dtype) == (shape, dtype)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in arguments[:-1]]
    if shape[-1] == 1:
        # Rounding is all that is left of gradients whose terms cancel.
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1e-2, atol=1e-5)
        assert all(np.isfinite(x).all() for x in gradients)
        return
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for found, exact_gradient in zip(gradients, expected_gradients, strict=True):
        assert relative_error(found, exact_gradient) < TOLERANCE[dtype]


def test_one_row_of_one_column_has_the_gradient_of_its_definition():
    x, scale, upstream = (jnp.full((1, 1), 3e-3), jnp.full(1, 2.0), jnp.ones((1, 1)))
    _, (of_x, of_scale) = jitted("rms_norm", "pallas_interpreted")(x, scale, upstream)
    deviation = np.sqrt(9e-6 + EPSILON)
    np.testing.assert_allclose(of_x, [[2.0 * EPSILON / deviation**3]], rtol=1e-5)
    np.testing.assert_allclose(of_scale, [3e-3 / deviation], rtol=1e-5)
    _, (of_x, of_scale, of_bias) = jitted("layer_norm", "pallas_interpreted")(x, scale, scale, upstream)
    assert (of_x == 0).all()
    assert (of_scale == 0).all()
    assert (of_bias == 1).all()


@pytest.mark.parametrize("name", NORMS)
def test_all_float_widths_are_exact_to_their_rounding_in_the_reference(name):
    with jax.enable_x64(True):
        arguments = inputs(name, (4, 33), "float64", parameter_dtype="float64")
        out, gradients = jitted(name, "auto")(*arguments)
        expected, expected_gradients = exact(name, *arguments)
        assert relative_error(out, expected) < 1e-14
        for found, exact_gradient in zip(gradients, expected_gradients, strict=True):
            assert relative_error(found, exact_gradient) < 1e-12


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("name", NORMS)
def test_forward_has_the_bits_of_the_models_layers(name, dtype):
    x, *parameters, _ = inputs(name, (5, 7, 768), dtype)
    layer = (LayerNorm if name == "layer_norm" else RMSNorm)(768, EPSILON, nnx.Rngs(0))
    layer.scale[...] = parameters[0]
    if name == "layer_norm":
        layer.bias[...] = parameters[1]
    expected = layer(x)
    for implementation in ("auto", "reference", "pallas_interpreted"):
        found = NORMS[name](x, *parameters, epsilon=EPSILON, implementation=implementation)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        differentiated, _ = jax.vjp(
            lambda x, i=implementation: NORMS[name](x, *parameters, epsilon=EPSILON, implementation=i), x
        )
        np.testing.assert_array_equal(differentiated, expected)


@pytest.mark.parametrize("shape", [(300, 20), (7, 768), (3, 8193)])
@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_is_deterministic(name, shape):
    arguments = inputs(name, shape, "bfloat16")
    once, again = (jitted(name, "pallas_interpreted")(*arguments) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)


@pytest.mark.parametrize("where", ["x", "upstream"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(300, 20), (7, 768), (3, 8193)])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_not_finite_stays_in_its_row(name, shape, bad, where):
    arguments = list(inputs(name, shape, "float32"))
    clean = jitted(name, "pallas_interpreted")(*arguments)[1]
    place = 0 if where == "x" else -1
    arguments[place] = arguments[place].at[1, shape[1] - 1].set(bad)
    of_x, *of_parameters = jitted(name, "pallas_interpreted")(*arguments)[1]
    others = np.arange(shape[0]) != 1
    np.testing.assert_array_equal(np.asarray(of_x)[others], np.asarray(clean[0])[others])
    assert not np.isfinite(of_x[1]).all()
    assert not np.isfinite(of_parameters[0]).all()


def test_rows_that_are_not_there_add_nothing_without_epsilon():
    """300 rows of 20 do not fill the last tile, and zeros without epsilon have no direction."""
    for name in NORMS:
        arguments = inputs(name, (300, 20), "float32")
        _, gradients = jitted(name, "pallas_interpreted", 0.0)(*arguments)
        for found, expected in zip(gradients, exact(name, *arguments, epsilon=0.0)[1], strict=True):
            assert relative_error(found, expected) < 1e-5


def test_split_over_devices_in_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("data")
    for name in NORMS:
        *arguments, upstream = inputs(name, (12, 100), "float32")
        norm = functools.partial(NORMS[name], epsilon=EPSILON, implementation="pallas_interpreted")
        specs = (split, *([whole] * (len(arguments) - 1)))
        sharded = jax.shard_map(norm, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
        gradients = jax.jit(lambda *x, f=sharded: jax.vjp(f, *x[:-1])[1](x[-1]))(*arguments, upstream)
        for found, expected in zip(gradients, exact(name, *arguments, upstream)[1], strict=True):
            assert relative_error(found, expected) < 1e-5


def shaped(name, rows, width, dtype):
    x, parameter = jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)
    return (x, *([parameter] * (2 if name == "layer_norm" else 1)), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gpu", KERNEL_GPUS)
@pytest.mark.parametrize("name", NORMS)
def test_gradient_kernels_lower_and_are_what_auto_picks(name, gpu, dtype):
    for rows, width in [(1, 1), (300, 20), (16384, 4096), (5, 5001), (3, 11008)]:
        text = lower_for(load_gpu(gpu), with_gradient(name, "auto"), *shaped(name, rows, width, dtype)).as_text()
        assert text.count(f'name = "{name}_gradient"') == 1


@pytest.mark.parametrize("name", NORMS)
def test_auto_leaves_to_xla_what_kernels_cannot_do(name):
    usual = NormCase(8, 4096, "bfloat16")

    def picked(device, case=usual):
        return choose(name, IMPLEMENTATIONS[name], "auto", case, device).name

    h100 = Device("gpu", load_gpu("h100_sxm"))
    assert picked(h100) == "pallas"
    assert picked(h100, NormCase(8, 16384, "float16", ("bfloat16", "float32"))) == "pallas"
    assert picked(h100, NormCase(8, 16385, "bfloat16")) == "reference"
    assert picked(h100, NormCase(0, 4096, "bfloat16")) == "reference"
    assert picked(h100, NormCase(1 << 20, 4096, "bfloat16")) == "reference"
    assert picked(h100, NormCase(8, 4096, "float64", ("float64",))) == "reference"
    assert picked(Device("gpu")) == "reference"
    assert picked(Device("cpu")) == "reference"
    for gpu in gpu_names():
        of_gpu = picked(Device("gpu", load_gpu(gpu)))
        assert of_gpu == ("pallas" if gpu in KERNEL_GPUS else "reference")


def test_what_cannot_be_computed_is_refused():
    x, scale = jnp.ones((4, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match="rms_norm: implementation pallas cannot run on cpu: needs an NVIDIA GPU"):
        rms_norm(x, scale, epsilon=EPSILON, implementation="pallas")
    with pytest.raises(ValueError, match="rows of up to 16384 in registers, not of 16385"):
        rms_norm(jnp.ones((1, 16385)), jnp.ones(16385), epsilon=EPSILON, implementation="pallas_interpreted")
    with pytest.raises(ValueError, match="1 to 2147418112 elements, not 0"):
        layer_norm(x[:0], scale, scale, epsilon=EPSILON, implementation="pallas_interpreted")
    with tracing_for(load_gpu("b200")), pytest.raises(ValueError, match="compute capability 10"):
        rms_norm(x, scale, epsilon=EPSILON, implementation="pallas")
    with jax.enable_x64(True), pytest.raises(ValueError, match="in float32, which is not for float64"):
        rms_norm(x, jnp.ones(8, "float64"), epsilon=EPSILON, implementation="pallas_interpreted")
    with pytest.raises(ValueError, match=r"rms_norm: scale is float32 \(7,\); give floats of \(8,\)"):
        rms_norm(x, scale[:7], epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"layer_norm: bias is int32 \(8,\); give floats"):
        layer_norm(x, scale, scale.astype(jnp.int32), epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"rms_norm: x is int32 \(4, 8\)"):
        rms_norm(x.astype(jnp.int32), scale, epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"rms_norm: epsilon -1.0 is negative; give 0 or more"):
        rms_norm(x, scale, epsilon=-1.0)


@pytest.mark.parametrize("name", NORMS)
def test_empty_arrays_are_left_empty(name):
    *arguments, upstream = inputs(name, (0, 8), "float32")
    out, gradients = jitted(name, "auto")(*arguments, upstream)
    assert out.shape == (0, 8)
    assert all((x == 0).all() for x in gradients)


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm"])
def test_what_the_compiler_makes_of_kernels_is_golden_and_spills_nothing(gpu, golden_kernels):
    found = {}
    for rows, width, dtype in [
        (16384, 128, "bfloat16"),
        (16384, 4096, "bfloat16"),
        (16384, 4096, "float32"),
        (1000, 5001, "bfloat16"),
        (16384, 12288, "bfloat16"),
        (16384, 12288, "float32"),
        (16384, 16384, "bfloat16"),
    ]:
        for name in NORMS:
            arguments = shaped(name, rows, width, dtype)
            reports = {r.name: r for r in compile_for(load_gpu(gpu), gradient_alone(name, "pallas"), *arguments)}
            report = reports[f"{name}_gradient"]
            assert report.spill_bytes == 0, (name, width, dtype)
            found.setdefault(f"{dtype}[{rows}, {width}]", {})[report.name] = report
    golden_kernels("norm", gpu, found)


BYTES = {"bf16": 2, "f32": 4}


def bytes_to_the_least(function, *arguments):
    """What kernels for H100 read and write beside the arguments and results."""
    gpu = load_gpu("h100_sxm")
    sharding = jax.sharding.SingleDeviceSharding(compile_only_devices(gpu.target_config)[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]
    lowered = lower_for(gpu, function, *placed)
    module = parse_hlo(lowered.compile().as_text())
    entry = module.computations[module.entry]
    moved = 0
    for instruction in entry.instructions:
        if instruction.opcode in ("fusion", "custom-call"):
            operands = [entry.operand(instruction, place).arrays for place in range(len(instruction.operands))]
            for arrays in (instruction.arrays, *operands):
                moved += sum(BYTES[x.dtype] * x.size for x in arrays)
        else:
            # Nothing else touches memory.
            assert instruction.opcode in ("parameter", "get-tuple-element", "tuple", "bitcast"), instruction.opcode
    least = sum(x.size * x.dtype.itemsize for x in (*arguments, *jax.tree.leaves(lowered.out_info)))
    return moved / least


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("width", [1024, 4096, 12288])
@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_moves_the_least_bytes(name, width):
    """The kernel, and XLA's sum of its partial sums."""
    ratio = bytes_to_the_least(gradient_alone(name, "auto"), *shaped(name, 16384, width, "bfloat16"))
    assert ratio == pytest.approx({"rms_norm": 1.02, "layer_norm": 1.04}[name], abs=0.025)
    assert 1.0 <= ratio <= 1.05


@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    ("name", "implementation", "ratio"),
    [
        ("rms_norm", "reference", 1.51),
        ("rms_norm", "pallas", 1.52),
        ("layer_norm", "reference", 2.77),
        ("layer_norm", "pallas", 1.53),
    ],
)
def test_bytes_with_the_gradient_of_a_residual_connection(name, implementation, ratio):
    """XLA fuses the addition into its own kernels, but not into ours."""

    def gradient(residual, *arguments):
        of_x, *of_parameters = gradient_alone(name, implementation)(*arguments)
        return of_x + residual, of_parameters

    arguments = shaped(name, 16384, 4096, "bfloat16")
    assert bytes_to_the_least(gradient, arguments[0], *arguments) == pytest.approx(ratio, abs=0.03)
