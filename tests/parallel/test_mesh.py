import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dseekjax.errors import UserError
from dseekjax.parallel.config import MeshConfig
from dseekjax.parallel.mesh import build_mesh, mesh_sizes
from dseekjax.parallel.sharding import build_rules, partition_spec, without

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


def test_specs_follow_the_rules():
    assert partition_spec(("layer", "embed", "mlp"), RULES) == PartitionSpec(None, "fsdp", "tensor")
    assert partition_spec(("batch", "sequence"), RULES) == PartitionSpec(("data", "fsdp", "expert"), "context")
    assert partition_spec(("batch",), without(RULES, "data")) == PartitionSpec(("fsdp", "expert"))


def test_two_dimensions_on_one_axis_are_refused_by_name():
    with pytest.raises(UserError, match=r"kernel with dimensions \('embed', 'mlp'\): 'embed' and 'mlp' both.*'fsdp'"):
        partition_spec(("embed", "mlp"), {**RULES, "mlp": ("fsdp",)}, array="kernel")


def test_unknown_names_and_uneven_sizes_are_refused():
    with pytest.raises(UserError, match="no sharding rule for the logical axis 'width'"):
        partition_spec(("width",), RULES)
    with pytest.raises(UserError, match=r"bias: its dimension 'embed' of 6 is not divisible by the 4 parts"):
        partition_spec(("embed",), RULES, shape=(6,), mesh_sizes={"fsdp": 4}, array="bias")
