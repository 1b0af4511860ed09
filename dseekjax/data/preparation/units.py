"""Input files cut into units of work, which depend on the files alone: any number of workers makes the same corpus."""

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from dseekjax.data.reading.documents import Span
from dseekjax.data.reading.inputs import Format, Input
from dseekjax.data.reading.parquet import row_groups

UNIT_BYTES = 4 << 20
SEARCHED_BYTES = 1 << 20
LINE_END = re.compile(rb"\n")
BETWEEN_LINES = re.compile(rb"(?<=\S)\n(?=[^\s])")

Unit = tuple[Span, ...]


def plan_units(inputs: Sequence[Input], format: Format) -> list[Unit]:
    """All that is to be read, in order: large files in several units, small ones several to a unit.

    A file that is compressed, or is cut into documents by an expression, has to be read from its start and stays whole.

    Raises:
        UserError: a Parquet file is damaged.
        OSError: a file cannot be read.
    """
    units: list[Unit] = []
    unit: list[Span] = []
    num_bytes = 0
    for file in inputs:
        for span in _spans(file, format):
            if unit and num_bytes + span.num_bytes > UNIT_BYTES:
                units.append(tuple(unit))
                unit, num_bytes = [], 0
            unit.append(span)
            num_bytes += span.num_bytes
    return [*units, tuple(unit)] if unit else units


def _spans(file: Input, format: Format) -> Iterator[Span]:
    if file.kind == "parquet":
        groups = row_groups(file)
        share = file.size // max(1, len(groups))
        yield from (Span(file, i, i + 1, share) for i in range(len(groups)))
    elif file.compression or file.size <= UNIT_BYTES or (file.kind == "text" and format.document_separator):
        yield Span(file, 0, file.size, file.size)
    else:
        with open(file.path, "rb") as stream:
            start = 0
            while start < file.size:
                stop = min(file.size, _place_to_cut(stream, start + UNIT_BYTES, file))
                yield Span(file, start, stop, stop - start)
                start = stop


def _place_to_cut(stream: BinaryIO, near: int, file: Input) -> int:
    """Where a line begins at or after `near`; JSON lines are cut nowhere else, a text between any two characters."""
    stream.seek(near - 1)
    if file.kind == "jsonl":
        stream.readline()
        return stream.tell()
    window = stream.read(SEARCHED_BYTES)
    match = BETWEEN_LINES.search(window) or LINE_END.search(window)
    if match:
        return near - 1 + match.end()
    return near + next((i for i, byte in enumerate(window[1:]) if byte & 0xC0 != 0x80), len(window) - 1)
