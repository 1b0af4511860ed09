"""Eight virtual CPU devices for every test, and a model small enough to compile often."""

import os
import sys
from pathlib import Path

# Before JAX starts. Programs here run a few steps: quick to compile counts for more than quick to run.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

REPOSITORY = Path(__file__).parent.parent
TRANSFORMERS_PYTHON = REPOSITORY / ".venv-transformers" / "bin" / "python"
sys.path.insert(0, str(REPOSITORY / "scripts" / "references"))
sys.path.insert(0, str(REPOSITORY))

hypothesis.settings.register_profile("default", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
    parser.addoption(
        "--require-cuda-compiler", action="store_true", help="fail what compiles for GPUs where the compiler is missing"
    )
    parser.addoption(
        "--require-transformers", action="store_true", help="fail what needs transformers where that is missing"
    )


def pytest_collection_modifyitems(config, items):
    from pallas_kernels.compile_only import has_compiler

    reasons = {}
    if not (has_compiler() or config.getoption("--require-cuda-compiler")):
        reasons["cuda_compiler"] = (
            "XLA's CUDA compiler is not installed; DSEEKJAX_EXTRA=cuda12 scripts/test installs it"
        )
    if not (TRANSFORMERS_PYTHON.is_file() or config.getoption("--require-transformers")):
        reasons["transformers"] = "transformers is not installed; DSEEKJAX_EXTRA=transformers scripts/test installs it"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
