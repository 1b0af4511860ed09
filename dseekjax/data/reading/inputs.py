"""Which files are meant, and what is in them."""

import errno
import glob
import hashlib
import importlib.resources
import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dseekjax.data.reading.rows import ChatRow, CompletionRow, RowForm, TextRow
from dseekjax.errors import UserError

BUILTIN = "builtin:"
TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
SAMPLED_BYTES = 1 << 16
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Format:
    """How documents lie in files."""

    text_field: str = "text"
    """Of JSON lines and Parquet: where a document's text is."""
    document_separator: str | None = None
    """Of text files: regular expression between two documents; null makes a file one document."""
    strict: bool = False
    """Whether a line that is no document is an error, rather than skipped and counted."""
    example: CompletionRow | ChatRow | None = None
    """What JSON lines and Parquet hold instead of texts, if they do: documents of which a part only counts."""

    @property
    def row(self) -> RowForm:
        """How a row becomes a document."""
        return self.example or TextRow(self.text_field)

    def refuse_unused(self, inputs: Sequence["Input"]) -> None:
        """Raises UserError if it says how to read files of a kind that is not there."""
        kinds = {file.kind for file in inputs}
        if self.document_separator is not None and "text" not in kinds:
            raise UserError("a document separator is for text files, and there are none; leave it out")
        if self.example is not None and "text" in kinds:
            named = next(file.path for file in inputs if file.kind == "text")
            raise UserError(f"{named} is a text, and prompts and answers are read from .jsonl and .parquet; give those")
        if self.example is not None and self.text_field != "text":
            raise UserError(
                f"the text field {self.text_field!r} is for documents that are one text, and these are put together "
                f"from {', '.join(map(repr, self.example.fields))}; leave it out"
            )
        if self.text_field != "text" and kinds == {"text"}:
            raise UserError(
                f"the text field {self.text_field!r} is not for text files, and there are no others; leave it out"
            )


@dataclass(frozen=True)
class Input:
    """A file of documents."""

    path: str
    kind: Literal["text", "jsonl", "parquet"]
    compression: str | None
    size: int
    """Bytes, as they lie on disk."""
    modified: int
    """Nanoseconds since 1970."""


def find_inputs(patterns: Iterable[str]) -> tuple[Input, ...]:
    """The files that patterns name, each once: patterns in their order, the files of each sorted by path.

    Raises:
        UserError: a pattern names no file, or one that is not there.
    """
    found: dict[str, Input] = {}
    for pattern in patterns:
        for path in _paths(pattern):
            found.setdefault(os.path.realpath(path), _input(path))
    return tuple(found.values())


def fingerprint_of(inputs: Sequence[Input]) -> str:
    """A hash of names, sizes and some of the content of files, which stays when all are moved elsewhere.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in inputs:
        digest.update(json.dumps([Path(file.path).name, file.size]).encode())
        with open(file.path, "rb") as stream:
            for place in (0, file.size // 2, max(0, file.size - SAMPLED_BYTES)):
                stream.seek(place)
                digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()


def _paths(pattern: str) -> list[Path]:
    if pattern.startswith(BUILTIN):
        file = Path(str(importlib.resources.files("dseekjax.data"))) / "texts" / f"{pattern.removeprefix(BUILTIN)}.txt"
        if not file.is_file():
            raise UserError(f"there is no {pattern}; the only built-in text is builtin:emma")
        return [file]
    if not pattern:
        raise UserError("a path is empty; give the path of a file")
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise UserError(f"{pattern} is a folder; name its files, as in '{pattern.rstrip('/')}/**/*.txt'")
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    matches = (Path(match) for match in glob.glob(str(path), recursive=True))
    paths = sorted(match for match in matches if match.is_file())
    if not paths:
        raise UserError(f"no file is named by {pattern}; patterns are relative to the working folder")
    return paths


def _input(path: Path) -> Input:
    suffixes = path.suffixes
    compression = COMPRESSIONS.get(suffixes[-1].lower()) if suffixes else None
    inner = suffixes[:-1] if compression else suffixes
    kind = TABLES.get(inner[-1].lower(), "text") if inner else "text"
    try:
        status = path.stat()
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}); give the path of a file, relative to the working folder"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is neither a file nor a pattern of files; give one")
    if kind == "parquet" and compression:
        raise UserError(f"{path} is compressed as a whole; Parquet compresses by column, so give it unpacked")
    return Input(str(path.absolute()), kind, compression, status.st_size, status.st_mtime_ns)  # type: ignore[arg-type]
