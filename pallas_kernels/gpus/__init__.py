"""What is known of each kind of GPU: a folder per kind, with facts, XLA's description, and tuned block sizes per op."""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str
    """Of its folder."""
    device_kind: str
    """As JAX names it."""
    compute_capability: int
    """90 is 9.0."""
    num_cores: int
    """Streaming multiprocessors."""
    shared_memory_per_block: int
    """The most bytes that a block may ask for."""
    memory_bandwidth: float
    """Bytes per second."""
    tensor_core_instruction: str
    """`mma.sync`, `wgmma` or `tcgen05`: the newest that it has."""
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by dtype (NVIDIA's data sheets); a dtype that its tensor cores lack is not there."""
    target_config: str
    """A GpuTargetConfigProto in text, what XLA compiles for."""


def gpu_names() -> list[str]:
    """The kinds that are known."""
    return sorted(path.parent.name for path in FOLDER.glob("*/facts.json"))


def target_path(name: str) -> Path:
    """Where XLA's description of a kind lies; there may be none."""
    return FOLDER / name / "target.txtpb"


@functools.cache
def load_gpu(name: str) -> Gpu:
    """The kind in the folder `name`.

    Raises:
        ValueError: there is no such folder.
    """
    if name not in gpu_names():
        raise ValueError(f"gpu {name}: unknown; known are {', '.join(gpu_names())}")
    facts = _facts(name)
    target = target_path(name).read_text("utf-8")

    def number(field: str) -> int:
        return int(_field(target, rf"\b{field}: (\d+)"))

    return Gpu(
        name=name,
        device_kind=_field(target, r'\bname: "([^"]+)"'),
        compute_capability=10 * number("major") + number("minor"),
        num_cores=number("core_count"),
        shared_memory_per_block=number("shared_memory_per_block_optin"),
        memory_bandwidth=float(number("memory_bandwidth")),
        tensor_core_instruction=facts["tensor_core_instruction"],
        peak_flops=facts["peak_flops"],
        target_config=target,
    )


def find_gpu(device_kind: str) -> Gpu | None:
    """The kind that JAX calls `device_kind`; None for what is no GPU, or one that is not known.

    Variants of one chip (PCIe, NVL) share the entry of the one that is described: what kernels they can run is the
    same, counts of cores and bandwidth are not.
    """
    for name in gpu_names():
        if any(re.match(rf"{re.escape(kind)}\b", device_kind) for kind in _facts(name)["device_kinds"]):
            return load_gpu(name)
    return None


def _facts(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((FOLDER / name / "facts.json").read_text("utf-8"))
    return facts


def _field(target: str, pattern: str) -> str:
    found = re.search(pattern, target)
    assert found, pattern
    return found[1]
