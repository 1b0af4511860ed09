"""What else the machine was busy with, so that steps it disturbed can be left out."""

import time
from dataclasses import dataclass
from statistics import median

import psutil

LIMIT = 0.12
"""Cores that others may use during a step that counts."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    others: float
    """Cores used by other processes, or taken by the host, meanwhile."""

    @property
    def quiet(self) -> bool:
        return self.others <= LIMIT


class Stopwatch:
    """Times stretches of this process; each `lap` ends one and begins the next."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._read()

    def lap(self) -> Timed:
        before, self._last = self._last, self._read()
        seconds, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return Timed(seconds, max(0.0, (busy - own) / seconds))

    def _read(self) -> tuple[float, float, float]:
        machine = psutil.cpu_times()
        # Time of guests is in that of users already.
        busy = sum(getattr(machine, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        own = self._process.cpu_times()
        return time.perf_counter(), busy, own.user + own.system


def counted(laps: list[Timed]) -> list[Timed]:
    """Those that were quiet; all, where fewer than three were."""
    quiet = [lap for lap in laps if lap.quiet]
    return quiet if len(quiet) >= 3 else laps


def median_ratio(numerators: list[Timed], denominators: list[Timed]) -> float:
    """Over pairs, each timed one right after the other, so that a machine's drift is in both alike.

    Of the pairs that were quiet; of all, where fewer than three were.
    """
    pairs = list(zip(numerators, denominators, strict=True))
    quiet = [pair for pair in pairs if all(lap.quiet for lap in pair)]
    return median(a.seconds / b.seconds for a, b in (quiet if len(quiet) >= 3 else pairs))
