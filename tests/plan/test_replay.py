"""Small schedules whose every number can be worked out by hand."""

import pytest

from dseekjax.plan.cluster import load_cluster
from dseekjax.plan.groups import Topology
from dseekjax.plan.hlo import parse_hlo
from dseekjax.plan.replay import Line, Replay
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "tests" / "plan" / "hlo"
CLUSTER = load_cluster("h100_sxm")


def replay(name, axes, text=None):
    devices = 1
    for size in axes.values():
        devices *= size
    text = text or (FOLDER / f"{name}.hlo").read_text()
    return Replay(parse_hlo(text), Topology(axes, [device // 8 for device in range(devices)]), CLUSTER)


def test_nested_loops_multiply_and_groups_become_axes():
    found = replay("loop", {"data": 2, "fsdp": 8})
    lines = dict(found.lines())
    gather = lines[Line("all-gather", "fsdp", 8, False, False)]
    assert gather["count"] == 15
    assert gather["payload_bytes"] == 15 * 64 * 32 * 2
    assert gather["wire_bytes"] == 15 * 64 * 32 * 2 * 7 / 8
    assert gather["network_bytes"] == 0
    assert gather["exposed_wire_bytes"] == gather["wire_bytes"]

    over_data = lines[Line("all-reduce", "data", 2, True, False)]
    assert (over_data["count"], over_data["payload_bytes"]) == (1, 4000)
    assert over_data["wire_bytes"] == over_data["network_bytes"] == 2 * 4000 / 2
    assert over_data["exposed_wire_bytes"] == 0  # The loop, which has matrix products, runs meanwhile.

    over_all = lines[Line("all-reduce", "data+fsdp", 16, True, False)]
    assert over_all["wire_bytes"] == 2 * 4000 * 15 / 16
    assert over_all["network_bytes"] == over_all["wire_bytes"] / 8  # One GPU in eight sends to the next host.
    assert over_all["exposed_wire_bytes"] == over_all["wire_bytes"]  # It is synchronous.

    assert found.state.flops == {"bf16": 15 * 2 * 128 * 64 * 32}
    assert found.state.kernels == {"triton gemm fusion": 15}
    assert not found.unknown_loops


def test_times_are_those_of_two_queues():
    found = replay("loop", {"data": 2, "fsdp": 8})
    lines = dict(found.lines())
    gather_takes = 64 * 32 * 2 * 7 / 8 / 450e9 + 7 * 3.4e-6
    assert lines[Line("all-gather", "fsdp", 8, False, False)]["seconds"] == pytest.approx(15 * gather_takes)
    matmul_takes = 2 * 128 * 64 * 32 / 989e12
    over_data = 2 * 14e-6 + 4000 / 50e9
    # The eighth that leaves the host takes longer than the rest: 50 GB/s against 450.
    over_all = 2 * (7 * 3.4e-6 + 14e-6) + 2 * 4000 * 15 / 16 / 8 / 50e9
    state = found.state
    assert state.compute_seconds == pytest.approx(15 * matmul_takes)
    # The first gather waits behind the all-reduce on the wire; nothing else overlaps.
    assert state.seconds == pytest.approx(over_data + 15 * (gather_takes + matmul_takes) + over_all)


@pytest.mark.parametrize("trips", [1, 2, 3, 10])
def test_a_pair_that_starts_in_one_pass_and_ends_in_the_next_is_hidden_by_what_lies_between(trips):
    text = (FOLDER / "pipelined.hlo").read_text().replace('"n":"10"', f'"n":"{trips}"')
    found = replay("pipelined", {"fsdp": 8}, text)
    (gather,) = dict(found.lines()).values()
    one = 64 * 32 * 2 * 7 / 8
    assert gather["count"] == trips + 1
    assert gather["exposed_wire_bytes"] == one  # Only the first: before the loop there is nothing to hide it.
    takes, matmul = one / 450e9 + 7 * 3.4e-6, 2 * 16 * 64 * 32 / 989e12
    assert found.state.seconds == pytest.approx(takes + trips * max(takes, matmul))
    assert gather["exposed_seconds"] == pytest.approx(takes + trips * (takes - matmul))
    assert not any(found.state.pending.values())


def test_branches_are_marked_and_the_longest_is_gone_on_from():
    found = replay("branches", {"data": 2, "fsdp": 2})
    lines = dict(found.lines())
    permute = lines[Line("collective-permute", "data", 2, False, True)]
    assert (permute["count"], permute["wire_bytes"]) == (1, 4096)
    # The permutation takes longer than the product, so the product of the other branch is not run.
    assert found.state.flops == {"f32": 2 * 32**3}
    assert found.state.kernels == {"cublas gemm": 1}

    scatter = lines[Line("reduce-scatter", "data+fsdp", 4, False, False)]
    assert (scatter["count"], scatter["payload_bytes"], scatter["wire_bytes"]) == (1, 4096, 3072)
    assert scatter["exposed_wire_bytes"] == 0
    assert found.unknown_loops == {"loop"}


def test_what_is_not_scheduled_is_refused():
    text = (FOLDER / "loop.hlo").read_text().replace("is_scheduled=true, ", "")
    with pytest.raises(ValueError, match="not scheduled"):
        replay("loop", {"data": 2, "fsdp": 8}, text)
