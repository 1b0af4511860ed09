"""`metrics.jsonl`, the source of truth, and what is fanned out from it."""

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from dseekjax.errors import UserError
from dseekjax.files import write_whole
from dseekjax.training.hooks import Context, Hook, Record


class Writer(Protocol):
    """Where else records go. Called from the writing thread."""

    def start(self, step: int) -> None:
        """Opens; records of steps after `step`, of an earlier start, are void."""

    def write(self, record: Record) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def read_records(path: Path) -> Iterator[Record]:
    """All whole records of a metrics file, in order."""
    if path.is_file():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                return


class MetricsHook(Hook):
    """Writes each record as a line, in a thread of its own, so that a slow disk never holds up a step.

    At a start, records after the restored step are dropped: the steps they are of will be done again.
    """

    def __init__(self, path: Path, writers: Sequence[Writer], tell: Callable[[str], None]) -> None:
        """
        Args:
            path: of the file.
            writers: called with each record, after it was written.
            tell: called with sentences for the user.
        """
        self._tell = tell
        self._path = path
        self._writers = writers
        self._queue: queue.Queue[Any] = queue.Queue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def on_start(self, context: Context) -> None:
        kept = [record for record in read_records(self._path) if (record["step"] or 0) <= context.step]
        if len(kept) < context.step:
            self._tell(
                f"Note: {self._path} lacks the records of {context.step - len(kept)} of {context.step} steps done."
            )
        try:
            write_whole(self._path, "".join(_line(record) for record in kept))
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by the thread
            for writer in self._writers:
                writer.start(context.step)
        except OSError as error:
            raise self._error(error) from error
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def on_record(self, record: Record) -> None:
        self._raise_failure()
        self._queue.put(record)

    def flush(self) -> None:
        written = threading.Event()
        self._queue.put(written)
        written.wait()
        self._raise_failure()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    for writer in self._writers:
                        writer.flush()
                elif self._failure is None:
                    self._file.write(_line(item))
                    self._file.flush()
                    for writer in self._writers:
                        writer.write(item)
            except Exception as error:  # nobody may be left waiting for a thread that died
                self._failure = error
            finally:
                if isinstance(item, threading.Event):
                    item.set()
        for close in (self._file.close, *(writer.close for writer in self._writers)):
            try:
                close()
            except OSError as error:
                self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._error(self._failure)

    def _error(self, error: Exception) -> UserError:
        reason = getattr(error, "strerror", None) or error
        return UserError(
            f"run.dir: cannot write {self._path} ({reason}); make room there and run again, training goes on from the "
            "last checkpoint"
        )


def _line(record: Record) -> str:
    return json.dumps({**record, "step": int(record["step"] or 0)}) + "\n"
