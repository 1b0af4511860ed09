"""Block sizes that were found for a kind of GPU: `gpus/<gpu>/<op>.json`, read by ops and written by `tune`."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from pallas_kernels.gpus import FOLDER, Gpu, gpu_names, load_gpu


def tuned_entries(gpu: Gpu, op: str) -> Mapping[str, Any]:
    """Entries by signature of the arguments, each with its sizes and their `source`: measured, or heuristic.

    What a kind has no entry for, it has from another of the same compute capability: an H200 from an H100.
    """
    alike = [name for name in gpu_names() if load_gpu(name).compute_capability == gpu.compute_capability]
    return {signature: entry for name in (*alike, gpu.name) for signature, entry in _entries(name, op).items()}


@functools.cache
def _entries(gpu: str, op: str) -> Mapping[str, Any]:
    path = FOLDER / gpu / f"{op}.json"
    if not path.is_file():
        return {}
    entries: Mapping[str, Any] = json.loads(path.read_text("utf-8"))["entries"]
    return entries


def write_tuned_entries(gpu: str, op: str, entries: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Adds `entries` to the file, in the place of those of the same signature.

    Args:
        gpu: whose folder it is.
        op: the op.
        entries: as `tuned_entries` gives them.
        versions: of what they were found with; noted in each entry.
    """
    path = FOLDER / gpu / f"{op}.json"
    noted = {signature: {**entry, "versions": dict(versions)} for signature, entry in entries.items()}
    merged = {"entries": dict(sorted({**_entries(gpu, op), **noted}.items()))}
    path.write_text(json.dumps(merged, indent=2) + "\n", "utf-8")
    _entries.cache_clear()
