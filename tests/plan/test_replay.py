"""Small schedules whose every number can be worked out by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dseekjax.plan.replay
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


def test_collectives_that_xla_writes_as_kernels_of_its_own_are_collectives():
    found = replay("kernel", {"fsdp": 8})
    (reduce,) = dict(found.lines()).values()
    one = 2 * 400 * 7 / 8
    assert (reduce["count"], reduce["wire_bytes"], reduce["exposed_wire_bytes"]) == (2, 2 * one, one)
    assert found.state.kernels == {"triton gemm fusion": 1}
    assert found.state.total_flops == 2 * 32**3


def test_what_is_not_scheduled_is_refused():
    text = (FOLDER / "loop.hlo").read_text().replace("is_scheduled=true, ", "")
    with pytest.raises(ValueError, match="not scheduled"):
        replay("loop", {"data": 2, "fsdp": 8}, text)


def test_a_start_that_waits_itself_is_exposed():
    text = (
        (FOLDER / "loop.hlo")
        .read_text()
        .replace(
            "{'data'}, to_apply=%sum",
            '{\'data\'}, to_apply=%sum, backend_config={"collective_backend_config":{"is_sync":true}}',
        )
    )
    assert "is_sync" in text
    over_data = dict(replay("loop", {"data": 2, "fsdp": 8}, text).lines())[Line("all-reduce", "data", 2, True, False)]
    assert over_data["exposed_wire_bytes"] == over_data["wire_bytes"]


def test_what_is_for_other_devices_is_refused():
    with pytest.raises(ValueError, match="for 16 devices, the mesh has 8"):
        replay("loop", {"fsdp": 8})


@st.composite
def loops(draw, numbers=None):
    """Computations of a loop: matrix products, collectives that end some time after they start, loops inside."""
    numbers = numbers or itertools.count()
    name, lines, inner = f"body{next(numbers)}", ["%x = f32[64,64] parameter(0)"], ""
    flying = []
    for step in draw(st.lists(st.sampled_from(["dot", "start", "done", "sync", "loop"]), max_size=6)):
        number = next(numbers)
        if step == "dot":
            lines.append(f"%v{number} = f32[64,64] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}")
        elif step == "start":
            lines.append(f"%v{number} = (f32[64,64], f32[64,64]) all-to-all-start(%x), replica_groups={{{{0,1}}}}")
            flying.append(number)
        elif step == "sync":
            lines.append(f"%v{number} = f32[64,64] all-to-all(%x), replica_groups={{{{0,1}}}}")
        elif step == "done" and flying:
            lines.append(f"%v{number} = f32[64,64] all-to-all-done(%v{flying.pop(0)})")
        elif step == "loop" and not inner:
            text, body = draw(loops(numbers))
            trips, inner = draw(st.integers(0, 5)), text
            known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
            lines.append(f"%v{number} = f32[64,64] while(%x), condition=%yes, body=%{body}, {known}")
    lines += [f"%v{next(numbers)} = f32[64,64] all-to-all-done(%v{number})" for number in flying]
    lines.append(f"ROOT %v{next(numbers)} = f32[64,64] copy(%x)")
    text = f"%{name} (x: f32[64,64]) -> f32[64,64] {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n\n"
    return inner + text, name


@given(loops())
def test_loops_multiplied_out_are_loops_gone_through(program):
    text, main = program
    head, _, entry = text.rpartition(f"%{main} ")
    text = f"HloModule m, is_scheduled=true, num_partitions=2\n\n{head}ENTRY %{main} {entry}"
    module, topology = parse_hlo(text), Topology({"fsdp": 2}, [0, 0])
    multiplied = Replay(module, topology, CLUSTER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dseekjax.plan.replay, "PASSES", 10**6)
        gone_through = Replay(module, topology, CLUSTER)
    for name in ("seconds", "compute_seconds", "total_flops"):
        assert getattr(multiplied.state, name) == pytest.approx(getattr(gone_through.state, name))
    assert multiplied.state.kernels == gone_through.state.kernels
    found, expected = dict(multiplied.lines()), dict(gone_through.lines())
    assert found.keys() == expected.keys()
    for line in found:
        assert found[line] == pytest.approx(expected[line])
