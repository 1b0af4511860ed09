"""Files and folders that are there whole or not at all."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import ClassVar

from dseekjax.errors import UserError


def shipped_configs() -> Path:
    """The folder of recipes and clusters: in the package where that is installed, beside it in a checkout."""
    package = Path(__file__).parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def write_whole(path: Path, text: str) -> None:
    """Replaces a file by `text` so that neither a crash nor a power cut leaves part of it.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def discard_begun() -> list[Path]:
    """Removes every `WholeFolder` that this process has begun, for one that is to end at once.

    Returns:
        What is left, where another thread still writes.
    """
    begun = list(WholeFolder.begun)
    for folder in begun:
        folder.discard()
    return [folder.hidden for folder in begun if folder.hidden.exists()]


class WholeFolder:
    """A folder that is filled under a hidden name beside its place, and takes its own name when it is whole.

    A process that is killed leaves the hidden one, which the next one begins anew.
    """

    begun: ClassVar[list["WholeFolder"]] = []
    """Those of this process that are neither finished nor discarded."""

    def __init__(self, place: Path) -> None:
        """
        Raises:
            UserError: a place without a name, as `/`.
        """
        if not place.name:
            raise UserError(f"{place} is no name for a new folder; give one within it")
        self.place = place
        self.hidden = place.with_name(f".{place.name}.partial")
        self._handle: int | None = None

    def refuse_existing(self) -> None:
        """Raises UserError if there is something in its place."""
        if self.place.exists():
            raise UserError(f"{self.place} is there already; choose another folder, or move it away")

    def begin(self) -> None:
        """Makes the hidden folder, empty, and keeps other processes out of it.

        Raises:
            UserError: something is in its place, another process makes it, or it cannot be made.
        """
        self.refuse_existing()
        try:
            self.hidden.mkdir(parents=True, exist_ok=True)
            self._hold()
            for left in self.hidden.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except BlockingIOError as error:
            raise UserError(f"another process is making {self.place}; choose another folder") from error
        except OSError as error:
            raise UserError(
                f"cannot make {self.place} ({error.strerror}); choose a folder that you may write"
            ) from error

    def finish(self) -> None:
        """Gives it its name.

        Raises:
            UserError: its place was taken meanwhile.
        """
        self.refuse_existing()
        self.hidden.rename(self.place)
        self._release()

    def discard(self) -> None:
        """Removes what was begun."""
        if self._handle is not None:
            shutil.rmtree(self.hidden, ignore_errors=True)
            self._release()

    def _hold(self) -> None:
        handle = os.open(self.hidden, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        self._handle = handle
        self.begun.append(self)

    def _release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self.begun.remove(self)
