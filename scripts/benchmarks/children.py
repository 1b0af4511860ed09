"""Child processes that end with the script that started them, however it ends, SIGKILL included. Linux only.

The kernel kills a child when the thread that started it ends, so start them from the main thread. That holds on when a
child replaces itself with another program, but not for what it starts in turn.
"""

import ctypes
import os
import signal
import subprocess
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any

__all__ = ["DEVNULL", "PIPE", "STDOUT", "Popen", "pool", "run", "start"]
_prctl, _PR_SET_PDEATHSIG = ctypes.PyDLL(None).prctl, 1
# JAX warns of every fork, as its threads are not in the child; this child only asks the kernel and starts its program.
warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)


def start(command: list[Any], **options: Any) -> Popen[Any]:
    return Popen(command, preexec_fn=partial(_end_with, os.getpid()), **options)


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(command, preexec_fn=partial(_end_with, os.getpid()), **options)


def pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), _end_with, (os.getpid(),))


def _end_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # It may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)
