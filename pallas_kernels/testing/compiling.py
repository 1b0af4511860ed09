"""Compiling for a GPU that is not there, and reading what the compiler made of each kernel.

XLA's CUDA compiler must be installed, and `compile_only.prepare_environment` called before JAX is imported.
"""

import contextlib
import hashlib
import importlib.util
import itertools
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
from jax.extend.mlir import ir

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

    Not for several threads at once: Mosaic is asked to report through the environment of the process.

    Args:
        gpu: the target.
        function: what to compile; of arrays.
        arguments: their shapes and dtypes.
    """
    sharding = jax.sharding.SingleDeviceSharding(compile_only_devices(gpu.target_config)[0])
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]
    with tempfile.TemporaryDirectory() as of_xla, tempfile.TemporaryDirectory() as of_mosaic:
        with _mosaic_dumps_to(of_mosaic):
            lowered = lower_for(gpu, function, *placed)
            _make_unknown(lowered)
            # Whatever speed XLA is told to compile at elsewhere: that changes the code of kernels too.
            options = {"xla_dump_to": of_xla, "xla_dump_emitter_re": "ptx", "xla_backend_optimization_level": 3}
            lowered.compile(compiler_options=options)
        launches = "".join(path.read_text() for path in Path(of_xla).glob("*thunk_sequence.txt"))
        reports = [
            *(report for path in Path(of_xla).glob("*.ptx") for report in _xla_reports(path, gpu, launches)),
            *(report for path in Path(of_mosaic).glob("*.ptx") for report in _mosaic_reports(path)),
        ]
        return sorted(reports, key=lambda report: report.name)


@contextlib.contextmanager
def _mosaic_dumps_to(folder: str) -> Iterator[None]:
    """Mosaic compiles its kernels apart from XLA, and listens to the environment alone."""
    before = os.environ.get(_MOSAIC_DUMPS)
    os.environ[_MOSAIC_DUMPS] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MOSAIC_DUMPS]
        else:
            os.environ[_MOSAIC_DUMPS] = before


def _make_unknown(lowered: jax.stages.Lowered) -> None:
    """Marks the Mosaic kernels anew: one whose hash this process knows is not compiled again, so nothing is said."""
    salt = next(_salts).to_bytes(8)

    def mark(operation: Any) -> ir.WalkResult:
        if "kernel_hash" in (config := operation.attributes.get("mhlo.backend_config") or {}):
            attributes = {entry.name: entry.attr for entry in config}
            known = attributes["kernel_hash"].value_bytes
            attributes["kernel_hash"] = ir.StringAttr.get(hashlib.sha256(known + salt).digest())
            operation.attributes["mhlo.backend_config"] = ir.DictAttr.get(attributes)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(mark)


_MOSAIC_DUMPS = "MOSAIC_GPU_DUMP_TO"
_salts = itertools.count()


def _mosaic_reports(ptx: Path) -> Iterator[KernelReport]:
    # What its own call of the assembler said: other flags would give other registers.
    said, passes = (ptx.with_suffix(suffix).read_text() for suffix in (".ptxas", ".mlir-passes.log"))
    shared_memory = int(_found(r"dynamic_shared_memory_size %c(\d+)_i32", passes))
    return _reports(ptx.read_text(), said, lambda name: shared_memory)


def _xla_reports(ptx: Path, gpu: Gpu, launches: str) -> Iterator[KernelReport]:
    suffix = "a" if gpu.compute_capability >= 90 else ""
    command = [_ptxas(), "-v", f"-arch=sm_{gpu.compute_capability}{suffix}", str(ptx), "-o", os.devnull]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr

    def shared_memory(name: str) -> int:
        launch = re.search(rf"\b{name} .*threads: \[\d+.*shared_memory: (\d+)", launches)
        return int(launch[1]) if launch else 0

    return _reports(ptx.read_text(), said, shared_memory)


def _reports(ptx: str, said: str, shared_memory: Callable[[str], int]) -> Iterator[KernelReport]:
    for entry in re.split(r"\.entry ", ptx)[1:]:
        name = _found(r"(\w+)", entry)
        of_entry = said[said.index(f"Compiling entry function '{name}'") :]
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", of_entry)
        assert spilled
        yield KernelReport(
            name=name,
            registers=int(_found(r"Used (\d+) registers", of_entry)),
            spill_bytes=int(spilled[1]) + int(spilled[2]),
            shared_memory=shared_memory(name),
            threads=int(_found(r"\.(?:reqntid|maxntid) (\d+)", entry)),
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
