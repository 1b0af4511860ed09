"""Examples of any fields, each of one shape: images and labels, say, in ArrayRecord files.

A folder holds `examples-00000.array_record` and so on and `manifest.json` with the fields. An example is the bytes of
all its fields, so that a batch is read as one array.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
    """Writes examples into a new folder, which has a manifest when all are there.

    Args:
        folder: to be made.
        examples: all with the same fields, each an array or a number, of the same shape and dtype throughout.

    Raises:
        UserError: the folder is there already, cannot be written, or examples differ in their fields.
    """
    try:
        folder.mkdir(parents=True)
        dtype: np.dtype | None = None
        names: list[str] = []
        writer, size, count = None, 0, 0
        for example in examples:
            arrays = {name: np.asarray(value) for name, value in example.items()}
            found = np.dtype([(name, array.dtype, array.shape) for name, array in arrays.items()])
            dtype = dtype or found
            if found != dtype:
                raise UserError(f"example {count} has the fields {found}, those before it {dtype}; make them alike")
            if writer is None or size >= FILE_BYTES:
                if writer is not None:
                    writer.close()
                names.append(f"examples-{len(names):05}.array_record")
                writer, size = array_record_module.ArrayRecordWriter(str(folder / names[-1]), "group_size:1"), 0
            record = b"".join(array.tobytes() for array in arrays.values())
            writer.write(record)
            size, count = size + len(record), count + 1
        if writer is None or dtype is None:
            raise UserError(f"{folder}: there are no examples to write")
        writer.close()
        manifest = {
            "format": FORMAT,
            "kind": "examples",
            "fields": {name: [kind.base.str, kind.shape] for name, (kind, *_) in (dtype.fields or {}).items()},
            "num_examples": count,
            "files": {name: hash_file(folder / name) for name in names},
        }
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=1))
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}); choose a new folder with room") from error


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
