"""The kernels of attention, interpreted, against float64; and what GPUs' compilers say of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import attention, attention_with_log_sum_exp
from pallas_kernels.attention.pallas import blocks
from pallas_kernels.compile_only import compile_only_devices
from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.compiling import compile_for
from pallas_kernels.testing.lowering import lower_for, tracing_for
from pallas_kernels.testing.numerics import relative_error
from tests.references.attention import with_gradients

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@st.composite
def cases(draw):
    """Shapes about the block of 32, of sequence 1, with heads that tensor cores do not multiply, and every mask."""
    causal = draw(st.booleans())
    query_length = draw(st.sampled_from((1, 7, 32, 33, 70)))
    kv_heads = draw(st.integers(1, 2))
    return {
        "query": (1, query_length, kv_heads * draw(st.integers(1, 3)), draw(st.sampled_from((8, 16, 40, 64)))),
        "key_length": query_length if causal else draw(st.sampled_from((1, 31, 64, 70))),
        "kv_heads": kv_heads,
        "value_dim": draw(st.sampled_from((16, 24, 48))),
        "dtype": draw(st.sampled_from(tuple(TOLERANCE))),
        "segmented": draw(st.booleans()),
        "causal": causal,
        "window": draw(st.sampled_from((None, None, 1, 9, 40))),
        "softcap": draw(st.sampled_from((None, None, 3.0))),
        "seed": draw(st.integers(0, 1 << 16)),
        "sizes": draw(st.sampled_from(((32, 32), (16, 64), (64, 16)))),
    }


def check(
    implementation, query, key_length, kv_heads, value_dim, dtype, segmented, causal, window, softcap, seed, sizes
):
    rng = np.random.default_rng(seed)
    batch, length, heads, head_dim = query
    shapes = (query, (batch, key_length, kv_heads, head_dim), (batch, key_length, kv_heads, value_dim))
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    ids = None
    if segmented:
        # Some documents are of queries alone: those see nothing.
        ids = [jnp.asarray(np.sort(rng.integers(0, 4, (batch, n))), jnp.int32) for n in (length, key_length)]
        ids[1] = ids[1] if causal else jnp.minimum(ids[1], 2)
    out_gradient = jnp.asarray(rng.normal(size=(batch, length, heads, value_dim)), dtype)
    logarithm_gradient = jnp.asarray(rng.normal(size=(batch, length, heads)), jnp.float32)
    names = {} if ids is None else {"query_segment_ids": ids[0], "key_segment_ids": ids[1]}

    @jax.jit
    def run(*arrays):
        def attend(*arrays):
            return attention_with_log_sum_exp(
                *arrays, causal=causal, window=window, softcap=softcap, implementation=implementation, **names
            )

        (out, log_sum_exp), pull_back = jax.vjp(attend, *arrays)
        return out, log_sum_exp, *pull_back((out_gradient, logarithm_gradient))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "UNTUNED", blocks.KernelBlocks(*[blocks.Blocks(*sizes, num_warps=4, num_stages=1)] * 3))
        out, log_sum_exp, *gradients = run(*arrays)
    assert out.dtype == dtype
    exact = with_gradients(
        *arrays, ids, out_gradient, logarithm_gradient, causal=causal, window=window, softcap=softcap
    )
    found = (out, jnp.where(jnp.isneginf(log_sum_exp), 0.0, log_sum_exp), *gradients)
    for name, a, b in zip(("out", "log_sum_exp", "query", "key", "value"), found, exact, strict=True):
        # Where exact numbers are nothing, as the gradient of the one key that a query sees, rounding is all there is.
        size = max(1.0, 0.1 * b.size**0.5 / max(float(np.linalg.norm(b)), 1e-30))
        error = relative_error(a, b) / size if np.linalg.norm(b) else float(np.abs(np.asarray(a, np.float64)).max())
        assert error < TOLERANCE[dtype], (name, error)


@settings(max_examples=10)
@given(cases())
def test_interpreted_kernels_equal_float64_forward_and_backward(case):
    check("pallas_interpreted", **case)


@settings(max_examples=6)
@given(cases())
def test_reference_with_log_sum_exp_equals_float64(case):
    check("reference", **case)


MLA = {"query": (1, 40, 2, 192), "key_length": 40, "kv_heads": 2, "value_dim": 128}


def test_heads_of_latent_attention():
    check(
        "pallas_interpreted",
        **MLA, dtype="bfloat16", segmented=True, causal=True, window=None, softcap=None, seed=0, sizes=(32, 32),
    )  # fmt: skip


def forward_and_gradients(implementation="pallas", **options):
    """Attention in bfloat16 with its gradients, as a function of arrays."""

    def run(query, key, value, *ids):
        names = dict(zip(("query_segment_ids", "key_segment_ids"), ids, strict=True)) if ids else {}
        attend = functools.partial(attention, implementation=implementation, **options, **names)
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, *pull_back(out)

    return run


def arguments(head_dim=128, value_dim=128, kv_heads=2, length=1024, dtype=jnp.bfloat16, segmented=True):
    def array(heads, dim):
        return jax.ShapeDtypeStruct((1, length, heads, dim), dtype)

    ids = (jax.ShapeDtypeStruct((1, length), jnp.int32),) * 2 if segmented else ()
    return array(4, head_dim), array(kv_heads, head_dim), array(kv_heads, value_dim), *ids


SIGNATURES = {
    "documents, heads of 64": (arguments(64, 64), {}),
    "documents, heads of 128": (arguments(), {}),
    "causal, heads of 128": (arguments(segmented=False), {}),
    "documents, heads of 192, values of 128": (arguments(192, 128, kv_heads=4), {}),
    "documents, window 300, softcap": (arguments(), {"window": 300, "softcap": 50.0}),
    "documents, heads of 128, float16": (arguments(dtype=jnp.float16), {}),
    "documents, heads of 64, float32": (arguments(64, 64, dtype=jnp.float32), {}),
    "documents, heads of 128, float32": (arguments(dtype=jnp.float32), {}),
}


@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm"])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        *SIGNATURES.values(),
        (arguments(80, 40, kv_heads=1, length=1000), {"causal": False, "window": 9}),
        (arguments(length=1, dtype=jnp.float16), {}),
        (arguments(length=100, dtype=jnp.float32), {"softcap": 2.0}),
    ],
)
def test_lowers_for_gpus(gpu, shapes, options):
    text = lower_for(load_gpu(gpu), forward_and_gradients(**options), *shapes).as_text()
    for kernel in ("attention_forward", "attention_query_gradient", "attention_key_value_gradient"):
        assert f'name = "{kernel}"' in text


def test_flops_stand_in_the_program():
    text = lower_for(load_gpu("h100_sxm"), forward_and_gradients(), *arguments(64, 64)).as_text()
    pairs = 4 * 1024 * 1025 // 2
    for products in (2, 3, 4):
        assert f"{2 * products * pairs * 64}" in text


def test_what_is_traced_for_a_gpu_has_its_block_sizes():
    with tracing_for(load_gpu("h100_sxm")):
        jaxpr = str(jax.make_jaxpr(forward_and_gradients())(*arguments()))
    # Eight blocks of 128 queries, for each of four heads, where what is not tuned would have 32.
    assert "grid=(8, 4, 1)" in jaxpr


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm"])
def test_compiled_kernels_are_the_golden_ones(gpu, golden_kernels):
    found = {}
    for name, (shapes, options) in SIGNATURES.items():
        reports = compile_for(load_gpu(gpu), forward_and_gradients(**options), *shapes)
        found[name] = reports = {report.name: report for report in reports if report.name.startswith("attention")}
        assert len(reports) == 3
        assert reports["attention_forward"].spill_bytes == 0
        for report in reports.values() if shapes[0].dtype != jnp.float32 else ():
            used = set(report.tensor_core_instructions)
            assert used, report
            if gpu == "h100_sxm":
                assert all(instruction.startswith("wgmma") for instruction in used), report
    golden_kernels("attention", gpu, found)


@pytest.mark.cuda_compiler
@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm"])
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"causal": False}])
def test_cudnn_compiles_forward_and_backward(gpu, options):
    sharding = jax.sharding.SingleDeviceSharding(compile_only_devices(load_gpu(gpu).target_config)[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments(segmented=False)]
    text = lower_for(load_gpu(gpu), forward_and_gradients("cudnn", **options), *placed).compile().as_text()
    assert "__cudnn$fmhaSoftmax" in text
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert ("CAUSAL" in text) == options.get("causal", True)
    assert ('"sliding_window_length":300' in text.replace(" ", "")) == ("window" in options)
