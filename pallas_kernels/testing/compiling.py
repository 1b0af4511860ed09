"""Compiling for a GPU that is not there, and reading what the compiler made of each kernel.

XLA's CUDA compiler must be installed, and `compile_only.prepare_environment` called before JAX is imported.
"""

import importlib.util
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.compile_only import compile_only_devices
from pallas_kernels.gpus import Gpu
from pallas_kernels.testing.lowering import lower_for


@dataclass(frozen=True)
class KernelReport:
    """What a compiled kernel takes of a core."""

    name: str
    registers: int
    """Per thread."""
    spill_bytes: int
    """Stored to and loaded from memory for want of registers, per thread."""
    shared_memory: int
    """Bytes per block."""
    threads: int
    """Per block."""
    tensor_core_instructions: dict[str, int]
    """How often each kind stands in the code."""


def compile_for(gpu: Gpu, function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> list[KernelReport]:
    """Compiles `function` for `gpu` and reports on every kernel of it, in order of their names.

    Args:
        gpu: the target.
        function: what to compile; of arrays.
        arguments: their shapes and dtypes.
    """
    sharding = jax.sharding.SingleDeviceSharding(compile_only_devices(gpu.target_config)[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]
    lowered = lower_for(gpu, function, *placed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lowered.compile(compiler_options={"xla_dump_to": name, "xla_dump_emitter_re": "ptx"})
        launches = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
        return sorted(
            (report for path in folder.glob("*.ptx") for report in _reports(path, gpu, launches)),
            key=lambda report: report.name,
        )


def _reports(ptx: Path, gpu: Gpu, launches: str) -> Iterator[KernelReport]:
    suffix = "a" if gpu.compute_capability >= 90 else ""
    command = [_ptxas(), "-v", f"-arch=sm_{gpu.compute_capability}{suffix}", str(ptx), "-o", os.devnull]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    for entry in re.split(r"\.entry ", ptx.read_text())[1:]:
        name = _found(r"(\w+)", entry)
        of_entry = said[said.index(f"Compiling entry function '{name}'") :]
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", of_entry)
        assert spilled
        launch = re.search(rf"\b{name} .*threads: \[(\d+).*shared_memory: (\d+)", launches)
        yield KernelReport(
            name=name,
            registers=int(_found(r"Used (\d+) registers", of_entry)),
            spill_bytes=int(spilled[1]) + int(spilled[2]),
            shared_memory=int(launch[2]) if launch else 0,
            threads=int(_found(r"\.reqntid (\d+)", entry)),
            tensor_core_instructions=dict(Counter(_TENSOR_CORE.findall(entry))),
        )


_TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async[\w.:]*|mma\.sync[\w.:]*|tcgen05\.mma[\w.:]*)")


def _ptxas() -> str:
    """CUDA's assembler as the plugin's packages bring it, so that reports do not depend on what else is installed."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert spec
    assert spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations)), "bin", "ptxas"))


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, pattern
    return found[1]
