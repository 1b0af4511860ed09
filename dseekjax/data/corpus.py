"""Tokenised documents in memory-mapped files.

A corpus is a folder: `tokens.bin` (all documents one after the other, each closed by its end token, uint16 or uint32),
`offsets.npy` (where each document starts, and the end), `manifest.json` (counts and hashes).
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int

from dseekjax.errors import UserError

FORMAT = 1
DOCUMENTS_PER_CALL = 512
# A process that was killed leaves its half-made corpus behind; one as old as this is nobody's any more.
ABANDONED_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Corpus:
    """An open corpus."""

    path: Path
    tokens: Int[np.ndarray, "tokens"]
    offsets: Int[np.ndarray, "documents+1"]
    manifest: dict[str, Any]
    label: str = "a source"
    """What it was made from, for messages."""

    @property
    def identity(self) -> str:
        """A hash of the tokens and where their documents start."""
        return self.manifest["sha256"]


def write_corpus(path: Path, documents: Sequence[str], tokenizer: tokenizers.Tokenizer, end_token: int) -> None:
    """Tokenises `documents` into a new corpus at `path`, which appears whole or not at all."""
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for abandoned in path.parent.glob(f".{path.name}-*"):
            if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(abandoned, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
        offsets, digest = [0], hashlib.sha256()
        with open(partial / "tokens.bin", "wb") as file:
            for ids in _encode(documents, tokenizer):
                block = np.asarray([*ids, end_token], dtype).tobytes()
                file.write(block)
                digest.update(block)
                offsets.append(offsets[-1] + len(ids) + 1)
        starts = np.asarray(offsets, np.int64)
        digest.update(starts.tobytes())
        np.save(partial / "offsets.npy", starts)
        manifest = {
            "format": FORMAT,
            "dtype": np.dtype(dtype).name,
            "num_tokens": offsets[-1],
            "num_documents": len(documents),
            "num_bytes": sum(len(document.encode()) for document in documents),
            "sha256": digest.hexdigest(),
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        try:
            os.rename(partial, path)
        except OSError:
            # Another process made the same corpus in the meantime; theirs is as good.
            if not (path / "manifest.json").is_file():
                raise
    except OSError as error:
        raise UserError(
            f"data.cache_dir: cannot write {path} ({error.strerror}); make room or choose another"
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _encode(documents: Sequence[str], tokenizer: tokenizers.Tokenizer) -> Iterator[list[int]]:
    for start in range(0, len(documents), DOCUMENTS_PER_CALL):
        some = documents[start : start + DOCUMENTS_PER_CALL]
        for encoding in tokenizer.encode_batch_fast(list(some), add_special_tokens=False):
            yield encoding.ids


def open_corpus(path: Path, label: str) -> Corpus:
    """Maps a corpus into memory, after a look at every byte of it.

    Args:
        path: of its folder.
        label: what it was made from.

    Raises:
        UserError: a file is missing, unreadable, or not what was written.
    """
    fix = f"remove {path} and start again; it will be made anew"
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        dtype, sha256 = np.dtype(manifest["dtype"]), manifest["sha256"]
        size, wanted = (path / "tokens.bin").stat().st_size, manifest["num_tokens"] * dtype.itemsize
        if size != wanted:
            raise UserError(f"the corpus {path} is damaged: tokens.bin has {size} bytes of {wanted}; {fix}")
        tokens = np.memmap(path / "tokens.bin", dtype, "r")
        offsets = np.load(path / "offsets.npy")
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise UserError(f"the corpus {path} is damaged ({type(error).__name__}: {error}); {fix}") from error
    digest = hashlib.sha256(tokens)
    digest.update(offsets.tobytes())
    if digest.hexdigest() != sha256:
        raise UserError(f"the corpus {path} is damaged: its checksum is not that of the manifest; {fix}")
    return Corpus(path, tokens, offsets, manifest, label)
