"""Exact evaluation of a choice of alternatives: true step time, communication and memory, without weights or solver.

All buffers and collectives are derived again from the chosen specs, one pair of states at a time. An error in the
construction of the `Problem` therefore shows as a difference.
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import overlapped_seconds
from autoshard.graph import LEAST_ROWS, TO_HOST
from autoshard.planning.price.device_memory import (
    LiveBuffer,
    copied_updates,
    gathered_copies,
    reserve,
    softmax_operands,
)
from autoshard.planning.price.gathered_buffers import (
    copied_into_place,
    exchanged_views,
    gathered_results,
    held_by_collectives,
    partial_scatters,
    waiting_gradients,
    with_moved_slices,
    with_whole_sums,
)
from autoshard.planning.price.heap_placement import heap_holes, written_by_collectives
from autoshard.planning.price.on_chip_memory import kernel_clock, on_chip_room, without_on_chip
from autoshard.planning.price.reshard_times import (
    ReshardTime,
    cluster_names,
    reshard_cause,
    reshard_line,
    reshard_overlap,
    reshard_time,
    uncharged_bytes,
)
from autoshard.planning.price.sparse_core_rows import (
    OFFLOADING,
    offloaded_gathers,
    sorted_indices,
    with_gathered_rows,
)
from autoshard.planning.record.plan_parts import Collective
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.attention_exchange import is_ring, ring_memory
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model, Reshard, link_names
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.overlap import Overlap, lanes
from autoshard.planning.xla.array_layouts import scratch_itemsize
from autoshard.planning.xla.axis_assignments import States
from autoshard.planning.xla.image_layouts import shifted_images, shifted_span
from autoshard.planning.xla.table_layouts import table_copies
from autoshard.program import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Evaluated time of a choice, by the resource that it occupies, and its memory."""

    channels: dict[Channel, float]
    """Seconds of one step by (block, resource): compute, links, host, and exposed communication."""
    collectives: tuple[Collective, ...]
    """Collectives of one step by kind, axes, exposure and cause, the slowest first."""
    peak_bytes: int
    """Peak memory of one device."""
    peak_time: int
    """Op id at which the peak is reached."""
    memory: dict[str, int]
    """Bytes at the peak by kind of buffer."""
    host_bytes: int = 0
    """Host memory that one device occupies."""
    solved_bytes: int = 0
    """Peak in the solver's model: without collective buffers, and with results allocated when they are written."""
    one_in_flight: bool = False
    """True if the step has one collective in flight at a time."""

    @property
    def lanes(self) -> dict[Channel, float]:
        """`channels` without that of exposed communication."""
        return {channel: seconds for channel, seconds in self.channels.items() if channel != EXPOSED}

    @property
    def blocks(self) -> list[int]:
        """The blocks with seconds in any channel but that of exposed communication, sorted."""
        return sorted({block for block, _ in self.channels if (block, _) != EXPOSED})

    @property
    def compute_s(self) -> float:
        """Seconds of compute in all blocks of a step."""
        return sum(s for (_, what), s in self.channels.items() if what == "compute")

    @property
    def step_time_s(self) -> float:
        """Exposed communication, plus every block's lanes, which overlap (`overlapped_seconds`), in seconds."""
        return self.channels.get(EXPOSED, 0.0) + float(overlapped_seconds(self.lanes, self.one_in_flight))

    @property
    def comm_s(self) -> float:
        """Seconds of all channels but compute: links, host memory and exposed communication."""
        return sum(s for (_, what), s in self.channels.items() if what != "compute")

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that overlap with compute or with each other; at least 0."""
        return max(0.0, self.comm_s - (self.step_time_s - self.compute_s))


def _local_dims(model: Model, choices: NDArray[np.int64], tensor: int) -> tuple[int, ...]:
    """Return the dims of a tensor's shard."""
    return tensor_spec(model, choices, tensor).local_shape(model.graph.tensors[tensor].shape, dict(model.mesh.axes))


