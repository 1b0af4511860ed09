"""Paths of checkpoints, for a library that reads more into some names than the file system does."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from etils.epath.gpath import PosixGPath

from dseekjax.errors import UserError


class LiteralPath(PosixGPath):
    """A path of which no letter is a pattern, and no folder a bucket of a cloud."""

    @property
    def _uri_scheme(self) -> None:
        return None

    def glob(self, pattern: str) -> Iterator[Self]:
        for match in sorted(glob.glob(pattern, root_dir=str(self))):
            yield self / match


def checkpoint_path(directory: Path) -> LiteralPath:
    """The absolute path of a directory of checkpoints.

    Raises:
        UserError: Orbax or TensorStore would write to another place, or nowhere.
    """
    path = str(directory.absolute())
    named = directory.parent.absolute()
    if "\\" in path:
        raise UserError(f"{named}: checkpoints cannot be written below a name with a backslash; choose another folder")
    if "gs:/" in path:
        raise UserError(
            f"{named}: checkpoints cannot be written below a name that ends in gs:, which stands for a bucket; choose "
            "another folder"
        )
    try:
        path.encode()
    except UnicodeEncodeError as error:
        shown = str(named).encode(errors="backslashreplace").decode()
        raise UserError(
            f"{shown}: checkpoints cannot be written below a name that is not UTF-8; choose another folder"
        ) from error
    return LiteralPath(path)
