"""What a choice of alternatives means: true step time, communication, memory. No weights, no solver.

Everything is listed again from the chosen specs, one pair of states at a time, so that an error in how the
`Problem` was put together shows up as a difference.
"""

import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.graph import TO_HOST
from autoshard.plan.model._factors import factor_states
from autoshard.plan.model._model import EXPOSED, Channel, Model, Path, Reshard, link_names
from autoshard.plan.model._overlap import AT_NARROW, Overlap, lanes
from autoshard.plan.model._ring import is_ring, ring_memory
from autoshard.plan.price._in_flight import in_flight
from autoshard.plan.price._paths import Relayouts, path_steps, relayouts
from autoshard.plan.price._unpaid import unpaid_bytes
from autoshard.plan.record._parts import Collective
from autoshard.plan.record._spec import Spec
from autoshard.plan.xla._states import States
from autoshard.plan.xla._tables import padded_bytes, table_of
from autoshard.program import Role


ReshardStep = tuple[str, tuple[str, ...], float, float]
"""(kind, axes, bytes, seconds) of one collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The true time of a choice, by what it competes with, and its memory."""

    channels: dict[Channel, float]
    collectives: tuple[Collective, ...]
    peak_bytes: int
    peak_time: int
    memory: dict[str, int]
    host_bytes: int = 0
    solved_bytes: int = 0
    """The peak as the solver knows it: without what collectives hold beside the values of the program."""

    @property
    def blocks(self) -> list[int]:
        return sorted({block for block, _ in self.channels if (block, _) != EXPOSED})

    @property
    def compute_s(self) -> float:
        return sum(s for (_, what), s in self.channels.items() if what == "compute")

    @property
    def step_time_s(self) -> float:
        """Exposed communication, plus for every block the longest of its compute and its links."""
        longest = {b: max(s for (block, _), s in self.channels.items() if block == b) for b in self.blocks}
        return self.channels.get(EXPOSED, 0.0) + sum(longest.values())

    @property
    def comm_s(self) -> float:
        return sum(s for (_, what), s in self.channels.items() if what != "compute")

    @property
    def hidden_s(self) -> float:
        """Communication that runs beside compute."""
        return max(0.0, self.comm_s - (self.step_time_s - self.compute_s))


def spec_of(model: Model, states: States, row: int, rank: int) -> Spec:
    """The chosen state of a tensor as a `Spec`."""
    dims: list[tuple[str, ...]] = [() for _ in range(rank)]
    for axis, dim in enumerate(states[row]):
        if dim >= 0:
            dims[dim] = (*dims[dim], model.axis_names[axis])
    return Spec(tuple(dims))


def tensor_spec(model: Model, choices: NDArray[np.int64], tensor: int) -> Spec:
    """The spec of any tensor under a choice; scalars and generated values are replicated."""
    cluster = model.structure.cluster_of[tensor]
    rank = len(model.graph.tensors[tensor].shape)
    if cluster < 0:
        return Spec.replicated(rank)
    number = model.cluster_node[cluster]
    split: dict[int, tuple[str, ...]] = {}
    for axis, factor in zip(model.mesh.names, model.nodes[number].states[int(choices[number])].tolist(), strict=True):
        split[factor] = (*split.get(factor, ()), axis)
    return Spec(tuple(split.get(factor, ()) if factor >= 0 else () for factor in model.structure.dims_of[tensor]))


