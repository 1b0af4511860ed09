"""From a compiled program to the fields of a report."""

from collections import defaultdict
from typing import Any

from dseekjax.plan.cluster import ClusterConfig
from dseekjax.plan.groups import Topology
from dseekjax.plan.hlo import Module
from dseekjax.plan.replay import Replay
from dseekjax.plan.report import CollectiveRow


def memory_fields(memory: Any, cluster: ClusterConfig) -> dict[str, Any]:
    """Fields about memory.

    Args:
        memory: what `compiled.memory_analysis()` gives.
        cluster: whose GPUs it must fit.
    """
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    host = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes + memory.host_temp_size_in_bytes
    spare = cluster.memory_bytes - cluster.reserved_bytes - peak
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "host_bytes": host - memory.host_alias_size_in_bytes,
        "peak_bytes": peak,
        "live_peak_bytes": memory.peak_memory_in_bytes,
        "capacity_bytes": cluster.memory_bytes,
        "reserved_bytes": cluster.reserved_bytes,
        "spare_bytes": spare,
        "fits": spare >= 0,
    }


def schedule_fields(module: Module, topology: Topology, cluster: ClusterConfig) -> dict[str, Any]:
    """Fields about collectives, their overlap, kernels and FLOPs, from the compiled program."""
    replay = Replay(module, topology, cluster)
    rows = [CollectiveRow(**vars(line), **sums) for line, sums in replay.lines()]
    exposed: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    for row in rows:
        exposed[row.axes] += row.exposed_wire_bytes
        sent[row.axes] += row.wire_bytes
    return {
        "collectives": rows,
        "exposed_share": sum(exposed.values()) / (sum(sent.values()) or 1.0),
        "exposed_share_by_axes": {axes: exposed[axes] / (sent[axes] or 1.0) for axes in sent},
        "wire_bytes_within_hosts": sum(row.wire_bytes for row in rows if not row.crosses_hosts),
        "wire_bytes_across_hosts": sum(row.wire_bytes for row in rows if row.crosses_hosts),
        "compiled_flops": replay.state.total_flops,
        "kernels": dict(sorted(replay.state.kernels.items(), key=lambda item: -item[1])),
        "compute_seconds": replay.state.compute_seconds,
        "communication_seconds": sum(row.seconds for row in rows),
        "exposed_seconds": sum(row.exposed_seconds for row in rows),
        "unknown_loops": len(replay.unknown_loops),
    }
