"""Parquet as rows. Needs the extra `parquet`, which is loaded when a file asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dseekjax.data.reading.inputs import Input
from dseekjax.data.reading.parts import Row
from dseekjax.data.reading.rows import ChatRow, RowForm
from dseekjax.errors import UserError

ROWS_PER_READ = 256
STRINGS = ("string", "large_string", "dictionary<values=string", "dictionary<values=large_string")
LISTS = ("list<", "large_list<")


def read_parquet(file: Input, start: int, stop: int, row: RowForm) -> Iterator[Row]:
    """The rows of row groups `start` to `stop`.

    Raises:
        UserError: the file is damaged or has no such column, or pyarrow is not installed.
    """
    with _open(file) as table:
        names = table.schema_arrow.names
        wanted, called = (LISTS, "lists of messages") if isinstance(row, ChatRow) else (STRINGS, "strings")
        for field in row.fields:
            if field not in names:
                known = ", ".join(map(repr, names))
                raise UserError(f"{file.path} has no column {field!r}, only {known}; give one of {called}")
            if names.count(field) > 1:
                raise UserError(f"{file.path} has {names.count(field)} columns {field!r}; rename all but one")
            kind = str(table.schema_arrow.field(field).type)
            if not kind.startswith(wanted):
                raise UserError(f"{file.path}: column {field!r} is of type {kind}; give one of {called}")
        groups = list(range(start, stop))
        for batch in table.iter_batches(ROWS_PER_READ, row_groups=groups, columns=list(row.fields)):
            for values in batch.to_pylist(maps_as_pydicts="lossy"):
                yield row.read({name: _without_nulls(value) for name, value in values.items()})


def row_groups(file: Input) -> list[tuple[int, int]]:
    """Rows and uncompressed bytes of each row group; raises UserError as `read_parquet` does."""
    with _open(file) as table:
        groups = (table.metadata.row_group(i) for i in range(table.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


def _without_nulls(value: Any) -> Any:
    """As a line of JSON has it: a column has a null for each key that an object is without and another has."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _open(file: Input) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{file.path} is Parquet, for which pyarrow is missing; install it with `pip install 'dseekjax[parquet]'`"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(file.path, memory_map=True, pre_buffer=False) as table:
            yield table
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{file.path} is no sound Parquet file ({reason}); get it anew") from error
