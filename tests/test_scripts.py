"""What scripts start ends with them, and what the benchmarks do by default."""

import ast
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts" / "benchmarks"))
import stepping

SCRIPTS = REPOSITORY / "scripts"
SOURCES = sorted(SCRIPTS.rglob("*.py"))
COMMANDS = sorted(path for path in SCRIPTS.iterdir() if path.is_file() and os.access(path, os.X_OK))
# Each is a line of Python: a process that tells its number and stays.
STAYING = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
REPLACED = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {STAYING!r}])"
STARTING = {
    "start": f"import sys, children; children.start([sys.executable, '-c', {STAYING!r}]).wait()",
    "run": f"import sys, children; children.run([sys.executable, '-c', {STAYING!r}])",
    "a child that replaces itself": f"import sys, children; children.run([sys.executable, '-c', {REPLACED!r}])",
    "pool": f"import children; children.pool(1).submit(exec, {STAYING!r}).result()",
}


def runs(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("code", STARTING.values(), ids=STARTING)
def test_a_child_ends_with_its_script(code, how):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as script:
        child = int(script.stdout.readline())
        assert runs(child)
        script.send_signal(how)
        assert script.wait() == -how
    deadline = time.monotonic() + 5
    while runs(child):
        assert time.monotonic() < deadline, f"{child} is left"
        time.sleep(0.01)


def test_a_child_that_comes_too_late_ends():
    """Its parent was gone before the kernel could be asked to tell of that."""
    code = f"import children; children._end_with({os.getppid()}); print('is left')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPTS / "benchmarks", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_only_children_starts_processes(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found.add(f"os.{node.attr}")
    starting = {"subprocess", "multiprocessing", "concurrent", "os.system", "os.popen", "os.fork", "os.posix_spawn"}
    assert path.name == "children.py" or not found & starting, "start it with scripts/benchmarks/children.py"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_a_command_becomes_the_python_it_runs(path):
    assert "exec " in path.read_text().splitlines()[-1], "who kills the command would leave Python running"


def test_a_step_benchmark_is_short_by_default():
    options = stepping.options_of([])
    assert (options.job, options.dtype, options.rounds) == (["small"], ["float32"], 1)


def test_all_is_every_job_and_dtype():
    options = stepping.options_of(["--all"])
    assert (options.job, options.dtype, options.rounds) == (list(stepping.JOBS), list(stepping.DTYPES), 3)
    assert stepping.options_of(["--all", "--rounds", "2"]).rounds == 2


def test_options_widen_it():
    options = stepping.options_of(["--job", "small", "--job", "gpt2_124m", "--dtype", "bfloat16", "--rounds", "2"])
    assert (options.job, options.dtype, options.rounds) == (["small", "gpt2_124m"], ["bfloat16"], 2)


@pytest.mark.parametrize("more", [("--job", "small"), ("--dtype", "bfloat16")])
def test_all_of_one_is_refused(more, capsys):
    with pytest.raises(SystemExit, match="2"):
        stepping.options_of(["--all", *more])
    assert "error: --all takes every job and dtype; leave out --job and --dtype, or --all\n" in capsys.readouterr().err
