"""How far the tokenising of files has come, in the terminal."""

import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SECONDS_BETWEEN_LINES = 10


class Prepared(Protocol):
    """What is told while files are tokenised."""

    @property
    def input_bytes(self) -> int: ...
    @property
    def total_input_bytes(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


class PreparationProgress:
    """A bar with text per second where there is a terminal, and until it is left; elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = self._began = time.perf_counter()
        self._first: int | None = None
        self.rate = 0.0
        """Bytes per second, without what an earlier process had done."""
        self._progress = Progress(
            TextColumn("tokenising"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("tokenising", total=None, visible=False, tokens="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, prepared: Prepared) -> None:
        self._progress.update(
            self._task,
            visible=True,
            completed=prepared.input_bytes,
            total=prepared.total_input_bytes,
            tokens=f"{prepared.num_tokens / 1e6:,.1f} M tokens",
        )
        now = time.perf_counter()
        if self._first is None:
            self._first, self._began = prepared.input_bytes, now
        self.rate = (prepared.input_bytes - self._first) / max(now - self._began, 1e-9)
        if not self._console.is_terminal and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self._console.print(
                f"tokenising  {prepared.input_bytes / 1e6:,.1f} of {prepared.total_input_bytes / 1e6:,.1f} MB  "
                f"{self.rate / 1e6:,.1f} MB/s  {prepared.num_tokens / 1e6:,.1f} M tokens",
                highlight=False,
            )
