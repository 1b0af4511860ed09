"""One process at a time prepares a corpus."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dseekjax.errors import UserError


@contextmanager
def claimed(output: Path, wait: bool) -> Iterator[Path | None]:
    """The folder to work in, which is this process's alone; None if `output` is there and nothing is to be done.

    Args:
        output: what the folder is to become.
        wait: whether to wait for a process that has it.

    Raises:
        UserError: another process has it.
        OSError: the folder cannot be made.
    """
    if not output.name:
        raise UserError(f"{output} cannot be a corpus; give a folder within it")
    unfinished = output.with_name(f"{output.name}.unfinished")
    while not output.exists():
        unfinished.mkdir(parents=True, exist_ok=True)
        handle = os.open(unfinished, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever had it may have renamed it meanwhile.
            if not output.exists() and os.path.samestat(os.fstat(handle), unfinished.stat()):
                yield unfinished
                return
        except BlockingIOError as error:
            raise UserError(
                f"another process is preparing {output}; wait until it is done, or choose another folder"
            ) from error
        finally:
            os.close(handle)
    yield None
