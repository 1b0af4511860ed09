"""Files that grow, and are found as they were left or not at all."""

import hashlib
import os
from pathlib import Path

from pydantic import BaseModel

from dseekjax.errors import UserError

COPIED_BYTES = 8 << 20


class Left(BaseModel):
    """How a file was left."""

    size: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class Appended:
    """A file that is only ever appended to, with the hash of its content."""

    def __init__(self, path: Path, left: Left) -> None:
        """
        Args:
            path: of the file.
            left: what of it is known to be good; what lies beyond is cut off.

        Raises:
            UserError: that is not there any more.
            OSError: the file cannot be used.
        """
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by `close`
        self._digest, self.size = hashlib.sha256(), 0
        while block := self._file.read(min(COPIED_BYTES, left.size - self.size)):
            self._digest.update(block)
            self.size += len(block)
        if self.left != left:
            self.close()
            raise UserError(f"{path} is damaged; remove {path.parent} to start over")
        self._file.truncate(self.size)
        self._file.seek(self.size)

    @property
    def left(self) -> Left:
        """What is known to be good after `flush`."""
        return Left(size=self.size, sha256=self._digest.hexdigest())

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.size += len(content)

    def flush(self) -> None:
        """Waits until all is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
