"""The notebook runs from top to bottom, and is shipped with what it shows."""

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def shipped():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook, run as a stranger would: nothing is kept from before, and XLA optimises."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"HOME": str(folder), "PYTHONPATH": str(REPOSITORY)}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    return client.execute(env=environment)


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    return "".join(output["text"] for output in outputs if output.output_type == "stream")


def numbers(pattern, text):
    found = re.search(pattern, text)
    assert found, pattern
    return [float(number) for number in found.groups()]


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    return [output for output in outputs if "image/png" in output.data]


@pytest.mark.parametrize("which", ["executed", "shipped"])
def test_the_notebook_shows_what_it_says(which, request):
    notebook = request.getfixturevalue(which)
    text = printed(notebook)
    first, last = numbers(r"loss ([\d.]+) at first, ([\d.]+) after", text)
    assert last < first - 1
    assert numbers(r"largest difference (\S+)", text)[0] < 1e-5
    sharded, alone = numbers(r"held-out batch: ([\d.]+) on 8 devices, ([\d.]+) on one", text)
    assert sharded == pytest.approx(alone, abs=1e-4)
    assert sharded < first - 1
    assert "Emma was" in text
    assert len(pictures(notebook)) == 3


def test_what_is_shipped_was_run_in_order_and_is_small(shipped):
    code = [cell for cell in shipped.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert NOTEBOOK.stat().st_size < 200_000
    # The limit that the README tells, on a quiet machine; what runs here may have to wait for others.
    assert numbers(r"All of this took (\d+) s after", printed(shipped))[0] < 60
