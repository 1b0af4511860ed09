"""A document or a part of one: what readers make and tokenizers take."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PART_CHARACTERS = 1 << 17
# Tokenizers that split text into words first, as all byte-level ones do, split there too: cut so, the parts of a text
# have the tokens of the whole.
BETWEEN_LINES = re.compile(r"(?<=\S)\n(?=\S)")
LINE_END = re.compile(r"\n")
SEARCHED = 1 << 14


class Part(NamedTuple):
    text: str
    ends: bool
    """Whether the document ends with it."""
    counts: bool = True
    """Whether its tokens, and the end token after it, are targets of the loss."""


class Segment(NamedTuple):
    """A stretch of a document that counts, or does not, as a whole; it is tokenised apart from the others."""

    text: str
    counts: bool = True


class Row(NamedTuple):
    """A document of a file that holds one to a line."""

    segments: tuple[Segment, ...] | None
    reason: str = ""
    """Why there is no document."""


def cut_segments(segments: Sequence[Segment]) -> Iterator[Part]:
    """A document in parts, none of them of more than one segment."""
    for number, segment in enumerate(segments, start=1):
        yield from cut(segment.text, number == len(segments), segment.counts)


def cut(text: str, ends: bool, counts: bool = True) -> Iterator[Part]:
    """A text in parts of about PART_CHARACTERS."""
    start = 0
    while len(text) - start > 2 * PART_CHARACTERS:
        stop = place_to_cut(text, start + PART_CHARACTERS)
        yield Part(text[start:stop], False, counts)
        start = stop
    yield Part(text[start:], ends, counts)


def place_to_cut(text: str, near: int) -> int:
    """An index at or after `near` where a line begins, or `near` where no line ends for long."""
    searched = (text, near, near + SEARCHED)
    match = BETWEEN_LINES.search(*searched) or LINE_END.search(*searched)
    return match.end() if match else near
