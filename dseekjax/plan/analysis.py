"""From the text of a compiled program to rows of the report."""

from collections import defaultdict
from collections.abc import Iterator

from dseekjax.plan.cluster import ClusterConfig
from dseekjax.plan.collectives import Collective, started_by
from dseekjax.plan.groups import Topology
from dseekjax.plan.hlo import Module, Runs, count_runs
from dseekjax.plan.report import CollectiveRow


def collectives_of(module: Module, topology: Topology) -> Iterator[tuple[Collective, Runs]]:
    """Every collective of a module with how often it runs."""
    wrapped = {
        module.called(instruction, "calls").name
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "async-start"
    }
    for name, runs in count_runs(module).items():
        if name in wrapped:
            continue
        computation = module.computations[name]
        for instruction in computation.instructions:
            for collective in started_by(module, computation, instruction, topology):
                yield collective, runs


def collective_rows(module: Module, topology: Topology, cluster: ClusterConfig) -> tuple[CollectiveRow, ...]:
    """Collectives summed by kind, axes and condition, the most bytes first."""
    sums: dict[tuple[str, str, int, bool, bool], list[float]] = defaultdict(lambda: [0.0] * 5)
    for collective, runs in collectives_of(module, topology):
        key = (
            collective.kind,
            collective.axes,
            collective.reach.group_size,
            collective.crosses_hosts,
            runs.is_conditional,
        )
        values = (
            1,
            collective.payload_bytes,
            collective.wire_bytes,
            collective.network_bytes,
            collective.seconds(cluster),
        )
        sums[key] = [total + runs.count * value for total, value in zip(sums[key], values, strict=True)]
    names = list(CollectiveRow.model_fields)
    rows = [CollectiveRow(**dict(zip(names, (*key, *values), strict=True))) for key, values in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))
