"""Goes through a schedule as a GPU would, and tallies what one step runs, sends and waits for.

Two queues, as XLA keeps them: kernels one after the other, collectives one after the other beside them. Starting an
asynchronous collective queues it; its `done` makes the kernels wait for it. Time is that of matrix products at peak
speed and of collectives at full bandwidth, all else takes none: so the time that is waited is an estimate, while what
runs between a start and its done is a fact of the schedule.
"""

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dseekjax.plan.cluster import ClusterConfig, PeakDtype
from dseekjax.plan.collectives import Collective, started_by
from dseekjax.plan.groups import Topology
from dseekjax.plan.hlo import Computation, Instruction, Module, branches_of, trip_count
from dseekjax.plan.work import Flops, Work

# The second pass through a loop meets what the first left in flight; all later ones are like it.
PASSES = 2
SUMS = (
    "count",
    "payload_bytes",
    "wire_bytes",
    "network_bytes",
    "seconds",
    "exposed_wire_bytes",
    "exposed_seconds",
)
WIDER: tuple[PeakDtype, ...] = ("float8", "bfloat16", "float16", "tensorfloat32", "float32")
NARROWEST: dict[str, PeakDtype] = {"f32": "tensorfloat32", "f16": "float16", "bf16": "bfloat16", "f64": "float32"}


@dataclass(frozen=True)
class Line:
    """What collectives are told apart by."""

    kind: str
    axes: str
    group_size: int
    crosses_hosts: bool
    is_conditional: bool


@dataclass
class Flight:
    """Collectives that have been started and not waited for."""

    number: int
    collectives: list[Collective]
    is_conditional: bool
    ends: float
    flops_before: float


@dataclass
class State:
    """Where a replay stands."""

    seconds: float = 0.0
    """When the kernel queue is free."""
    wire_free: float = 0.0
    """When the queue of collectives is."""
    compute_seconds: float = 0.0
    flops: Flops = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    collectives: dict[tuple[Line, str], float] = field(default_factory=lambda: defaultdict(float))
    """By line and one of `SUMS`."""
    flights: int = 0
    pending: dict[tuple[str, str], deque[Flight]] = field(default_factory=lambda: defaultdict(deque))
    """By computation and name of the start."""

    @property
    def total_flops(self) -> float:
        return self.flops.total()

    def repeat(self, before: "State", times: int) -> None:
        """Adds what has come since `before` another `times` times."""
        wire, flops = self.wire_free - before.wire_free, self.total_flops - before.total_flops
        for flight in (flight for queue in self.pending.values() for flight in queue):
            if flight.number > before.flights:
                flight.ends += times * wire
                flight.flops_before += times * flops
        self.seconds += times * (self.seconds - before.seconds)
        self.wire_free += times * wire
        self.compute_seconds += times * (self.compute_seconds - before.compute_seconds)
        for name in self.flops:
            self.flops[name] += times * (self.flops[name] - before.flops[name])
        for name in self.kernels:
            self.kernels[name] += times * (self.kernels[name] - before.kernels[name])
        for key in self.collectives:
            self.collectives[key] += times * (self.collectives[key] - before.collectives.get(key, 0.0))


