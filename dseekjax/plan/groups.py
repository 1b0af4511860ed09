"""Which devices talk with each other, and along which axes of the mesh."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dseekjax.plan.hlo import Instruction

Groups = Int[np.ndarray, "groups members"]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? ?\{(.*)\}")
_MESH_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_CHOSEN_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_ATTRIBUTE = re.compile(r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\(.*?\))? ?\{[^}]*\}|.*?(?=, [a-z_\-]+=|$))")


def parse_groups(text: str, num_devices: int) -> Groups:
    """The groups of a collective, in any of the forms in which XLA writes them.

    Explicit `{{0,1},{2,3}}`; iota `[2,2]<=[4]` and `[2,2]<=[2,2]T(1,0)`; axes of a mesh `mesh['a'=2,'b'=2] {'a'}`, also
    parts of an axis, `{'a':(1)2}`, and with `device_ids=`; `{}` for all devices together.

    Raises:
        ValueError: it is none of these, or the groups differ in size.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if iota := _IOTA.fullmatch(text):
        return _iota(iota.group(2), iota.group(3)).reshape(_numbers(iota.group(1)))
    if text == "{}":
        return np.arange(num_devices)[None]
    rows = [_numbers(row) for row in re.findall(r"\{([\d, ]+)\}", text)]
    if not rows or len({len(row) for row in rows}) > 1:
        raise ValueError(f"cannot read the device groups {text[:200]}")
    return np.array(rows)


def parse_pairs(text: str) -> Groups:
    """Source and target of each transfer of a collective-permute, `{{0,1},{1,0}}`."""
    return np.array([_numbers(row) for row in re.findall(r"\{([\d, ]+)\}", text)]).reshape(-1, 2)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.replace(" ", "").split(",") if number]


def _iota(dimensions: str, permutation: str | None) -> Int[np.ndarray, "devices"]:
    shape = _numbers(dimensions)
    order = _numbers(permutation) if permutation else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)


def _mesh_groups(text: str) -> Groups:
    found = _MESH.fullmatch(text)
    if found is None:
        raise ValueError(f"cannot read the device groups {text[:200]}")
    axes, dimensions, permutation, listed, chosen_text = found.groups()
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    devices = np.array(_numbers(listed)) if listed else _iota(dimensions or str(math.prod(sizes.values())), permutation)
    # A part of an axis, `'a':(2)4`, is 4 after a major part of 2: both ends cut the axis into dimensions of their own.
    chosen = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in _CHOSEN_AXIS.findall(chosen_text)
    ]
    cut = []
    for name, size in sizes.items():
        ends = sorted({1, size, *(end for axis, *bounds in chosen if axis == name for end in bounds)})
        cut += [(name, low, high) for low, high in itertools.pairwise(ends)]
    inside = [
        place
        for name, low, high in chosen
        for place, part in enumerate(cut)
        if part[0] == name and low <= part[1] and part[2] <= high
    ]
    outside = [place for place in range(len(cut)) if place not in inside]
    grid = devices.reshape([high // low for _, low, high in cut]).transpose(outside + inside)
    return grid.reshape(-1, math.prod(cut[place][2] // cut[place][1] for place in inside))


@dataclass(frozen=True)
class Reach:
    """Whom the members of a group are."""

    axes: tuple[str, ...]
    """The mesh axes along which they differ."""
    group_size: int
    hosts: int
    """How many hosts one group stands on."""

    @property
    def members_per_host(self) -> float:
        return self.group_size / self.hosts


@dataclass(frozen=True)
class Topology:
    """A mesh on hosts."""

    axes: Mapping[str, int]
    """Size of each axis, in order; device number i is at the i-th place of the mesh."""
    hosts: Sequence[int]
    """The host of each device."""

    def reach(self, groups: Groups) -> Reach:
        """Axes and hosts of groups, or of the pairs of a permutation."""
        places = np.stack(np.unravel_index(groups, tuple(self.axes.values())))
        differs = (places != places[:, :, :1]).any((1, 2))
        hosts = np.sort(np.asarray(self.hosts)[groups], axis=1)
        return Reach(
            axes=tuple(axis for axis, moves in zip(self.axes, differs, strict=True) if moves),
            group_size=groups.shape[1],
            hosts=int((1 + (np.diff(hosts, axis=1) != 0).sum(1)).max()),
        )


def groups_of(instruction: Instruction, num_devices: int) -> Groups:
    """The groups of a collective; the pairs of a permutation.

    Raises:
        ValueError: it names none.
    """
    if pairs := instruction.attribute("source_target_pairs"):
        return parse_pairs(pairs)
    groups = _ATTRIBUTE.search(instruction.attributes)
    if groups is None:
        raise ValueError(f"{instruction.name} names no device groups")
    return parse_groups(groups.group(1), num_devices)
