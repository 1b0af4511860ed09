"""SIGTERM and SIGINT as requests to stop after the current step."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Interruption:
    """While entered, remembers the first signal; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            if jax.process_count() == 1:
                handlers = {signal.SIGINT: self._remember, signal.SIGTERM: self._remember}
            else:
                # SIGTERM belongs to JAX's coordination, which has all processes stop at the same step.
                handlers = {signal.SIGINT: _terminate}
            self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def stop_after(self, step: int) -> bool:
        """Whether the loop is to end after `step`; the same answer on every process."""
        if jax.process_count() > 1:
            if multihost_utils.reached_preemption_sync_point(step):
                self.received = signal.SIGTERM
                return True
            return False
        return self.received is not None


def _terminate(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
