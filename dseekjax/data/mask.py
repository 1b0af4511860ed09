"""Which tokens of a corpus are no targets of the loss: prompts, and what users say."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

Places = Int[np.ndarray, "..."] | int


@dataclass(frozen=True)
class Mask:
    """Stretches of tokens that do not count, in order and apart from each other."""

    starts: Int[np.ndarray, "stretches"]
    """Number of the first token of each in the corpus."""
    ends: Int[np.ndarray, "stretches"]
    """Number of the token after its last."""
    counted_bytes: Int[np.ndarray, "documents"]
    """How many bytes of the text of each document count."""

    def count(self, start: Places, stop: Places) -> Int[np.ndarray, "..."]:
        """How many tokens from number `start` to before `stop` do not count."""
        return self._before(stop) - self._before(start)

    def apply(
        self,
        weights: Float[np.ndarray, "positions"],
        places: Int[np.ndarray, "runs"],
        starts: Int[np.ndarray, "runs"],
        lengths: Int[np.ndarray, "runs"],
    ) -> None:
        """Sets the weights of what does not count to 0.

        Args:
            weights: of positions whose targets are runs of tokens.
            places: where each run begins in `weights`.
            starts: number of its first target in the corpus.
            lengths: of each run.
        """
        first = np.searchsorted(self.ends, starts, side="right")
        counts = np.maximum(np.searchsorted(self.starts, starts + lengths, side="left") - first, 0)
        run = np.repeat(np.arange(len(starts)), counts)
        stretch = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = places[run] + np.maximum(self.starts[stretch] - starts[run], 0)
        stops = places[run] + np.minimum(self.ends[stretch] - starts[run], lengths[run])
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
            weights[begin:stop] = 0

    @cached_property
    def _totals(self) -> Int[np.ndarray, "stretches+1"]:
        """Tokens in all stretches before each, and in all."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.ends) - self.starts)])

    def _before(self, places: Places) -> Int[np.ndarray, "..."]:
        """How many tokens before each place do not count."""
        if not len(self.starts):
            return np.zeros(np.shape(places), np.int64)
        begun = np.searchsorted(self.starts, places, side="left")
        beyond = np.maximum(self.ends[np.maximum(begun, 1) - 1] - places, 0)
        return np.where(begun > 0, self._totals[begun] - beyond, 0)
