"""What training is fed, from where a checkpoint says."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from dseekjax.data.batches import TrainingBatches, prefetched
from dseekjax.data.endless import Source
from dseekjax.data.mixture import Mixture
from dseekjax.data.records import Fields
from dseekjax.errors import UserError


class TrainingFeed:
    """Batches of a mixture of sources.

    Its state is the number of the next batch and the mixture's history, from which the batch follows whatever the
    number of processes; and, for sources that can only be read in order, where they are.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        max_epochs: Sequence[int | None],
        *,
        global_batch_size: int,
        rows: Int[np.ndarray, "rows"],
        num_batches: int,
        prefetch: int,
        held_out: Sequence[str] = (),
    ) -> None:
        """
        Args:
            sources: to be mixed.
            weights: of the sources from the next batch on.
            max_epochs: how often each source may be read, or None.
            global_batch_size: rows of a batch in all processes.
            rows: those of this process.
            num_batches: how many are wanted in all.
            prefetch: batches read ahead.
            held_out: identities of what is not fed, but evaluated on.
        """
        self._sources = sources
        self._weights = list(weights)
        self._limits = [_limit(source, epochs) for source, epochs in zip(sources, max_epochs, strict=True)]
        self._global_batch_size = global_batch_size
        self._rows = rows
        self._num_batches = num_batches
        self._prefetch = prefetch
        self._held_out = list(held_out)
        self._go_on_from([(0, self._weights)])

    @property
    def identity(self) -> list[str]:
        """Of the sources: with equal identities, equal states mean equal batches."""
        return [source.identity for source in self._sources]

    def state(self, batch: int) -> dict[str, Any]:
        """All that is needed to go on with batch number `batch`, as JSON."""
        taken = self._mixture.taken(batch * self._global_batch_size)
        return {
            "batch": batch,
            "identity": self.identity,
            "held_out": self._held_out,
            "mixture": [[start, weights] for start, weights in self._history],
            "positions": [source.position(number) for source, number in zip(self._sources, taken, strict=True)],
        }

    def start(self, state: Mapping[str, Any]) -> Iterator[Fields]:
        """This process's rows of the batch that a state goes on with, and of all that follow.

        From there on the weights are this feed's own, if they are not those of the state.

        Raises:
            UserError: the sources may not be read as often as that takes.
        """
        record = state["batch"] * self._global_batch_size
        history = [(start, list(weights)) for start, weights in state["mixture"] if start < record]
        if not history or history[-1][1] != self._weights:
            history.append((record, self._weights))
        self._go_on_from(history)
        self.refuse_too_few()
        for source, position in zip(self._sources, state["positions"], strict=True):
            source.seek(position)
        batches = TrainingBatches(self._sources, self._mixture, self._global_batch_size, self._rows, self._num_batches)
        return prefetched(batches, state["batch"], self._prefetch)

    def epochs(self) -> list[float | None]:
        """How often each source will have been read after the last batch; None where only reading tells."""
        taken = self._mixture.taken(self._num_batches * self._global_batch_size)
        return [
            None if source.records_per_epoch is None else number / source.records_per_epoch
            for source, number in zip(self._sources, taken, strict=True)
        ]

    def refuse_too_few(self) -> None:
        """Raises UserError if the sources may not be read as often as all batches take."""
        there, needed = self._mixture.num_records, self._num_batches * self._global_batch_size
        if there is not None and there < needed:
            raise UserError(
                f"train.steps {self._num_batches} needs {needed:,} sequences, and what data.sources and their "
                f"max_epochs allow is {there:,}; choose at most {there // self._global_batch_size} steps, raise "
                "max_epochs or add sources"
            )

    def _go_on_from(self, history: list[tuple[int, list[float]]]) -> None:
        self._history = history
        self._mixture = Mixture.of(history, self._limits)


def _limit(source: Source, max_epochs: int | None) -> int | None:
    if max_epochs is None or source.records_per_epoch is None:
        return None
    return max_epochs * source.records_per_epoch
