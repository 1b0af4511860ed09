"""Token ids in one long row, whatever pieces they lie in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int


def map_file(path: Path, dtype: str) -> np.ndarray:
    """A file of numbers as an array in memory, read when it is looked at."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    # A plain array: slices of a np.memmap take ten times as long.
    return np.asarray(np.memmap(path, dtype, "r"))


@dataclass(frozen=True)
class Tokens:
    """Shards of one length, but the last, as one row of ids."""

    shards: Sequence[Int[np.ndarray, "tokens"]]
    per_shard: int

    def copy(self, start: int, out: Int[np.ndarray, "length"]) -> None:
        """Fills `out` with the ids from number `start` on."""
        if not len(out):
            return
        shard, place = divmod(start, self.per_shard)
        found = self.shards[shard][place : place + len(out)]
        out[: len(found)] = found
        if len(found) < len(out):
            self.copy(start + len(found), out[len(found) :])

    def read(self, start: int, length: int) -> Int[np.ndarray, "length"]:
        """`length` ids from number `start` on, as int32."""
        out = np.empty(length, np.int32)
        self.copy(start, out)
        return out
