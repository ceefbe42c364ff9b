"""Estimated time of a scheduled TPU program, from a walk over its instructions in the order of execution.

Compute is a roofline (matrix unit, main memory, vector units) with the chip's calibrated efficiencies. `cost` prices
collectives on the physical axes that their groups span. A synchronous collective blocks all other work. An asynchronous
collective occupies its links from its start, and its done waits for it: compute between the two hides it. Collectives
that share links queue. Loop bodies are walked once and multiplied by their trips.
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
# Kinds of time that published runs do not test, since they take next to no time in any of them.
_UNMEASURED = ("overhead", "vector", "copy")
SHORTEST = 1e-5
"""Share of the step below which a span is omitted from the timeline."""


@dataclasses.dataclass(frozen=True, slots=True)
class EstimatorError:
    """Errors of estimates against measured step times, as shares of the measured times."""

    mean: float
    """Mean error over the published runs."""
    within: float
    """Error that nine of ten published runs stay below."""
    source: str
    """The published runs behind `mean` and `within`."""
    pairs: float
    """Error of the ratio of two measured plans that nine of ten pairs stay below, as a share of the longer step. Both
    plans are of one model on the same chips, so errors common to both cancel.
    """
    pairs_source: str
    """The measured plans behind `pairs`."""


@functools.cache
def estimator_error() -> EstimatorError:
    """Return the estimator's error, measured on published runs and on plans of one model.

    `experiments/fidelity/published_runs.py` and `experiments/fidelity/pair_estimates.py` measure it.
    """
    return EstimatorError(**json.loads(_ERROR_FILE.read_text()))


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated times of one step of a compiled program; seconds on one device."""

    step_time_s: float
    """Seconds of one step: own work and waits."""
    compute_s: float
    """Seconds of the device's own work, overheads included."""
    exposed_comm_s: float
    """Seconds that the device waits for transfers between devices."""
    hidden_comm_s: float
    """Seconds of such transfers less those that it waits for, at least 0."""
    copy_s: float
    """Seconds of waits for copies between memories."""
    flops: float
    """Matrix FLOPs of one device in one step, recomputation included."""
    remat_flops: float
    """Matrix FLOPs that the compiler's own rematerialisation added."""
    by_kind: dict[str, float]
    """Seconds that count to the step, by kind of time: matmul, kernel, memory, vector, overhead, copy, and the kinds of
    collectives.
    """
    traffic: dict[tuple[str, bool], Traffic]
    """Seconds of communication, total and exposed, by kind of collective and a flag for transfers between slices."""
    unknown_trips: int
    """Number of loops without a trip count in the text; they count as one trip."""
    spans: tuple[Busy, ...]
    """The step's timeline without spans below `SHORTEST` of it; all trips of a loop are one span."""

    @property
    def hidden(self) -> dict[str, float]:
        """Hidden share, from 0 to 1, of each class of communication (`cost.traffic_class`)."""
        classes: dict[str, tuple[float, float]] = {}
        for (kind, far), seconds in self.traffic.items():
            name = traffic_class(kind, far)
            sent, waited = classes.get(name, (0.0, 0.0))
            classes[name] = (sent + seconds.sent_s, waited + seconds.waited_s)
        return hidden_shares(classes)

    @property
    def error(self) -> float:
        """Share by which the step time may be wrong, at most 1.

        It is `EstimatorError.within`, plus the share of time that no published run tests (fixed overheads, vector
        units, copies).
        """
        unknown = sum(self.by_kind.get(kind, 0.0) for kind in _UNMEASURED)
        return min(1.0, estimator_error().within + (unknown / self.step_time_s if self.step_time_s else 0.0))


