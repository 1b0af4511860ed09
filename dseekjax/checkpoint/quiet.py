"""Keeps what Orbax says about its own failures off the terminal: they are raised, and told in one sentence."""

import logging
import sys
from typing import Any


def silence_orbax() -> None:
    """For the rest of the process. After a failed read or write its threads print a traceback for each array."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def without_closed_loops(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = without_closed_loops