def spec_of(model: Model, states: States, row: int, rank: int) -> Spec:
    """Return one of a tensor's states as a `Spec`; axes that split one dim are in mesh order.

    - `states`: for each state the dim that every mesh axis splits, [states, axes]. Negative entries split nothing.
    - `row`: index of the chosen state.
    - `rank`: number of the tensor's dims.
    """
    dims: list[tuple[str, ...]] = [() for _ in range(rank)]
    for axis, dim in enumerate(states[row]):
        if dim >= 0:
            dims[dim] = (*dims[dim], model.axis_names[axis])
    return Spec(tuple(dims))


def tensor_spec(model: Model, choices: NDArray[np.int64], tensor: int) -> Spec:
    """Return the spec of a tensor under a choice. Scalars and generated tensors, without a cluster, are replicated."""
    cluster = model.structure.cluster_of[tensor]
    rank = len(model.graph.tensors[tensor].shape)
    if cluster < 0:
        return Spec.replicated(rank)
    number = model.cluster_node[cluster]
    state = model.nodes[number].states[choices[number]].tolist()
    return _spec_of_factors(model.mesh.names, tuple(state), model.structure.dims_of[tensor])


@functools.lru_cache(4096)
def _spec_of_factors(axes: tuple[str, ...], state: tuple[int, ...], factors: tuple[int, ...]) -> Spec:
    """Return the spec of a tensor from its cluster's state; axes that split a factor which the tensor lacks split
    nothing. Cached.

    - `axes`: names of the mesh axes.
    - `state`: cluster factor that each mesh axis splits.
    - `factors`: cluster factor of each of the tensor's dims, -1 for none.
    """
    split: dict[int, tuple[str, ...]] = {}
    for axis, factor in zip(axes, state, strict=True):
        split[factor] = (*split.get(factor, ()), axis)
    return Spec(tuple(split.get(factor, ()) if factor >= 0 else () for factor in factors))