def estimate(
    text: str | HloModule,
    mesh: Mesh,
    calibration: Calibration | None = None,
    layers: tuple[int, int] | None = None,
) -> Estimate:
    """Estimate one step of scheduled HLO that was compiled for `mesh`.

    - `text`: HLO text, or the parsed module.
    - `calibration`: efficiencies of the chip; None for the topology's own.
    - `layers`: compiled and real number of repeated layers, if fewer were compiled: (8, 32) for 8 of 32. Outermost
      loops of 8 trips then run 24 times more, as do loops of up to two fewer, from which the compiler peeled layers.
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
        remat_flops=clock.remat_flops,
        by_kind=dict(sorted(clock.by_kind.items())),
        traffic=dict(sorted(clock.traffic.items())),
        unknown_trips=clock.unknown_trips,
        spans=tuple(span for span in clock.spans if span.seconds >= SHORTEST * clock.now),
    )


def decided(a: float, b: float, error: float) -> bool:
    """Return True if two times differ by more than the share `error` of the longer one."""
    return abs(a - b) > error * max(a, b)


def pair_error(a: Mapping[str, float], b: Mapping[str, float], longer_s: float) -> float:
    """Return the share of the longer of two estimated steps by which their difference may be wrong, at most 1.

    It is the error on pairs of plans of one model, plus the difference in time that no published run tests.

    - `a`, `b`: seconds by kind, as in `Estimate.by_kind`.
    - `longer_s`: seconds of the longer step.
    """
    apart = sum(abs(a.get(kind, 0.0) - b.get(kind, 0.0)) for kind in _UNMEASURED)
    return min(1.0, estimator_error().pairs + (apart / longer_s if longer_s else 0.0))


class _Simulator:
    """Walk over a scheduled module that advances a clock, computation by computation."""

    def __init__(self, module: HloModule, mesh: Mesh, calibration: Calibration | None, layers: tuple[int, int]) -> None:
        self.module = module
        self.mesh = mesh
        self.layers = layers
        self.walk = Walk(module, mesh)
        self.compute = Compute(mesh.topology, calibration)
        self.reader = Reader(module, self.compute.burst_bytes)
        self.routes: dict[tuple[object, ...], tuple[float, frozenset[str]]] = {}
        """Cache of `cost`."""
        self.cache: dict[str, Clock] = {}
        """Name of a computation -> its clock."""

    def run(self, computation: Computation) -> Clock:
        """Walk a computation from time 0, wait for its pending transfers, and return its clock.

        Clocks are cached by the computation's name, so callers must not change them.
        """
        if computation.name not in self.cache:
            clock = Clock()
            for op in computation.instructions:
                self.step(clock, computation, op)
            clock.finish()
            self.cache[computation.name] = clock
        return self.cache[computation.name]

    def step(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        """Move the clock past one instruction of `owner`.

        A conditional counts as its slowest branch. A send starts a transfer, for which its recv-done waits. A `-done`
        waits for its start. Free instructions, `recv`, `send-done` and most `-update` take no time.
        """
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
            for collective in self.walk.instruction(owner, op, _Place()):
                self.begin(clock, collective, _rendezvous(owner, op))
        elif op.opcode == "recv-done":
            clock.end(_rendezvous(owner, op))
        elif op.opcode.endswith("-done"):
            clock.end(self.origin(owner, op))
        elif op.opcode.endswith("-update"):
            self.handed(clock, owner, op)
        else:
            self.plain(clock, owner, op)

    def loop(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        """Move the clock past all trips of a loop; one trip if their number is unknown, which the clock counts.

        Loops of the entry computation run more often if fewer layers were compiled (`estimate`).
        """
        body = self.module.computations.get((op.attribute("body") or "").lstrip("%"))
        if body is None:
            return
        trips = trip_count(self.module, op)
        clock.unknown_trips += trips is None
        if trips is not None and owner.name == self.module.entry:
            compiled, real = self.layers
            # The layers that were left out run as further trips of the loop over layers.
            trips += real - compiled if compiled - 2 <= trips <= compiled else 0
        clock.add(self.run(body), 1 if trips is None else trips)

    def plain(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        """Run compute or a synchronous collective, or start an asynchronous op.

        The end of an asynchronous collective fusion waits for that collective. Asynchronous ops are collectives,
        transfers with the host, copies on the chip, and sparse-core ops, which occupy no link.
        """
        chain = self.chain(op)
        if chain is not None and chain[0] == "done":
            clock.end(chain[1])
            return
        collectives = self.walk.instruction(owner, op, _Place()) if _may_communicate(op) else []
        if op.opcode.endswith("-start") or (chain is not None and chain[0] == "start"):
            key = chain[1] if chain is not None else op.name
            if collectives:
                for collective in collectives:
                    self.begin(clock, collective, key)
            elif any(shape.space == HOST_SPACE for shape in op.shapes):
                # A transfer to or from the host has its other end in main memory.
                size = sum(shape.padded_bytes for shape in op.shapes if shape.space == 0)
                clock.transfer(float(self.compute.host_seconds(size)), ("host",), _title(op), key, "copy")
            elif op.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
                self.copy(clock, op)
            else:
                # Asynchronous compute (the sparse core's gathers) is memory bound and overlaps with everything else.
                size = sum(shape.padded_bytes for shape in op.shapes if shape.space == 0)
                clock.transfer(float(self.compute.memory_seconds(size)), (), _title(op), key, "copy")
            return
        if collectives:
            for collective in collectives:
                self.synchronous(clock, collective)
            return
        self.roofline(clock, op, self.reader.work(owner, op))

    def handed(self, clock: Clock, owner: Computation, op: Instruction) -> None:
        """Start an asynchronous op that has no operands before its update hands them over; other updates do nothing.

        Gathers and relayouts on sparse cores have this form. Every element of the result is read and written once.
        """
        start = owner.by_name.get(self.origin(owner, op))
        if start is None or start.operands or len(op.operands) < 2:
            return
        inside = self.module.computations.get((start.attribute("calls") or "").lstrip("%"))
        given = [owner.by_name[name] for name in op.operands[2:] if name in owner.by_name]
        shapes = [*(inside.root.shapes * 2 if inside is not None else ()), *(s for each in given for s in each.shapes)]
        size = sum(shape.padded_bytes for shape in shapes if shape.space == 0)
        clock.transfer(float(self.compute.memory_seconds(size)), (), _title(op), start.name, "copy")

    def copy(self, clock: Clock, op: Instruction) -> None:
        """Start an asynchronous copy of the first result's array between main and on-chip memory.

        Such copies queue behind each other, at the speed of main memory.
        """
        seconds = float(self.compute.memory_seconds(op.shapes[0].padded_bytes))
        clock.transfer(seconds, ("copies",), _title(op), op.name, "copy")

    def roofline(self, clock: Clock, op: Instruction, work: InstructionWork) -> None:
        """Count an instruction's FLOPs, and move the clock by the longest of its matrix, memory and vector time.

        The fixed overhead is added, except for scalar ops and kernels. A kernel call takes only the seconds of
        `kernel`, and an instruction without any work no time.
        """
        clock.flops += work.flops
        clock.remat_flops += work.flops if ".remat" in op.name else 0.0
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
        """Return the seconds of a fusion's matmuls without the launch overhead; 0 without matmuls.

        The seconds include the fusion's memory traffic, the repeated reads of blocks, and further passes over the
        matrix unit. Traffic is shared out among the matmuls by FLOPs.
        """
        total = sum(x.flops for x in work.matmuls)
        seconds = 0.0
        for x in work.matmuls:
            if x.flops:
                # FLOPs beyond one product of m, n and k are those of a batch of products.
                batch, share = x.flops / (2.0 * x.m * x.n * x.k), x.flops / total
                # Traffic beyond operands and result belongs to the fusion's other ops, which read and write once.
                own = 2.0 * batch * (x.m * x.k + x.k * x.n + x.m * x.n)
                size = min(own, work.hbm_bytes * share)
                fused = work.hbm_bytes * share - size
                dot = self.compute.dot_seconds(x.m, x.n, x.k, batch, dtype_class(x.dtype), size, fused)
                busy = self.compute.matmul_seconds(x.m, x.n, x.k, batch, dtype_class(x.dtype))
                seconds += float(dot) - self.compute.calibration.op_overhead_s + float(busy) * (x.passes - 1)
        return seconds

    def kernel(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel call: a roofline of FLOPs and traffic.

        An attention kernel has the matrix unit's efficiency at its head dim, and a fixed time for each block of scores.
        """
        if not kernel.head:
            return float(self.compute.op_seconds(kernel.flops, kernel.traffic))
        passes = kernel.score_passes
        busy = self.compute.attention_seconds(passes, kernel.head, kernel.head, 1, "bf16", kernel.traffic)
        return float(busy + self.compute.step_seconds(kernel.steps))

    # Collectives

    def cost(self, collective: CompiledCollective) -> tuple[float, frozenset[str]]:
        """Return the seconds of one execution of a collective, and the links that it occupies (`Route.links`);
        cached.
        """
        key = (collective.kind, collective.size_bytes, collective.members, collective.pairs, collective.network)
        if key not in self.routes:
            self.routes[key] = self.priced(collective)
        return self.routes[key]

    def priced(self, collective: CompiledCollective) -> tuple[float, frozenset[str]]:
        """Price one execution of a collective on the links of its group; return the seconds and the links.

        A transfer between slices is priced on the network, with at least two slices. A permute is priced by its pairs.
        """
        topology, calibration = self.mesh.topology, self.compute.calibration
        size = collective.size_bytes
        if collective.network:
            segments = (Segment("slice", "network", max(2, collective.group), 1, False),)
        elif collective.pairs:
            return permute_seconds(topology, calibration, collective.pairs, size)
        else:
            segments = group_segments(topology, collective.members)
        if segments is None:
            # A group that forms no box is priced as all devices, since no group can be slower.
            segments = tuple(s for axis in self.mesh.names for s in self.mesh.segments(axis))
        group_route = route(topology, calibration, segments)
        return float(group_route.prices.time(collective.kind, ("group",), size)), group_route.links

    def synchronous(self, clock: Clock, collective: CompiledCollective) -> None:
        """Run a collective and wait for its end."""
        clock.wait(self.begin(clock, collective, ""), collective.kind, collective.network)

    def begin(self, clock: Clock, collective: CompiledCollective, key: str) -> float:
        """Start a collective, named `key` for its end; return the time at which it ends."""
        seconds, links = self.cost(collective)
        return clock.transfer(seconds, links, _named(collective), key, collective.kind, collective.network)

    def origin(self, owner: Computation, op: Instruction) -> str:
        """Return the name of the start that a done belongs to, through updates and tuple elements.

        Without a start it is the name of the last producer found, or empty.
        """
        source = owner.by_name.get(op.operands[0]) if op.operands else None
        while source is not None and not source.opcode.endswith("-start"):
            if not source.operands:
                break
            source = owner.by_name.get(source.operands[0])
        return source.name if source is not None else ""

    def chain(self, op: Instruction) -> tuple[str, str] | None:
        """Return part ("start", "during", "done") and key of one of TPU's asynchronous collective fusions.

        Returns None for any other instruction. The key is equal for the parts of one fusion chain.
        """
        if op.opcode != "fusion":
            return None
        inside = self.module.computations.get((op.attribute("calls") or "").lstrip("%"))
        if inside is None:
            return None
        for inner in inside.instructions:
            chain_id = re.search(r'chain_id="([^"]*)"', inner.attributes)
            if chain_id:
                targets = " ".join(i.attributes for i in inside.instructions if i.opcode == "custom-call")
                part = (
                    "start"
                    if "AsyncCollectiveStart" in targets
                    else "done"
                    if "CollectiveDone" in targets
                    else "during"
                )
                return part, f"chain {chain_id[1]}"
        return None


