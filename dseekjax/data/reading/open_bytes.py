"""Files as streams of bytes, unpacked where they are compressed."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from dseekjax.data.reading.inputs import Input
from dseekjax.errors import UserError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 1 << 20


@contextmanager
def open_bytes(file: Input) -> Iterator[BinaryIO]:
    """The content of a file.

    Raises:
        UserError: while it is read, because it is compressed and damaged.
        OSError: it cannot be read.
    """
    openers: dict[str | None, Any] = {None: open, "gzip": gzip.open, "zstd": zstd.open}
    try:
        with openers[file.compression](file.path, "rb") as stream:
            yield cast(BinaryIO, stream)
    except (gzip.BadGzipFile, EOFError, zlib.error, zstd.ZstdError) as error:
        raise UserError(f"{file.path} is damaged ({str(error).rstrip('.')}); get it anew") from error
