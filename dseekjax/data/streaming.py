"""Files that are tokenised while they are read, for data that is not prepared.

The records of a stream are those of its documents, one after the other, in the order of the files, again and again.
They are shuffled within blocks of so many records, and so a batch is as much a function of files, seed and number as
with a corpus. What differs: the order is no more random than that; an epoch ends where it ends, not at a whole record;
a record far ahead can only be reached by reading up to it, or from a position that was told before; nothing can be held
out; and every process reads and tokenises all that is fed to any.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import tokenizers
from jaxtyping import Int

from dseekjax.data.encoding import batched, encode
from dseekjax.data.endless import order_key
from dseekjax.data.permutation import permute
from dseekjax.data.reading.documents import Passed, read_documents, whole
from dseekjax.data.reading.inputs import Format, Input, fingerprint_of
from dseekjax.data.records import Concatenated, Fields, merge
from dseekjax.data.tokens import Tokens
from dseekjax.errors import UserError

BLOCK_RECORDS = 1024
# A batch may begin in one block and end in the next.
BLOCKS_KEPT = 2


class Place(NamedTuple):
    """A token of the stream."""

    file: int
    part: int
    """Number of the document within the file, or of the part of one where they are long."""
    token: int
    """Number within the part."""


class Piece(NamedTuple):
    """A part of a document, or what of it was not used yet."""

    place: Place
    ids: Int[np.ndarray, "tokens"]
    ends: bool
    """Whether the document ends with it."""


@dataclass(frozen=True)
class Stream:
    """Which documents, and how they become tokens."""

    inputs: Sequence[Input]
    format: Format
    tokenizer: tokenizers.Tokenizer
    end_token: int
    tell: Callable[[str], None] = lambda sentence: None
    """Called with a sentence for each file with lines that are no document."""

    @cached_property
    def identity(self) -> str:
        return fingerprint_of(self.inputs)

    def pieces(self, place: Place) -> Iterator[Piece]:
        """The stream from a place on, files again and again.

        Raises:
            UserError: a file is damaged, or there is no document in any.
        """
        start = place
        while True:
            found = False
            for number in range(start.file, len(self.inputs)):
                first, skip = (start.part, start.token) if number == start.file else (0, 0)
                for part, ids, ends in self._encoded(number, first):
                    found = True
                    yield Piece(Place(number, part, skip), ids[skip:], ends)
                    skip = 0
            if not found and start == Place(0, 0, 0):
                raise UserError(f"{self.inputs[0].path}, and what is named with it, holds no document to stream")
            start = Place(0, 0, 0)

    def _encoded(self, number: int, first: int) -> Iterator[tuple[int, np.ndarray, bool]]:
        file = self.inputs[number]
        span = whole(file)
        passed = Passed.of(span)
        # Parts before the first are read, which is quick, and not tokenised, which is not.
        parts = islice(read_documents(span, self.format, passed), first, None)
        for some in batched(parts):
            ids, lengths = encode(self.tokenizer, self.end_token, some)
            for part, piece in zip(some, np.split(np.asarray(ids, np.int32), np.cumsum(lengths)[:-1]), strict=True):
                yield first, piece, part.ends
                first += 1
        if passed.reasons:
            line, reason = passed.reasons[0]
            self.tell(f"Left out {passed.num_malformed} lines of {file.path}; line {line + 1} {reason}.")


class Streamed:
    """A stream as an endless source."""

    records_per_epoch = None

    def __init__(self, stream: Stream, sequence_length: int, key: int, block_records: int = BLOCK_RECORDS) -> None:
        """
        Args:
            stream: what to read.
            sequence_length: tokens of a record.
            key: names the order within blocks, uint64.
            block_records: how many records are shuffled among each other, and held in memory.
        """
        self._stream = stream
        self._sequence_length = sequence_length
        self._key = key
        self._block_records = block_records
        self._places = {0: Place(0, 0, 0)}
        self._blocks: OrderedDict[int, Concatenated] = OrderedDict()
        self._go_to(0)

    @property
    def identity(self) -> str:
        return f"{self._stream.identity}:stream-{self._sequence_length}-{self._block_records}"

    def take(self, numbers: Int[np.ndarray, "batch"]) -> Fields:
        blocks, within = np.divmod(numbers, self._block_records)
        parts = []
        for block in np.unique(blocks).tolist():
            (rows,) = np.nonzero(blocks == block)
            order = permute(within[rows], self._block_records, order_key(self._key, block))
            parts.append((rows, self._block(block).read(order)))
        return merge(parts, len(numbers))

    def position(self, number: int) -> list[int]:
        """The last block at or before that of the record of which the place is known, and that place."""
        block = max(known for known in list(self._places) if known <= number // self._block_records)
        return [block, *self._places[block]]

    def seek(self, position: Sequence[int]) -> None:
        block, *place = position
        self._places[block] = Place(*place)

    def _block(self, block: int) -> Concatenated:
        if block not in self._blocks:
            known = max(known for known in self._places if known <= block)
            if not known <= self._next <= block:
                self._go_to(known)
            while self._next <= block:
                records = self._read_block()
            self._blocks[block] = records
            while len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[block]

    def _go_to(self, block: int) -> None:
        self._next = block
        self._pieces = self._stream.pieces(self._places[block])
        self._left: Piece | None = None

    def _read_block(self) -> Concatenated:
        """Reads the next block, whose last target is the first token of the one after it."""
        size = self._block_records * self._sequence_length
        ids, ends, filled = np.empty(size + 1, np.int32), [], 0
        while True:
            piece = self._left or next(self._pieces)
            used = min(len(piece.ids), size - filled)
            ids[filled : filled + used] = piece.ids[:used]
            filled += used
            if used < len(piece.ids):
                break
            if piece.ends:
                ends.append(filled)
            self._left = None
        self._left = Piece(piece.place._replace(token=piece.place.token + used), piece.ids[used:], piece.ends)
        ids[size] = self._left.ids[0]
        self._next += 1
        self._places[self._next] = self._left.place
        # The document that the block ends in ends beyond it.
        ends.append(size + 2)
        tokens = Tokens((ids,), size + 1)
        return Concatenated(tokens, np.asarray(ends), 0, size + 1, self._sequence_length, identity="")
