"""How the process gets memory: what was measured fastest for steps on CPU, put in force by starting again with it.

XLA for CPU asks the C library for the buffers of every step and gives them back after it. From glibc as it comes, they
are mapped anew each time, and up to a quarter of a step goes into page faults of 4 KiB. With huge pages, a setting of
glibc itself, a step is as fast as with tcmalloc, in up to 30 % less memory. Both can only be chosen when a process
starts.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HUGE_PAGES = "glibc.malloc.hugetlb"
"""Since glibc 2.35: 1 asks the kernel for huge pages wherever it maps memory."""
KERNEL_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LIBRARY_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
RESTARTED = "DSEEKJAX_RESTARTED"
"""Set in a process that has been started again."""
OTHER_ALLOCATORS = re.compile(r"tcmalloc|jemalloc|mimalloc|snmalloc|tbbmalloc")


@dataclass(frozen=True)
class Allocator:
    """Where memory comes from."""

    name: str
    environment: Mapping[str, str]
    """What has to be set when the process starts; nothing if it cannot be chosen here."""
    hint: str | None = None
    """What the user could do for a faster one."""


def best_allocator() -> Allocator:
    """The best that this machine has, beside what its user has already set."""
    tunables, preload = os.environ.get("GLIBC_TUNABLES", ""), os.environ.get("LD_PRELOAD", "")
    if (chosen := OTHER_ALLOCATORS.search(preload)) is not None:
        return Allocator(chosen[0], {})
    if (chosen := re.search(rf"{HUGE_PAGES}=(\d)", tunables)) is not None:
        return Allocator("glibc" if chosen[1] == "0" else "glibc with huge pages", {})
    if not sys.platform.startswith("linux"):
        return Allocator("the system's allocator", {})
    if _has_huge_pages():
        return Allocator("glibc with huge pages", {"GLIBC_TUNABLES": _joined(tunables, f"{HUGE_PAGES}=1")})
    library = _find_tcmalloc()
    if library is not None:
        return Allocator("tcmalloc", {"LD_PRELOAD": _joined(preload, str(library))})
    return Allocator(
        "the system's allocator",
        {},
        f"steps on CPU would be faster with huge pages (as root, echo madvise > {KERNEL_SWITCH}; needs glibc 2.35) or "
        "with tcmalloc (apt install libtcmalloc-minimal4)",
    )


def allocator_in_force() -> str:
    """The name of what this process has started with."""
    best = best_allocator()
    return "the system's allocator" if best.environment else best.name


def restart_with(allocator: Allocator) -> None:
    """Replaces this process, which has done nothing yet, by the same command with the allocator in force.

    Returns if that is so already, if there is nothing to choose, or if it was tried: where a program has more rights
    than its user, what was set does not reach it.
    """
    if allocator.environment and RESTARTED not in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        environment = {**os.environ, **allocator.environment, RESTARTED: "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _has_huge_pages() -> bool:
    library, version = platform.libc_ver()
    try:
        allowed = "[never]" not in KERNEL_SWITCH.read_text()
    except OSError:
        return False
    return allowed and library == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)


def _find_tcmalloc() -> Path | None:
    found = (path for folder in LIBRARY_FOLDERS for path in Path("/").glob(f"{folder[1:]}/libtcmalloc_minimal.so.*"))
    return next(found, None)


def _joined(existing: str, more: str) -> str:
    return f"{existing}:{more}" if existing else more
