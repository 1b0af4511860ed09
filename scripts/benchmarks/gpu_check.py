"""Checks every kernel on the GPU at hand and times it: needs this repository, jax for that GPU, and nothing else.

Numbers are compared with the plain-JAX reference in float32 at full precision. Times are beside what is there to beat:
cuDNN, XLA's products, a copy, and the GPU's peaks. Then block sizes are measured and kept. What no time is left for is
named. --interpret tries all of it but the times on a CPU, with small arrays.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax

from pallas_kernels import tune
from pallas_kernels.dispatch import device_at_hand
from pallas_kernels.gpus import Gpu

sys.path.insert(0, str(Path(__file__).parent))
from kernel_numbers import check_attention, check_fp8, check_matmul, check_norms, check_quantize
from kernel_rows import Check, Row
from kernel_times import time_attention, time_fp8, time_matmul, time_norms, time_quantize


def measure_blocks(gpu: Gpu) -> Iterator[Row]:
    """Block sizes of attention, timed and kept in `pallas_kernels/gpus/`."""
    status = tune.main(["attention", "--gpu", gpu.name, "--measure", "--shapes", "bfloat16 128 128"])
    yield Row("block sizes of attention", {"exit status": status}, status == 0)


def checks(gpu: Gpu | None, interpret: bool) -> dict[str, Check]:
    """What is to be done, the most wanted first."""
    pallas = "pallas_interpreted" if interpret else "pallas"
    numbers: dict[str, Check] = {
        "attention": lambda: check_attention(pallas, 40 if interpret else 1000),
        "quantize": lambda: check_quantize(pallas, 1 << (12 if interpret else 24)),
        "matmul": lambda: check_matmul(pallas, 128 if interpret else 1024),
        "norms": lambda: check_norms(pallas, 5 if interpret else 1000),
    }
    capability = 90 if interpret or gpu is None else gpu.compute_capability
    multiplying = {90: ("mosaic", "pallas"), 80: ("pallas",)}.get(capability, ())
    for name in multiplying:
        kernel = f"{name}_interpreted" if interpret else name
        numbers[f"fp8_matmul {name}"] = partial(check_fp8, kernel, 128 if interpret else 1024)
    if interpret or gpu is None:
        return numbers
    times: dict[str, Check] = {"time of attention": lambda: time_attention(gpu)}
    for name in multiplying:
        times[f"time of fp8_matmul {name}"] = partial(time_fp8, gpu, name)
    times["time of quantize"] = lambda: time_quantize(gpu)
    times["time of norms"] = lambda: time_norms(gpu)
    times["time of matmul"] = lambda: time_matmul(gpu)
    times["block sizes"] = lambda: measure_blocks(gpu)
    return {**numbers, **times}


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("scripts/gpu_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing after these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every figure")
    parser.add_argument("--interpret", action="store_true", help="on a CPU, numbers alone, with small arrays")
    parser.add_argument("--only", metavar="WORD", default="", help="what has this in its name")
    given = parser.parse_args()
    device = device_at_hand()
    if not given.interpret and device.gpu is None:
        print(f"error: the device at hand is {device}, no GPU that is known; --interpret needs none", file=sys.stderr)
        return 2
    print(f"{device}, jax {jax.__version__}", flush=True)
    chosen = {n: check for n, check in checks(device.gpu, given.interpret).items() if given.only in n}
    if not chosen:
        print(f"error: --only: nothing that can be done here has {given.only!r} in its name", file=sys.stderr)
        return 2
    if given.json and not given.json.absolute().parent.is_dir():
        print(f"error: --json: there is no folder {given.json.absolute().parent}", file=sys.stderr)
        return 2
    start, rows, left_out = time.monotonic(), [], []
    for name, check in chosen.items():
        if time.monotonic() - start > 60 * given.minutes:
            left_out.append(name)
            continue
        for row in _guarded(name, check):
            print(row, flush=True)
            rows.append(row)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} found, {failed} failed, in {time.monotonic() - start:.0f} s", flush=True)
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}", flush=True)
    if given.json:
        found = {"device": str(device), "jax": jax.__version__, "left_out": left_out, "rows": [asdict(r) for r in rows]}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed or left_out else 0


def _guarded(name: str, check: Check) -> Iterator[Row]:
    """The rows of a check, and a last one that failed if it breaks off: the others are wanted all the same."""
    try:
        yield from check()
    except Exception as error:
        yield Row(f"{name} broke off: {type(error).__name__}: {' '.join(str(error).split())[:300]}", passed=False)


if __name__ == "__main__":
    sys.exit(main())
