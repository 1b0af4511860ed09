"""Global batches as a random-access source: element `i` is one process's rows of batch `i`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from dseekjax.data.endless import Source
from dseekjax.data.mixture import Mixture
from dseekjax.data.records import Fields, Records, merge


@dataclass(frozen=True)
class TrainingBatches:
    """Batches dealt from endless sources by a mixture."""

    sources: Sequence[Source]
    mixture: Mixture
    global_batch_size: int
    rows: Int[np.ndarray, "rows"]
    """The rows of the global batch that this process feeds."""
    num_batches: int
    """Length of the source; batch `i` does not depend on it."""

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Fields:
        _check_index(index, len(self))
        source, running = self.mixture.assign(index * self.global_batch_size + self.rows)
        chosen = [np.flatnonzero(source == i) for i in range(len(self.sources))]
        parts = [(rows, self.sources[i].take(running[rows])) for i, rows in enumerate(chosen) if rows.size]
        return merge(parts, len(self.rows))


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
        return merge(parts, len(self.rows))


def _check_index(index: int, length: int) -> None:
    # Iterating over what has only `__getitem__` ends with this error, and without it never.
    if not 0 <= index < length:
        raise IndexError(f"batch {index} of {length}")


def prefetched(batches: Any, start: int, prefetch: int) -> Iterator[Fields]:
    """The batches from number `start` on, read ahead in a thread by Grain."""
    dataset = grain.MapDataset.source(batches)[start:]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))
