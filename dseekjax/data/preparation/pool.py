"""Units of work given to worker processes, and what comes of them taken in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import connection
from pathlib import Path

from dseekjax.data.preparation.units import Unit
from dseekjax.data.preparation.worker import Encoder, UnitFiles, UnitReport

# A worker that is slow with one unit must not leave the others idle; what they write meanwhile takes room on disk.
UNITS_AHEAD = 4


def encoded(
    units: Sequence[Unit], first: int, encoder: Encoder, folder: Path, workers: int
) -> Iterator[tuple[int, UnitReport]]:
    """The number and the report of each unit from `first` on, whose files then lie in `folder`.

    Raises:
        UserError: an input is damaged.
        OSError: a unit cannot be written.
        BrokenProcessPool: a worker was killed.
    """
    numbers = range(first, len(units))
    workers = min(workers, len(numbers))
    if workers <= 1:
        yield from ((number, _encode(number, units[number], encoder, folder)) for number in numbers)
        return
    # Not by forking: whoever prepares may have threads, JAX's for one.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (encoder, folder))
    waiting: deque[tuple[int, Future[UnitReport]]] = deque()
    try:
        for number in numbers:
            waiting.append((number, executor.submit(_work, number, units[number])))
            if len(waiting) >= workers * UNITS_AHEAD:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        for number, future in waiting:
            yield number, future.result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _encode(number: int, unit: Unit, encoder: Encoder, folder: Path) -> UnitReport:
    files = UnitFiles.of(folder, number)
    return files.load(encoder.dtype) or encoder.encode(unit, files)


_worker: tuple[Encoder, Path]


def _start_worker(encoder: Encoder, folder: Path) -> None:
    global _worker
    _worker = (encoder, folder)
    # Each worker is one of several, so each keeps to one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(number: int, unit: Unit) -> UnitReport:
    return _encode(number, unit, *_worker)
