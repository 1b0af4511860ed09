"""Files that are there whole or not at all."""

import os
from pathlib import Path


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
