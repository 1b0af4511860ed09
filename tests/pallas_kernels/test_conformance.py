"""What every implementation of attention takes, as `docs/kernels.md` has it; and that it is right, where it can run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import (
    IMPLEMENTATIONS,
    WITH_LOG_SUM_EXP,
    attention,
    attention_with_log_sum_exp,
    blocked,
    describe,
)
from pallas_kernels.dispatch import Device
from pallas_kernels.gpus import load_gpu
from pallas_kernels.testing.numerics import relative_error
from tests.conftest import REPOSITORY
from tests.references.attention import with_gradients

CASES = {
    # words: heads, kv_heads, head_dim, value_dim, dtype, documents, masks
    "causal": (2, 2, 16, 16, "bfloat16", False, {}),
    "causal, window": (2, 2, 16, 16, "bfloat16", False, {"window": 5}),
    "causal, documents": (2, 2, 16, 16, "bfloat16", True, {}),
    "causal, window, documents": (2, 2, 16, 16, "bfloat16", True, {"window": 5}),
    "both ways": (2, 2, 16, 16, "bfloat16", False, {"causal": False}),
    "both ways, window": (2, 2, 16, 16, "bfloat16", False, {"causal": False, "window": 5}),
    "both ways, documents": (2, 2, 16, 16, "bfloat16", True, {"causal": False}),
    "softcap": (2, 2, 16, 16, "bfloat16", False, {"softcap": 5.0}),
    "grouped queries": (4, 2, 16, 16, "bfloat16", False, {}),
    "one key head": (4, 1, 16, 16, "bfloat16", False, {}),
    "heads of 192, values of 128": (2, 2, 192, 128, "bfloat16", False, {}),
    "float16": (2, 2, 16, 16, "float16", False, {}),
    "float32": (2, 2, 16, 16, "float32", False, {}),
}
COLUMNS = {
    # words: implementations, name, device
    "`reference`": (IMPLEMENTATIONS, "reference", "cpu"),
    "`blocked`": (IMPLEMENTATIONS, "blocked", "cpu"),
    "`cudnn` on A100, H100": (IMPLEMENTATIONS, "cudnn", "h100_sxm"),
    "`pallas` on A100, H100": (IMPLEMENTATIONS, "pallas", "h100_sxm"),
    "`pallas`, log-sum-exp": (WITH_LOG_SUM_EXP, "pallas", "h100_sxm"),
}
LENGTH = 70
"""Several blocks of `BLOCK_SIZE` queries, and of the kernels' 32."""
BLOCK_SIZE = 32


def arrays_of(case):
    heads, kv_heads, head_dim, value_dim, dtype, documents, masks = case
    rng = np.random.default_rng(0)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    arrays = [jnp.asarray(rng.normal(size=(1, LENGTH, *shape)), dtype) for shape in shapes]
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (1, LENGTH))), jnp.int32) if documents else None
    return arrays, ids, {"causal": True, "window": None, "softcap": None, **masks}


def is_taken(case, implementations, name, device):
    arrays, ids, masks = arrays_of(case)
    described, _ = describe(*arrays, query_segment_ids=ids, key_segment_ids=ids, **masks)
    (implementation,) = (i for i in implementations if i.name == name)
    devices = [device, "a100_80gb"] if device == "h100_sxm" else [device]
    found = {
        not implementation.reasons_against(described, Device("cpu") if d == "cpu" else Device("gpu", load_gpu(d)))
        for d in devices
    }
    assert len(found) == 1, "one column stands for both"
    return found.pop()


def test_the_matrix_in_the_docs_is_what_dispatch_says():
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for words, case in CASES.items():
        cells = ["yes" if is_taken(case, *column) else "refused" for column in COLUMNS.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    assert "\n".join(lines) in (REPOSITORY / "docs" / "kernels.md").read_text()


def forward_and_gradients(name, upstream, names):
    @jax.jit
    def run(*arrays):
        out, pull_back = jax.vjp(lambda *x: attention(*x, implementation=name, **names), *arrays)
        return out, *pull_back(upstream)

    return run


@pytest.mark.parametrize("words", CASES)
def test_what_is_taken_is_right(words, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_SIZE", BLOCK_SIZE)
    case = CASES[words]
    arrays, ids, masks = arrays_of(case)
    names = {**masks, "query_segment_ids": ids, "key_segment_ids": ids}
    upstream = jnp.asarray(np.random.default_rng(1).normal(size=(*arrays[0].shape[:3], case[3])), case[4])
    zeros = jnp.zeros(arrays[0].shape[:3])
    pair = None if ids is None else (ids, ids)
    exact, exact_logarithm, *exact_gradients = with_gradients(*arrays, pair, upstream, zeros, **masks)
    tolerance = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}[case[4]]
    for name in ("reference", "blocked", "pallas_interpreted"):
        found, *gradients = forward_and_gradients(name, upstream, names)(*arrays)
        for a, b in zip((found, *gradients), (exact, *exact_gradients), strict=True):
            assert relative_error(a, b) < tolerance, name
    for name in ("reference", "pallas_interpreted"):
        out, logarithm = attention_with_log_sum_exp(*arrays, implementation=name, **names)
        assert relative_error(out, exact) < tolerance
        assert relative_error(logarithm, exact_logarithm) < tolerance
