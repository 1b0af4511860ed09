"""Products where each group of rows has a matrix of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.bf16_matmul import GROUPS_THAT_PAY, grouped_matmul
from pallas_kernels.bf16_matmul.grouped import row_blocks
from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.lowering import lower_for, tracing_for
from tests.references import products
from tests.references.products import relative_error, with_gradients

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
ROWS = 70
SPLITS = (
    (0, 1, 17, 0, 9),
    (0, 0, 0, 0, 0),
    (70, 0, 0, 0, 0),
    (0, 0, 0, 0, 70),
    (16, 16, 16, 16, 6),
    (1, 1, 1, 1, 1),
    (15, 17, 31, 2, 5),
)
"""Of rows that are worked on 16 at a time."""


def normal(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.cache
def found(implementation):
    @jax.jit
    def run(x, w, group_sizes, cotangent):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, group_sizes, implementation=implementation), x, w)
        return out, pull(cotangent)

    return run


@pytest.mark.parametrize("implementation", ["pallas_interpreted", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SPLITS)
def test_equals_float64(implementation, dtype, sizes):
    inner, cols = 20, 33
    x, w = normal(0, (ROWS, inner), dtype), normal(1, (len(sizes), inner, cols), dtype)
    cotangent = normal(2, (ROWS, cols), dtype)
    out, gradients = found(implementation)(x, w, jnp.asarray(sizes, jnp.int32), cotangent)
    expected = with_gradients(functools.partial(products.grouped_matmul, group_sizes=sizes), (x, w), cotangent)
    assert [y.dtype for y in (out, *gradients)] == [dtype] * 3
    assert relative_error((out, gradients), expected) < TOLERANCE[dtype]
    assert not out[sum(sizes) :].any()


@pytest.mark.parametrize("implementation", ["pallas_interpreted", "reference"])
@pytest.mark.parametrize(
    ("rows", "sizes", "inner", "cols"), [(1, (1,), 1, 1), (3, (0, 2), 40, 16), (33, (33,), 16, 64)]
)
def test_odd_shapes(implementation, rows, sizes, inner, cols):
    x, w = normal(0, (rows, inner), "float32"), normal(1, (len(sizes), inner, cols), "float32")
    cotangent = normal(2, (rows, cols), "float32")
    result = found(implementation)(x, w, jnp.asarray(sizes, jnp.int32), cotangent)
    definition = functools.partial(products.grouped_matmul, group_sizes=sizes)
    assert relative_error(result, with_gradients(definition, (x, w), cotangent)) < 1e-5


@pytest.mark.parametrize("implementation", ["pallas_interpreted", "reference"])
def test_rows_of_no_group_may_hold_anything(implementation):
    x, w = normal(0, (ROWS, 20), "float32").at[33:].set(jnp.nan), normal(1, (5, 20, 33), "float32")
    cotangent = jnp.ones((ROWS, 33)).at[33:].set(jnp.nan)
    out, (of_x, of_w) = found(implementation)(x, w, jnp.asarray([8, 8, 8, 8, 1], jnp.int32), cotangent)
    assert np.isfinite(out).all()
    assert np.isfinite(of_w).all()
    assert not of_x[33:].any()


def test_reference_is_exact_in_float64():
    with jax.enable_x64(True):
        x, w, cotangent = normal(0, (9, 4), "float64"), normal(1, (3, 4, 5), "float64"), normal(2, (9, 5), "float64")
        sizes = (4, 0, 3)
        result = found("auto")(x, w, jnp.asarray(sizes), cotangent)
        definition = functools.partial(products.grouped_matmul, group_sizes=sizes)
        assert relative_error(result, with_gradients(definition, (x, w), cotangent)) < 1e-12


@settings(max_examples=200)
@example(sizes=[0] * 4, size=4)
@example(sizes=[40, 0, 0, 0], size=4)
@example(sizes=[9, 9, 9, 9], size=4)
@example(sizes=[40, 40, 40, 40], size=16)
@given(sizes=st.lists(st.integers(0, 15), min_size=4, max_size=4), size=st.sampled_from([1, 4, 16]))
def test_blocks_cover_each_row_once(sizes, size):
    """Whatever the split, even one of more rows than there are."""
    rows = 40
    owners = np.repeat(np.arange(5), [*sizes, rows])[:rows]
    table = jax.jit(row_blocks, static_argnums=(1, 2))(jnp.asarray(sizes), rows, size)
    group, start, stop, is_live = map(np.asarray, table)
    seen = np.zeros(rows, int)
    for block in range(group.size):
        covered = slice(start[block], min(start[block] + size, stop[block]))
        seen[covered] += 1
        assert (owners[covered] == (group[block] if is_live[block] else 4)).all()
    assert (seen == 1).all()
    assert (stop <= rows).all()
    assert group.size == rows // size + 5


@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm", "h200"])
@pytest.mark.parametrize(("rows", "inner", "cols"), [(100, 72, 136), (8192, 1024, 1024), (1, 1, 1)])
def test_kernels_lower(gpu, rows, inner, cols):
    def both(x, w, sizes):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="pallas"), x, w)
        return out, pull(out)

    shapes = ((rows, inner), "bfloat16"), ((8, inner, cols), "bfloat16"), ((8,), "int32")
    text = lower_for(load_gpu(gpu), both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)).as_text()
    for kernel in ("grouped_matmul", "grouped_matmul_x_gradient", "grouped_matmul_w_gradient"):
        assert f'name = "{kernel}"' in text


def test_auto_takes_the_kernel_where_the_reference_has_many_times_its_flops():
    def takes_kernel(groups, dtype):
        x, w = jnp.zeros((64, 32), dtype), jnp.zeros((groups, 32, 32), dtype)
        return "pallas_call" in str(jax.make_jaxpr(grouped_matmul)(x, w, jnp.zeros(groups, jnp.int32)))

    assert not takes_kernel(GROUPS_THAT_PAY, "bfloat16")
    with tracing_for(load_gpu("h100_sxm")):
        assert takes_kernel(GROUPS_THAT_PAY, "bfloat16")
        assert not takes_kernel(GROUPS_THAT_PAY - 1, "bfloat16")
        assert not takes_kernel(GROUPS_THAT_PAY, "float32")


def test_what_does_not_fit_is_refused():
    x, w, sizes = jnp.zeros((4, 8)), jnp.zeros((2, 8, 3)), jnp.asarray([1, 3])
    with pytest.raises(ValueError, match=r"grouped_matmul: w has shape \(8, 3\); it must be \(groups, inner, cols\)"):
        grouped_matmul(x, w[0], sizes)
    with pytest.raises(ValueError, match=r"grouped_matmul: shapes \(4, 7\) and \(8, 3\) do not multiply"):
        grouped_matmul(x[:, :7], w, sizes)
    with pytest.raises(ValueError, match=r"grouped_matmul: group_sizes has shape \(1,\); it must be \(2,\)"):
        grouped_matmul(x, w, sizes[:1])
    with pytest.raises(ValueError, match="grouped_matmul: group_sizes are float32; they must be integers"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="grouped_matmul: implementation pallas cannot run on cpu"):
        grouped_matmul(x, w, sizes, implementation="pallas")


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
@pytest.mark.parametrize("implementation", ["reference", "pallas_interpreted"])
def test_sizes_may_be_narrow_integers(implementation, dtype):
    x, w = normal(0, (300, 16), jnp.float32), normal(1, (3, 16, 16), jnp.float32)
    sizes = jnp.array([100, 100, 100])
    found, exact = (grouped_matmul(x, w, s, implementation=implementation) for s in (sizes.astype(dtype), sizes))
    np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("implementation", ["reference", "pallas_interpreted"])
def test_what_is_not_finite_stays_in_its_group(implementation):
    x, w = normal(0, (30, 16), jnp.float32).at[0, 0].set(jnp.nan), normal(1, (3, 16, 16), jnp.float32)
    run = lambda x, w: grouped_matmul(x, w, jnp.array([10, 10, 10]), implementation=implementation)  # noqa: E731
    out, pull_back = jax.vjp(run, x, w)
    _, of_w = pull_back(jnp.ones_like(out))
    assert jnp.isfinite(out[1:]).all()
    assert jnp.isfinite(of_w[1:]).all()
    assert jnp.isnan(of_w[0]).any()
