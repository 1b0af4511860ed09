"""Documents of one span of a file, whatever its format."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel

from dseekjax.data.reading.inputs import Format, Input
from dseekjax.data.reading.json_lines import read_json_lines
from dseekjax.data.reading.parquet import read_parquet, row_groups
from dseekjax.data.reading.parts import Part, cut_segments
from dseekjax.data.reading.text import read_text
from dseekjax.errors import UserError

REPORTED = 20


@dataclass(frozen=True)
class Span:
    """A stretch of a file that can be read without the rest."""

    file: Input
    start: int
    """First byte of text and JSON lines, first row group of Parquet."""
    stop: int
    """The same, of what comes after it."""
    num_bytes: int
    """What it takes of the file, or about that."""


def whole(file: Input) -> Span:
    """All of a file; raises UserError if it is a damaged Parquet file."""
    stop = len(row_groups(file)) if file.kind == "parquet" else file.size
    return Span(file, 0, stop, file.size)


class Passed(BaseModel):
    """How far the reading of a span has come, and what was left out on the way."""

    path: str
    starts_file: bool
    num_lines: int = 0
    """Of JSON, or rows of Parquet."""
    num_malformed: int = 0
    num_empty: int = 0
    """Documents of nothing but white space."""
    reasons: list[tuple[int, str]] = []
    """Line within the span, from 0, and what is wrong with it; the first few."""

    @classmethod
    def of(cls, span: Span) -> Self:
        return cls(path=span.file.path, starts_file=span.start == 0)


def read_documents(span: Span, format: Format, passed: Passed) -> Iterator[Part]:
    """The documents of a span, long ones in several parts.

    Args:
        span: what to read.
        format: how documents lie in it.
        passed: filled in as reading goes on.

    Raises:
        UserError: the file is damaged or no text; with `format.strict`, a line is no document.
    """
    path = span.file.path
    try:
        if span.file.kind == "text":
            parts = read_text(span.file, span.start, span.stop, format.document_separator)
            yield from _without_empty(parts, passed, is_open=span.start > 0)
            return
        rows = read_json_lines if span.file.kind == "jsonl" else read_parquet
        for row in rows(span.file, span.start, span.stop, format.row):
            number, passed.num_lines = passed.num_lines, passed.num_lines + 1
            if row.segments is not None:
                yield from _without_empty(cut_segments(row.segments), passed, is_open=False)
                continue
            passed.num_malformed += 1
            if format.strict:
                raise UserError(
                    f"{path} line {_line_number(span, number)} {row.reason}; mend it, or do without strictness"
                )
            if len(passed.reasons) < REPORTED:
                passed.reasons.append((number, row.reason))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error}); mend that and run again") from error


def _without_empty(parts: Iterable[Part], passed: Passed, is_open: bool) -> Iterator[Part]:
    """Leaves out documents of nothing but white space; `is_open` tells whether the first part goes on with one."""
    for part in parts:
        if not is_open and part.ends and (not part.text or part.text.isspace()):
            passed.num_empty += 1
            continue
        is_open = not part.ends
        yield part


def _line_number(span: Span, number: int) -> int:
    """The line's number in its file, from 1, for which all before the span have to be counted."""
    if span.file.kind == "parquet":
        return number + 1 + sum(rows for rows, _ in row_groups(span.file)[: span.start])
    before, left = 0, span.start
    with open(span.file.path, "rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            before, left = before + block.count(b"\n"), left - len(block)
    return before + number + 1
