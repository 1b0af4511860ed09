"""The script that checks kernels on a GPU, as far as it goes without one."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts" / "benchmarks"))
import gpu_check
from kernel_rows import Row, compare


def run(*arguments):
    environment = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    command = [REPOSITORY / "scripts" / "gpu_check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_it_checks_what_can_be_interpreted(tmp_path):
    kept = tmp_path / "found.json"
    done = run("--interpret", "--only", "quantize", "--json", kept)
    assert done.returncode == 0, done.stderr
    found = json.loads(kept.read_text())
    assert [row["what"] for row in found["rows"]][::4] == [
        "quantize_int8 pallas_interpreted",
        "prune_two_of_four pallas_interpreted",
    ]
    assert all(row["passed"] and row["values"]["elements that differ"] == 0 for row in found["rows"])


def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2
    assert done.stderr == "error: the device at hand is cpu, no GPU that is known; --interpret needs none\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "nonsense"), "error: --only: nothing that can be done here has 'nonsense' in its name"),
        (("--only", "quantize", "--json", "/nowhere/found.json"), "error: --json: there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--interpret", *arguments])
    assert gpu_check.main() == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("found", "fails"), [(1.001, False), (1.1, True), (float("nan"), True)])
def test_what_is_too_far_off_fails(found, fails):
    row = compare("it", jnp.full(4, found), jnp.ones(4), 1e-2)
    assert row.passed != fails
    assert str(row).startswith("FAIL it: error" if fails else "ok   it: error 0.001")


def test_what_breaks_off_is_a_failure_and_ends_nothing(monkeypatch, capsys):
    def broken():
        yield Row("first")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_check, "checks", lambda *_: {"one": broken, "two": lambda: iter([Row("last")])})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--interpret"])
    assert gpu_check.main() == 1
    said = capsys.readouterr().out
    assert "FAIL one broke off: RuntimeError: out of memory" in said
    assert "ok   last" in said
    assert "3 found, 1 failed" in said


def test_nothing_is_begun_after_the_time(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "checks", lambda *_: {"one": lambda: iter([Row("row")])})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--interpret", "--minutes", "-1"])
    assert gpu_check.main() == 1
    assert "left out for want of time: one" in capsys.readouterr().out