def reshard_overlap(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> Overlap:
    """What a move may hide behind, by what its matmul computes in the chosen state."""
    overlap = Overlap(reshard.overlap)
    if reshard.narrow is None:
        return overlap
    at_source = model.nodes[reshard.source].kind == "op"
    return AT_NARROW[overlap] if reshard.narrow[choices[reshard.source if at_source else reshard.target]] else overlap


def evaluate(model: Model, choices: NDArray[np.int64]) -> Outcome:
    """The true outcome of one alternative per node. Raises ValueError if a forbidden pair was chosen."""
    channels: dict[Channel, float] = defaultdict(float)
    for node, choice in zip(model.nodes, choices, strict=True):
        for channel, seconds in node.time.items():
            channels[channel] += float(seconds[int(choice)])
    gathered: dict[tuple[str, tuple[str, ...], bool, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    lines: dict[tuple[str, tuple[str, ...], bool, str], str] = {}
    link_of, named = link_names(model.mesh), cluster_names(model)
    for reshard in model.reshards:
        taken = _reshard_time(model, reshard, choices)
        if again := _laid_out_seconds(model, reshard, choices, taken.relayouts):
            channels[reshard.block, "compute"] += again
        overlap = reshard_overlap(model, reshard, choices)
        for kind, axes, size, seconds in taken.steps:
            where = lanes(model.collectives, link_of, overlap, kind, axes, size, reshard.block)
            for channel, share in where.items():
                channels[channel] += seconds * share * reshard.trips
            exposed = where.get(EXPOSED, 0.0)
            key = (kind, axes, exposed < 0.5, reshard_cause(model, reshard, named))
            lines[key] = lines.get(key) or reshard_line(model, reshard)
            entry = gathered[key]
            entry[0] += reshard.trips
            entry[1] += size * reshard.trips
            entry[2] += seconds * reshard.trips
            entry[3] += seconds * exposed * reshard.trips
    for node, choice in zip(model.nodes, choices, strict=True):
        for inner in node.inner:
            size = float(inner.size[int(choice)])
            if size > 0:
                axes = tuple(model.axis_names[a] for a in inner.axes)
                trips = model.graph.trips(model.graph.ops[node.ref].loop)
                seconds, exposed = (float(each[0]) * trips for each in inner.times(model.collectives, int(choice)))
                key = (inner.kind, axes, exposed < 0.5 * seconds, node.name)
                lines[key] = model.graph.ops[node.ref].line
                entry = gathered[key]
                entry[0] += trips * inner.count
                entry[1] += size * inner.senders * inner.count * trips
                entry[2] += seconds
                entry[3] += exposed
    collectives = []
    for key, (count, size, seconds, exposed) in gathered.items():
        kind, axes, hidden, cause = key
        wire = sum(float(v) for v in model.collectives.wire_bytes(kind, axes, size).values())  # type: ignore[arg-type]
        collectives.append(
            Collective(kind, axes, math.ceil(count), int(round(wire)), seconds, hidden, cause, lines[key], exposed)
        )
    collectives.sort(key=lambda c: (-c.seconds, c.kind, c.axes, c.cause))
    peak, when, memory = _memory(model, memory_events(model, choices))
    solved = peak
    if model.mesh.topology.traits.holds_in_flight:
        solved, _, _ = _memory(model, _events(solved_buffers(model, choices)))
    return Outcome(dict(channels), tuple(collectives), peak, when, memory, host_bytes(model, choices), solved)


def host_bytes(model: Model, choices: NDArray[np.int64]) -> int:
    """Bytes that wait in the host's memory for one device: stacks that loops fill, and what is sent outside of them."""
    graph, away = model.graph, model.liveness.hosted
    if not away:
        return 0
    filled = {c.body for loop in graph.loops for c in loop.carries if c.body in away and c.update != c.body}
    single = {t for op in graph.ops if op.kind == TO_HOST and op.loop < 0 for t in op.results}
    sizes, total = dict(model.mesh.axes), 0
    for tensor in filled | single:
        record = graph.tensors[tensor]
        local = tensor_spec(model, choices, tensor).local_shape(record.shape, sizes)
        total += math.prod(local) * record.itemsize
    return total


def argument_bytes_on_host(model: Model, choices: NDArray[np.int64]) -> dict[Role, int]:
    """Bytes of a device's arguments that wait in its host's memory before a step and after it, by their role."""
    sizes, found = dict(model.mesh.axes), defaultdict[Role, int](int)
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if tensor in model.liveness.hosted:
            local = tensor_spec(model, choices, tensor).local_shape(argument.shape, sizes)
            found[argument.role] += math.prod(local) * model.graph.tensors[tensor].itemsize
    return found


def cluster_names(model: Model) -> dict[int, str]:
    """Of every cluster with arguments in it, the name of the first, also of those that loops begin with."""
    arguments = {model.graph.arguments[i]: a.name for i, a in enumerate(model.program.arguments)}
    carried = {
        model.structure.cluster_of[carry.body]: arguments[carry.init]
        for loop in model.graph.loops
        for carry in reversed(loop.carries)
        if carry.init in arguments
    }
    return carried | {
        number: arguments[tensor]
        for number, cluster in enumerate(model.structure.clusters)
        if (tensor := next((t for t in cluster.tensors if t in arguments), None)) is not None
    }


def reshard_cause(model: Model, reshard: Reshard, named: dict[int, str]) -> str:
    """Name of what moves: the argument behind it, of the clusters' that are `named`, or the op that makes it."""
    node = model.nodes[reshard.source]
    if node.kind == "copy":
        node = model.nodes[model.cluster_node[model.structure.cluster_of[node.ref]]]
    end = model.nodes[reshard.target]
    if node.kind == "op" and end.kind == "cluster" and end.name and not model.graph.tensors[reshard.tensor].name:
        return end.name
    for side in (node, end):
        if side.kind == "cluster" and side.ref in named:
            return named[side.ref]
    return model.graph.tensors[reshard.tensor].name or node.name


def reshard_line(model: Model, reshard: Reshard) -> str:
    """Where the code asks for the op that the value enters or leaves, else for the one that makes it."""
    ops = model.graph.ops
    maker = model.graph.tensors[reshard.tensor].producer
    return next((ops[op].line for op in (reshard.op, maker) if op >= 0 and ops[op].line), "")


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardTime:
    """What one execution of a reshard takes under a choice."""

    steps: tuple[ReshardStep, ...]
    """(kind, axes, bytes, seconds) of its collectives."""
    relayouts: Relayouts
    """The relayouts that it makes beside its collectives."""


def reshard_steps(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> tuple[ReshardStep, ...]:
    """(kind, axes, bytes, seconds) of one execution of a reshard under a choice."""
    return _reshard_time(model, reshard, choices).steps


def relayout_seconds(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> float:
    """Seconds in one step for laying out what a reshard brings, and of what a softmax took off a matmul too much."""
    return _laid_out_seconds(model, reshard, choices, reshard_relayouts(model, reshard, choices))


def _laid_out_seconds(model: Model, reshard: Reshard, choices: NDArray[np.int64], anew: Relayouts) -> float:
    found, owed = float(anew.seconds(model.compute)), unpaid_bytes(model, reshard, choices)
    return (found + float(model.compute.memory_seconds(owed)) if owed else found) * reshard.trips


def reshard_relayouts(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> Relayouts:
    """What laying out anew takes in one execution of a reshard."""
    return _reshard_time(model, reshard, choices).relayouts


_known: "weakref.WeakKeyDictionary[Collectives, dict[object, ReshardTime]]" = weakref.WeakKeyDictionary()
"""Repeated layers take the same steps; of every priced mesh, by what the path is at both ends."""


def _reshard_time(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> ReshardTime:
    """Of the path with one state at each end. Raises ValueError for a forbidden pair."""
    row = int(reshard.rows[int(choices[reshard.source])])
    column = int(reshard.columns[int(choices[reshard.target])])
    if reshard.forbidden is not None and reshard.forbidden[row, column]:
        raise ValueError(f"nodes {reshard.source} and {reshard.target} take a pair of alternatives that is not allowed")
    path = reshard.path
    ends = (path.held[row], path.kept[row], path.source[row], path.target[column])
    sizes = (path.shape, path.factors, path.itemsize, path.reduce_itemsize, path.collected)
    key = (*sizes, *(end.tobytes() for end in ends))
    known = _known.setdefault(model.collectives, {})
    if key not in known:
        held, kept, source, target = (end[None, :] for end in ends)
        known[key] = _reshard_time_of(
            dataclasses.replace(path, held=held, kept=kept, source=source, target=target), model.collectives
        )
    return known[key]


def _reshard_time_of(path: Path, collectives: Collectives) -> ReshardTime:
    found: list[ReshardStep] = []
    gathers, steps = path_steps(path, collectives)
    for step in (*gathers, *steps):
        size = float(step.size[0, 0])
        if size > 0:
            axes = tuple(collectives.mesh.names[a] for a in step.axes)
            found.append((step.kind, axes, size, float(collectives.time(step.kind, axes, size))))
    return ReshardTime(tuple(found), relayouts(path, collectives).at(0, 0))


class HeldBuffer(NamedTuple):
    """Bytes that every device holds during [start, stop), in op ids."""

    start: int
    stop: int
    size: int
    kind: str
    tensor: int
    """The tensor that they are of, or that they are held to make; -1 if none is known."""


def memory_events(model: Model, choices: NDArray[np.int64]) -> list[tuple[int, int, str]]:
    """(op id, bytes that come or go, kind) in order, from the specs and lifetimes of every buffer, those of collectives
    among them where they have some."""
    return _events(held_buffers(model, choices))


def _events(buffers: Sequence[HeldBuffer]) -> list[tuple[int, int, str]]:
    both = [
        event for each in buffers for event in ((each.start, each.size, each.kind), (each.stop, -each.size, each.kind))
    ]
    return sorted(both, key=lambda event: event[:2])


def held_buffers(model: Model, choices: NDArray[np.int64]) -> list[HeldBuffer]:
    """Every buffer, those of collectives among them where they have some."""
    buffers = solved_buffers(model, choices)
    if not model.mesh.topology.traits.holds_in_flight:
        return buffers
    steps = [reshard_steps(model, reshard, choices) for reshard in model.reshards]
    return [*buffers, *(HeldBuffer(*each) for each in in_flight(model, choices, steps))]


def solved_buffers(model: Model, choices: NDArray[np.int64]) -> list[HeldBuffer]:
    """The same without those of collectives: what the `Problem` has as well."""
    sizes = dict(model.mesh.axes)
    found: list[HeldBuffer] = []
    kinds = {
        (term.start, term.stop, number): term.kind for number, node in enumerate(model.nodes) for term in node.memory
    }
    for tensor, start, stop in model.liveness.buffers:
        cluster = model.structure.cluster_of[tensor]
        if cluster < 0:
            continue
        record = model.graph.tensors[tensor]
        local = tensor_spec(model, choices, tensor).local_shape(record.shape, sizes)
        size = model.padding.held(tensor, local, model.liveness.itemsize(model.graph, (tensor, start, stop)))
        found.append(HeldBuffer(start, stop, size, kinds[(start, stop, model.cluster_node[cluster])], tensor))
    for softmax in model.liveness.softmaxes:
        spec = tensor_spec(model, choices, softmax.scores)
        split = any(spec.dims[dim] for dim in softmax.rows)
        again = split or 1 in spec.local_shape(model.graph.tensors[softmax.scores].shape, sizes)
        for tensor, start, stop, width in (softmax.again if again else softmax.whole).buffers:
            local = tensor_spec(model, choices, tensor).local_shape(model.graph.tensors[tensor].shape, sizes)
            size = model.padding.held(tensor, local, width)
            kind = kinds[(start, stop, model.cluster_node[softmax.cluster])]
            found.append(HeldBuffer(start, stop, size, kind, tensor))
    for (tensor, _), number in model.copy_nodes.items():
        node = model.nodes[number]
        row = int(choices[number])
        if not node.held[row] or not node.memory:
            continue
        record = model.graph.tensors[tensor]
        local = spec_of(model, node.states, row, len(record.shape)).local_shape(record.shape, sizes)
        size = model.padding.held(tensor, local, record.itemsize)
        found.append(HeldBuffer(node.memory[0].start, node.memory[0].stop, size, "gathered", tensor))
    for op_id, number in model.op_node.items():
        op, node = model.graph.ops[op_id], model.nodes[number]
        if is_ring(op):
            (size,) = ring_memory(model.graph, op, node.states[[int(choices[number])]], model.axis_sizes).tolist()
            found.append(HeldBuffer(op_id, op_id + 1, size, "temporaries", op.results[0]))
        table = table_of(model.graph, op, model.mesh.topology.backend)
        if table is None or op.rule is None:
            continue
        record = model.graph.tensors[table]
        split = factor_states(node.states[[int(choices[number])]], op.rule.operands[0])
        local = spec_of(model, split, 0, len(record.shape)).local_shape(record.shape, sizes)
        size = padded_bytes(op.kind, local, record.itemsize)
        found.append(HeldBuffer(op_id, op_id + 1, size, "temporaries", table))
    return found


def _memory(model: Model, events: Sequence[tuple[int, int, str]]) -> tuple[int, int, dict[str, int]]:
    """Peak bytes, when (op id), and what holds them."""
    now: dict[str, int] = defaultdict(int)
    total = peak = when = 0
    at_peak: dict[str, int] = {}
    for moment, size, kind in events:
        now[kind] += size
        total += size
        if total > peak:
            peak, when, at_peak = total, moment, dict(now)
    at_peak["temporaries"] = at_peak.get("temporaries", 0) + model.fixed_bytes
    return peak + model.fixed_bytes, when, {k: v for k, v in sorted(at_peak.items()) if v}
