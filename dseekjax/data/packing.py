"""Which pieces of which documents share a record: first-fit packing, worked out once and kept beside the corpus."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
from jaxtyping import Int

from dseekjax.data.corpus import Portion
from dseekjax.data.manifest import hash_file
from dseekjax.data.tokens import map_file
from dseekjax.errors import UserError
from dseekjax.files import write_whole

PIECES_PER_BLOCK = 1 << 16
# A process that was killed leaves its half-made index behind; one as old as this is nobody's any more.
ABANDONED_SECONDS = 24 * 3600
FORMAT = 1
FILES = {"record_starts": "int64", "piece_starts": "int64", "piece_lengths": "int32"}


@dataclass(frozen=True)
class PackingIndex:
    """Records as lists of pieces, in compressed rows."""

    record_starts: Int[np.ndarray, "records+1"]
    """Where the pieces of each record begin, and the end."""
    piece_starts: Int[np.ndarray, "pieces"]
    """Number of the first token in the corpus. The token after the last of a piece is its last target."""
    piece_lengths: Int[np.ndarray, "pieces"]

    @property
    def num_records(self) -> int:
        return len(self.record_starts) - 1


def first_fit(lengths: Int[np.ndarray, "pieces"], capacity: int) -> Int[np.ndarray, "pieces"]:
    """The bin of each piece: the first that has room for it (Johnson 1974, "Fast algorithms for bin packing").

    Two bins that follow each other are never both half empty, so that all but one are more than half full together,
    and there are at most 1.7 times as many as the fewest possible. O(n log n), by a tree of the most room below a node.
    """
    width = 1 << max(0, (len(lengths) - 1).bit_length())
    room = [capacity] * (2 * width)
    bins = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths.tolist()):
        node = 1
        while node < width:
            node *= 2
            if room[node] < length:
                node += 1
        bins[i] = node - width
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            room[node] = left if left > right else right
    return bins


def pieces(portion: Portion, length: int) -> Iterator[tuple[Int[np.ndarray, "pieces"], Int[np.ndarray, "pieces"]]]:
    """Starts and lengths of what documents are cut into: `length` tokens each, and less at a document's end.

    The last token of a document, or of a portion, is a target only, and a document of one token has no piece. Of an
    example that has a prompt only the first piece is one, for those after it would not see the prompt; none if the loss
    would count nothing of it.
    """
    ends, mask = portion.corpus.document_ends, portion.corpus.mask
    document, last = np.searchsorted(ends, [portion.start, portion.stop], side="right").tolist()
    while document <= last and document < len(ends):
        start = int(ends[document - 1]) if document else 0
        # So many documents, or fewer if they are long, so that a block is never of more than twice as many pieces.
        beyond = int(np.searchsorted(ends, start + PIECES_PER_BLOCK * length)) + 1
        after = min(document + PIECES_PER_BLOCK, beyond, last + 1)
        stops = np.asarray(ends[document:after])
        document = after
        begins = np.concatenate([[start], stops[:-1]])
        begins, stops = np.maximum(begins, portion.start), np.minimum(stops, portion.stop)
        tokens = np.maximum(stops - begins - 1, 0)
        counts = -(-tokens // length)
        if mask is not None:
            kept = np.minimum(tokens, length)
            counts = (mask.count(begins + 1, begins + 1 + kept) < kept).astype(np.int64)
        which = np.repeat(np.arange(len(tokens)), counts)
        number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield begins[which] + number * length, np.minimum(length, tokens[which] - number * length)


def index_path(portion: Portion, length: int) -> Path:
    """Where the index of a portion is kept."""
    return portion.corpus.path / "packing" / f"first_fit-{length}-{portion.start}-{portion.stop}"


def open_index(portion: Portion, length: int, tell: Callable[[str], None] = lambda sentence: None) -> PackingIndex:
    """The packing of a portion into records of `length` tokens; built where it is missing.

    Documents are packed in blocks, so that the index of any number of them is built in constant memory.

    Args:
        portion: what to pack.
        length: tokens of a record.
        tell: called with a sentence before something that may take long.

    Raises:
        UserError: the index is damaged, or cannot be written.
    """
    path = index_path(portion, length)
    if not path.is_dir():
        tell(f"Packing {portion.num_tokens:,} tokens into records of {length}, which is kept in {path}.")
        _build(portion, length, path)
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        sound = manifest["format"] == FORMAT and all(
            hash_file(path / f"{name}.bin") == sha256 for name, sha256 in manifest["files"].items()
        )
    except OSError as error:
        raise UserError(f"the packing index {path} cannot be read ({error.strerror}); mend that") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"the packing index {path} is damaged; remove it, and it will be built anew")
    return PackingIndex(*(map_file(path / f"{name}.bin", dtype) for name, dtype in FILES.items()))


def _build(portion: Portion, length: int, path: Path) -> None:
    partial = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        for abandoned in path.parent.glob(".*"):
            if time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(abandoned, ignore_errors=True)
        with ExitStack() as stack:
            files = [stack.enter_context(open(partial / f"{name}.bin", "wb")) for name in FILES]
            done = 0
            for starts, lengths in pieces(portion, length):
                bins = first_fit(lengths, length)
                order = np.argsort(bins, kind="stable")
                counts = np.bincount(bins)
                columns = (done + np.cumsum(counts) - counts, starts[order], lengths[order])
                for file, column, dtype in zip(files, columns, FILES.values(), strict=True):
                    file.write(column.astype(dtype).tobytes())
                done += len(starts)
            files[0].write(np.asarray([done], FILES["record_starts"]).tobytes())
        hashes = {name: hash_file(partial / f"{name}.bin") for name in FILES}
        write_whole(partial / "manifest.json", json.dumps({"format": FORMAT, "files": hashes}))
        try:
            os.rename(partial, path)
        except OSError:
            # Another process built the same index in the meantime; theirs is as good.
            if not (path / "manifest.json").is_file():
                raise
    except OSError as error:
        raise UserError(
            f"cannot write the packing index {path} ({error.strerror}); make room or get the right to, or set "
            "data.packing to concatenate, which needs none"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
