"""The tutorial's commands are run as they stand, in order, as a stranger would."""

import os
import re
import subprocess
import sys
from itertools import count

import pytest

from dseekjax.insight.metrics import read_records
from tests.conftest import REPOSITORY

TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
IN_A_CHECKOUT = ("README.md", "configs", "docs", "pyproject.toml", "requirements.lock", "scripts")


def bash_blocks(path):
    return re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)


def check_out(folder):
    """A folder with what a checkout has, whose .venv is the Python that runs the tests."""
    for name in IN_A_CHECKOUT:
        (folder / name).symlink_to(REPOSITORY / name)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made_from = "".join((REPOSITORY / name).read_text() for name in ("requirements.lock", "pyproject.toml"))
    (folder / ".venv" / "made-from").write_text(f"{folder}\n{made_from}")


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The folder after the walk, and what each block printed."""
    folder = tmp_path_factory.mktemp("stranger")
    check_out(folder)
    blocks = bash_blocks(TUTORIAL)
    marked = "".join(f"echo '<<block {number}>>'\n{block}" for number, block in zip(count(), blocks, strict=False))
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment = {**kept, "HOME": str(folder / "home"), "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    walk = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", marked],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert walk.returncode == 0, walk.stdout
    return folder, re.split(r"<<block \d+>>\n", walk.stdout)[1:]


def output_of(walked, command):
    blocks, (_, outputs) = bash_blocks(TUTORIAL), walked
    (found,) = [output for block, output in zip(blocks, outputs, strict=True) if command in block]
    return found


def test_training_leaves_what_the_tutorial_looks_at(walked):
    folder, _ = walked
    records = list(read_records(folder / "runs" / "quickstart" / "metrics.jsonl"))
    assert len(records) == 60
    assert records[0]["loss"] == pytest.approx(7, abs=0.3)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    listed = output_of(walked, "ls runs/quickstart")
    for name in ("checkpoints", "config.yaml", "metrics.jsonl", "report.html", "tokenizer.json"):
        assert name in listed
    assert '"step": 60' in listed


def test_a_stopped_run_goes_on(walked):
    folder, outputs = walked
    stopped = re.search(r"Stopped after step (\d+), which is saved", "".join(outputs))
    assert stopped
    assert f"Resuming from step {stopped[1]}." in "".join(outputs)
    assert len(list(read_records(folder / "runs" / "mine" / "metrics.jsonl"))) == 80


def test_the_model_writes_and_is_evaluated(walked):
    assert output_of(walked, "--prompt 'Emma was'").startswith("Emma was")
    assert "bits per byte" in output_of(walked, "builtin:emma_endings")
    assert re.search(r"builtin:emma_endings +[\d.]+%", output_of(walked, "builtin:emma_endings"))


def test_fine_tuning_begins_with_the_other_run_and_learns_what_an_answer_is(walked):
    output = output_of(walked, "sums.jsonl")
    assert "Starting from the parameters of runs/quickstart at step 60." in output
    assert re.fullmatch(r"7\+8=\d+", output.splitlines()[-1])
