"""Device groups in every form that XLA writes, and back to axes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dseekjax.plan.groups import Topology, groups_of, parse_groups, parse_pairs
from dseekjax.plan.hlo import parse_hlo


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh[a=4,b=2] {b}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2] {'b','a'}", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ],
)
def test_forms(text, groups):
    assert parse_groups(text, 8).tolist() == groups
    line = f"  ROOT %g = f32[8]{{0}} all-gather(%p), channel_id=1, replica_groups={text}, dimensions={{0}}"
    module = parse_hlo(f"HloModule m\n\nENTRY %main (p: f32[1]) -> f32[8] {{\n{line}\n}}\n")
    assert groups_of(module.computations["main"].root, 8).tolist() == groups


@pytest.mark.parametrize("text", ["", "{{0,1},{2}}", "[2,4]", "mesh['a'=2] 'a'"])
def test_what_is_no_group_is_refused(text):
    with pytest.raises(ValueError, match="cannot read the device groups"):
        parse_groups(text, 8)


@st.composite
def meshes(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    axes = {f"axis_{i}": size for i, size in enumerate(sizes)}
    chosen = draw(st.lists(st.sampled_from(sorted(axes)), min_size=1, unique=True))
    return axes, sorted(chosen)


@given(meshes())
def test_all_forms_of_the_groups_along_some_axes_are_the_same_and_name_those_axes(mesh):
    axes, chosen = mesh
    names, shape = list(axes), tuple(axes.values())
    # The definition: devices whose coordinates agree along all other axes.
    others = [place for place, name in enumerate(names) if name not in chosen]
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(shape)):
        place = np.unravel_index(device, shape)
        groups.setdefault(tuple(int(place[other]) for other in others), []).append(device)
    expected = sorted(groups.values())

    members = len(expected[0])
    order = [*others, *(names.index(name) for name in chosen)]
    dimensions, permutation = ",".join(map(str, shape)), ",".join(map(str, order))
    forms = [
        "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in expected) + "}",
        f"[{len(expected)},{members}]<=[{dimensions}]T({permutation})",
        f"mesh[{','.join(f'{name!r}={size}' for name, size in axes.items())}] {{{','.join(map(repr, chosen))}}}",
    ]
    topology = Topology(axes, [device // 2 for device in range(math.prod(shape))])
    for form in forms:
        found = parse_groups(form, math.prod(shape))
        assert sorted(sorted(group) for group in found.tolist()) == expected
        reach = topology.reach(found)
        assert reach.axes == tuple(name for name in chosen if axes[name] > 1)
        assert reach.group_size == members
        assert reach.hosts == max(len({device // 2 for device in group}) for group in expected)


def test_pairs_name_the_axis_they_move_along():
    topology = Topology({"data": 2, "tensor": 4}, [0] * 4 + [1] * 4)
    ring = parse_pairs("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}")
    assert topology.reach(ring).axes == ("tensor",)
    assert topology.reach(ring).hosts == 1
    assert topology.reach(parse_pairs("{{0,4},{4,0}}")).axes == ("data",)
    assert topology.reach(parse_pairs("{{0,4},{4,0}}")).hosts == 2