def _is_scalar(op: Instruction) -> bool:
    """Return True if the results of an op are all in the scalar core's memory.

    Such counters and indices cost an instruction or two of that core, and no kernel is launched.
    """
    return bool(op.shapes) and all(shape.space == SCALAR_SPACE for shape in op.shapes)


def _title(op: Instruction) -> str:
    """Return the title of an instruction's span: its name in the source, else its own."""
    return op.op_name or op.name


def _named(collective: CompiledCollective) -> str:
    """Return the title of a collective's span: its kind, its mesh axes, and its source or name."""
    return f"{collective.kind} over {', '.join(collective.axes)}: {collective.source or collective.name}"


def _may_communicate(op: Instruction) -> bool:
    """Return True if an instruction may contain a collective, by its opcode."""
    base = op.opcode.removesuffix("-start")
    return op.opcode in ("fusion", "async-start", "custom-call") or base in OPCODES


def _rendezvous(owner: Computation, op: Instruction) -> str:
    """Return the key that a send and its recv-done share: the rendezvous in the attributes, else the instruction's
    name.
    """
    if op.opcode.endswith("-done") and op.operands and op.operands[0] in owner.by_name:
        op = owner.by_name[op.operands[0]]
    rendezvous = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', op.attributes)
    return f"transfer {rendezvous[1]}" if rendezvous else op.name
