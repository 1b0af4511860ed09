"""JSON lines as rows."""

import codecs
from collections.abc import Iterator

import pydantic_core

from dseekjax.data.reading.inputs import Input
from dseekjax.data.reading.open_bytes import open_bytes
from dseekjax.data.reading.parts import Row, Segment
from dseekjax.data.reading.rows import RowForm
from dseekjax.errors import UserError


def read_json_lines(file: Input, start: int, stop: int, row: RowForm) -> Iterator[Row]:
    """A row for each line that begins in `[start, stop)`; `start` begins a line. Blank lines have no text.

    Raises:
        UserError: the file is compressed and damaged, or a single value over several lines.
    """
    with open_bytes(file) as stream:
        if start:
            stream.seek(start)
        left, begins = stop - start, start == 0
        for number, line in enumerate(stream):
            if left <= 0 and file.compression is None:
                break
            left -= len(line)
            if begins and not line.isspace():
                _refuse_one_value(file, line)
                begins = False
            yield _row(line.removeprefix(codecs.BOM_UTF8) if number == start == 0 else line, row)


def _refuse_one_value(file: Input, first_line: bytes) -> None:
    """Raises UserError if what the first line begins goes on in the next: some of those alone may look right."""
    try:
        pydantic_core.from_json(first_line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        if first_line.endswith(b"\n") and str(error).startswith("EOF while parsing"):
            raise UserError(
                f"{file.path} holds one JSON value over several lines, where each line is to be an object; convert it, "
                "as an array with `jq -c '.[]' FILE >FILE.jsonl`"
            ) from error


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
