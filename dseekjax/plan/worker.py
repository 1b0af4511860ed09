"""The process that compiles: one request on stdin, progress and the report as JSON lines on stdout."""

import importlib.metadata
import json
import sys
import time
from typing import Any

from dseekjax.errors import UserError
from dseekjax.files import write_whole
from dseekjax.plan.report import Report
from dseekjax.plan.request import Request
from dseekjax.plan.target import compile_only_devices, prepare_environment

PACKAGES = ("dseekjax", "jax", "jaxlib")


def compile_for(request: Request) -> Report:
    """Builds the program that is asked for and compiles its train step.

    Raises:
        UserError: the config does not fit the cluster.
    """
    from dseekjax.plan.analysis import collective_rows
    from dseekjax.plan.groups import Topology
    from dseekjax.plan.hlo import count_runs, parse_hlo
    from dseekjax.training.program import build_program

    config, cluster = request.config, request.cluster
    devices = compile_only_devices(cluster, request.hosts)
    started = time.perf_counter()
    program = build_program(config, devices)
    built = time.perf_counter()
    step: Any = program.train_step
    lowered = step.lower(program.state_shape, program.batch_shape)
    was_lowered = time.perf_counter()
    _tell(stage=f"compiling for {len(devices)} GPUs")
    compiled = lowered.compile()
    was_compiled = time.perf_counter()
    _tell(stage="reading what came of it")
    text = compiled.as_text()
    if request.hlo is not None:
        write_whole(request.hlo, text)

    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    host = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes + memory.host_temp_size_in_bytes
    spare = cluster.memory_bytes - cluster.reserved_bytes - peak
    host_of = {device.id: place // cluster.gpus_per_host for place, device in enumerate(devices)}
    topology = Topology(dict(program.mesh.shape), [host_of[device.id] for device in program.mesh.devices.flat])
    module = parse_hlo(text)
    rows = collective_rows(module, topology, cluster)
    return Report(
        program=request.program,
        cluster=request.cluster_name,
        gpu=cluster.gpu,
        hosts=request.hosts,
        gpus_per_host=cluster.gpus_per_host,
        gpus=len(devices),
        mesh=dict(program.mesh.shape),
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=host - memory.host_alias_size_in_bytes,
        peak_bytes=peak,
        live_peak_bytes=memory.peak_memory_in_bytes,
        capacity_bytes=cluster.memory_bytes,
        reserved_bytes=cluster.reserved_bytes,
        spare_bytes=spare,
        fits=spare >= 0,
        collectives=rows,
        wire_bytes_within_hosts=sum(row.wire_bytes for row in rows if not row.crosses_hosts),
        wire_bytes_across_hosts=sum(row.wire_bytes for row in rows if row.crosses_hosts),
        unknown_loops=sum(runs.has_unknown_loop for runs in count_runs(module).values()),
        build_seconds=built - started,
        lower_seconds=was_lowered - built,
        compile_seconds=was_compiled - was_lowered,
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    prepare_environment()
    request = Request.model_validate_json(sys.stdin.read())
    _tell(stage=f"building the program for {request.hosts} hosts")
    try:
        report = compile_for(request)
    except UserError as error:
        _tell(error=str(error))
        return error.exit_code
    _tell(report=report.model_dump(mode="json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
