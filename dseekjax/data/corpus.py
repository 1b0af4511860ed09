"""Tokenised documents in memory-mapped files.

A corpus is a folder: `tokens-00000.bin` and so on hold the ids of all documents one after the other, each document
closed by its end token; `document_ends.bin` tells where they end, `document_bytes.bin` how many bytes of text they
were, both as int64; `tokenizer.json`; `inputs.jsonl`, the files that were read; `manifest.json`, counts and hashes.
Where the loss counts some of the tokens only, `mask_starts.bin` and `mask_ends.bin` tell which it does not, and
`counted_bytes.bin` how many bytes of each document it does, all as int64.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int

from dseekjax.data.manifest import (
    COUNTED_BYTES,
    DOCUMENT_BYTES,
    DOCUMENT_ENDS,
    MASK_ENDS,
    MASK_STARTS,
    TOKENIZER,
    Manifest,
    hash_file,
    read_manifest,
    shard_name,
)
from dseekjax.data.mask import Mask
from dseekjax.data.tokens import Tokens, map_file
from dseekjax.errors import UserError

# So much is read through in a second or so; more is left to `verify_corpus`.
VERIFIED_AT_OPEN = 1 << 30
DECODED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Corpus:
    """An open corpus."""

    path: Path
    manifest: Manifest
    tokens: Tokens
    document_ends: Int[np.ndarray, "documents"]
    """Where each document ends, its end token included."""
    document_bytes: Int[np.ndarray, "documents"]
    mask: Mask | None = None
    """Which tokens are no targets of the loss; None if all are."""

    @property
    def counted_bytes(self) -> Int[np.ndarray, "documents"]:
        """How many bytes of each document's text are targets of the loss."""
        return self.document_bytes if self.mask is None else self.mask.counted_bytes

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The one that made the tokens."""
        return tokenizers.Tokenizer.from_file(str(self.path / TOKENIZER))


def open_corpus(path: Path) -> Corpus:
    """Maps a corpus into memory, after a look at the size of every file, and at its content where that is quick.

    Raises:
        UserError: a file is missing, unreadable, or not what was written.
    """
    manifest = read_manifest(path)
    if sum(file.size for file in manifest.files.values()) <= VERIFIED_AT_OPEN:
        verify_corpus(path)
    else:
        for name in manifest.files:
            _check_size(path, manifest, name)
    num_shards = sum(name.startswith("tokens-") for name in manifest.files)
    shards = [map_file(path / shard_name(i), manifest.dtype) for i in range(num_shards)]
    ends, num_bytes = (map_file(path / name, "int64") for name in (DOCUMENT_ENDS, DOCUMENT_BYTES))
    mask = None
    if manifest.is_masked:
        mask = Mask(*(map_file(path / name, "int64") for name in (MASK_STARTS, MASK_ENDS, COUNTED_BYTES)))
    return Corpus(path, manifest, Tokens(tuple(shards), manifest.tokens_per_shard), ends, num_bytes, mask)


def verify_corpus(path: Path, watch: Callable[[int, int], None] = lambda done, total: None) -> Manifest:
    """Reads every byte of a corpus and compares the hashes with those of the manifest.

    Args:
        path: of its folder.
        watch: called with the bytes that are done, and all.

    Raises:
        UserError: a file is missing, unreadable, or not what was written.
    """
    manifest = read_manifest(path)
    done, total = 0, sum(file.size for file in manifest.files.values())
    for name, file in manifest.files.items():
        watch(done, total)
        _check_size(path, manifest, name)
        if hash_file(path / name) != file.sha256:
            raise UserError(
                f"the corpus {path} is damaged: the checksum of {name} is not that of the manifest; {_fix(path)}"
            )
        done += file.size
    watch(done, total)
    return manifest


def _check_size(path: Path, manifest: Manifest, name: str) -> None:
    try:
        size, wanted = (path / name).stat().st_size, manifest.files[name].size
    except OSError as error:
        raise UserError(
            f"the corpus {path} is damaged: {name} cannot be read ({error.strerror}); {_fix(path)}"
        ) from error
    if size != wanted:
        raise UserError(f"the corpus {path} is damaged: {name} has {size} bytes of {wanted}; {_fix(path)}")


def _fix(path: Path) -> str:
    return f"remove {path} and prepare it again"


@dataclass(frozen=True)
class Portion:
    """A stretch of a corpus."""

    corpus: Corpus
    start: int
    """Its first token."""
    stop: int
    """The token after its last."""
    num_bytes: int
    """Of text that the loss counts."""
    label: str = field(default="a source", compare=False)
    """What it is of, for messages."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_counted(self) -> int:
        """Tokens that the loss counts."""
        mask = self.corpus.mask
        return self.num_tokens - (0 if mask is None else int(mask.count(self.start, self.stop)))

    @property
    def identity(self) -> str:
        """A hash of its tokens, where its documents start and which count."""
        return f"{self.corpus.manifest.identity}:{self.start}-{self.stop}"


def hold_out(corpus: Corpus, fraction: float, label: str = "a source") -> tuple[Portion, Portion | None]:
    """Splits off the last `fraction` of the documents; a single one is cut, at the end of a line if one is near.

    Raises:
        UserError: it is a single one of which a part only counts.
    """
    total = corpus.manifest.num_tokens
    all_bytes = corpus.manifest.num_bytes if corpus.mask is None else int(corpus.counted_bytes.sum())
    if fraction == 0.0:
        return Portion(corpus, 0, total, all_bytes, label), None
    held_out = f"the held-out part of {label}"
    count = kept_documents(corpus.manifest.num_documents, fraction)
    if count:
        cut, num_bytes = int(corpus.document_ends[count - 1]), int(corpus.counted_bytes[:count].sum())
    elif corpus.mask is not None:
        raise UserError(f"{label} is a single example, and none can be held out; give more, or hold out none")
    else:
        cut = _line_start(corpus, max(1, int(total * (1 - fraction))))
        num_bytes = all_bytes - _text_bytes(corpus, cut, total)
    rest = Portion(corpus, cut, total, all_bytes - num_bytes, held_out) if cut < total else None
    return Portion(corpus, 0, cut, num_bytes, label), rest


def kept_documents(num_documents: int, fraction: float) -> int:
    """How many documents are left to train on; 0 if the only one has to be cut."""
    return 0 if num_documents == 1 else max(1, min(num_documents - 1, round(num_documents * (1 - fraction))))


def _text_bytes(corpus: Corpus, start: int, stop: int) -> int:
    """Bytes of the text that some tokens are of, decoded a little at a time."""
    num_bytes = 0
    while start < stop:
        end = start + DECODED_TOKENS
        end = min(stop, _line_start(corpus, end)) if end < stop else stop
        num_bytes += len(corpus.tokenizer.decode(corpus.tokens.read(start, end - start).tolist()).encode())
        start = end
    return num_bytes


def _line_start(corpus: Corpus, near: int) -> int:
    """Where a line begins at or soon after a token, or just that token."""
    window = corpus.tokens.read(near, min(4096, corpus.manifest.num_tokens - near)).tolist()
    for place, token in enumerate(window):
        if corpus.tokenizer.decode([token]).endswith("\n"):
            return near + place + 1
    return near
