"""JSON lines as rows."""

import codecs
from collections.abc import Iterator

import pydantic_core

from dseekjax.data.reading.inputs import Input
from dseekjax.data.reading.open_bytes import open_bytes
from dseekjax.data.reading.parts import Row, Segment
from dseekjax.data.reading.rows import RowForm


def read_json_lines(file: Input, start: int, stop: int, row: RowForm) -> Iterator[Row]:
    """A row for each line that begins in `[start, stop)`; `start` begins a line. Blank lines have no text.

    Raises:
        UserError: the file is compressed and damaged.
    """
    with open_bytes(file) as stream:
        if start:
            stream.seek(start)
        left = stop - start
        for number, line in enumerate(stream):
            if left <= 0 and file.compression is None:
                break
            left -= len(line)
            yield _row(line.removeprefix(codecs.BOM_UTF8) if number == start == 0 else line, row)


def _row(line: bytes, row: RowForm) -> Row:
    if line.isspace():
        return Row((Segment(""),))
    try:
        values = pydantic_core.from_json(line)
    except ValueError as error:
        reason = str(error).replace(" at line 1 column", " at column")
        return Row(None, f"is no JSON ({reason})")
    if not isinstance(values, dict):
        return Row(None, f"is no JSON object but a {type(values).__name__}")
    return row.read(values)
