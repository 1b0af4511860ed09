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
        UserError: the file is compressed and damaged, or JSON that goes on from line to line: some lines of that
            may look right.
    """
    with open_bytes(file) as stream:
        if start:
            stream.seek(start)
        left, unread, goes_on = stop - start, start == 0, False
        for number, line in enumerate(stream):
            if left <= 0 and file.compression is None:
                break
            left -= len(line)
            line = line.removeprefix(codecs.BOM_UTF8) if number == start == 0 else line
            if not line.isspace():
                if goes_on and not _is_object(line):
                    raise UserError(
                        f"{file.path} holds JSON that goes on from line to line, where each line is to be an object; "
                        "convert it, as an array with `jq -c '.[]' FILE >FILE.jsonl`"
                    )
                unread, goes_on = False, unread and _goes_on(line)
            yield _row(line, row)


def _goes_on(line: bytes) -> bool:
    """Whether a line begins a value that it does not end, or ends with what comes between two."""
    try:
        pydantic_core.from_json(line)
    except ValueError as error:
        return str(error).startswith("EOF while parsing") or line.rstrip().endswith(b",")
    return False


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(pydantic_core.from_json(line), dict)
    except ValueError:
        return False


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