class Replay:
    """Runs a module once.

    Attributes:
        state: what there was at the end of the step.
        unknown_loops: names of loops whose length the compiler did not know, which run once here.
    """

    def __init__(self, module: Module, topology: Topology, cluster: ClusterConfig) -> None:
        """Raises ValueError if the module is not scheduled, or is for another number of devices."""
        if not module.is_scheduled:
            raise ValueError("this HLO is not scheduled, so nothing is known of what runs beside what")
        if module.num_partitions != len(topology.hosts):
            raise ValueError(f"this HLO is for {module.num_partitions} devices, the mesh has {len(topology.hosts)}")
        self._module, self._topology, self._cluster = module, topology, cluster
        self._work = Work(module)
        self._loops = {
            module.called(instruction, "body").name: (computation, instruction)
            for computation in module.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "while"
        }
        self.state = State()
        self.unknown_loops: set[str] = set()
        self._run(module.computations[module.entry], False)

    def lines(self) -> Iterator[tuple[Line, dict[str, float]]]:
        """Collectives summed over the step by line, the most bytes first."""
        lines = {line for line, _ in self.state.collectives}
        sums = {line: {name: self.state.collectives.get((line, name), 0.0) for name in SUMS} for line in lines}
        yield from sorted(sums.items(), key=lambda item: (-item[1]["wire_bytes"], str(item[0])))

    def _run(self, computation: Computation, in_branch: bool) -> None:
        for instruction in computation.instructions:
            collectives = list(started_by(self._module, computation, instruction, self._topology))
            if collectives:
                flight = self._launch(collectives, in_branch)
                if _is_asynchronous(instruction):
                    self.state.pending[computation.name, instruction.name].append(flight)
                else:
                    self._land(flight)
            elif instruction.opcode.endswith("-done"):
                self._wait(computation, instruction)
            elif instruction.opcode == "while":
                self._loop(instruction, in_branch)
            elif instruction.opcode == "conditional":
                self._branch(instruction)
            elif instruction.opcode in ("call", "async-start"):
                attribute = "to_apply" if instruction.opcode == "call" else "calls"
                self._run(self._module.called(instruction, attribute), in_branch)
            else:
                self._compute(computation, instruction)

    def _compute(self, computation: Computation, instruction: Instruction) -> None:
        if kernel := self._work.kernel(computation, instruction):
            self.state.kernels[kernel] += 1
        flops = self._work.of_instruction(computation, instruction)
        took = sum(count / self._peak(dtype) for dtype, count in flops.items())
        self.state.flops.update(flops)
        self.state.seconds += took
        self.state.compute_seconds += took

    def _launch(self, collectives: list[Collective], in_branch: bool) -> Flight:
        state = self.state
        took = sum(collective.seconds(self._cluster) for collective in collectives)
        state.wire_free = max(state.wire_free, state.seconds) + took
        state.flights += 1
        for collective in collectives:
            line = _line(collective, in_branch)
            state.collectives[line, "count"] += 1
            state.collectives[line, "payload_bytes"] += collective.payload_bytes
            state.collectives[line, "wire_bytes"] += collective.wire_bytes
            state.collectives[line, "network_bytes"] += collective.network_bytes
            state.collectives[line, "seconds"] += collective.seconds(self._cluster)
        return Flight(state.flights, collectives, in_branch, state.wire_free, state.total_flops)

    def _wait(self, computation: Computation, done: Instruction) -> None:
        waiting = [self.state.pending[key] for key in self._starts(computation, done) if self.state.pending[key]]
        if waiting:
            self._land(min(waiting, key=lambda flights: flights[0].number).popleft())

    def _land(self, flight: Flight) -> None:
        state = self.state
        waits = max(0.0, flight.ends - state.seconds)
        state.seconds += waits
        is_exposed = state.total_flops == flight.flops_before
        whole = sum(collective.wire_bytes for collective in flight.collectives) or 1.0
        for collective in flight.collectives:
            line = _line(collective, flight.is_conditional)
            state.collectives[line, "exposed_wire_bytes"] += collective.wire_bytes * is_exposed
            state.collectives[line, "exposed_seconds"] += waits * collective.wire_bytes / whole

    def _loop(self, loop: Instruction, in_branch: bool) -> None:
        body = self._module.called(loop, "body")
        trips = trip_count(loop)
        if trips is None:
            self.unknown_loops.add(loop.name)
            trips = 1
        before = self.state
        for _ in range(min(trips, PASSES)):
            before = copy.deepcopy(self.state)
            self._run(body, in_branch)
        if trips > PASSES:
            self.state.repeat(before, trips - PASSES)

    def _branch(self, conditional: Instruction) -> None:
        """Goes on from the branch that takes longest; collectives of the others are tallied too."""
        before = self.state
        outcomes = []
        for branch in branches_of(self._module, conditional):
            self.state = copy.deepcopy(before)
            self._run(branch, True)
            outcomes.append(self.state)
        self.state = max(outcomes, key=lambda state: (state.seconds, state.total_flops))
        for other in outcomes:
            if other is not self.state:
                for key, value in other.collectives.items():
                    self.state.collectives[key] += value - before.collectives.get(key, 0.0)

    def _starts(self, computation: Computation, done: Instruction) -> set[tuple[str, str]]:
        """Every start whose result may reach a done, also through the values that a loop carries."""
        found: set[tuple[str, str]] = set()
        seen: set[tuple[str, str, int | None]] = set()

        def follow(computation: Computation, instruction: Instruction, element: int | None) -> None:
            if (key := (computation.name, instruction.name, element)) in seen:
                return
            seen.add(key)
            match instruction.opcode:
                case "get-tuple-element":
                    follow(computation, computation.operand(instruction, 0), int(instruction.attribute("index") or 0))
                case "tuple":
                    if element is not None:
                        follow(computation, computation.operand(instruction, element), None)
                case "bitcast" | "copy" | "opt-barrier" | "async-update":
                    follow(computation, computation.operand(instruction, 0), element)
                case "while":
                    body = self._module.called(instruction, "body")
                    follow(body, body.root, element)
                case "parameter" if computation.name in self._loops:
                    outer, loop = self._loops[computation.name]
                    follow(computation, computation.root, element)
                    follow(outer, outer.operand(loop, 0), element)
                case opcode if opcode.endswith("-start"):
                    found.add((computation.name, instruction.name))

        follow(computation, computation.operand(done, 0), None)
        return found

    def _peak(self, dtype: str) -> float:
        """FLOP/s for a dtype; what the GPU has no units for runs as the next wider one."""
        peaks = self._cluster.peak_flops
        narrowest: PeakDtype = "float8" if dtype.startswith("f8") else NARROWEST.get(dtype, "float32")
        fitting = WIDER[WIDER.index(narrowest) :]
        return next((peaks[name] for name in fitting if name in peaks), min(peaks.values()))


def _is_asynchronous(instruction: Instruction) -> bool:
    config = instruction.backend_config.get("collective_backend_config") or {}
    return instruction.opcode.endswith("-start") and not config.get("is_sync", False)


def _line(collective: Collective, in_branch: bool) -> Line:
    reach = collective.reach
    return Line(collective.kind, collective.axes, reach.group_size, collective.crosses_hosts, in_branch)
