"""One device mesh for everything."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from dseekjax.errors import UserError
from dseekjax.parallel.config import AXES, MeshConfig

AnyMesh = Mesh | AbstractMesh


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
    """The mesh over `devices`; a plain number gives an abstract mesh, which lowers programs but runs none."""
    num_devices = devices if isinstance(devices, int) else len(devices)
    sizes = mesh_sizes(config, num_devices)
    shape, names, kinds = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
    if isinstance(devices, int):
        return AbstractMesh(shape, names, axis_types=kinds)
    return Mesh(np.asarray(devices).reshape(shape), names, axis_types=kinds)
