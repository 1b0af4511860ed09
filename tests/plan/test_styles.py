"""What each style of parallelism communicates, in programs compiled for eight H100s that are not there.

Counts and bytes are those of theory, and there is nothing else: an unexpected collective fails.
"""

import pytest

from dseekjax.config import load_config
from dseekjax.plan import compile_report
from tests.plan.test_compile import KEYS

pytestmark = pytest.mark.cuda_compiler
EMBED, LAYERS, LENGTH, BATCH = 512, 6, 64, 16


def collectives(*changes):
    """Payload bytes by kind, axis and count, of all that are not small sums for norms and losses."""
    keys = [key for key in KEYS if not key.startswith(("mesh.", "memory."))]
    report = compile_report(load_config(None, [*keys, *changes]), "h100_sxm")
    small = 64 * 1024
    rows = [row for row in report.collectives if not (row.kind == "all-reduce" and row.payload_bytes < small)]
    return {(row.kind, row.axes): (row.count, row.payload_bytes) for row in rows}


def stream_bytes(replicas):
    """Of the residual stream of one replica, in bfloat16."""
    return 2 * BATCH // replicas * LENGTH * EMBED


def test_tensor_with_sequence_parallel_gathers_and_scatters_twice_a_layer_and_pass():
    found = collectives("mesh.data=2", "mesh.tensor=4", "mesh.fsdp=1")
    # Two per layer forward and two backward; the embedding is scattered and the loss gathers, and the other way back.
    count = LAYERS * 4 + 2
    assert found["all-gather", "tensor"] == (count, count * stream_bytes(2))
    assert found["reduce-scatter", "tensor"] == (count, count * stream_bytes(2))
    assert set(found) == {("all-gather", "tensor"), ("reduce-scatter", "tensor"), ("all-reduce", "data")}
