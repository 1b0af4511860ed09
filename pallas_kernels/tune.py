"""Finds block sizes for an op on a kind of GPU, and keeps them.

With --measure, on that GPU, candidates are timed. Without, anywhere, they are compiled for it: those that do not fit
are dropped, and of the rest the first by spills, use of the newest tensor cores, and the op's heuristic is taken.
"""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.compile_only import has_compiler, prepare_environment
from pallas_kernels.gpus import Gpu, find_gpu, gpu_names, load_gpu
from pallas_kernels.tuned import write_tuned_entries

OPS = ("attention", "bf16_matmul")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--gpu", choices=gpu_names(), required=True, help="the kind to find them for")
    parser.add_argument("--shapes", nargs="*", help="as the op writes them, such as 'bfloat16 128 128'; its usual ones")
    parser.add_argument("--dry-run", action="store_true", help="print what was found and keep nothing")
    parser.add_argument("--measure", action="store_true", help="time the candidates on the GPU at hand")
    given = parser.parse_args(arguments)
    gpu = load_gpu(given.gpu)
    if not given.measure:
        prepare_environment()
    import jax

    tuning = importlib.import_module(f"pallas_kernels.{given.op}.tuning")
    error = None
    if unknown := [shape for shape in given.shapes or () if not tuning.is_shape(shape)]:
        error = f"--shapes: {unknown[0]!r} is not {tuning.SHAPE}, as in {tuning.SHAPES[0]!r}"
    elif gpu.compute_capability not in tuning.CAPABILITIES:
        error = f"--gpu: {given.op} has no kernels for {gpu.name}, of compute capability {gpu.compute_capability / 10}"
    elif given.measure and find_gpu(jax.devices()[0].device_kind) is not gpu:
        error = f"--measure: the device at hand is {jax.devices()[0].device_kind}, not {gpu.name}"
    elif not given.measure and not has_compiler():
        error = "without --measure this needs XLA's CUDA compiler; install dseekjax[cuda12]"
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rank = _time if given.measure else _compile
    entries = {}
    for shape in given.shapes or tuning.SHAPES:
        blocks = {}
        for part in tuning.PARTS:
            ranked = [(rank(tuning, gpu, shape, part, candidate), candidate) for candidate in tuning.candidates(shape)]
            fitting = [(found, candidate) for found, candidate in ranked if found is not None]
            if not fitting:
                print(f"error: {shape}: no candidate for {part} fits {gpu.device_kind}", file=sys.stderr)
                return 1
            found, best = min(fitting, key=lambda pair: pair[0])
            print(f"{gpu.name}: {shape}: {part}: {best} with {found}, of {len(fitting)} that fit", flush=True)
            blocks[part] = best._asdict()
        name, kept = tuning.entry(shape, blocks)
        entries[name] = {**kept, "source": "measured" if given.measure else "heuristic"}
    if not given.dry_run:
        write_tuned_entries(gpu.name, given.op, entries, {"jax": importlib.metadata.version("jax")})
    return 0


def _compile(tuning: Any, gpu: Gpu, shape: str, part: str, candidate: Any) -> tuple[int, bool, float] | None:
    """Bytes spilled, whether the newest tensor cores are left unused, and the heuristic, less being better."""
    from pallas_kernels.testing.compiling import compile_for

    function, inputs, kernel = tuning.workload(shape, part, candidate)
    reports = _unless_too_large(lambda: compile_for(gpu, function, *inputs))
    if reports is None:
        return None
    (report,) = (report for report in reports if report.name == kernel)
    newest = any(name.startswith(gpu.tensor_core_instruction) for name in report.tensor_core_instructions)
    return report.spill_bytes, not newest, -tuning.intensity(candidate)


def _time(tuning: Any, gpu: Gpu, shape: str, part: str, candidate: Any) -> float | None:
    """Seconds."""
    from pallas_kernels.testing.timing import random_arrays, seconds_per_call

    function, inputs, _ = tuning.workload(shape, part, candidate)
    return _unless_too_large(lambda: seconds_per_call(function, *random_arrays(inputs)))


def _unless_too_large[Result](call: Callable[[], Result]) -> Result | None:
    """What `call` gives, or None if a kernel of it takes more shared memory than there is."""
    import jax

    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


if __name__ == "__main__":
    sys.exit(main())
