"""The collectives of a compiled program: what each moves, along which axes, how often."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dseekjax.plan.cluster import ClusterConfig
from dseekjax.plan.groups import Reach, Topology, groups_of
from dseekjax.plan.hlo import Computation, Instruction, Module

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective of one group of devices."""

    kind: str
    reach: Reach
    payload_bytes: float
    """The whole array as NCCL counts it: what an all-gather gives, what the others are given."""
    wire_bytes: float
    """What one GPU sends, on a ring."""
    network_bytes: float
    """The part of it that leaves the host."""

    @property
    def axes(self) -> str:
        """Names of its mesh axes, joined; "none" if nothing moves."""
        return "+".join(self.reach.axes) or "none"

    @property
    def crosses_hosts(self) -> bool:
        return self.reach.hosts > 1

    def seconds(self, cluster: ClusterConfig) -> float:
        """An estimate: the slower of the two networks at its full bandwidth, and latency up and down a tree.

        The tree is that of NCCL's tuning model: GPUs of a host one after the other, hosts in log2 steps.
        """
        if not self.wire_bytes:
            return 0.0
        within, between = cluster.within_host, cluster.between_hosts
        transfer = max(
            (self.wire_bytes - self.network_bytes) / within.bandwidth, self.network_bytes / between.bandwidth
        )
        hops = math.ceil(self.reach.members_per_host) - 1
        latency = hops * within.latency + math.ceil(math.log2(self.reach.hosts)) * between.latency
        return transfer + latency * (2 if self.kind == "all-reduce" else 1)


def kind_of(instruction: Instruction) -> str | None:
    """The kind of the collective that an instruction is or starts, None for any other."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def read_collective(computation: Computation, instruction: Instruction, topology: Topology) -> Collective:
    """Reads a collective; `instruction` is synchronous or the start of an asynchronous one."""
    kind = kind_of(instruction)
    if kind is None:
        raise ValueError(f"{instruction.name} is no collective")
    groups = groups_of(instruction, len(topology.hosts))
    reach = topology.reach(groups)
    members = reach.group_size
    operand_bytes = sum(array.num_bytes for array in computation.operand_arrays(instruction))
    payload = operand_bytes * members if kind == "all-gather" else operand_bytes
    if kind == "ragged-all-to-all":
        # Its first operand is sent; the others are where to, and how much.
        payload = sum(array.num_bytes for array in computation.operand(instruction, 0).arrays)
    if kind == "collective-permute":
        return Collective(kind, reach, payload, payload if reach.axes else 0.0, payload if reach.hosts > 1 else 0.0)
    wire = payload * (members - 1) / members * (2 if kind == "all-reduce" else 1)
    if kind in ("all-to-all", "ragged-all-to-all"):
        network = payload * (members - reach.members_per_host) / members
    else:
        # On rings that leave a host by every member's own port, one sending in `members_per_host` is on the network.
        network = wire / reach.members_per_host if reach.hosts > 1 else 0.0
    return Collective(kind, reach, payload, wire, network)


def started_by(
    module: Module, computation: Computation, instruction: Instruction, topology: Topology
) -> Iterator[Collective]:
    """The collectives that an instruction runs or starts: itself, in a fusion or in a computation wrapped for that."""
    if kind_of(instruction):
        yield read_collective(computation, instruction, topology)
    elif instruction.opcode in ("async-start", "fusion", "fusion-start"):
        inside = module.called(instruction, "calls")
        for inner in inside.instructions:
            yield from started_by(module, inside, inner, topology)
