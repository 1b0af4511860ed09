"""A document or a part of one: what readers make and tokenizers take."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

PART_CHARACTERS = 1 << 17
# Tokenizers that split text into words first, as all byte-level ones do, split there too: cut so, the parts of a text
# have the tokens of the whole.
BETWEEN_LINES = re.compile(r"(?<=\S)\n(?=\S)")
LINE_END = re.compile(r"\n")
SEARCHED = 1 << 14


Characters = tuple[int, int]
"""A stretch of a text: its first character, and the one after its last."""


class Part(NamedTuple):
    text: str
    ends: bool
    """Whether the document ends with it."""
    uncounted: tuple[Characters, ...] = ()
    """What of the text is no target of the loss, in order."""
    end_counts: bool = True
    """Whether the end token after it is a target of the loss."""


class Segment(NamedTuple):
    """A stretch of a document whose characters are targets of the loss, or are not."""

    text: str
    counts: bool = True


class Row(NamedTuple):
    """A document of a file that holds one to a line."""

    segments: tuple[Segment, ...] | None
    reason: str = ""
    """Why there is no document."""


def cut_segments(segments: Sequence[Segment]) -> Iterator[Part]:
    """A document in parts of about PART_CHARACTERS, which segments have no influence on."""
    stops = list(accumulate(len(segment.text) for segment in segments))
    uncounted = [
        (stop - len(segment.text), stop)
        for segment, stop in zip(segments, stops, strict=True)
        if segment.text and not segment.counts
    ]
    start = 0
    for part in cut("".join(segment.text for segment in segments), True):
        stop = start + len(part.text)
        within = ((max(first, start) - start, min(after, stop) - start) for first, after in uncounted)
        yield part._replace(
            uncounted=tuple((first, after) for first, after in within if first < after),
            end_counts=segments[-1].counts,
        )
        start = stop


def cut(text: str, ends: bool) -> Iterator[Part]:
    """A text in parts of about PART_CHARACTERS, all of which counts."""
    start = 0
    while len(text) - start > 2 * PART_CHARACTERS:
        stop = place_to_cut(text, start + PART_CHARACTERS)
        yield Part(text[start:stop], False)
        start = stop
    yield Part(text[start:], ends)


def place_to_cut(text: str, near: int) -> int:
    """An index at or after `near` where a line begins, or `near` where no line ends for long."""
    searched = (text, near, near + SEARCHED)
    match = BETWEEN_LINES.search(*searched) or LINE_END.search(*searched)
    return match.end() if match else near
