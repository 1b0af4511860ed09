"""What is computed of queries, keys and values, as static data; and which key a query may see."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class AttentionSpec:
    """The parts of attention that are known when a program is traced."""

    causal: bool
    """Query `i` sees keys up to `i`."""
    window: int | None
    """A query sees keys less than this far away; None for all."""
    scale: float
    """Factor on the scores."""
    softcap: float | None
    """Scores become `softcap * tanh(score / softcap)`, before the mask; None leaves them."""

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before its own position a query sees, and how many after; None for no limit."""
        away = None if self.window is None else self.window - 1
        return away, 0 if self.causal else away

    def pairs(self, query_length: int, key_length: int) -> int:
        """How many pairs of a query and a key there are that see each other, if documents hide none."""
        before, after = self.reach
        queries = np.arange(query_length)
        last = np.full(query_length, key_length - 1) if after is None else np.minimum(queries + after, key_length - 1)
        first = np.zeros(query_length, int) if before is None else np.maximum(queries - before, 0)
        return int(np.maximum(last - first + 1, 0).sum())


SegmentIds = tuple[Int[Array, "batch query_length"], Int[Array, "batch key_length"]] | None
"""Document numbers of queries and of keys; a query sees only keys of its own document."""


def visible(
    spec: AttentionSpec,
    query_positions: Int[Array, "query_length"],
    key_positions: Int[Array, "key_length"],
    segment_ids: SegmentIds,
) -> Bool[Array, "#batch query_length key_length"]:
    """Which key each query may see."""
    before, after = spec.reach
    ahead = key_positions[None, :] - query_positions[:, None]
    mask = jnp.ones((1, *ahead.shape), bool)
    if before is not None:
        mask = mask & (ahead >= -before)
    if after is not None:
        mask = mask & (ahead <= after)
    if segment_ids is not None:
        mask = mask & (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])
    return mask
