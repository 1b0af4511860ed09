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
    def num_documents(self) -> int:
        """Documents that it has a token of."""
        first = np.searchsorted(self.corpus.document_ends, self.start, side="right")
        return int(np.searchsorted(self.corpus.document_ends, self.stop) - first) + 1

    @property
    def num_counted(self) -> int:
        """Tokens that the loss counts."""
        mask = self.corpus.mask
        return self.num_tokens - (0 if mask is None else int(mask.count(self.start, self.stop)))

    @property
    def identity(self) -> str:
        """A hash of its tokens, where its documents start and which count."""
        return f"{self.corpus.manifest.identity}:{self.start}-{self.stop}"
