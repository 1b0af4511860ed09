"""What is in a corpus, as its manifest.json tells it."""

import hashlib
import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dseekjax.errors import UserError
from dseekjax.files import write_whole

FORMAT = 2
# The same, with a mask; who knows only 2 must not read it as text of which all counts.
MASKED_FORMAT = 3
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
INPUTS = "inputs.jsonl"
DOCUMENT_ENDS = "document_ends.bin"
DOCUMENT_BYTES = "document_bytes.bin"
COUNTED_BYTES = "counted_bytes.bin"
MASK_STARTS = "mask_starts.bin"
MASK_ENDS = "mask_ends.bin"


class File(BaseModel):
    size: int
    """In bytes."""
    sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str) -> Self:
        return cls(size=path.stat().st_size, sha256=sha256)


class LeftOut(BaseModel):
    """What the files held and the corpus does not."""

    num_malformed: int = 0
    """Lines that are no document."""
    num_empty: int = 0
    """Documents of nothing but white space."""
    examples: list[str] = []
    """The first lines that are no document: file, line, and why."""


class Manifest(BaseModel):
    """All counts are of the whole corpus."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    kind: str = "tokens"
    dtype: str
    """Of the token ids: uint16 or uint32."""
    num_tokens: int
    """With one at the end of each document."""
    num_documents: int
    num_bytes: int
    """Of UTF-8 text."""
    tokens_per_shard: int
    """Of every shard but the last."""
    end_of_document: str
    end_token: int
    tokenizer: str
    """Fingerprint of the tokenizer."""
    made_from: str
    """Fingerprint of inputs, tokenizer and options."""
    num_inputs: int
    input_bytes: int
    left_out: LeftOut
    files: dict[str, File]

    @property
    def is_masked(self) -> bool:
        """Whether the loss counts some of the tokens only."""
        return self.format == MASKED_FORMAT

    @property
    def identity(self) -> str:
        """A hash of the tokens, where their documents start and which count, whatever they were made from."""
        hashed = {name: file.sha256 for name, file in self.files.items() if name.endswith(".bin")}
        return hashlib.sha256(json.dumps([self.dtype, hashed], sort_keys=True).encode()).hexdigest()


def shard_name(number: int) -> str:
    return f"tokens-{number:05}.bin"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes it, with a hash of itself.

    Raises:
        OSError: it cannot be written.
    """
    values = manifest.model_dump()
    write_whole(folder / MANIFEST, json.dumps({**values, "sha256": _hash(values)}, indent=1, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a corpus.

    Raises:
        UserError: there is none, or it is damaged, or another version wrote it.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} is no corpus: it has no {MANIFEST}; give a folder that was prepared")
    try:
        values = json.loads(path.read_bytes())
        if values.get("kind", "tokens") != "tokens":
            raise UserError(f"{folder} holds {values['kind']}, and tokens are needed; give a folder of tokens")
        if values.get("format") not in (FORMAT, MASKED_FORMAT):
            raise UserError(
                f"the corpus {folder} is of format {values.get('format')!r} and this version reads {FORMAT} and "
                f"{MASKED_FORMAT}; prepare it anew"
            )
        if values.pop("sha256") != _hash(values):
            raise UserError(
                f"the corpus {folder} is damaged: manifest.json was changed; put it back or {_anew(folder)}"
            )
        return Manifest.model_validate(values)
    except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no manifest"
        raise UserError(
            f"the corpus {folder} is damaged: manifest.json cannot be read ({reason}); {_anew(folder)}"
        ) from error


def _anew(folder: Path) -> str:
    return f"remove {folder} and prepare it again"


def _hash(values: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Its SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
