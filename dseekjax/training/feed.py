"""From a process's rows in host memory to global arrays."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from dseekjax.models.batch import Batch


def rows_of_process(batch_shape: Batch) -> Int[np.ndarray, "rows"]:
    """The rows of the global batch that this process's devices hold, in order."""
    shape = batch_shape.tokens
    places = shape.sharding.addressable_devices_indices_map(shape.shape).values()
    rows = np.arange(shape.shape[0])
    return np.unique(np.concatenate([rows[place[0]] for place in places if place is not None]))


def to_devices(fields: dict[str, np.ndarray], rows: Int[np.ndarray, "rows"], batch_shape: Batch) -> Batch:
    """Global arrays from the fields of this process's `rows`."""

    def place(local: np.ndarray, shape: Any) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape.shape[0])
            first = int(np.searchsorted(rows, start))
            return local[(slice(first, first + stop - start), *index[1:])]

        return jax.make_array_from_callback(shape.shape, shape.sharding, part)

    return Batch(**{name: place(fields[name], getattr(batch_shape, name)) for name in Batch.__dataclass_fields__})
