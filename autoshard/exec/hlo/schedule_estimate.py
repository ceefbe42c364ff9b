"""How long a scheduled TPU program takes: its instructions walked in the order in which they will run.

Compute is a roofline (matrix unit, main memory, vector units) with the chip's calibrated efficiencies; collectives
are priced by `cost` on the physical axes that their groups span. A synchronous collective stops everything. An
asynchronous one occupies its links from its start, and its done waits for it: what compute stands between is
hidden. Collectives that share links queue. Loop bodies are walked once and multiplied by their trips.
"""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Mapping

from autoshard.cost import Calibration, Compute, Mesh, Segment, dtype_class, hidden_shares, traffic_class
from autoshard.exec.hlo.compiled_collectives import OPCODES, CompiledCollective, Walk, _Place
from autoshard.exec.hlo.hlo_text import HOST_SPACE, SCALAR_SPACE, Computation, HloModule, Instruction, parse_hlo
from autoshard.exec.hlo.instruction_work import FREE, InstructionWork, Reader
from autoshard.exec.hlo.physical_links import group_segments, permute_seconds, route
from autoshard.exec.hlo.schedule_clock import Busy, Clock, Traffic
from autoshard.exec.hlo.tpu_kernels import Kernel
from autoshard.exec.hlo.trip_counts import trip_count


_ERROR_FILE = pathlib.Path(__file__).with_name("estimator.json")
_UNMEASURED = ("overhead", "vector", "copy")
SHORTEST = 1e-5
"""Spans shorter than this share of the step are left out of the timeline."""


@dataclasses.dataclass(frozen=True, slots=True)
class EstimatorError:
    """How far estimates were from measured step times, as shares of those."""

    mean: float
    within: float
    """Nine of ten published runs were nearer than this."""
    source: str
    """The published runs that `mean` and `within` are of."""
    pairs: float
    """Nine of ten ratios of two measured plans of one model on one set of chips were less wrong than this share of the
    longer step; what is wrong with both plans cancels."""
    pairs_source: str
    """The measured plans that `pairs` is of."""


@functools.cache
def estimator_error() -> EstimatorError:
    """The estimator's error, as it was measured on published runs and on plans of one model.

    `experiments/fidelity/published_runs.py` and `experiments/fidelity/pair_estimates.py` measure it.
    """
    return EstimatorError(**json.loads(_ERROR_FILE.read_text()))


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
    remat_flops: float
    """The part of them that the compiler's own rematerialisation added."""
    by_kind: dict[str, float]
    """Seconds by what the time went to: matmul, kernel, memory, vector, overhead, and the kinds of collectives."""
    traffic: dict[tuple[str, bool], Traffic]
    """Seconds of communication by kind of collective and whether it goes between slices: sent, and waited for."""
    unknown_trips: int
    """Loops whose trip count the text does not tell; counted once."""
    spans: tuple[Busy, ...]
    """The step laid out in time; all trips of a loop are drawn as one."""

    @property
    def hidden(self) -> dict[str, float]:
        """Share of each class of communication (`cost.traffic_class`) that compute does not wait for."""
        classes: dict[str, tuple[float, float]] = {}
        for (kind, far), found in self.traffic.items():
            name = traffic_class(kind, far)
            sent, waited = classes.get(name, (0.0, 0.0))
            classes[name] = (sent + found.sent_s, waited + found.waited_s)
        return hidden_shares(classes)

    @property
    def error(self) -> float:
        """Share by which the step time may be wrong: as measured on published runs, and on top of that the share of
        what took next to no time in any of them (fixed overheads, vector units, copies)."""
        unknown = sum(self.by_kind.get(kind, 0.0) for kind in _UNMEASURED)
        return min(1.0, estimator_error().within + (unknown / self.step_time_s if self.step_time_s else 0.0))