def evaluate(model: Model, choices: NDArray[np.int64]) -> Outcome:
    """Evaluate a choice of one alternative per node: seconds by channel, collectives, and peak memory.

    Seconds of nodes, relayouts and collectives are summed over all executions in a step. Raises `ValueError` if a
    forbidden pair was chosen.
    """
    channels: dict[Channel, float] = defaultdict(float)
    chosen = choices.tolist()
    for node, choice in zip(model.nodes, chosen, strict=True):
        for channel, seconds in node.time.items():
            channels[channel] += float(seconds[choice])
    totals: dict[tuple[str, tuple[str, ...], bool, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    lines: dict[tuple[str, tuple[str, ...], bool, str], str] = {}
    link_of, named = link_names(model.mesh), cluster_names(model)
    lanes_of = functools.cache(functools.partial(lanes, model.collectives, link_of))  # repeated layers ask the same
    for reshard in model.reshards:
        timing = reshard_time(model, reshard, choices)
        if relayout_s := _relayout_seconds(model, reshard, choices, timing):
            channels[reshard.block, "compute"] += relayout_s
        overlap = reshard_overlap(model, reshard, choices) if timing.steps else Overlap.NONE
        for kind, axes, size, seconds in timing.steps:
            where = lanes_of(overlap, kind, axes, size, reshard.block, reshard.exposed)
            for channel, share in where.items():
                channels[channel] += seconds * share * reshard.trips
            exposed = where.get(EXPOSED, 0.0)
            key = (kind, axes, exposed < 0.5, reshard_cause(model, reshard, named))
            lines[key] = lines.get(key) or reshard_line(model, reshard)
            entry = totals[key]
            entry[0] += reshard.trips * reshard.combined
            entry[1] += size * reshard.trips
            entry[2] += seconds * reshard.trips
            entry[3] += seconds * exposed * reshard.trips
    for node, choice in zip(model.nodes, chosen, strict=True):
        for inner in node.inner:
            size = float(inner.size[choice])
            if size > 0:
                axes = tuple(model.axis_names[a] for a in inner.axes)
                trips = model.graph.trips(model.graph.ops[node.ref].loop)
                seconds, exposed = (float(each[0]) * trips for each in inner.times(model.collectives, choice))
                key = (inner.kind, axes, exposed < 0.5 * seconds, node.name)
                lines[key] = model.graph.ops[node.ref].line
                entry = totals[key]
                entry[0] += trips * inner.count
                entry[1] += size * inner.senders * inner.count * trips
                entry[2] += seconds
                entry[3] += exposed
    collectives = []
    for key, (count, size, seconds, exposed) in totals.items():
        kind, axes, hidden, cause = key
        wire = sum(float(v) for v in model.collectives.wire_bytes(kind, axes, size).values())  # type: ignore[arg-type]
        collectives.append(
            Collective(kind, axes, math.ceil(count), int(round(wire)), seconds, hidden, cause, lines[key], exposed)
        )
    collectives.sort(key=lambda c: (-c.seconds, c.kind, c.axes, c.cause))
    buffers = solved_buffers(model, choices)
    peak, when, memory = _memory(model, live_buffers(model, choices, buffers))
    solved = peak
    traits = model.mesh.topology.traits
    if traits.separate_collective_buffers or model.liveness.reserved or traits.tiled:
        solved, _, _ = _memory(model, buffers)
    return Outcome(
        dict(channels), tuple(collectives), peak, when, memory, host_bytes(model, choices), solved, model.one_in_flight
    )


def _relayout_seconds(model: Model, reshard: Reshard, choices: NDArray[np.int64], timing: ReshardTime) -> float:
    """Return the seconds in one step of a reshard's relayouts, plus the memory traffic of `uncharged_bytes`; 0 if there
    is neither.
    """
    seconds, unpaid = 0.0, uncharged_bytes(model, reshard, choices)
    if timing.relays:
        seconds = float(timing.relayouts.seconds(model.compute))
    return (seconds + float(model.compute.memory_seconds(unpaid)) if unpaid else seconds) * reshard.trips


def host_bytes(model: Model, choices: NDArray[np.int64]) -> int:
    """Return the bytes of host memory that one device occupies.

    They are stacks that loops fill, and tensors that are offloaded outside loops, each split like its tensor; 0 if
    nothing is on the hosts.
    """
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
    """Return by role the bytes of one device's arguments that are in host memory before and after a step; empty if
    there are none.
    """
    sizes, size_of_role = dict(model.mesh.axes), defaultdict[Role, int](int)
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if tensor in model.liveness.hosted:
            local = tensor_spec(model, choices, tensor).local_shape(argument.shape, sizes)
            size_of_role[argument.role] += math.prod(local) * model.graph.tensors[tensor].itemsize
    return size_of_role


def memory_events(model: Model, choices: NDArray[np.int64]) -> list[tuple[int, int, str]]:
    """Return (op id, bytes, kind) in order: positive bytes where a buffer is allocated, negative where it is freed.

    The bytes are those of one device; at one op, frees come first. The buffers follow from the specs and lifetimes, and
    include those of collectives on backends that have them.
    """
    return _events(live_buffers(model, choices))


def _events(buffers: Sequence[LiveBuffer]) -> list[tuple[int, int, str]]:
    """Return the events of `memory_events` for some buffers; at one op, frees come before allocations."""
    both = [
        event for each in buffers for event in ((each.start, each.size, each.kind), (each.stop, -each.size, each.kind))
    ]
    return sorted(both, key=lambda event: event[:2])


def live_buffers(
    model: Model, choices: NDArray[np.int64], solved: Sequence[LiveBuffer] | None = None
) -> list[LiveBuffer]:
    """Return every buffer in a device's main memory; on TPUs one more has the holes of the heap at the peak.

    - `solved`: result of `solved_buffers`; default: it is computed.
    """
    buffers = _buffers(model, choices, solved_buffers(model, choices) if solved is None else solved)
    if model.mesh.topology.traits.tiled:
        peak, when, _ = _memory(model, buffers)
        about = buffers, len(model.graph.ops), peak
        # Few programs have holes, and only those need to know what collectives write.
        if heap_holes(*about) and (holes := heap_holes(*about, written_by_collectives(model, choices))):
            buffers = [*buffers, LiveBuffer(when, when + 1, holes, "temporaries", -1)]
    return buffers


def _buffers(model: Model, choices: NDArray[np.int64], solved: Sequence[LiveBuffer]) -> list[LiveBuffer]:
    """Return every buffer in a device's main memory, with results allocated from the start where the backend does so.

    `solved` is the result of `solved_buffers`.

    Buffers of collectives are included; on TPUs these are the tables that gathers read and gradients before their sum.
    """
    local_of = functools.partial(_local_dims, model, choices)
    traits, gathered = model.mesh.topology.traits, dict(gathered_results(model, choices, local_of))
    # The solver has these results as shards.
    buffers = [
        each._replace(size=gathered.get(each.tensor, each.size)) if each.stop > len(model.graph.ops) else each
        for each in solved
    ]
    if traits.tiled:
        buffers = with_moved_slices(model, choices, with_whole_sums(model, choices, buffers), local_of)
    # Kernels that gathers are fused with write several values.
    if model.mesh.topology.chip.fused_gathers != "by default":
        ends = model.liveness.early_ends
        buffers = [each._replace(stop=min(each.stop, ends.get(each.tensor, each.stop))) for each in buffers]
    if traits.tiled:
        steps_to_copies = {
            number: reshard_time(model, reshard, choices).steps
            for number, reshard in enumerate(model.reshards)
            if (node := model.nodes[reshard.target]).kind == "copy" and not node.memory
        }
        buffers += [*gathered_copies(model, choices, steps_to_copies), *_relaid_rows(model, choices)]
        buffers += [*copied_into_place(model, gathered, local_of), *copied_updates(model, choices)]
        buffers += softmax_operands(model, choices, local_of)
    if traits.tiled or traits.separate_collective_buffers:
        buffers += exchanged_views(model, choices, local_of)
    offloaded = offloaded_gathers(model, choices, local_of)
    if model.mesh.topology.chip.name in OFFLOADING:
        buffers += sorted_indices(model.graph, local_of)
    if traits.tiled:
        buffers = list(with_gathered_rows(model.graph, buffers, local_of, offloaded))
        clock_of = functools.partial(kernel_clock, model, choices, tuple(buffers))
        buffers += [*waiting_gradients(model, choices, clock_of), *partial_scatters(model, choices)]
    if traits.tiled and (room := on_chip_room(model.mesh.topology, _memory(model, buffers)[0])):
        copies = [each for each in buffers if each.start in offloaded and offloaded[each.start].reads_copy(each)]
        buffers = [each for each in buffers if each not in copies]
        away = {tensor for each in offloaded.values() for tensor in each.tensors}
        buffers = [*without_on_chip(model, choices, buffers, room, away), *copies]
    if traits.separate_collective_buffers or traits.tiled:
        buffers += held_by_collectives(model, choices, offloaded)
    if model.liveness.reserved:
        buffers = reserve(model.graph, buffers, model.liveness.reserved, traits.results_apart)
    return buffers


def _relaid_rows(model: Model, choices: NDArray[np.int64]) -> Iterator[LiveBuffer]:
    """Yield the buffers of `Liveness.relaid_rows` whose outermost dim has at least `LEAST_ROWS` on a device."""
    for tensor, start, stop in model.liveness.relaid_rows:
        local = _local_dims(model, choices, tensor)
        if local[0] >= LEAST_ROWS:
            size = model.padding.shard_bytes(tensor, local, model.graph.tensors[tensor].itemsize)
            yield LiveBuffer(start, stop, size, "temporaries", tensor)


def solved_buffers(model: Model, choices: NDArray[np.int64]) -> list[LiveBuffer]:
    """Return the buffers that the `Problem` also has, on one device.

    There are no collective buffers, and results are allocated when they are written. Besides tensors they are those of
    softmaxes, of copies, and temporaries of heavy ops.
    """
    sizes = dict(model.mesh.axes)
    buffers: list[LiveBuffer] = []
    kinds = {
        (term.start, term.stop, number): term.kind for number, node in enumerate(model.nodes) for term in node.memory
    }
    for tensor, start, stop in model.liveness.buffers:
        cluster = model.structure.cluster_of[tensor]
        if cluster < 0:
            continue
        record = model.graph.tensors[tensor]
        local = tensor_spec(model, choices, tensor).local_shape(record.shape, sizes)
        size = model.padding.shard_bytes(tensor, local, model.liveness.itemsize(model.graph, (tensor, start, stop)))
        buffers.append(LiveBuffer(start, stop, size, kinds[(start, stop, model.cluster_node[cluster])], tensor))
    for softmax in model.liveness.softmaxes:
        spec = tensor_spec(model, choices, softmax.scores)
        split = any(spec.dims[dim] for dim in softmax.rows)
        again = softmax.narrow or split or 1 in spec.local_shape(model.graph.tensors[softmax.scores].shape, sizes)
        for tensor, start, stop, width in (softmax.recomputed if again else softmax.fused).buffers:
            local = tensor_spec(model, choices, tensor).local_shape(model.graph.tensors[tensor].shape, sizes)
            size = model.padding.shard_bytes(tensor, local, width)
            kind = kinds[(start, stop, model.cluster_node[softmax.cluster])]
            buffers.append(LiveBuffer(start, stop, size, kind, tensor))
    for (tensor, *_), number in model.copy_nodes.items():
        node = model.nodes[number]
        row = int(choices[number])
        if not node.has_memory[row] or not node.memory:
            continue
        record = model.graph.tensors[tensor]
        local = spec_of(model, node.states, row, len(record.shape)).local_shape(record.shape, sizes)
        size = model.padding.shard_bytes(tensor, local, record.itemsize)
        buffers.append(LiveBuffer(node.memory[0].start, node.memory[0].stop, size, "gathered", tensor))
    for op_id, number in model.op_node.items():
        op, node = model.graph.ops[op_id], model.nodes[number]
        if is_ring(op):
            (size,) = ring_memory(model.graph, op, node.states[[int(choices[number])]], model.axis_sizes).tolist()
            buffers.append(LiveBuffer(op_id, op_id + 1, size, "temporaries", op.results[0]))
        if scratch := scratch_itemsize(model.graph, op, model.mesh.topology.backend):
            first, state = model.graph.tensors[op.operands[0]], node.states[[int(choices[number])]]
            split = state if op.rule is None else factor_states(state, op.rule.operands[0])
            local = spec_of(model, split, 0, len(first.shape)).local_shape(first.shape, sizes)
            buffers.append(LiveBuffer(op_id, op_id + 1, math.prod(local) * scratch, "temporaries", op.operands[0]))
        state, topology = node.states[[int(choices[number])]], model.mesh.topology
        copies = table_copies(model.graph, op, state, model.axis_sizes, topology)
        for start, stop, copied in copies.held if copies is not None else ():
            buffers.append(LiveBuffer(start, stop, int(np.rint(copied[0])), "temporaries", op.operands[0]))
        shifted, _ = shifted_images(model.graph, op, model.padding.images, state, model.axis_sizes)
        if shifted.any():
            span = shifted_span(model.graph, op)
            buffers.append(LiveBuffer(*span, int(np.rint(shifted[0])), "temporaries", op.operands[0]))
    return buffers


def _memory(model: Model, buffers: Sequence[LiveBuffer]) -> tuple[int, int, dict[str, int]]:
    """Return the peak in bytes, its op id, and the nonzero bytes of each kind at the peak.

    The peak is after the first event of `memory_events` at which the total is largest. The model's `fixed_bytes` are
    added as `temporaries`.
    """
    if not buffers:
        return model.fixed_bytes, 0, {"temporaries": model.fixed_bytes} if model.fixed_bytes else {}
    moments = [moment for each in buffers for moment in (each.start, each.stop)]
    changes = [change for each in buffers for change in (each.size, -each.size)]
    order = np.lexsort((changes, moments)).tolist()  # stable, as `sorted` is
    totals = list(itertools.accumulate(changes[event] for event in order))
    peak = max(totals)
    at = totals.index(peak)
    at_peak: dict[str, int] = {}
    if peak > 0:
        for event in order[: at + 1]:
            kind = buffers[event // 2].kind
            at_peak[kind] = at_peak.get(kind, 0) + changes[event]
    at_peak["temporaries"] = at_peak.get("temporaries", 0) + model.fixed_bytes
    when = moments[order[at]] if peak > 0 else 0
    return max(peak, 0) + model.fixed_bytes, when, {k: v for k, v in sorted(at_peak.items()) if v}
