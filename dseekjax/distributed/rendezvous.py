"""The processes of a run meet before JAX starts, which would abort where one of them is missing or wrong.

Every process connects to the coordinator's address, where process 0 listens, says who it is and what it is to run, and
waits for the verdict; all get the same one. Messages are lines of JSON.
"""

import asyncio
import collections
import contextlib
import errno
import json
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pydantic

from dseekjax.distributed.membership import Membership
from dseekjax.errors import UserError

GRACE_SECONDS = 2.0
"""How long a verdict may take to arrive, and how long a refusal waits for those who are about to come."""
RETRY_SECONDS = 0.2
LINE_BYTES = 1 << 24


@pydantic.dataclasses.dataclass(frozen=True)
class Hello:
    """What a process says of itself."""

    process_id: int
    num_processes: int
    host: str
    patience: float
    """Seconds that it will still wait."""
    settings: Mapping[str, Any]
    """What has to be the same everywhere, by key."""


def meet(member: Membership, settings: Mapping[str, Any], timeout: float) -> None:
    """Returns when all processes of the run are there and agree.

    Args:
        member: this process.
        settings: what has to be the same everywhere, by key; JSON values.
        timeout: seconds to wait.

    Raises:
        UserError: they are not, or do not; on every process that reached the coordinator with the same sentence.
    """
    problem = asyncio.run(_meet(member, settings, timeout))
    if problem:
        raise UserError(problem)


def disagreement(hellos: Sequence[Hello]) -> str:
    """What no waiting can mend, as a sentence; empty if there is nothing."""
    hosts: dict[int, list[str]] = collections.defaultdict(list)
    for hello in hellos:
        hosts[hello.process_id].append(hello.host)
    for process_id, places in sorted(hosts.items()):
        if len(places) > 1:
            return (
                f"{len(places)} processes say that they are process {process_id} (on {' and '.join(sorted(places))}); "
                "give each its own distributed.process_id (or JAX_PROCESS_ID)"
            )
    differences = _differences({hello.process_id: {"num_processes": hello.num_processes} for hello in hellos})
    if differences:
        return f"the processes disagree: distributed.{differences[0]}; set the same number everywhere"
    differences = _differences({hello.process_id: hello.settings for hello in hellos})
    if differences:
        return f"the processes have different configs: {'; '.join(differences)}; start them all with the same"
    return ""


def absence(hellos: Iterable[Hello], num_processes: int, address: str, seconds: float) -> str:
    """Who did not come, as a sentence; empty if all did."""
    present = {hello.process_id for hello in hellos}
    missing = [process_id for process_id in range(num_processes) if process_id not in present]
    if not missing:
        return ""
    here = f"only {_processes(present)} did" if present else "none did"
    return (
        f"{_processes(missing)} of {num_processes} did not come to {address} within {seconds:.0f} seconds, {here}; "
        "look at what became of them, or raise distributed.timeout"
    )


def _differences(values: Mapping[int, Mapping[str, Any]]) -> list[str]:
    found = []
    for key in sorted({key for of_process in values.values() for key in of_process}):
        owners: dict[str, list[int]] = collections.defaultdict(list)
        for process_id, of_process in sorted(values.items()):
            owners[repr(of_process[key]) if key in of_process else "missing"].append(process_id)
        if len(owners) > 1:
            found.append(f"{key} is " + " and ".join(f"{value} on {_processes(ids)}" for value, ids in owners.items()))
    return found


def _processes(ids: Iterable[int]) -> str:
    """As in 'processes 0-5, 7'."""
    spans: list[list[int]] = []
    for process_id in sorted(ids):
        if spans and spans[-1][1] == process_id - 1:
            spans[-1][1] = process_id
        else:
            spans.append([process_id, process_id])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"process {words}" if words.isdecimal() else f"processes {words}"


