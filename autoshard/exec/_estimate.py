"""How long a scheduled TPU program takes: its instructions walked in the order in which they will run.

Compute is a roofline (matrix unit, main memory, vector units) with the chip's calibrated efficiencies; collectives
are priced by `cost` on the mesh axes that their groups use. A synchronous collective stops everything. An
asynchronous one occupies its links from its start, and its done waits for it: what compute stands between is
hidden. Collectives that share links queue. Loop bodies are walked once and multiplied by their trips.
"""

import collections
import dataclasses
import re

from autoshard.cost import Calibration, Compute, Mesh, Segment, dtype_class
from autoshard.exec._collectives import CompiledCollective, Walk, _Place
from autoshard.exec._hlo import Computation, HloModule, Instruction, parse_hlo
from autoshard.exec._kernel import Kernel
from autoshard.exec._physical import group_segments, permute_seconds, route
from autoshard.exec._work import FREE, Reader, Work


ERROR = 0.15
"""Share by which the estimate may be wrong: two plans that differ by less are undecided."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """One step of a compiled program; seconds on one device."""

    step_time_s: float
    compute_s: float
    exposed_comm_s: float
    hidden_comm_s: float
    copy_s: float
    """Waiting for copies between memories."""
    flops: float
    """Matrix flops of one device in one step, recompute included."""
    by_kind: dict[str, float]
    """Seconds by what the time went to: matmul, memory, vector, overhead, and the kinds of collectives."""
    unknown_trips: int
    """Loops whose trip count the text does not tell; counted once."""
    error: float = ERROR


def estimate(text: str | HloModule, mesh: Mesh, calibration: Calibration | None = None) -> Estimate:
    """Estimate one step of scheduled HLO that was compiled for `mesh`."""
    module = parse_hlo(text) if isinstance(text, str) else text
    clock = _Simulator(module, mesh, calibration).run(module.computations[module.entry])
    return Estimate(
        step_time_s=clock.now,
        compute_s=clock.compute,
        exposed_comm_s=clock.exposed,
        hidden_comm_s=max(0.0, clock.communication - clock.exposed),
        copy_s=clock.copies,
        flops=clock.flops,
        by_kind=dict(sorted(clock.by_kind.items())),
        unknown_trips=clock.unknown_trips,
    )


def decided(a: float, b: float, error: float = ERROR) -> bool:
    """Whether two estimated times differ by more than the estimator's own error."""
    return abs(a - b) > error * max(a, b)


