"""What all commands share: what they are called, and how they end."""

import codecs
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from dseekjax.errors import UserError

AS_IN_JSON = "dseekjax.as_in_json"
"""What becomes of letters that the terminal's encoding lacks: `\\u00e9`. JSON stays JSON, and no text is lost."""


def _as_in_json(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(AS_IN_JSON, _as_in_json)


def command_name(door: str) -> str:
    """How the user called a command: by a script, by its installed name, or as a module."""
    name = Path(sys.argv[0]).name
    return os.environ.get("DSEEKJAX_COMMAND") or (name if name == f"dseek-{door}" else f"python -m dseekjax.{door}")


def exit_status(run: Callable[[], int], on_interrupt: Callable[[], str] = lambda: "interrupted") -> int:
    """Runs a command to its end.

    Args:
        run: does all of it; returns the exit status.
        on_interrupt: what to do, and to say, when the user stops it where nothing is lost by that. The process ends
            then and there: a KeyboardInterrupt instead, raised while libraries load, is swallowed by some of them.

    Returns:
        What `run` does; or `UserError.exit_code`, usually 2, with one sentence on standard error.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{on_interrupt()}\n".encode())
        os._exit(128 + signal.SIGINT)

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=AS_IN_JSON)
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupted) if on_main_thread else None
    try:
        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever was to read it has gone.
        _stop_printing()
        return 0
    except OSError as error:
        # A disk or a permission, at a place that has no better words for it.
        place = error.filename or "standard output"
        print(f"error: cannot use {place} ({error.strerror}); mend that and run again", file=sys.stderr)
        if error.filename is None:
            _stop_printing()
        return UserError.exit_code
    finally:
        if on_main_thread:
            signal.signal(signal.SIGINT, before)


def _stop_printing() -> None:
    """Python must not write there again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
