"""Hashes of the files of a folder, kept beside them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from dseekjax.checkpoint.hugging_face.config_json import read_json
from dseekjax.errors import UserError
from dseekjax.files import write_whole

NAME = "checksums.json"


def write_digests(folder: Path) -> None:
    """Writes the SHA-256 of every file there into `checksums.json`."""
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != NAME}
    write_whole(folder / NAME, json.dumps({"sha256": digests}, indent=2) + "\n")


def check_digests(folder: Path, watch: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Compares every file with `checksums.json`, if there is one.

    Raises:
        UserError: a file is missing, or is not what it was.
    """
    if not (folder / NAME).is_file():
        return
    digests = read_json(folder / NAME).get("sha256")
    if not isinstance(digests, dict):
        raise UserError(f"{folder / NAME} has no sha256 for each file; delete it to go without, or fetch it again")
    paths = [folder / Path(str(name)).name for name in digests]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(f"{folder}: {missing[0]} is missing, which {NAME} lists; fetch it again")
    total, done = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        if _digest(path) != digests[path.name]:
            raise UserError(f"{path} is not what it was: its SHA-256 differs from {NAME}; fetch it again")
        done += path.stat().st_size
        watch(done, total)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
