import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.attention import AttentionCase, AttentionSpec, attention, blocked, choose_implementation
from pallas_kernels.dispatch import Device
from pallas_kernels.gpus import load_gpu
from tests.references.attention import attention as exact


@st.composite
def cases(draw):
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    length = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 1 << 16))
    masks = {"causal": draw(st.booleans()), "window": draw(st.sampled_from((None, None, 1, 3)))}
    masks["softcap"] = draw(st.sampled_from((None, None, 2.0)))
    return (draw(st.integers(1, 2)), length, heads, kv_heads, seed, masks, draw(st.booleans()))


def inputs(batch, length, heads, kv_heads, seed, size=4):
    rng = np.random.default_rng(seed)
    draw = lambda heads: jnp.asarray(rng.normal(size=(batch, length, heads, size)), jnp.float32)  # noqa: E731
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (batch, length)), axis=1), jnp.int32)
    return draw(heads), draw(kv_heads), draw(kv_heads), segments


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
@given(cases())
def test_equals_float64(implementation, case):
    batch, length, heads, kv_heads, seed, masks, packed = case
    q, k, v, segments = inputs(batch, length, heads, kv_heads, seed)
    ids = (segments, segments) if packed else (None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK_SIZE", 4)
        names = dict(zip(("query_segment_ids", "key_segment_ids"), ids, strict=True))
        out = attention(q, k, v, implementation=implementation, **masks, **names)
    np.testing.assert_allclose(out, exact(q, k, v, *ids, **masks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 7, 13])
def test_blocked_has_the_gradient_of_reference(length, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_SIZE", 4)
    q, k, v, segments = inputs(2, length, 4, 2, seed=0)

    def loss(arrays, implementation):
        out = attention(*arrays, query_segment_ids=segments, key_segment_ids=segments, implementation=implementation)
        return jnp.sin(out).sum()

    expected, found = (jax.grad(loss)((q, k, v), name) for name in ("reference", "blocked"))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(implementation):
    q, k, v, segments = inputs(1, 4, 2, 2, seed=0)

    def total(q):
        out = attention(
            q, k, v, query_segment_ids=segments + 7, key_segment_ids=segments, implementation=implementation
        )
        return out.sum()

    assert total(q) == 0.0
    assert (jax.grad(total)(q) == 0.0).all()


def chosen(platform="cpu", gpu=None, implementation="auto", **changes):
    case = {"dtype": "bfloat16", "length": 8192, "causal": True, "segmented": True, "window": None, "softcap": None}
    case = {**case, "head_dim": 128, "value_dim": 128, **changes}
    spec = AttentionSpec(case["causal"], case["window"], 1.0, case["softcap"])
    length, sizes = case["length"], (case["head_dim"], case["value_dim"])
    described = AttentionCase(case["dtype"], length, length, *sizes, case["segmented"], spec)
    return choose_implementation(described, Device(platform, gpu and load_gpu(gpu)), implementation)


def test_auto_on_cpu_blocks_only_long_sequences_of_which_part_is_hidden():
    assert chosen(length=128) == "reference"
    assert chosen() == "blocked"
    assert chosen(causal=False, window=9) == "blocked"
    assert chosen(causal=False) == "reference"


@pytest.mark.parametrize("gpu", ["a100_80gb", "h100_sxm"])
def test_auto_on_gpus_takes_cudnn_and_else_the_kernel(gpu):
    assert chosen("gpu", gpu, segmented=False) == "cudnn"
    assert chosen("gpu", gpu, segmented=False, window=512) == "cudnn"
    assert chosen("gpu", gpu) == "pallas"
    assert chosen("gpu", gpu, segmented=False, softcap=3.0) == "pallas"
    assert chosen("gpu", gpu, segmented=False, head_dim=192) == "pallas"
    assert chosen("gpu", gpu, dtype="float32") == "blocked"
    assert chosen("gpu", gpu, head_dim=512, length=64) == "reference"
    assert chosen("gpu") == "blocked", "a GPU that is not known"


def test_an_explicit_choice_that_cannot_run_says_all_reasons():
    with pytest.raises(ValueError, match=r"cudnn cannot run on cpu: needs an NVIDIA GPU.*32; takes no segment ids"):
        chosen(implementation="cudnn", dtype="float32")
    with pytest.raises(ValueError, match="pallas cannot run on cpu: needs an NVIDIA GPU that"):
        chosen(implementation="pallas")
    with pytest.raises(ValueError, match="no implementation 'flash'; there are auto, cudnn, pallas, blocked"):
        chosen(implementation="flash")


def test_what_cannot_run_is_refused():
    q, k, v, segments = inputs(1, 4, 3, 2, seed=0)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="cudnn cannot run on cpu"):
        attention(q[:, :, :2], k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="do not fit together"):
        attention(q[:, :, :2], k, v[:, :3])
    for window in (0, 2.5, jnp.int32(3)):
        with pytest.raises(ValueError, match=r"window .* must be a positive int"):
            attention(q[:, :, :2], k, v, window=window)
    with pytest.raises(ValueError, match="softcap -1"):
        attention(q[:, :, :2], k, v, softcap=-1.0)
    for number in (float("nan"), jnp.float32(1)):
        with pytest.raises(ValueError, match="scale must be a finite Python number"):
            attention(q[:, :, :2], k, v, scale=number)
    with pytest.raises(ValueError, match=r"query has shape .* none of them 0"):
        attention(q[:, :0], k[:, :0], v[:, :0])
    with pytest.raises(ValueError, match="key is bfloat16, query float32; cast all to one float dtype"):
        attention(q[:, :, :2], k.astype(jnp.bfloat16), v)
    for ids in (segments[:, :3], segments[0], segments.astype(jnp.float32)):
        with pytest.raises(ValueError, match=r"query_segment_ids are .* give integers of shape"):
            attention(q[:, :, :2], k, v, query_segment_ids=ids, key_segment_ids=segments)

    with pytest.raises(ValueError, match="together"):
        attention(q[:, :, :2], k, v, query_segment_ids=segments)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attention(q[:, :2, :2], k, v)


@pytest.mark.parametrize("window", [40, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_wider_than_the_sequence_hides_nothing(window, causal):
    q, k, v, _ = inputs(1, 40, 2, 2, seed=0)
    for name in ("reference", "pallas_interpreted"):
        wide, none = (attention(q, k, v, causal=causal, window=w, implementation=name) for w in (window, None))
        np.testing.assert_array_equal(wide, none)
