"""Compiles a config for a cluster that is not there, in a process of its own."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dseekjax.config import Config
from dseekjax.errors import UserError
from dseekjax.plan.cluster import load_cluster
from dseekjax.plan.report import Report
from dseekjax.plan.request import Request
from dseekjax.plan.target import require_compiler

# What XLA says on stderr because no GPU is there, or of what the report says better: memory and time.
HARMLESS = re.compile(
    r"cuInit|failed call to cu|no NVIDIA GPU device|cuda_diagnostics|hlo_rematerialization|before absl::InitializeLog"
    r"|slow_operation_alarm|The operation took|Very slow compile|^\**$"
)
MAX_HOSTS = 100_000
WORKER = ("-m", "dseekjax.plan.worker")


class CompilerError(Exception):
    """XLA itself failed, on a config and cluster that are well formed."""


def compile_report(
    config: Config,
    cluster: str,
    hosts: int | None = None,
    *,
    program: str = "config",
    hlo: Path | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Compiles the train step of a config for a cluster and reports memory, collectives and cost.

    Another process does it, so JAX in this one stays as it is. It takes from ten seconds to some minutes.

    Args:
        config: what would be trained.
        cluster: name of a shipped cluster, or the path of a YAML file.
        hosts: how many of its hosts; None is what the cluster's file says.
        program: a name for the report.
        hlo: where to keep the compiled HLO text.
        tell: is called with what is being done.

    Raises:
        UserError: the cluster is unknown, the config does not fit it, the CUDA compiler is not installed, or the file
            cannot be written.
        CompilerError: the compiler failed.
    """
    cluster_config = load_cluster(cluster)
    hosts = cluster_config.hosts if hosts is None else hosts
    if not 1 <= hosts <= MAX_HOSTS:
        raise UserError(f"--hosts {hosts} is no number of hosts; give 1 to {MAX_HOSTS}")
    if hlo is not None:
        hlo = hlo.resolve()
        _check_writable(hlo)
    require_compiler()
    request = Request(
        program=program, config=config, cluster_name=cluster, cluster=cluster_config, hosts=hosts, hlo=hlo
    )
    answer, complaints, status = _ask(request, tell)
    if "error" in answer:
        raise UserError(answer["error"])
    for line in complaints:
        if not HARMLESS.search(line):
            print(line, file=sys.stderr)
    if "report" not in answer:
        how = f"was stopped by signal {-status}" if status < 0 else f"ended with status {status}"
        raise CompilerError(f"the compiling process {how} without a report; what it said, if anything, stands above")
    return Report.model_validate(answer["report"])


def _ask(request: Request, tell: Callable[[str], None]) -> tuple[dict, list[str], int]:
    """The last answer of a worker, what it wrote to stderr, and its exit status."""
    answer: dict = {}
    # A file, since an unread pipe would stop a worker that complains much.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            [sys.executable, *WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(request.model_dump_json() + "\n")
            worker.stdin.flush()
            for line in worker.stdout:
                answer = json.loads(line)
                if "stage" in answer:
                    tell(answer["stage"])
        except BaseException:
            worker.kill()
            raise
        status = worker.wait()
        complaints.seek(0)
        return answer, complaints.read().splitlines(), status


def _check_writable(path: Path) -> None:
    """Before a minute of compiling, rather than after; leaves nothing behind."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "no regular file"
        raise UserError(f"--hlo: {path} is {kind}; give the path of a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"--hlo: cannot write {path} ({error.strerror}); give the path of a file") from error
