"""Examples of any fields, each of one shape: images and labels, say, in ArrayRecord files.

A folder holds `examples-00000.array_record` and so on and `manifest.json` with the fields. An example is the bytes of
all its fields, so that a batch is read as one array.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
from array_record.python import array_record_data_source, array_record_module
from jaxtyping import Int

from dseekjax.data.manifest import hash_file
from dseekjax.data.records import Fields
from dseekjax.errors import UserError
from dseekjax.files import write_whole

MANIFEST = "manifest.json"
FORMAT = 1
FILE_BYTES = 128 << 20


def write_examples(folder: Path, examples: Iterable[Mapping[str, Any]]) -> None:
    """Writes examples into a new folder, which is there when all of them are.

    Args:
        folder: to be made.
        examples: all with the same fields, each an array or a number, of the same shape and dtype throughout.

    Raises:
        UserError: the folder is there already, cannot be written, or examples differ in their fields.
    """
    partial = folder.with_name(f".{folder.name}-{uuid4().hex}")
    try:
        if folder.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        partial.mkdir(parents=True)
        fields = _write_files(partial, examples)
        files = {path.name: hash_file(path) for path in sorted(partial.iterdir())}
        manifest = {"format": FORMAT, "kind": "examples", "fields": fields, "files": files}
        write_whole(partial / MANIFEST, json.dumps(manifest, indent=1))
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}); choose a new folder with room") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_files(folder: Path, examples: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Writes the files; returns dtype and shape of each field."""
    with ExitStack() as stack:
        dtype, size, num_files = None, FILE_BYTES, 0
        for number, example in enumerate(examples):
            arrays = {name: np.asarray(value) for name, value in example.items()}
            found = np.dtype([(name, array.dtype, array.shape) for name, array in arrays.items()])
            if found.hasobject or not arrays:
                raise UserError(f"example {number} has the fields {found}; give arrays or numbers of a fixed size")
            dtype = dtype or found
            if found != dtype:
                raise UserError(f"example {number} has the fields {found}, those before it {dtype}; make them alike")
            if size >= FILE_BYTES:
                stack.close()
                path = folder / f"examples-{num_files:05}.array_record"
                writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
                stack.callback(writer.close)
                num_files, size = num_files + 1, 0
            record = b"".join(array.tobytes() for array in arrays.values())
            writer.write(record)
            size += len(record)
    if dtype is None:
        raise UserError("there are no examples to write; give one or more")
    return {name: (kind.base.str, kind.shape) for name, (kind, *_) in (dtype.fields or {}).items()}


@dataclass(frozen=True)
class Examples:
    """Examples as records: each field of a batch is `[batch, *shape]`."""

    source: array_record_data_source.ArrayRecordDataSource
    dtype: np.dtype
    identity: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Opens what `write_examples` wrote.

        Raises:
            UserError: it is not there, or damaged.
        """
        try:
            text = (folder / MANIFEST).read_bytes()
            manifest = json.loads(text)
            if manifest["kind"] != "examples" or manifest["format"] != FORMAT:
                raise UserError(f"{folder} holds {manifest['kind']}, of format {manifest['format']}, and no examples")
            fields = [(name, kind, tuple(shape)) for name, (kind, shape) in manifest["fields"].items()]
            for name, sha256 in manifest["files"].items():
                if hash_file(folder / name) != sha256:
                    raise UserError(f"{folder} is damaged: the checksum of {name} is wrong; write it anew")
            source = array_record_data_source.ArrayRecordDataSource([str(folder / name) for name in manifest["files"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} holds no examples that can be read ({error}); write them anew") from error
        return cls(source, np.dtype(fields), hashlib.sha256(text).hexdigest())

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Int[np.ndarray, "batch"]) -> Fields:
        joined = b"".join(self.source.__getitems__(indices.tolist()))
        examples = np.frombuffer(joined, self.dtype)
        return {name: np.ascontiguousarray(examples[name]) for name in self.dtype.names or ()}
