"""Stretches of tokens put through a program's score step, many to a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dseekjax.data.packing import first_fit
from dseekjax.data.records import Fields
from dseekjax.training.feed import rows_of_process, to_devices
from dseekjax.training.program import Program

Watch = Callable[[int, int], None]
"""Called with the batches that are done, and all."""


def nobody(done: int, total: int) -> None:
    """Watches nothing."""


class Stretch(NamedTuple):
    """Tokens that follow each other, of which the last are scored."""

    tokens: Sequence[int]
    """One more than fit into a row at most, for the last is a target only."""
    num_scored: int
    """Less than there are tokens."""


class TokenScores(NamedTuple):
    """One of each for every token that is scored."""

    log_probabilities: Float[np.ndarray, "tokens"]
    are_greedy: Bool[np.ndarray, "tokens"]


@dataclass(frozen=True)
class Scorer:
    """A model ready to score."""

    program: Program
    params: Any
    """As in `TrainState`, where the program has them."""

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Rows of a batch, and tokens of a row."""
        rows, length = self.program.batch_shape.tokens.shape
        return rows, length

    def score_batch(self, fields: Fields) -> tuple[Float[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
        """Log-probability of every target (nats), and whether no token is more likely.

        Args:
            fields: of the whole batch, on every process, as the data room makes them.
        """
        local = {name: field[self._rows] for name, field in fields.items()}
        scores = self.program.score_step(self.params, to_devices(local, self._rows, self.program.batch_shape))
        return np.asarray(scores.log_probabilities), np.asarray(scores.are_greedy)

    def score(self, stretches: Sequence[Stretch], watch: Watch = nobody) -> list[TokenScores]:
        """Scores of each stretch. They share rows, first fit decreasing, and do not see each other."""
        if not stretches:
            return []
        num_rows, length = self.batch_shape
        lengths = np.array([len(stretch.tokens) - 1 for stretch in stretches])
        order = np.argsort(-lengths, kind="stable")
        row_of = np.empty(len(lengths), np.int64)
        row_of[order] = first_fit(lengths[order], length)
        by_row = np.argsort(row_of, kind="stable")
        found: dict[int, TokenScores] = {}
        num_batches = -(-(int(row_of.max()) + 1) // num_rows)
        for number in range(num_batches):
            first, last = np.searchsorted(row_of[by_row], [number * num_rows, (number + 1) * num_rows])
            chosen = by_row[first:last]
            fields, starts = _fields(stretches, chosen, row_of[chosen] - number * num_rows, self.batch_shape)
            log_probabilities, are_greedy = self.score_batch(fields)
            for which, row, start in zip(chosen.tolist(), row_of[chosen] - number * num_rows, starts, strict=True):
                end = start + int(lengths[which])
                scored = slice(end - stretches[which].num_scored, end)
                found[which] = TokenScores(log_probabilities[row, scored], are_greedy[row, scored])
            watch(number + 1, num_batches)
        return [found[which] for which in range(len(stretches))]

    @cached_property
    def _rows(self) -> Int[np.ndarray, "rows"]:
        return rows_of_process(self.program.batch_shape)


def _fields(
    stretches: Sequence[Stretch],
    chosen: Int[np.ndarray, "stretches"],
    rows: Int[np.ndarray, "stretches"],
    shape: tuple[int, int],
) -> tuple[Fields, list[int]]:
    """The fields of a batch that holds the `chosen` stretches in `rows`, and where in its row each starts."""
    names = ("tokens", "targets", "segment_ids", "positions")
    fields: Fields = {name: np.zeros(shape, np.int32) for name in names}
    fields["loss_weights"] = np.zeros(shape, np.float32)
    used, count = [0] * shape[0], [0] * shape[0]
    starts: list[int] = []
    for which, row in zip(chosen.tolist(), rows.tolist(), strict=True):
        tokens, num_scored = np.asarray(stretches[which].tokens, np.int32), stretches[which].num_scored
        start, end = used[row], used[row] + len(tokens) - 1
        used[row], count[row] = end, count[row] + 1
        starts.append(start)
        fields["tokens"][row, start:end] = tokens[:-1]
        fields["targets"][row, start:end] = tokens[1:]
        fields["segment_ids"][row, start:end] = count[row]
        fields["positions"][row, start:end] = np.arange(end - start)
        fields["loss_weights"][row, end - num_scored : end] = 1
    return fields, starts