def estimate(
    text: str | HloModule,
    mesh: Mesh,
    calibration: Calibration | None = None,
    layers: tuple[int, int] | None = None,
) -> Estimate:
    """Estimate one step of scheduled HLO that was compiled for `mesh`.

    `layers` says that a program was compiled with fewer repeated layers than it has, (8, 32) with 8 of 32: outermost
    loops of 8 trips, or of up to two fewer where the compiler took some out, run 24 times more.
    """
    module = parse_hlo(text) if isinstance(text, str) else text
    clock = _Simulator(module, mesh, calibration, layers or (0, 0)).run(module.computations[module.entry])
    return Estimate(
        step_time_s=clock.now,
        compute_s=clock.compute,
        exposed_comm_s=clock.exposed,
        hidden_comm_s=max(0.0, clock.communication - clock.exposed),
        copy_s=clock.copies,
        flops=clock.flops,
        remat_flops=clock.again,
        by_kind=dict(sorted(clock.by_kind.items())),
        traffic=dict(sorted(clock.traffic.items())),
        unknown_trips=clock.unknown_trips,
        spans=tuple(span for span in clock.spans if span.seconds >= SHORTEST * clock.now),
    )


def decided(a: float, b: float, error: float) -> bool:
    """Whether two times differ by more than the share `error` of the longer one."""
    return abs(a - b) > error * max(a, b)


def pair_error(a: Mapping[str, float], b: Mapping[str, float], longer_s: float) -> float:
    """Share of the longer of two estimated steps, `longer_s`, by which their difference may be wrong: as measured on
    pairs of plans of one model, and on top by how much the two differ in what took next to no time in published runs.

    `a`, `b`: seconds by kind, as in `Estimate.by_kind`.
    """
    apart = sum(abs(a.get(kind, 0.0) - b.get(kind, 0.0)) for kind in _UNMEASURED)
    return min(1.0, estimator_error().pairs + (apart / longer_s if longer_s else 0.0))


