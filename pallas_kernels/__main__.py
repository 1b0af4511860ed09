"""Shows which implementation of each op runs, here or on a GPU that is named, and why the others do not."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pallas_kernels.gpus import gpu_names, load_gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m pallas_kernels", description=__doc__)
    parser.add_argument("--gpu", choices=gpu_names(), help="a kind of GPU, in the place of the device at hand")
    given = parser.parse_args(arguments)

    from pallas_kernels.dispatch import Device, device_at_hand

    device = Device("gpu", load_gpu(given.gpu)) if given.gpu else device_at_hand()
    print(f"What `auto` stands for on {device}:")
    for op, implementations, examples in _ops():
        for case in examples:
            _show(op, implementations, case, device)
    return 0


def _ops() -> list[tuple[str, Any, Any]]:
    from pallas_kernels import attention, bf16_matmul, fp8_matmul, norm, quantize

    return [
        ("attention", attention.IMPLEMENTATIONS, attention.EXAMPLES),
        ("attention_with_log_sum_exp", attention.WITH_LOG_SUM_EXP, attention.EXAMPLES[:1]),
        ("fp8_matmul", fp8_matmul.IMPLEMENTATIONS, fp8_matmul.EXAMPLES),
        *((case.op, bf16_matmul.IMPLEMENTATIONS[case.op], [case]) for case in bf16_matmul.EXAMPLES),
        *((op, implementations, norm.EXAMPLES) for op, implementations in norm.IMPLEMENTATIONS.items()),
        *((op, implementations, quantize.EXAMPLES) for op, implementations in quantize.IMPLEMENTATIONS.items()),
    ]


def _show(op: str, implementations: Any, case: Any, device: Any) -> None:
    from pallas_kernels.dispatch import choose, refusals

    chosen = choose(op, implementations, "auto", case, device).name
    print(f"\n{op}: {case}\n  {chosen}")
    for name, reason in refusals(implementations, case, device).items():
        print(f"  not {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
