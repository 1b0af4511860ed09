import math
import random
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dseekjax.errors import UserError
from dseekjax.parallel.config import AXES, MeshConfig
from dseekjax.parallel.mesh import NEAREST_FIRST, build_mesh, mesh_sizes, place_devices
from dseekjax.parallel.sharding import PARAMETER_AXES, build_rules, partition_spec, without

RULES = build_rules(MeshConfig())


@given(st.integers(1, 8), st.integers(1, 64))
def test_fsdp_fills_what_data_leaves(data, rest):
    sizes = mesh_sizes(MeshConfig(data=data), data * rest)
    assert sizes["fsdp"] == rest
    assert math.prod(sizes.values()) == data * rest


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"data": 4, "fsdp": 4}, 8, "needs 16 devices, there are 8"),
        ({"data": 3}, 8, "does not divide the 8 devices"),
        ({"data": 2, "fsdp": 2}, 8, "uses 4 of the 8 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, devices, message):
    with pytest.raises(UserError, match=message):
        mesh_sizes(MeshConfig(**mesh), devices)


def test_abstract_mesh_has_the_axes_of_a_real_one():
    config = MeshConfig(data=2)
    assert build_mesh(config, 8).axis_names == build_mesh(config, jax.devices()).axis_names
    assert dict(build_mesh(config, 8).shape) == dict(build_mesh(config, jax.devices()).shape)


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int = 0


def cluster(num_hosts, per_host, seed=0):
    """Devices in any order, whose ids say nothing of where they are."""
    rng = random.Random(seed)
    ids = rng.sample(range(10_000), num_hosts * per_host)
    devices = [Device(number, place // per_host) for place, number in enumerate(ids)]
    return rng.sample(devices, len(devices))


def groups(placed, axis):
    """The sets of devices that differ in one axis only."""
    number = AXES.index(axis)
    return np.moveaxis(placed, number, -1).reshape(-1, placed.shape[number])


def hosts_of(group):
    return {device.process_index for device in group}


@st.composite
def sizes_for_hosts_of_eight(draw):
    sizes = dict.fromkeys(AXES, 1)
    sizes["tensor"] = draw(st.sampled_from([1, 2, 4, 8]))
    num_hosts = draw(st.sampled_from([1, 2, 3, 4, 6, 16]))
    left = num_hosts * 8 // sizes["tensor"]
    for axis in draw(st.permutations([axis for axis in AXES if axis != "tensor"])):
        sizes[axis] = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[axis]
    sizes["data"] *= left
    return num_hosts, sizes


@given(sizes_for_hosts_of_eight(), st.integers(0, 99))
def test_every_device_has_one_place_and_near_axes_stay_in_a_host(drawn, seed):
    num_hosts, sizes = drawn
    devices = cluster(num_hosts, 8, seed)
    placed = place_devices(devices, sizes)
    assert placed.shape == tuple(sizes.values())
    assert sorted(device.id for device in placed.flat) == sorted(device.id for device in devices)
    # An axis stays in a host wherever it and all nearer ones fit there.
    inner = 1
    for axis in NEAREST_FIRST:
        inner *= sizes[axis]
        if 8 % inner == 0:
            assert all(len(hosts_of(group)) == 1 for group in groups(placed, axis))
    assert all(len(hosts_of(group)) == 1 for group in groups(placed, "tensor"))


def test_hosts_and_slices_are_contiguous_along_the_far_axes():
    devices = [
        Device(id=10 * host + i, process_index=host, slice_index=host % 2) for host in range(4) for i in range(2)
    ]
    placed = place_devices(devices, dict.fromkeys(AXES, 1) | {"data": 2, "pipe": 2, "tensor": 2})
    # Each replica in one slice, each stage in one host.
    assert [[hosts_of(stage) for stage in replica.T] for replica in placed.reshape(2, 2, 2)] == [[{0}, {2}], [{1}, {3}]]


def test_real_devices_keep_their_order_along_data_and_fsdp():
    mesh = build_mesh(MeshConfig(data=2), jax.devices())
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize(
    ("devices", "tensor"),
    [
        (cluster(3, 8), 3),
        (cluster(3, 4), 6),
        (cluster(1, 4) + [Device(20_000 + i, 1) for i in range(2)], 3),
        ([Device(i, process_index=i, slice_index=i // 4) for i in range(12)], 3),
    ],
)
def test_groups_that_cross_hosts_here_and_not_there_are_refused(devices, tensor):
    sizes = dict.fromkeys(AXES, 1) | {"tensor": tensor, "data": len(devices) // tensor}
    with pytest.raises(UserError, match=f"mesh.tensor {tensor} would cut across hosts unevenly.*use a divisor of"):
        place_devices(devices, sizes)


@pytest.mark.parametrize(
    ("devices", "tensor"),
    [
        (cluster(4, 4), 8),
        (cluster(1, 4) + [Device(20_000 + i, 1) for i in range(2)], 2),
        ([Device(i, process_index=i, slice_index=i // 4) for i in range(12)], 2),
        ([Device(i, process_index=i) for i in range(6)], 3),
    ],
)
def test_groups_that_are_alike_are_not_refused(devices, tensor):
    sizes = dict.fromkeys(AXES, 1) | {"tensor": tensor, "data": len(devices) // tensor}
    assert place_devices(devices, sizes).size == len(devices)


def test_specs_follow_the_rules():
    assert partition_spec(("layer", "embed", "mlp"), RULES) == PartitionSpec(None, PARAMETER_AXES, "tensor")
    assert partition_spec(("batch", "sequence"), RULES) == PartitionSpec(("data", "fsdp", "expert"), "context")
    assert partition_spec(("batch",), without(RULES, "data")) == PartitionSpec(("fsdp", "expert"))


def test_two_dimensions_on_one_axis_are_refused_by_name():
    with pytest.raises(UserError, match=r"kernel with dimensions \('embed', 'mlp'\): 'embed' and 'mlp' both.*'fsdp'"):
        partition_spec(("embed", "mlp"), {**RULES, "mlp": ("fsdp",)}, array="kernel")


def test_unknown_names_and_uneven_sizes_are_refused():
    with pytest.raises(UserError, match="no sharding rule for the logical axis 'width'"):
        partition_spec(("width",), RULES)
    with pytest.raises(UserError, match=r"bias: its dimension 'embed' of 6 is not divisible by the 4 parts"):
        partition_spec(("embed",), RULES, shape=(6,), mesh_sizes={"fsdp": 4, "expert": 1, "context": 1}, array="bias")