class _Clock:
    """Time inside one computation, and what it was spent on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compute = 0.0
        self.exposed = 0.0
        self.communication = 0.0
        self.copies = 0.0
        self.flops = 0.0
        self.unknown_trips = 0
        self.by_kind: dict[str, float] = collections.defaultdict(float)
        self.busy: dict[str, float] = collections.defaultdict(float)
        """When each link group is free again."""
        self.pending: dict[str, tuple[float, str]] = {}
        """Key of a running transfer -> when it ends, and its kind."""

    def work(self, seconds: float, kind: str) -> None:
        self.now += seconds
        self.compute += seconds
        self.by_kind[kind] += seconds

    def wait(self, until: float, kind: str) -> None:
        waited = max(0.0, until - self.now)
        self.now += waited
        self.by_kind[kind] += waited
        if kind == "copy":
            self.copies += waited
        else:
            self.exposed += waited

    def add(self, other: "_Clock", times: float) -> None:
        self.now += other.now * times
        self.compute += other.compute * times
        self.exposed += other.exposed * times
        self.communication += other.communication * times
        self.copies += other.copies * times
        self.flops += other.flops * times
        self.unknown_trips += other.unknown_trips
        for kind, seconds in other.by_kind.items():
            self.by_kind[kind] += seconds * times


class _Simulator:
    def __init__(self, module: HloModule, mesh: Mesh, calibration: Calibration | None) -> None:
        self.module = module
        self.mesh = mesh
        self.reader = Reader(module)
        self.walk = Walk(module, mesh)
        self.compute = Compute(mesh.topology, calibration)
        self.routes: dict[tuple[object, ...], tuple[float, frozenset[str]]] = {}
        self.cache: dict[str, _Clock] = {}

    def run(self, computation: Computation) -> _Clock:
        if computation.name not in self.cache:
            clock = _Clock()
            for op in computation.instructions:
                self.step(clock, computation, op)
            for until, kind in list(clock.pending.values()):
                clock.wait(until, kind)
            self.cache[computation.name] = clock
        return self.cache[computation.name]

    def step(self, clock: _Clock, owner: Computation, op: Instruction) -> None:
        if op.opcode in FREE and op.opcode != "copy-done":
            return
        if op.opcode == "while":
            self.loop(clock, op)
        elif op.opcode == "conditional":
            branches = [self.module.computations[name] for name in op.called if name in self.module.computations]
            if branches:
                clock.add(max((self.run(b) for b in branches), key=lambda c: c.now), 1)
        elif op.opcode == "call":
            inside = self.module.computations.get((op.attribute("to_apply") or "").lstrip("%"))
            if inside is not None:
                clock.add(self.run(inside), 1)
        elif op.opcode in ("recv", "send-done"):
            return  # the transfer runs from its send to its recv-done
        elif op.opcode == "send":
            for found in self.walk.instruction(owner, op, _Place()):
                self.begin(clock, found, _rendezvous(owner, op))
        elif op.opcode == "recv-done":
            self.end(clock, _rendezvous(owner, op))
        elif op.opcode.endswith("-done"):
            self.end(clock, self.origin(owner, op))
        elif op.opcode.endswith("-update"):
            return
        else:
            self.plain(clock, owner, op)

    def loop(self, clock: _Clock, op: Instruction) -> None:
        body = self.module.computations.get((op.attribute("body") or "").lstrip("%"))
        if body is None:
            return
        trips = self.module.trip_count(op)
        clock.unknown_trips += trips is None
        clock.add(self.run(body), 1 if trips is None else trips)

    def plain(self, clock: _Clock, owner: Computation, op: Instruction) -> None:
        """Compute, a copy, or a collective."""
        chain = self.chain(op)
        if chain is not None and chain[0] == "done":
            self.end(clock, chain[1])
            return
        found = self.walk.instruction(owner, op, _Place()) if _may_communicate(op) else []
        if op.opcode.endswith("-start") or (chain is not None and chain[0] == "start"):
            key = chain[1] if chain is not None else op.name
            if found:
                for collective in found:
                    self.begin(clock, collective, key)
            elif op.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
                self.copy(clock, op)
            else:
                # Asynchronous compute (the sparse core's gathers): memory bound, beside everything else.
                size = sum(shape.bytes for shape in op.shapes if shape.space == 0)
                clock.pending[key] = (clock.now + float(self.compute.memory_seconds(size)), "copy")
            return
        if found:
            for collective in found:
                self.synchronous(clock, collective)
            return
        self.roofline(clock, self.reader.work(owner, op))

    def copy(self, clock: _Clock, op: Instruction) -> None:
        size = op.shapes[0].bytes
        begin = max(clock.now, clock.busy["copy"])
        until = begin + float(self.compute.memory_seconds(size))
        clock.busy["copy"] = until
        clock.pending[op.name] = (until, "copy")

    def roofline(self, clock: _Clock, work: Work) -> None:
        if work.kernel is not None:
            self.kernel(clock, work.kernel)
            return
        if not work.matmuls and not work.hbm_bytes and not work.vmem_bytes and not work.elements:
            return
        memory = float(self.compute.memory_seconds(work.hbm_bytes))
        memory += float(self.compute.memory_seconds(work.vmem_bytes, on_chip=True))
        vector = float(self.compute.vector_seconds(work.elements))
        matrix = self.matrix(work)
        longest = max(matrix, memory, vector)
        kind = "matmul" if longest == matrix else "memory" if longest == memory else "vector"
        clock.flops += work.flops
        clock.work(longest, kind)
        clock.work(self.compute.calibration.op_overhead_s, "overhead")

    def matrix(self, work: Work) -> float:
        """Seconds of a fusion's matmuls, the traffic that blocks of theirs cause included."""
        total = sum(x.flops for x in work.matmuls)
        seconds = 0.0
        for x in work.matmuls:
            if x.flops:
                batch, share = x.flops / (2.0 * x.m * x.n * x.k), x.flops / total
                dot = self.compute.dot_seconds(x.m, x.n, x.k, batch, dtype_class(x.dtype), work.hbm_bytes * share)
                busy = self.compute.matmul_seconds(x.m, x.n, x.k, batch, dtype_class(x.dtype))
                seconds += float(dot) - self.compute.calibration.op_overhead_s + float(busy) * (x.passes - 1)
        return seconds

    def kernel(self, clock: _Clock, kernel: Kernel) -> None:
        if kernel.head:
            passes = kernel.score_passes
            seconds = self.compute.attention_seconds(passes, kernel.head, kernel.head, 1, "bf16", kernel.traffic)
        else:
            seconds = self.compute.op_seconds(kernel.flops, kernel.traffic)
        clock.flops += kernel.flops
        clock.work(float(seconds), "kernel")

    # Collectives

    def cost(self, collective: CompiledCollective) -> tuple[float, frozenset[str]]:
        """Seconds of one execution, and the physical axes that it occupies."""
        key = (collective.kind, collective.size_bytes, collective.members, collective.pairs, collective.network)
        if key not in self.routes:
            self.routes[key] = self.priced(collective)
        return self.routes[key]

    def priced(self, collective: CompiledCollective) -> tuple[float, frozenset[str]]:
        topology, calibration = self.mesh.topology, self.compute.calibration
        size = collective.size_bytes
        if collective.network:
            segments = (Segment("slice", "network", max(2, collective.group), 1, False),)
        elif collective.pairs:
            return permute_seconds(topology, calibration, collective.pairs, size)
        else:
            segments = group_segments(topology, collective.members)
        if segments is None:
            # No box: as if all devices took part, which no group of them can be slower than.
            segments = tuple(s for axis in self.mesh.names for s in self.mesh.segments(axis))
        found = route(topology, calibration, segments)
        return float(found.prices.time(collective.kind, ("group",), size)), found.links

    def synchronous(self, clock: _Clock, collective: CompiledCollective) -> None:
        seconds, used = self.cost(collective)
        until = max([clock.now, *(clock.busy[link] for link in used)]) + seconds
        for link in used:
            clock.busy[link] = until
        clock.communication += seconds
        clock.wait(until, collective.kind)

    def begin(self, clock: _Clock, collective: CompiledCollective, key: str) -> None:
        seconds, used = self.cost(collective)
        until = max([clock.now, *(clock.busy[link] for link in used)]) + seconds
        for link in used:
            clock.busy[link] = until
        clock.communication += seconds
        earlier = clock.pending.get(key)
        clock.pending[key] = (max(until, earlier[0]) if earlier else until, collective.kind)

    def end(self, clock: _Clock, key: str) -> None:
        if key in clock.pending:
            until, kind = clock.pending.pop(key)
            clock.wait(until, kind)

    def origin(self, owner: Computation, op: Instruction) -> str:
        """Name of the start that a done belongs to, through updates and tuple elements."""
        source = owner.by_name.get(op.operands[0]) if op.operands else None
        while source is not None and not source.opcode.endswith("-start"):
            if not source.operands:
                break
            source = owner.by_name.get(source.operands[0])
        return source.name if source is not None else ""

    def chain(self, op: Instruction) -> tuple[str, str] | None:
        """Part ("start", "during", "done") and key of one of TPU's asynchronous collective fusions."""
        if op.opcode != "fusion":
            return None
        inside = self.module.computations.get((op.attribute("calls") or "").lstrip("%"))
        if inside is None:
            return None
        for inner in inside.instructions:
            found = re.search(r'chain_id="([^"]*)"', inner.attributes)
            if found:
                targets = " ".join(i.attributes for i in inside.instructions if i.opcode == "custom-call")
                part = (
                    "start"
                    if "AsyncCollectiveStart" in targets
                    else "done"
                    if "CollectiveDone" in targets
                    else "during"
                )
                return part, f"chain {found[1]}"
        return None


def _may_communicate(op: Instruction) -> bool:
    base = op.opcode.removesuffix("-start")
    return op.opcode in ("fusion", "async-start", "custom-call") or base in (
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
    )


def _rendezvous(owner: Computation, op: Instruction) -> str:
    """What a send and its recv-done have in common."""
    if op.opcode.endswith("-done") and op.operands and op.operands[0] in owner.by_name:
        op = owner.by_name[op.operands[0]]
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', op.attributes)
    return f"transfer {found[1]}" if found else op.name
