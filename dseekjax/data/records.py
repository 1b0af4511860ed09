"""A portion of a corpus cut into records of one length, and how a batch of them is put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
from jaxtyping import Bool, Int

from dseekjax.data.corpus import Portion
from dseekjax.data.mask import Mask
from dseekjax.data.packing import PackingIndex
from dseekjax.data.tokens import Tokens
from dseekjax.errors import UserError

Fields = dict[str, np.ndarray]


class Records(Protocol):
    """Any number of records, each with the same fields."""

    @property
    def identity(self) -> str:
        """Tells these records from others."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Int[np.ndarray, "batch"]) -> Fields:
        """The fields of a batch, each with a leading axis `batch`."""
        ...


def merge(parts: Sequence[tuple[Int[np.ndarray, "rows"], Fields]], num_rows: int) -> Fields:
    """The fields of a batch from those of some of its rows each."""
    if len(parts) == 1:
        return parts[0][1]
    merged = {name: np.empty((num_rows, *field.shape[1:]), field.dtype) for name, field in parts[0][1].items()}
    for rows, fields in parts:
        for name, field in fields.items():
            merged[name][rows] = field
    return merged


class Pieces(NamedTuple):
    """What of which document lies where in a batch, row by row from left to right."""

    rows: Int[np.ndarray, "pieces"]
    starts: Int[np.ndarray, "pieces"]
    """Number of the first token in the corpus."""
    lengths: Int[np.ndarray, "pieces"]
    end_document: Bool[np.ndarray, "pieces"]
    """Whether the last token of the piece is the last of its document, so that what comes after it is no target."""


