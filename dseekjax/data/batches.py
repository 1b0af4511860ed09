"""Global batches as a random-access source: element `i` is one process's rows of batch `i`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from dseekjax.data.mixture import assign
from dseekjax.data.permutation import mix, permute
from dseekjax.data.records import Records

Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class TrainingBatches:
    """Endless shuffled batches: every epoch of every source is a new random order of all its records."""

    sources: Sequence[Records]
    weights: Sequence[float]
    seed: int
    global_batch_size: int
    rows: Int[np.ndarray, "rows"]
    """The rows of the global batch that this process feeds."""
    num_batches: int
    """Length of the source; batch `i` does not depend on it."""

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Fields:
        _check_index(index, len(self))
        source, running = assign(index * self.global_batch_size + self.rows, self.weights)
        parts: list[tuple[np.ndarray, Fields]] = []
        for i, records in enumerate(self.sources):
            (chosen,) = np.nonzero(source == i)
            if chosen.size:
                epoch, place = np.divmod(running[chosen], len(records))
                keys = mix(mix(np.full(epoch.shape, self.seed) * len(self.sources) + i) + epoch.astype(np.uint64))
                parts.append((chosen, records.read(permute(place, len(records), keys))))
        return _merge(parts, len(self.rows))


@dataclass(frozen=True)
class EvaluationBatches:
    """Every record of every source once, in order; the last batch is filled up with rows that do not count."""

    sources: Sequence[Records]
    global_batch_size: int
    rows: Int[np.ndarray, "rows"]

    def __len__(self) -> int:
        return -(-sum(map(len, self.sources)) // self.global_batch_size)

    def __getitem__(self, index: int) -> Fields:
        _check_index(index, len(self))
        numbers = index * self.global_batch_size + self.rows
        starts = np.cumsum([0, *map(len, self.sources)])
        parts: list[tuple[np.ndarray, Fields]] = []
        for i, records in enumerate(self.sources):
            (chosen,) = np.nonzero((numbers >= starts[i]) & (numbers < starts[i + 1]))
            if chosen.size:
                parts.append((chosen, records.read(numbers[chosen] - starts[i])))
        (beyond,) = np.nonzero(numbers >= starts[-1])
        if beyond.size:
            blank = {name: np.zeros_like(field) for name, field in self.sources[0].read(beyond * 0).items()}
            parts.append((beyond, blank))
        return _merge(parts, len(self.rows))


def _check_index(index: int, length: int) -> None:
    # Iterating over what has only `__getitem__` ends with this error, and without it never.
    if not 0 <= index < length:
        raise IndexError(f"batch {index} of {length}")


def _merge(parts: list[tuple[np.ndarray, Fields]], num_rows: int) -> Fields:
    if len(parts) == 1:
        return parts[0][1]
    merged = {name: np.empty((num_rows, *field.shape[1:]), field.dtype) for name, field in parts[0][1].items()}
    for rows, fields in parts:
        for name, field in fields.items():
            merged[name][rows] = field
    return merged


def prefetched(batches: Any, start: int, prefetch: int) -> Iterator[Fields]:
    """The batches from number `start` on, read ahead in a thread by Grain."""
    dataset = grain.MapDataset.source(batches)[start:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))
