"""Sources without an end: records by running number, epoch after epoch."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int

from dseekjax.data.permutation import mix, permute
from dseekjax.data.records import Fields, Records


class Source(Protocol):
    """Where training takes its records from."""

    @property
    def identity(self) -> str:
        """Tells this source from others."""
        ...

    @property
    def records_per_epoch(self) -> int | None:
        """None if only reading tells."""
        ...

    def take(self, numbers: Int[np.ndarray, "batch"]) -> Fields:
        """The fields of the records with these running numbers, each with a leading axis `batch`."""
        ...

    def position(self, number: int) -> Any:
        """What `seek` needs to take record `number` next without a look at those before it; JSON."""
        ...

    def seek(self, position: Any) -> None:
        """Makes the records after a position, which an earlier process told, quick to take."""
        ...


@dataclass(frozen=True)
class Shuffled:
    """All records in a random order, then all in another; any running number is as quick to take as any other."""

    records: Records
    key: int
    """Names the orders, uint64."""

    @property
    def identity(self) -> str:
        return self.records.identity

    @property
    def records_per_epoch(self) -> int:
        return len(self.records)

    def take(self, numbers: Int[np.ndarray, "batch"]) -> Fields:
        epochs, places = np.divmod(numbers, len(self.records))
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            places[now] = permute(places[now], len(self.records), order_key(self.key, epoch))
        return self.records.read(places)

    def position(self, number: int) -> None:
        return None

    def seek(self, position: None) -> None:
        pass


def order_key(*parts: int) -> int:
    """A key, uint64, for `permute`, that differs with each of the parts."""
    key = np.zeros((), np.uint64)
    for part in parts:
        key = mix(key ^ np.uint64(part))
    return int(key)
