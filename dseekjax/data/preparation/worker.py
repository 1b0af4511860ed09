"""One unit of work: its documents read, tokenised and written down."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Bool, Int
from pydantic import BaseModel

from dseekjax.data.encoding import batched, encode, encode_examples
from dseekjax.data.preparation.units import Unit
from dseekjax.data.reading.documents import Passed, read_documents
from dseekjax.data.reading.inputs import Format
from dseekjax.data.reading.parts import Part
from dseekjax.files import write_whole


class UnitReport(BaseModel):
    """What came of a unit. Where the file of this report is, the files beside it are whole."""

    num_tokens: int
    num_documents: int
    num_masked: int = 0
    """Stretches of tokens that do not count."""
    open_bytes: int
    """Of the document that the last token belongs to and that goes on in the next unit."""
    spans: list[Passed]


@dataclass(frozen=True)
class UnitFiles:
    """Where a unit is written."""

    report: Path
    tokens: Path
    """All ids, each document closed by the end token."""
    documents: Path
    """Tokens, bytes and bytes that count of each document that ends here, int64; of the first, what lies in this
    unit."""
    mask: Path
    """Where stretches of tokens begin and end that do not count, int64, from the unit's first token on."""

    @classmethod
    def of(cls, folder: Path, number: int) -> "UnitFiles":
        return cls(*(folder / f"unit-{number:08}.{kind}" for kind in ("json", "tokens", "documents", "mask")))

    def load(self, dtype: str) -> UnitReport | None:
        """The report of an earlier run, if all that it tells of is there."""
        try:
            report = UnitReport.model_validate_json(self.report.read_bytes())
            sizes = [path.stat().st_size for path in (self.tokens, self.documents, self.mask)]
        except (OSError, ValueError):
            return None
        wanted = [report.num_tokens * np.dtype(dtype).itemsize, report.num_documents * 24, report.num_masked * 16]
        return report if sizes == wanted else None

    def remove(self) -> None:
        for path in (self.report, self.tokens, self.documents, self.mask):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Encoder:
    """What a worker needs to turn units into tokens."""

    tokenizer: tokenizers.Tokenizer
    end_token: int
    dtype: str
    format: Format

    def encode(self, unit: Unit, files: UnitFiles) -> UnitReport:
        """Writes a unit's tokens.

        Raises:
            UserError: an input is damaged, or no text.
            OSError: the unit cannot be written.
        """
        spans = [Passed.of(span) for span in unit]
        read = (read_documents(span, self.format, passed) for span, passed in zip(unit, spans, strict=True))
        num_tokens, documents, num_masked, open_tokens, open_bytes, open_counted = 0, 0, 0, 0, 0, 0
        with open(files.tokens, "wb") as tokens, open(files.documents, "wb") as ends, open(files.mask, "wb") as mask:
            for some in batched(chain.from_iterable(read)):
                ids, lengths, counts = self._encoded(some)
                tokens.write(np.asarray(ids, self.dtype).tobytes())
                masked = num_tokens + _stretches(~counts)
                num_tokens += len(ids)
                closed = []
                for part, length in zip(some, lengths, strict=True):
                    open_tokens += length
                    num_bytes = len(part.text.encode())
                    open_bytes += num_bytes
                    open_counted += num_bytes - sum(len(part.text[a:b].encode()) for a, b in part.uncounted)
                    if part.ends:
                        closed.append((open_tokens, open_bytes, open_counted))
                        open_tokens = open_bytes = open_counted = 0
                ends.write(np.asarray(closed, np.int64).tobytes())
                mask.write(masked.astype(np.int64).tobytes())
                documents += len(closed)
                num_masked += len(masked)
            # Before the report that vouches for them.
            for file in (tokens, ends, mask):
                file.flush()
                os.fsync(file.fileno())
        report = UnitReport(
            num_tokens=num_tokens,
            num_documents=documents,
            num_masked=num_masked,
            open_bytes=open_bytes,
            spans=spans,
        )
        write_whole(files.report, report.model_dump_json())
        return report

    def _encoded(self, parts: Sequence[Part]) -> tuple[list[int], list[int], Bool[np.ndarray, "tokens"]]:
        """Ids, how many are of each part, and whether each counts."""
        if self.format.example is not None:
            return encode_examples(self.tokenizer, self.end_token, parts)
        ids, lengths = encode(self.tokenizer, self.end_token, parts)
        return ids, lengths, np.ones(len(ids), bool)


def _stretches(holds: Bool[np.ndarray, "tokens"]) -> Int[np.ndarray, "stretches 2"]:
    """Where it holds: the first of each stretch, and the one after its last."""
    return np.flatnonzero(np.diff(holds, prepend=False, append=False)).reshape(-1, 2)
