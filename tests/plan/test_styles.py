"""What each style of parallelism communicates, in programs compiled for eight H100s that are not there.

Counts and bytes are those of theory, and there is nothing else: an unexpected collective fails.
"""

import pytest

from dseekjax.config import load_config
from dseekjax.plan import compile_report
from tests.plan.test_compile import KEYS

pytestmark = pytest.mark.cuda_compiler
EMBED, KV_WIDTH, LAYERS, LENGTH, BATCH = 512, 4 * 64, 6, 64, 16
BFLOAT16 = 2
# Sums of norms' gradients, losses and the like, and integers of the batch.
SMALL = 64 * 1024


def compile_small(*mesh):
    keys = [key for key in KEYS if not key.startswith("mesh.")]
    return compile_report(load_config(None, [*keys, *mesh]), "h100_sxm")


def collectives(*mesh):
    """Count and payload bytes by kind and axes, without what is small."""
    return large(compile_small(*mesh))


def large(report):
    return {
        (row.kind, row.axes): (row.count, row.payload_bytes) for row in report.collectives if row.payload_bytes > SMALL
    }


def test_tensor_with_sequence_parallel():
    report = compile_small("mesh.data=2", "mesh.tensor=4", "memory.recompute=none", "model.loss_chunk=128")
    found = large(report)
    stream = BFLOAT16 * BATCH // 2 * LENGTH * EMBED
    # Attention and feed-forward gather and scatter, forward and backward, where what was gathered on the way in is
    # gathered again rather than kept; the lookup scatters and the loss gathers, and both go back.
    gathers, scatters = LAYERS * 2 * 3 + 2, LAYERS * 2 * 2 + 2
    # XLA combines some of the gathers.
    assert found.pop(("all-gather", "tensor"))[1] == gathers * stream
    assert found.pop(("reduce-scatter", "tensor")) == (scatters, scatters * stream)
    assert found.pop(("all-reduce", "data"))[0] == 1
    assert not found
    # Small sums: each layer's gradients of norms, the last norm's; what goes back into the loss, and two for each of
    # its four chunks.
    (small,) = (row.count for row in report.collectives if row.kind == "all-reduce" and row.axes == "tensor")
    assert small <= LAYERS + 4 + 2 * 4


def test_tensor_round_a_ring_hides_every_hop():
    report = compile_small("mesh.data=2", "mesh.tensor=4", "memory.recompute=none", "mesh.tensor_overlap=ring")
    found = large(report)
    stream = BFLOAT16 * BATCH // 2 * LENGTH * EMBED
    # Each gather and scatter of a layer is three hops of a quarter. XLA combines some of them.
    hops = LAYERS * 2 * (3 + 2) * 3
    assert found.pop(("collective-permute", "tensor"))[1] == hops * stream // 4
    assert found.pop(("all-gather", "tensor")) == found.pop(("reduce-scatter", "tensor")) == (2, 2 * stream)
    assert found.pop(("all-reduce", "data"))[0] == 1
    assert not found
    (permutes,) = (row for row in report.collectives if row.kind == "collective-permute")
    assert permutes.exposed_wire_bytes == 0


def test_tensor_without_sequence_parallel():
    found = collectives("mesh.data=2", "mesh.tensor=4", "memory.recompute=none", "mesh.sequence_parallel=false")
    stream = BFLOAT16 * BATCH // 2 * LENGTH * EMBED
    # As above, a gather and a scatter being one sum here; the lookup's goes back as another, which could be spared.
    count = LAYERS * 2 * 2 + 3
    assert found.pop(("all-reduce", "tensor"))[1] == pytest.approx(count * stream, rel=0.01)
    assert found.pop(("all-reduce", "data"))[0] == 1
    assert not found


def test_context_by_heads_and_shared_parameters():
    found = collectives("mesh.fsdp=2", "mesh.context=4", "memory.recompute=none")
    tokens = BATCH // 2 * LENGTH // 4
    # Queries, keys, values and what comes of them, forward and backward; and the lookup.
    count, num_bytes = found.pop(("all-to-all", "context"))
    assert count == LAYERS * 4 * 2 + 2
    widths = LAYERS * 2 * (2 * EMBED + 2 * KV_WIDTH)
    assert num_bytes == pytest.approx(BFLOAT16 * tokens * (widths + 2 * EMBED), rel=0.01)
    assert found.pop(("all-to-all", "fsdp"))[0] == 2
    # Parameters of a layer, forward and backward, as with fsdp alone.
    assert {kind for kind, axes in found if axes == "fsdp+context"} == {"all-gather", "reduce-scatter"}
    assert {axes for _, axes in found} == {"fsdp+context"}


def test_context_round_a_ring_hides_every_hop():
    report = compile_small("mesh.fsdp=2", "mesh.context=4", "memory.recompute=none", "mesh.context_attention=ring")
    (permutes,) = (row for row in report.collectives if row.kind == "collective-permute")
    block = BATCH // 2 * LENGTH // 4 * 2 * KV_WIDTH
    # Keys with values go three hops forward and three backward, their gradients, in float32, four; and beside the keys
    # a few numbers of documents.
    assert permutes.wire_bytes == pytest.approx(LAYERS * (6 * BFLOAT16 + 4 * 4) * block, rel=0.01)
    assert permutes.exposed_wire_bytes < SMALL


def test_fsdp_context_and_tensor_together_move_what_each_does_alone():
    found = collectives("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "memory.recompute=none")
    stream = BFLOAT16 * BATCH // 2 * LENGTH // 2 * EMBED
    gathers, scatters = LAYERS * 2 * 3 + 2, LAYERS * 2 * 2 + 2
    # XLA combines some of the gathers.
    assert found.pop(("all-gather", "tensor"))[1] == gathers * stream
    assert found.pop(("reduce-scatter", "tensor")) == (scatters, scatters * stream)
    assert found.pop(("all-to-all", "context"))[0] == LAYERS * 4 * 2 + 2
    assert found.pop(("all-to-all", "fsdp"))[0] == 2
    # Parameters and their gradients, in one step along both axes or in one along each.
    assert {kind for kind, _ in found} == {"all-gather", "reduce-scatter"}
    assert {axes for _, axes in found} <= {"fsdp+context", "fsdp", "context"}