@dataclass(frozen=True)
class Concatenated:
    """Record `r` is the tokens from `r * sequence_length`, and one more, which is only a target.

    Documents follow each other without padding; a record may hold the end of one and the start of the next.
    """

    tokens: Tokens
    document_ends: Int[np.ndarray, "documents"]
    start: int
    stop: int
    sequence_length: int
    identity: str
    mask: Mask | None = None

    @classmethod
    def of(cls, portion: Portion, sequence_length: int) -> Self:
        """The records of a portion.

        Raises:
            UserError: it has not one.
        """
        if portion.num_tokens <= sequence_length:
            raise UserError(
                f"data.sequence_length {sequence_length} is longer than {portion.label}, which has "
                f"{portion.num_tokens} tokens; choose at most {portion.num_tokens - 1}, give more text, or "
                "hold out another part of it"
            )
        corpus = portion.corpus
        identity = f"{portion.identity}:concatenate-{sequence_length}"
        return cls(
            corpus.tokens, corpus.document_ends, portion.start, portion.stop, sequence_length, identity, corpus.mask
        )

    def __len__(self) -> int:
        return (self.stop - self.start - 1) // self.sequence_length

    def read(self, indices: Int[np.ndarray, "batch"]) -> Fields:
        """The fields of a batch, each `[batch, sequence_length]`."""
        begins = self.start + indices * self.sequence_length
        stops = begins + self.sequence_length
        first = np.searchsorted(self.document_ends, begins, side="right")
        counts = np.searchsorted(self.document_ends, stops, side="left") - first + 1
        rows = np.repeat(np.arange(len(indices)), counts)
        documents = first[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = self.document_ends[documents]
        starts = np.maximum(begins[rows], np.where(documents > 0, self.document_ends[documents - 1], 0))
        piece_stops = np.minimum(stops[rows], ends)
        pieces = Pieces(rows, starts, piece_stops - starts, piece_stops == ends)
        # A row is one stretch of tokens, whatever documents it holds.
        runs = (np.arange(len(indices)) * self.sequence_length, begins, np.full(len(indices), self.sequence_length))
        return _assemble(self.tokens, self.mask, pieces, runs, len(indices), self.sequence_length)


@dataclass(frozen=True)
class Packed:
    """Record `r` is as many pieces of documents as were found to fit, and padding."""

    tokens: Tokens
    index: PackingIndex
    sequence_length: int
    identity: str
    mask: Mask | None = None

    @classmethod
    def of(cls, portion: Portion, index: PackingIndex, sequence_length: int) -> Self:
        """The records of a portion, by its index.

        Raises:
            UserError: it has not one.
        """
        if not index.num_records:
            raise UserError(_nothing_packed(portion, sequence_length))
        identity = f"{portion.identity}:first_fit-{sequence_length}"
        return cls(portion.corpus.tokens, index, sequence_length, identity, portion.corpus.mask)

    def __len__(self) -> int:
        return self.index.num_records

    def read(self, indices: Int[np.ndarray, "batch"]) -> Fields:
        """The fields of a batch, each `[batch, sequence_length]`."""
        begins = self.index.record_starts[indices]
        counts = self.index.record_starts[indices + 1] - begins
        rows = np.repeat(np.arange(len(indices)), counts)
        which = np.arange(len(rows)) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        lengths = self.index.piece_lengths[which].astype(np.int64)
        starts = self.index.piece_starts[which]
        pieces = Pieces(rows, starts, lengths, np.zeros(len(rows), bool))
        runs = (_flat(pieces, self.sequence_length), starts, lengths)
        return _assemble(self.tokens, self.mask, pieces, runs, len(indices), self.sequence_length)


def _nothing_packed(portion: Portion, sequence_length: int) -> str:
    if portion.corpus.mask is None:
        return f"{portion.label} has no document of two tokens or more; give more text"
    return (
        f"data.sequence_length {sequence_length} is too short for {portion.label}: every prompt fills it, and nothing "
        "is left to count; choose more"
    )


def _flat(pieces: Pieces, sequence_length: int) -> Int[np.ndarray, "pieces"]:
    """Where each piece begins in the batch as one row."""
    before = np.cumsum(pieces.lengths) - pieces.lengths
    first_of_row = np.searchsorted(pieces.rows, pieces.rows, side="left")
    return pieces.rows * sequence_length + before - before[first_of_row]


def _assemble(
    tokens: Tokens,
    mask: Mask | None,
    pieces: Pieces,
    runs: tuple[np.ndarray, np.ndarray, np.ndarray],
    batch: int,
    sequence_length: int,
) -> Fields:
    """The fields of a batch.

    Args:
        tokens: of the corpus.
        mask: which of them are no targets.
        pieces: what lies where; what they leave free at the end of a row is padding.
        runs: stretches of tokens that cover the pieces: place in the batch as one row, first token, length.
    """
    size = batch * sequence_length
    inputs, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
    for place, start, length in zip(*(column.tolist() for column in runs), strict=True):
        tokens.copy(start, inputs[place : place + length])
        tokens.copy(start + 1, targets[place : place + length])
    places = _flat(pieces, sequence_length)
    begins_row = places % sequence_length == 0
    segment_ids = np.zeros(size, np.int32)
    segment_ids[places] = 1
    positions = np.ones(size, np.int32)
    positions[places[1:]] = 1 - pieces.lengths[:-1]
    positions[places[begins_row]] = 0
    loss_weights = np.ones(size, np.float32)
    loss_weights[(places + pieces.lengths - 1)[pieces.end_document]] = 0
    if mask is not None:
        mask.apply(loss_weights, runs[0], runs[1] + 1, runs[2])
    shape = (batch, sequence_length)
    fields = {
        "tokens": inputs.reshape(shape),
        "targets": targets.reshape(shape),
        "loss_weights": loss_weights.reshape(shape),
        "segment_ids": np.cumsum(segment_ids.reshape(shape), axis=1, dtype=np.int32),
        "positions": np.cumsum(positions.reshape(shape), axis=1, dtype=np.int32),
    }
    used = np.bincount(pieces.rows, pieces.lengths, batch).astype(np.int64)
    if (used < sequence_length).any():
        padding = np.arange(sequence_length) >= used[:, None]
        for name in ("loss_weights", "segment_ids", "positions"):
            fields[name][padding] = 0
    return fields
