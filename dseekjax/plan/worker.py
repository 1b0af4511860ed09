"""The process that compiles: one request, a line, on stdin; progress and the report as JSON lines on stdout.

It ends with its stdin: whoever asked is gone.
"""

import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import Any

from dseekjax.errors import UserError
from dseekjax.files import write_whole
from dseekjax.models.flops import training_flops_per_token
from dseekjax.plan.analysis import memory_fields, schedule_fields
from dseekjax.plan.cluster import ClusterConfig
from dseekjax.plan.groups import Topology
from dseekjax.plan.hlo import parse_hlo
from dseekjax.plan.report import Report
from dseekjax.plan.request import Request
from dseekjax.plan.target import compile_only_devices
from pallas_kernels.compile_only import prepare_environment

PACKAGES = ("dseekjax", "jax", "jaxlib")


def compile_for(request: Request) -> Report:
    """Builds the program that is asked for and compiles its train step.

    Raises:
        UserError: the config does not fit the cluster, or the compiled program cannot be read.
    """
    from dseekjax.plan.flops import count_flops
    from dseekjax.training.program import build_program

    config, cluster = request.config, request.cluster
    devices = compile_only_devices(cluster, request.hosts)
    started = time.perf_counter()
    program = build_program(config, devices)
    built = time.perf_counter()
    step: Any = program.train_step
    traced = step.trace(program.state_shape, program.batch_shape)
    lowered = traced.lower()
    was_lowered = time.perf_counter()
    _tell(stage=f"compiling for {len(devices)} GPUs")
    compiled = lowered.compile()
    was_compiled = time.perf_counter()
    _tell(stage="reading what came of it")
    text = compiled.as_text()
    if request.hlo is not None:
        write_whole(request.hlo, text)

    host_of = {device.id: place // cluster.gpus_per_host for place, device in enumerate(devices)}
    topology = Topology(dict(program.mesh.shape), [host_of[device.id] for device in program.mesh.devices.flat])
    tokens = config.train.global_batch_size * config.data.sequence_length
    flops = training_flops_per_token(config.model, config.data.sequence_length) * tokens
    price = cluster.dollars_per_gpu_hour
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
        **memory_fields(compiled.memory_analysis(), cluster),
        **_schedule(text, topology, cluster),
        model_flops=flops / len(devices),
        program_flops=count_flops(traced.jaxpr) / len(devices),
        dollars_per_hour=None if price is None else len(devices) * price,
        build_seconds=built - started,
        lower_seconds=was_lowered - built,
        compile_seconds=was_compiled - was_lowered,
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )


def _schedule(text: str, topology: Topology, cluster: ClusterConfig) -> dict[str, Any]:
    try:
        return schedule_fields(parse_hlo(text), topology, cluster)
    except (ValueError, LookupError) as error:
        raise UserError(
            f"the program compiled, but its HLO is not as this version reads it ({error}); keep it with --hlo FILE and "
            "report it, or use the locked version of JAX"
        ) from error


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _end_with_stdin() -> None:
    # Not through sys.stdin, whose lock a thread must not hold when Python ends.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main() -> int:
    prepare_environment()
    request = Request.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _tell(stage=f"building the program for {request.hosts} host{'s'[: request.hosts > 1]}")
    try:
        report = compile_for(request)
    except UserError as error:
        _tell(error=str(error))
        return error.exit_code
    _tell(report=report.model_dump(mode="json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