class _Coordinator:
    """What process 0 does for all: it collects what they say, and gives every one the same answer."""

    def __init__(self, member: Membership, timeout: float) -> None:
        self._member = member
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._present: dict[asyncio.StreamWriter, tuple[Hello, float]] = {}
        self._changed = asyncio.Event()

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Counts a process as present for as long as its connection lasts."""
        # What connects may be anything; what says nothing sensible is not of the run.
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, asyncio.LimitOverrunError):
            hello = Hello(**json.loads(await reader.readuntil()))
            self._present[writer] = hello, time.monotonic() + hello.patience
            self._changed.set()
            await reader.read(1)
        self._present.pop(writer, None)
        self._changed.set()
        writer.close()

    async def judge(self) -> None:
        """Waits for all, until one of them will wait no more, and tells them what is wrong, if anything is."""
        refused_at = None
        while True:
            hellos = [hello for hello, _ in self._present.values()]
            problem = disagreement(hellos)
            if not problem and len(hellos) == self._member.num_processes:
                break
            deadline = min([self._deadline, *(until for _, until in self._present.values())])
            refused_at = (refused_at or time.monotonic()) if problem else None
            if refused_at is not None:
                deadline = min(deadline, refused_at + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                member = self._member
                problem = problem or absence(hellos, member.num_processes, member.coordinator_address, self._timeout)
                break
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
        for writer in list(self._present):
            with contextlib.suppress(OSError):
                writer.write(_line({"problem": problem}))
                await asyncio.wait_for(writer.drain(), GRACE_SECONDS)


async def _meet(member: Membership, settings: Mapping[str, Any], timeout: float) -> str:
    if member.process_id > 0:
        return await _verdict(member, settings, timeout)
    try:
        listener = _listener(member)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"process 0 cannot listen on port {member.port} ({error.strerror}); choose another port"
        # It may be the coordinator of this very run, which wants to know that it has two of them.
        with contextlib.suppress(*NO_VERDICT):
            return await _ask(member, settings, 2 * GRACE_SECONDS)
        return (
            f"port {member.port} of this machine, where process 0 is to listen at {member.coordinator_address}, is in "
            "use; choose another, or stop what uses it"
        )
    coordinator = _Coordinator(member, timeout)
    async with await asyncio.start_server(coordinator.listen, sock=listener, limit=LINE_BYTES):
        judging = asyncio.create_task(coordinator.judge())
        problem = await _verdict(member, settings, timeout)
        await judging
    return problem


def _listener(member: Membership) -> socket.socket:
    """On all interfaces, as JAX's own coordinator.

    Unlike that one it does not share its port: two runs on one port would otherwise take each other's processes.
    """
    both = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", member.port),
        family=socket.AF_INET6 if both else socket.AF_INET,
        dualstack_ipv6=both,
        backlog=max(128, member.num_processes),
    )


async def _verdict(member: Membership, settings: Mapping[str, Any], timeout: float) -> str:
    """Asks until there is an answer: the coordinator, or its name, may come about later than this process."""
    deadline = time.monotonic() + timeout
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            return await _ask(member, settings, left)
        except NO_VERDICT as error:
            reason = _reason(error)
            await asyncio.sleep(min(RETRY_SECONDS, left))
    place = f"{member.coordinator_address} within {timeout:.0f} seconds: {reason}"
    if member.process_id == 0:
        return (
            f"process 0 did not find itself at {place}; distributed.coordinator_address must be an address of its "
            f"machine, which is {socket.gethostname()}"
        )
    return (
        f"process {member.process_id} did not find the coordinator, which is process 0, at {place}; look at what "
        "became of process 0, or correct distributed.coordinator_address"
    )


NO_VERDICT = (OSError, EOFError, ValueError, TypeError, KeyError, asyncio.LimitOverrunError)


async def _ask(member: Membership, settings: Mapping[str, Any], patience: float) -> str:
    """The coordinator's verdict; raises one of `NO_VERDICT` if there is none."""
    async with asyncio.timeout(patience + GRACE_SECONDS):
        reader, writer = await asyncio.open_connection(member.host, member.port, limit=LINE_BYTES)
        try:
            hello = Hello(member.process_id, member.num_processes, socket.gethostname(), patience, settings)
            writer.write(_line(asdict(hello)))
            return str(json.loads(await reader.readuntil())["problem"])
        finally:
            writer.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return f"there is no machine of that name ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, OSError) and not isinstance(error, ConnectionResetError | BrokenPipeError):
        return "nothing listens there" if error.errno in (None, errno.ECONNREFUSED) else str(error.strerror)
    return "what answers there is no coordinator of a run that is about to start"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
