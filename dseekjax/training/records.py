"""Records of steps whose numbers are still being computed."""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax

from dseekjax.training.hooks import Record

MAX_PENDING = 2


@dataclass(frozen=True)
class _Pending:
    step: int
    numbers: Future[tuple[Record, float]]
    """The step's metrics, and when they arrived."""
    extra: Record


class PendingRecords:
    """Fetches the metrics of a step when a later step has been handed out, so that devices never wait for the host."""

    def __init__(
        self, emit: Callable[[Record], None], tokens_per_step: int, flops_per_token: float, peak: float | None
    ):
        """
        Args:
            emit: takes each finished record, in order.
            tokens_per_step: tokens of a global batch.
            flops_per_token: floating-point operations of training on one token.
            peak: FLOP/s of all devices together, None if not known.
        """
        self._emit = emit
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._pending: deque[_Pending] = deque()
        # A thread of its own, so that the moment of arrival is known although nobody waits for it.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._last = self._resumed = time.perf_counter()
        self._paused = True

    def push(self, step: int, metrics: dict[str, jax.Array], extra: Record) -> None:
        """Takes the metrics of a step just handed out; finishes those of older steps."""
        self._pending.append(_Pending(step, self._fetcher.submit(_fetch, metrics), extra))
        while len(self._pending) > MAX_PENDING:
            self._finish(self._pending.popleft())

    def amend(self, extra: Record) -> None:
        """Adds fields to the record pushed last."""
        self._pending[-1].extra.update(extra)

    def wait(self) -> None:
        """Waits until all numbers have arrived; what comes until `resume` belongs to no step's duration."""
        for pending in self._pending:
            pending.numbers.result()
        self._paused = True

    def drain(self) -> None:
        """Waits, and finishes all records."""
        self.wait()
        while self._pending:
            self._finish(self._pending.popleft())

    def close(self) -> None:
        """Lets the fetching thread go; what is still pending is dropped."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)

    def resume(self) -> None:
        """Ends a wait; does nothing if there was none."""
        if self._paused:
            self._resumed = time.perf_counter()
            self._paused = False

    def _finish(self, pending: _Pending) -> None:
        metrics, arrived = pending.numbers.result()
        began = max(self._last, self._resumed) if arrived > self._resumed else self._last
        seconds, self._last = arrived - began, arrived
        rate = self._tokens_per_step / seconds
        record: Record = {
            "step": pending.step,
            **metrics,
            "tokens_per_second": rate,
            "mfu": None if self._peak is None else rate * self._flops_per_token / self._peak,
            "step_seconds": seconds,
            **pending.extra,
        }
        self._emit({name: value if value is None or math.isfinite(value) else None for name, value in record.items()})


def _fetch(metrics: dict[str, jax.Array]) -> tuple[Record, float]:
    numbers: Record = {name: float(value) for name, value in jax.device_get(metrics).items()}
    return numbers, time.perf_counter()