class _Simulator:
    def __init__(self, module: HloModule, mesh: Mesh, calibration: Calibration | None, layers: tuple[int, int]) -> None:
        self.module = module
        self.mesh = mesh
        self.layers = layers
        self.reader = Reader(module)
        self.walk = Walk(module, mesh)
        self.compute = Compute(mesh.topology, calibration)
        self.routes: dict[tuple[object, ...], tuple[float, frozenset[str]]] = {}
        self.cache: dict[str, Clock] = {}

    def run(self, computation: Computation) -> Clock:
        if computation.name not in self.cache:
            clock = Clock()
            for op in computation.instructions:
                self.step(clock, computation, op)
            clock.finish()
            self.cache[computation.name] = clock
        return self.cache[computation.name]

    def step(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        if op.opcode in FREE and op.opcode != "copy-done":
            return
        if op.opcode == "while":
            self.loop(clock, owner, op)
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
            clock.end(_rendezvous(owner, op))
        elif op.opcode.endswith("-done"):
            clock.end(self.origin(owner, op))
        elif op.opcode.endswith("-update"):
            return
        else:
            self.plain(clock, owner, op)

    def loop(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        body = self.module.computations.get((op.attribute("body") or "").lstrip("%"))
        if body is None:
            return
        trips = trip_count(self.module, op)
        clock.unknown_trips += trips is None
        if trips is not None and owner.name == self.module.entry:
            compiled, whole = self.layers
            trips += whole - compiled if compiled - 2 <= trips <= compiled else 0
        clock.add(self.run(body), 1 if trips is None else trips)

    def plain(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        """Compute, a copy, or a collective."""
        chain = self.chain(op)
        if chain is not None and chain[0] == "done":
            clock.end(chain[1])
            return
        found = self.walk.instruction(owner, op, _Place()) if _may_communicate(op) else []
        if op.opcode.endswith("-start") or (chain is not None and chain[0] == "start"):
            key = chain[1] if chain is not None else op.name
            if found:
                for collective in found:
                    self.begin(clock, collective, key)
            elif any(shape.space == HOST_SPACE for shape in op.shapes):
                # What goes to the host or comes from there is in main memory at its other end.
                size = sum(shape.held for shape in op.shapes if shape.space == 0)
                clock.transfer(float(self.compute.host_seconds(size)), ("host",), _title(op), key, "copy")
            elif op.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
                self.copy(clock, op)
            else:
                # Asynchronous compute (the sparse core's gathers): memory bound, beside everything else.
                size = sum(shape.held for shape in op.shapes if shape.space == 0)
                clock.transfer(float(self.compute.memory_seconds(size)), (), _title(op), key, "copy")
            return
        if found:
            for collective in found:
                self.synchronous(clock, collective)
            return
        self.roofline(clock, op, self.reader.work(owner, op))

    def copy(self, clock: Clock, op: Instruction) -> None:
        seconds = float(self.compute.memory_seconds(op.shapes[0].held))
        clock.transfer(seconds, ("copies",), _title(op), op.name, "copy")

    def roofline(self, clock: Clock, op: Instruction, work: InstructionWork) -> None:
        clock.flops += work.flops
        clock.again += work.flops if ".remat" in op.name else 0.0
        if work.kernel is not None:
            clock.work(self.kernel(work.kernel), "kernel", _title(op))
            return
        if not work.matmuls and not work.hbm_bytes and not work.vmem_bytes and not work.elements:
            return
        memory = float(self.compute.memory_seconds(work.hbm_bytes))
        memory += float(self.compute.memory_seconds(work.vmem_bytes, on_chip=True))
        vector = float(self.compute.vector_seconds(work.elements))
        matrix = self.matrix(work)
        longest = max(matrix, memory, vector)
        kind = "matmul" if longest == matrix else "memory" if longest == memory else "vector"
        clock.work(longest, kind, _title(op))
        if not _is_scalar(op):
            clock.work(self.compute.calibration.op_overhead_s, "overhead", "overhead")

    def matrix(self, work: InstructionWork) -> float:
        """Seconds of a fusion's matmuls, the traffic that blocks of theirs cause included."""
        total = sum(x.flops for x in work.matmuls)
        seconds = 0.0
        for x in work.matmuls:
            if x.flops:
                batch, share = x.flops / (2.0 * x.m * x.n * x.k), x.flops / total
                # What goes beyond operands and result belongs to the fusion's other ops, which read and write once.
                own = 2.0 * batch * (x.m * x.k + x.k * x.n + x.m * x.n)
                size = min(own, work.hbm_bytes * share)
                fused = work.hbm_bytes * share - size
                dot = self.compute.dot_seconds(x.m, x.n, x.k, batch, dtype_class(x.dtype), size, fused)
                busy = self.compute.matmul_seconds(x.m, x.n, x.k, batch, dtype_class(x.dtype))
                seconds += float(dot) - self.compute.calibration.op_overhead_s + float(busy) * (x.passes - 1)
        return seconds

    def kernel(self, kernel: Kernel) -> float:
        if not kernel.head:
            return float(self.compute.op_seconds(kernel.flops, kernel.traffic))
        passes = kernel.score_passes
        busy = self.compute.attention_seconds(passes, kernel.head, kernel.head, 1, "bf16", kernel.traffic)
        return float(busy + self.compute.step_seconds(kernel.steps))

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

    def synchronous(self, clock: Clock, collective: CompiledCollective) -> None:
        clock.wait(self.begin(clock, collective, ""), collective.kind, collective.network)

    def begin(self, clock: Clock, collective: CompiledCollective, key: str) -> float:
        seconds, links = self.cost(collective)
        return clock.transfer(seconds, links, _named(collective), key, collective.kind, collective.network)

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


def _is_scalar(op: Instruction) -> bool:
    """Whether the compiler has put all that an op makes into the scalar core's memory: counters and indices, which are
    an instruction or two of that core and no kernel to start."""
    return bool(op.shapes) and all(shape.space == SCALAR_SPACE for shape in op.shapes)


def _title(op: Instruction) -> str:
    return op.op_name or op.name


def _named(collective: CompiledCollective) -> str:
    return f"{collective.kind} over {', '.join(collective.axes)}: {collective.source or collective.name}"


def _may_communicate(op: Instruction) -> bool:
    base = op.opcode.removesuffix("-start")
    return op.opcode in ("fusion", "async-start", "custom-call") or base in OPCODES


def _rendezvous(owner: Computation, op: Instruction) -> str:
    """What a send and its recv-done have in common."""
    if op.opcode.endswith("-done") and op.operands and op.operands[0] in owner.by_name:
        op = owner.by_name[op.operands[0]]
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', op.attributes)
    return f"transfer {found[1]}" if found else op.name
