"""The tokens of all units, one after the other, in shards; it goes on from wherever it was stopped."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from pydantic import BaseModel

from dseekjax.data.manifest import DOCUMENT_BYTES, DOCUMENT_ENDS, File, LeftOut, hash_file, shard_name
from dseekjax.data.preparation.worker import UnitFiles, UnitReport
from dseekjax.data.reading.documents import REPORTED, Passed
from dseekjax.files import write_whole

SHARD_BYTES = 128 << 20
COPIED_BYTES = 8 << 20
JOURNAL = "journal.json"


class Journal(BaseModel):
    """How far it came, written after every unit: what lies in the files beyond that is cut off at the next start."""

    made_from: str
    """Fingerprint of inputs, tokenizer and options."""
    num_units: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    open_bytes: int = 0
    """Of the document that goes on in the next unit."""
    full_shards: list[str] = []
    """Their hashes."""
    left_out: LeftOut = LeftOut()
    lines_of_file: int = 0
    """How many lines of the file that the last unit ended in have been read."""


def read_journal(folder: Path) -> Journal | None:
    """The journal of an earlier run in this folder, if there was one."""
    path = folder / JOURNAL
    return Journal.model_validate_json(path.read_bytes()) if path.is_file() else None


def write_journal(folder: Path, journal: Journal) -> None:
    write_whole(folder / JOURNAL, journal.model_dump_json())


class Shards:
    """Writes shards and the ends of documents into a folder."""

    def __init__(self, folder: Path, dtype: str, journal: Journal) -> None:
        """
        Args:
            folder: of the corpus.
            dtype: of the token ids.
            journal: where to go on.
        """
        self._folder = folder
        self._itemsize = np.dtype(dtype).itemsize
        self.tokens_per_shard = SHARD_BYTES // self._itemsize
        self.journal = journal
        self._full = list(journal.full_shards)

    def __enter__(self) -> Self:
        begun = [shard_name(number) for number in range(len(self._full) + 1)]
        for path in self._folder.glob("tokens-*.bin"):
            if path.name not in begun:
                path.unlink()
        documents = self.journal.num_documents * 8
        self._ends = _open_at(self._folder / DOCUMENT_ENDS, documents)
        self._bytes = _open_at(self._folder / DOCUMENT_BYTES, documents)
        tokens = self.journal.num_tokens - len(self._full) * self.tokens_per_shard
        self._open_shard(tokens * self._itemsize)
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self._shard, self._ends, self._bytes):
            file.close()

    def append(self, report: UnitReport, files: UnitFiles) -> None:
        """Adds the next unit and removes its files.

        Raises:
            OSError: a file cannot be written.
        """
        before = self.journal
        tokens, num_bytes = np.fromfile(files.documents, np.int64).reshape(-1, 2).T
        # The first document to end here may have begun in an earlier unit.
        num_bytes[:1] += before.open_bytes
        self._ends.write((before.num_tokens + np.cumsum(tokens)).tobytes())
        self._bytes.write(num_bytes.tobytes())
        self._append_tokens(files.tokens)
        for file in (self._shard, self._ends, self._bytes):
            _flush(file)
        self.journal = Journal(
            made_from=before.made_from,
            num_units=before.num_units + 1,
            num_tokens=before.num_tokens + report.num_tokens,
            num_documents=before.num_documents + report.num_documents,
            num_bytes=before.num_bytes + int(num_bytes.sum()),
            open_bytes=report.open_bytes + (0 if report.num_documents else before.open_bytes),
            full_shards=list(self._full),
            **_left_out(before, report.spans),
        )
        write_journal(self._folder, self.journal)
        files.remove()

    def finish(self) -> dict[str, File]:
        """The files that were written, with their hashes."""
        hashes = self._full
        if self._shard_size:
            hashes = [*self._full, self._digest.hexdigest()]
        else:
            (self._folder / shard_name(len(self._full))).unlink()
        files = {shard_name(number): sha256 for number, sha256 in enumerate(hashes)}
        files |= {name: hash_file(self._folder / name) for name in (DOCUMENT_ENDS, DOCUMENT_BYTES)}
        return {name: File.of(self._folder / name, sha256) for name, sha256 in files.items()}

    def _open_shard(self, size: int) -> None:
        """Goes on with the last shard, which has `size` bytes so far."""
        path = self._folder / shard_name(len(self._full))
        self._shard, self._shard_size = _open_at(path, size), size
        self._digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(COPIED_BYTES):
                self._digest.update(block)

    def _append_tokens(self, path: Path) -> None:
        with open(path, "rb") as tokens:
            while block := tokens.read(min(COPIED_BYTES, SHARD_BYTES - self._shard_size)):
                self._shard.write(block)
                self._digest.update(block)
                self._shard_size += len(block)
                if self._shard_size == SHARD_BYTES:
                    _flush(self._shard)
                    self._shard.close()
                    self._full.append(self._digest.hexdigest())
                    self._open_shard(0)


def _left_out(before: Journal, spans: Sequence[Passed]) -> dict[str, Any]:
    lines, examples = before.lines_of_file, list(before.left_out.examples)
    for passed in spans:
        lines = 0 if passed.starts_file else lines
        examples += [f"{passed.path} line {lines + number + 1} {reason}" for number, reason in passed.reasons]
        lines += passed.num_lines
    left_out = LeftOut(
        num_malformed=before.left_out.num_malformed + sum(passed.num_malformed for passed in spans),
        num_empty=before.left_out.num_empty + sum(passed.num_empty for passed in spans),
        examples=examples[:REPORTED],
    )
    return {"left_out": left_out, "lines_of_file": lines}


def _open_at(path: Path, size: int) -> BinaryIO:
    """A file to append to, without what lies beyond `size`."""
    file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by its owner
    file.truncate(size)
    file.seek(size)
    return file


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
