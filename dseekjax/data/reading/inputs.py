"""Which files are meant, and what is in them."""

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
    sample: str
    """A hash of its content: of all of it where it is small, else of its beginning, middle and end."""


def find_inputs(patterns: Iterable[str]) -> tuple[Input, ...]:
    """The files that patterns name, each once: patterns in their order, the files of each sorted by path.

    Raises:
        UserError: a pattern names no file, or one that is not there.
    """
    found: dict[str, Input] = {}
    for pattern in patterns:
        for path in _paths(pattern):
            found.setdefault(os.path.realpath(path), look_at(path))
    return tuple(found.values())


def fingerprint_of(inputs: Sequence[Input]) -> str:
    """A hash of names, sizes and samples of files, which stays when all are moved elsewhere."""
    parts = [[Path(file.path).name, file.size, file.sample] for file in inputs]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def look_at(path: Path) -> Input:
    """A file as it is now.

    Raises:
        UserError: it cannot be read, or not as a file of documents.
    """
    suffixes = path.suffixes
    compression = COMPRESSIONS.get(suffixes[-1].lower()) if suffixes else None
    inner = suffixes[:-1] if compression else suffixes
    kind = TABLES.get(inner[-1].lower(), "text") if inner else "text"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is neither a file nor a pattern of files; give one")
        sample = _sample(path, status.st_size)
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror}); give the path of a file, relative to the working folder"
        ) from error
    if kind == "parquet" and compression:
        raise UserError(f"{path} is compressed as a whole; Parquet compresses by column, so give it unpacked")
    size, modified = status.st_size, status.st_mtime_ns
    return Input(str(path.absolute()), kind, compression, size, modified, sample)  # type: ignore[arg-type]


def _sample(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for place in sorted({0, max(0, (size - SAMPLED_BYTES) // 2), max(0, size - SAMPLED_BYTES)}):
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
    # What stands for a user's home is no pattern, whatever letters it has.
    first, slash, rest = pattern.partition("/")
    first = glob.escape(os.path.expanduser(first)) if first.startswith("~") else first
    matches = map(Path, glob.glob(f"{first}{slash}{rest}", recursive=True))
    paths = sorted(match for match in matches if match.is_file())
    if not paths:
        raise UserError(f"no file is named by {pattern}; patterns are relative to the working folder")
    return paths
