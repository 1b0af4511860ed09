"""One device mesh for everything."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from dseekjax.errors import UserError
from dseekjax.parallel.config import AXES, MeshConfig

AnyMesh = Mesh | AbstractMesh

NEAREST_FIRST = ("tensor", "context", "expert", "fsdp", "pipe", "data")
"""Axes in the order in which they are given devices that are near to each other.

By what a step waits for: `tensor` reduces activations several times in every layer, `context` passes keys and values
around and `expert` exchanges tokens once in every layer, `fsdp` gathers parameters that can be fetched ahead, `pipe`
hands activations from stage to stage, and `data` sums gradients once in a step.
"""


def mesh_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Size of every axis for `num_devices`, with -1 filled in.

    Raises:
        UserError: the sizes do not multiply to the number of devices.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    wanted = " x ".join(f"mesh.{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "the mesh"
    hint = "take more devices (run.virtual_devices on CPU, --hosts when planning)"
    if fixed > num_devices:
        raise UserError(f"{wanted} needs {fixed} devices, there are {num_devices}; make it smaller, or {hint}")
    if num_devices % fixed:
        raise UserError(f"{wanted} does not divide the {num_devices} devices; use a divisor")
    if -1 in sizes.values():
        return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
    if fixed != num_devices:
        raise UserError(f"{wanted} uses {fixed} of the {num_devices} devices; set one axis to -1 to use them all")
    return sizes


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device] | int) -> AnyMesh:
    """The mesh over `devices`; a plain number gives an abstract mesh, which lowers programs but runs none.

    Raises:
        UserError: the sizes do not fit the devices, or the hosts that they are in.
    """
    num_devices = devices if isinstance(devices, int) else len(devices)
    sizes = mesh_sizes(config, num_devices)
    shape, names, kinds = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
    if isinstance(devices, int):
        return AbstractMesh(shape, names, axis_types=kinds)
    return Mesh(place_devices(devices, sizes), names, axis_types=kinds)


def place_devices(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """Devices as an array with one dimension per axis of `sizes`, in its order, near ones along `NEAREST_FIRST`.

    Args:
        devices: of JAX, or anything with an `id`, a `process_index` and perhaps the index of a slice.
        sizes: of all axes in `AXES`.

    Raises:
        UserError: groups of `tensor` would lie in one host here and across hosts there.
    """
    ordered = sorted(devices, key=lambda device: (_slice(device), device.process_index, device.id))
    _refuse_uneven_tensor(ordered, sizes["tensor"])
    outermost_first = NEAREST_FIRST[::-1]
    placed = np.empty(len(ordered), object)
    placed[:] = ordered
    placed = placed.reshape([sizes[axis] for axis in outermost_first])
    return placed.transpose([outermost_first.index(axis) for axis in sizes])


def _refuse_uneven_tensor(devices: Sequence[Any], tensor: int) -> None:
    """Such a mesh could run, but every step would wait for the groups that cross hosts: another size is never worse."""
    # With a process for each device, what shares a host can only be told by the slice.
    processes = collections.Counter(device.process_index for device in devices)
    alone = max(processes.values()) == 1
    hosts = collections.Counter(_slice(device) if alone else device.process_index for device in devices)
    counts = set(hosts.values())
    within = all(count % tensor == 0 for count in counts)
    if not within and not (len(counts) == 1 and tensor % min(counts) == 0):
        raise UserError(
            f"mesh.tensor {tensor} would cut across hosts unevenly, which have {' or '.join(map(str, sorted(counts)))} "
            f"devices each; use a divisor of {math.gcd(*counts)}"
        )


def _slice(device: Any) -> int:
    """The number of the group of hosts with a fast network of their own, 0 where JAX tells none."""
    return getattr(device, "slice_index", None) or 0
