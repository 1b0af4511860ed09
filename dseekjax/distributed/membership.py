"""Which process of which run this is: what the config says, then JAX's variables, then the cluster."""

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dseekjax.distributed.config import DistributedConfig
from dseekjax.errors import UserError

VARIABLES = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
"""The keys of `distributed` that say who this process is, and the environment variable that stands in for each."""


@dataclass(frozen=True)
class Membership:
    """This process among those of its run."""

    coordinator_address: str
    """HOST:PORT at which process 0 listens."""
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    """The devices of this host that are this process's; None is all that it can see."""

    @property
    def host(self) -> str:
        return self.coordinator_address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator_address.rpartition(":")[2])


def find_membership(config: DistributedConfig) -> Membership | None:
    """Who this process is; None if it runs alone.

    Raises:
        UserError: something is said, but not enough, or it contradicts itself.
    """
    said = {key: value for key in VARIABLES if (value := _said(config, key)) is not None}
    if said.get("num_processes") == 1 and not said.get("process_id"):
        return None
    asked = {} if len(said) == len(VARIABLES) else _ask_cluster(config.timeout, already_said=said)
    if not said and not asked:
        return None
    known = {**asked, **said}
    missing = [key for key in VARIABLES if key not in known]
    if missing:
        raise UserError(
            f"{_names(said)} {'is' if len(said) == 1 else 'are'} set, but not {_names(missing)}; set all three for a "
            "run of several processes, or none of them to run alone"
        )
    member = Membership(**known)
    if member.process_id >= member.num_processes:
        raise UserError(
            f"{_names(['process_id'])} is {member.process_id}, of {member.num_processes} processes; they count from 0 "
            f"to {member.num_processes - 1}"
        )
    host, _, port = member.coordinator_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"{_names(['coordinator_address'])} is {member.coordinator_address!r}; give it as HOST:PORT")
    return member


def _said(config: DistributedConfig, key: str) -> Any:
    configured = getattr(config, key)
    if configured is not None:
        return configured
    value = os.environ.get(VARIABLES[key])
    if value is None or key == "coordinator_address":
        return value
    least = 1 if key == "num_processes" else 0
    if not value.isdecimal() or int(value) < least:
        raise UserError(f"{VARIABLES[key]} is {value!r}; it must be a number from {least} on")
    return int(value)


def _names(keys: Iterable[str]) -> str:
    return " and ".join(f"distributed.{key} (or {VARIABLES[key]})" for key in keys)


def _ask_cluster(timeout: int, already_said: Iterable[str]) -> dict[str, Any]:
    """What the cluster knows that was not said already; nothing if it started this process alone, or is none.

    Raises:
        UserError: there is a cluster, but it does not say enough.
    """
    try:
        cluster = _cluster()
        if cluster is None:
            return {}
        port = os.environ.get("JAX_COORDINATOR_PORT")
        questions = {
            "coordinator_address": lambda: cluster.get_coordinator_address(timeout, port),
            "num_processes": cluster.get_process_count,
            "process_id": cluster.get_process_id,
            "local_device_ids": lambda: _local_device_ids(cluster.get_local_process_id()),
        }
        return {key: ask() for key, ask in questions.items() if key not in already_said}
    except Exception as error:  # Of whatever library the cluster is asked with.
        raise UserError(
            "this process seems to be one of several, but who the others are cannot be found out "
            f"({' '.join(str(error).split())}); set {_names(VARIABLES)}, or distributed.num_processes=1 to run alone"
        ) from error


def _cluster() -> Any:
    """JAX's own class for the cluster that started this process as one of several; None if there is none."""
    # Private, but this is what `jax.distributed.initialize()` asks, and it cannot be asked by itself.
    from jax._src.clusters import K8sCluster, OmpiCluster, SlurmCluster

    if OmpiCluster.is_env_present():
        return OmpiCluster if OmpiCluster.get_process_count() > 1 else None
    if SlurmCluster.is_env_present():
        # The shell of an allocation may be a step of one task, and SLURM_NTASKS there be that of the allocation.
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"])
        return SlurmCluster if int(tasks) > 1 else None
    # Only the pods of an indexed job are several of one kind.
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not K8sCluster.is_env_present():
                raise ImportError("a pod of an indexed job needs the package kubernetes for that")
        return K8sCluster
    return None


def _local_device_ids(local_process_id: int | None) -> tuple[int, ...] | None:
    """The devices that a process takes of its host.

    JAX by itself gives the n-th task on a host the n-th device. That leaves devices idle where a host has one task, and
    names devices that are not there where each task sees only its own; both then have what they see.
    """
    variables = os.environ
    if local_process_id is None or "JAX_LOCAL_DEVICE_IDS" in variables:
        return None
    alone = variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1" or (
        "SLURM_STEP_NUM_NODES" in variables
        and variables["SLURM_STEP_NUM_NODES"] == variables.get("SLURM_STEP_NUM_TASKS")
    )
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    bound = "SLURM_GPUS_PER_TASK" in variables or (visible is not None and local_process_id >= len(visible.split(",")))
    return None if alone or bound else (local_process_id,)
