"""Golden reports of compiled kernels."""

import dataclasses
import json

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture
def golden_kernels(request):
    """`(op, gpu, {signature: {kernel: report}})`: fails unless they are those of `tests/golden/kernels/<op>.json`."""

    def check(op, gpu, reports):
        path = REPOSITORY / "tests" / "golden" / "kernels" / f"{op}.json"
        found = {
            signature: {name: _fields(report) for name, report in kernels.items()}
            for signature, kernels in reports.items()
        }
        golden = json.loads(path.read_text()) if path.is_file() else {}
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            golden = dict(sorted({**golden, gpu: found}.items()))
            path.write_text(json.dumps(golden, indent=1) + "\n")
        assert found == golden.get(gpu)

    return check


def _fields(report):
    fields = dataclasses.asdict(report)
    del fields["name"]
    return fields
