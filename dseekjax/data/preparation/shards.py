"""The tokens of all units, one after the other, in shards; it goes on from wherever it was stopped."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel

from dseekjax.data.manifest import (
    COUNTED_BYTES,
    DOCUMENT_BYTES,
    DOCUMENT_ENDS,
    MASK_ENDS,
    MASK_STARTS,
    File,
    LeftOut,
    shard_name,
)
from dseekjax.data.preparation.appended import COPIED_BYTES, Appended, Left
from dseekjax.data.preparation.worker import UnitFiles, UnitReport
from dseekjax.data.reading.documents import REPORTED, Passed
from dseekjax.errors import UserError
from dseekjax.files import write_whole

SHARD_BYTES = 128 << 20
JOURNAL = "journal.json"


class Journal(BaseModel):
    """How far it came, written after every unit: what lies in the files beyond that is cut off at the next start."""

    made_from: str
    """Fingerprint of inputs, tokenizer and options."""
    tokenizer: str
    """Hash of its file."""
    num_units: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    open_bytes: int = 0
    """Of the document that goes on in the next unit."""
    full_shards: list[str] = []
    """Their hashes."""
    shard: Left = Left()
    """The shard that is not full yet."""
    ends: Left = Left()
    bytes: Left = Left()
    counted_bytes: Left = Left()
    mask_starts: Left = Left()
    mask_ends: Left = Left()
    left_out: LeftOut = LeftOut()
    lines_of_file: int = 0
    """How many lines of the file that the last unit ended in have been read."""


def read_journal(folder: Path) -> Journal | None:
    """The journal of an earlier run in this folder, if there was one.

    Raises:
        UserError: it is damaged.
    """
    path = folder / JOURNAL
    try:
        return Journal.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValueError as error:
        raise UserError(f"{path} is damaged; remove {folder} to start over") from error


def write_journal(folder: Path, journal: Journal) -> None:
    write_whole(folder / JOURNAL, journal.model_dump_json())


# Files of a number for each document, or each stretch that does not count, and where the journal tells of them.
COLUMNS = {DOCUMENT_ENDS: "ends", DOCUMENT_BYTES: "bytes"}
MASKED_COLUMNS = {**COLUMNS, COUNTED_BYTES: "counted_bytes", MASK_STARTS: "mask_starts", MASK_ENDS: "mask_ends"}


class Shards:
    """Writes shards, and what is known of documents, into a folder."""

    def __init__(self, folder: Path, dtype: str, journal: Journal, columns: Mapping[str, str] = COLUMNS) -> None:
        """
        Args:
            folder: of the corpus.
            dtype: of the token ids.
            journal: where to go on.
            columns: `COLUMNS`, or `MASKED_COLUMNS` where not every token counts.
        """
        self._names = columns
        self._folder = folder
        self.tokens_per_shard = SHARD_BYTES // np.dtype(dtype).itemsize
        self.journal = journal
        self._full = list(journal.full_shards)

    def __enter__(self) -> Self:
        """Raises UserError if what the journal tells of is not there any more."""
        journal = self.journal
        self._columns = {
            name: Appended(self._folder / name, getattr(journal, field)) for name, field in self._names.items()
        }
        self._shard = Appended(self._folder / shard_name(len(self._full)), journal.shard)
        return self

    def __exit__(self, *exception: object) -> None:
        for file in (self._shard, *self._columns.values()):
            file.close()

    def append(self, report: UnitReport, files: UnitFiles) -> None:
        """Adds the next unit and removes its files.

        Raises:
            OSError: a file cannot be written.
        """
        before = self.journal
        tokens, num_bytes, counted_bytes = np.fromfile(files.documents, np.int64).reshape(-1, 3).T
        mask_starts, mask_ends = before.num_tokens + np.fromfile(files.mask, np.int64).reshape(-1, 2).T
        # The first document to end here may have begun in an earlier unit.
        num_bytes[:1] += before.open_bytes
        columns = {
            DOCUMENT_ENDS: before.num_tokens + np.cumsum(tokens),
            DOCUMENT_BYTES: num_bytes,
            COUNTED_BYTES: counted_bytes,
            MASK_STARTS: mask_starts,
            MASK_ENDS: mask_ends,
        }
        for name, file in self._columns.items():
            file.write(columns[name].tobytes())
        self._append_tokens(files.tokens)
        for file in (self._shard, *self._columns.values()):
            file.flush()
        self.journal = Journal(
            made_from=before.made_from,
            tokenizer=before.tokenizer,
            num_units=before.num_units + 1,
            num_tokens=before.num_tokens + report.num_tokens,
            num_documents=before.num_documents + report.num_documents,
            num_bytes=before.num_bytes + int(num_bytes.sum()),
            open_bytes=report.open_bytes + (0 if report.num_documents else before.open_bytes),
            full_shards=list(self._full),
            shard=self._shard.left,
            **{self._names[name]: file.left for name, file in self._columns.items()},
            **_left_out(before, report.spans),
        )
        write_journal(self._folder, self.journal)
        files.remove()

    def finish(self) -> dict[str, File]:
        """The files that were written, with their hashes."""
        assert not self.journal.open_bytes, "the last document has no end"
        full = {shard_name(number): File(size=SHARD_BYTES, sha256=it) for number, it in enumerate(self._full)}
        growing = {name: file.left for name, file in self._columns.items()}
        if self._shard.size:
            growing[shard_name(len(self._full))] = self._shard.left
        return full | {name: File(size=left.size, sha256=left.sha256) for name, left in growing.items()}

    def _append_tokens(self, path: Path) -> None:
        with open(path, "rb") as tokens:
            while block := tokens.read(min(COPIED_BYTES, SHARD_BYTES - self._shard.size)):
                self._shard.write(block)
                if self._shard.size == SHARD_BYTES:
                    self._shard.flush()
                    self._shard.close()
                    self._full.append(self._shard.left.sha256)
                    self._shard = Appended(self._folder / shard_name(len(self._full)), Left())


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
