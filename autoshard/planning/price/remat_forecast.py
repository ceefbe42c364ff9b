"""Forecasts of better remat policies from one plan.

A plan whose layers recompute everything gives the recomputation seconds and the bytes of every value that a policy may
save. From these the step of any set of saved or offloaded values follows:

- The backward pass recomputes only ops that its roots need and that no saved value cuts off.
- Offloaded values share the links to the host.
- Saved values are live between the loops of the forward and the backward pass.

All sets of at most `MOST` values are compared.

A plan without recomputation gives the seconds that its stacks of saved values take, and the best policy spares a part
of these (`spared_seconds`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import HOST, overlapped_seconds
from autoshard.graph import Carry, Loop, Op, OpClass, OpGraph, is_copied
from autoshard.planning.price.device_memory import tight_seconds
from autoshard.planning.price.evaluate import evaluate, memory_events, tensor_spec
from autoshard.planning.price.remat_values import AGAIN, Occurrence, find_values
from autoshard.planning.price.step_ledger import Ledger, Place, itemise, memory_passes
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model
from autoshard.planning.space.op_models import FOLDED_OPS
from autoshard.program import INPUT, Policy, short_names


MOST = 9
"""Number of values whose sets are all compared: the layer's input and the values that take longest to recompute."""

STREAMS = 3
"""Number of additional times that a saved value's bytes pass through memory.

A copy into the stack of all layers reads and writes the value, and the backward pass reads it from there.
"""

Bools = NDArray[np.bool_]
"""Masks; shapes are given as [sets, values] or [values]."""
Floats = NDArray[Any]
"""Figures of sets, [sets]."""


@dataclasses.dataclass(frozen=True, slots=True)
class RematForecast:
    """Forecast of a policy that names the saved and offloaded values."""

    policy: Policy
    step_time_s: float
    """Seconds of a step without the cost of nearly full memory."""
    peak_bytes: int
    """Peak memory of one device."""
    expected_s: float
    """Step seconds plus the expected cost of nearly full memory (`tight_seconds`)."""


def forecast_remat(
    model: Model, choices: NDArray[np.int64], memory_limit: int, offloads: bool = True
) -> RematForecast | None:
    """Return the best policy by value for a plan's shardings; the plan's program recomputes its layers in full.

    `memory_limit` is in bytes of one device; without `offloads` the policy offloads nothing. None if there is nothing
    to save, or if no fitting policy has a shorter expected step than the plan.
    """
    values = _SavableValues(model, choices, offloads)
    return values.best(memory_limit) if values.paths else None


class _SavableValues:
    """Values of one plan that may be saved or offloaded, and the forecast of sets of them."""

    def __init__(self, model: Model, choices: NDArray[np.int64], offloads: bool) -> None:
        """Evaluate the plan, and choose the values to consider: the `MOST - 1` that take longest to recompute, and the
        layer's input if it can be offloaded.
        """
        self.model, self.choices = model, choices
        # The host's memory must be separate from that of the devices.
        self.can_offload = offloads and not model.mesh.topology.traits.shares_machine
        self.outcome = evaluate(model, choices)
        self.seconds = _op_seconds(itemise(model, choices))
        places: dict[str, list[Occurrence]] = defaultdict(list)
        for place in find_values(model.program, model.graph):
            places[place.path].append(place)
        cost = {path: sum(self.alone(place) for place in own) for path, own in places.items()}
        worth = sorted((path for path in places if path != INPUT and cost[path] > 0), key=lambda path: -cost[path])
        self.paths = [path for path in places if path in worth[: MOST - 1] or (path == INPUT and self.can_offload)]
        self.places = {path: places[path] for path in self.paths}

    def alone(self, place: Occurrence) -> float:
        """Return the seconds in one step of the ops that recompute one occurrence of a value, in all channels."""
        producers = {self.model.graph.tensors[t].producer for t in place.recomputed}
        return sum(sum(self.seconds.get(op, {}).values()) for op in producers)

    def best(self, memory_limit: int) -> RematForecast | None:
        """Return the fitting set with the least expected step; None if no set is better than the plan.

        Seconds include the expected cost of nearly full memory, for the plan too. Among equal sets the one that
        offloads least is returned, then the one that saves least.
        """
        kept, away = _sets([path == INPUT for path in self.paths], self.can_offload)
        step, compute, hidden = self.times(kept, away)
        peak = self.peaks(kept, away)
        base = self.outcome
        least = float("inf")
        if base.peak_bytes <= memory_limit:
            least = base.step_time_s + tight_seconds(self.model, base.peak_bytes, base.compute_s, base.hidden_s)
        best: RematForecast | None = None
        for at in np.lexsort((kept.sum(axis=1), away.sum(axis=1), step)):
            # Sets are in order of their step, and memory pressure only adds to it.
            if step[at] >= least:
                break
            if peak[at] > memory_limit or not (kept[at].any() or away[at].any()):
                continue
            expected = step[at] + tight_seconds(self.model, int(peak[at]), float(compute[at]), float(hidden[at]))
            if expected < least:
                least = expected
                best = RematForecast(self.policy(kept[at], away[at]), float(step[at]), int(peak[at]), float(expected))
        return best

    def policy(self, kept: Bools, away: Bools) -> Policy:
        """Return the policy that saves the values marked in `kept` and offloads those in `away`, [values] each; all
        others are recomputed.
        """
        names = short_names(self.model.program.savable)
        mine = [names[path] for path in self.paths]
        chosen = [tuple(name for name, takes in zip(mine, takes, strict=True) if takes) for takes in (kept, away)]
        return Policy("full", *chosen)

    def times(self, kept: Bools, away: Bools) -> tuple[Floats, Floats, Floats]:
        """Return for every set the seconds of the step, of its compute, and of its hidden communication, each [sets].

        Saved and offloaded values spare recomputation and add copies into stacks, except the layer's input. Offloaded
        ones also cross the host's link in both passes.

        - `kept`, `away`: masks of the values that are saved, and of those that are offloaded, [sets, values].
        """
        spared = self.saved_seconds(kept | away)
        channels: dict[Channel, Floats] = {
            channel: np.full(len(kept), seconds) for channel, seconds in self.outcome.channels.items()
        }

        def add(channel: Channel, seconds: Floats) -> None:
            """Add seconds, [sets], to a channel."""
            channels[channel] = channels.get(channel, np.zeros(len(kept))) + seconds

        for channel, seconds in spared.items():
            add(channel, -seconds)
        compute = self.model.compute
        for number, path in enumerate(self.paths):
            for place in self.places[path]:
                size = self.local_bytes(place) * self.model.graph.trips(place.loop)
                copy_s = 0.0 if path == INPUT else float(compute.memory_seconds(STREAMS * size))
                add((place.loop, "compute"), copy_s * (kept[:, number] | away[:, number]))
                for block in (place.loop, place.recompute_loop):
                    add((block, HOST), float(compute.host_seconds(size)) * away[:, number])
        lanes = {channel: seconds for channel, seconds in channels.items() if channel != EXPOSED}
        step = channels.get(EXPOSED, np.zeros(len(kept))) + overlapped_seconds(lanes, self.model.one_in_flight)
        work = sum((s for (_, what), s in channels.items() if what == "compute"), np.zeros(len(kept)))
        rest = sum((s for (_, what), s in channels.items() if what != "compute"), np.zeros(len(kept)))
        return step, work, np.maximum(0.0, rest - (step - work))

    def saved_seconds(self, saved: Bools) -> Mapping[Channel, Floats]:
        """Return by channel the seconds of recomputation that saved values avoid, [sets].

        A recomputed op is needed if an unsaved result of it has a consumer that is needed or that is not recomputed.
        `saved` is a mask, [sets, values].
        """
        graph = self.model.graph
        again = {op.id for op in graph.ops if AGAIN in op.name}
        at = {t: number for number, path in enumerate(self.paths) for p in self.places[path] for t in p.recomputed}
        needed: dict[int, Bools] = {}
        spared: dict[Channel, Floats] = defaultdict(lambda: np.zeros(len(saved)))
        for op in (graph.ops[number] for number in sorted(again, reverse=True)):
            is_needed = np.zeros(len(saved), dtype=bool)
            for tensor in op.results:
                users = [user.id for user in graph.users[tensor]]
                wanted = np.full(len(saved), tensor in graph.returned or any(u not in again for u in users))
                for user in users:
                    if user in again:
                        wanted = wanted | needed[user]
                is_needed |= wanted & ~saved[:, at[tensor]] if tensor in at else wanted
            needed[op.id] = is_needed
            for channel, seconds in self.seconds.get(op.id, {}).items():
                spared[channel] += seconds * ~is_needed
        return spared

    def peaks(self, kept: Bools, away: Bools) -> NDArray[np.int64]:
        """Return the peak bytes of one device for every set, [sets].

        Saved values add their bytes for all layers, and offloaded ones the bytes of one transfer. Offloading layer
        inputs frees them. `kept` and `away` are masks, [sets, values].
        """
        events = memory_events(self.model, self.choices)
        usage = np.zeros(len(self.model.graph.ops) + 2, dtype=np.int64)
        for moment, size, _ in events:
            usage[min(moment, len(usage) - 1)] += size
        usage = usage.cumsum() + self.model.fixed_bytes
        spans: dict[tuple[int, int], NDArray[np.int64]] = defaultdict(lambda: np.zeros(len(kept), dtype=np.int64))
        for number, path in enumerate(self.paths):
            for place in self.places[path]:
                size = self.local_bytes(place) * self.layers(place)
                # The plan already stores the layer inputs, so offloading them frees memory.
                spans[self.span(place)] += -size * away[:, number] if path == INPUT else size * kept[:, number]
                if place.loop >= 0:  # the transfer of one trip overlaps with the next trip's compute
                    spans[self.span(place)] += self.local_bytes(place) * away[:, number]
                    if path == INPUT and is_copied(self.model.graph.tensors[place.value].shape):
                        span = self.model.graph.loops[place.loop].stop, self.span(place)[1]
                        spans[span] += size * (~away[:, number] & away.any(axis=1))
                for tensor, start, stop in self.model.liveness.buffers:
                    if tensor in place.recomputed:  # the consumer reads its slice of the stack in place
                        spans[start, stop] -= self.local_bytes(place, tensor) * kept[:, number]
        edges = sorted({0, len(usage), *(edge for span in spans for edge in span)})
        parts = [(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]
        held = [
            int(usage[a:b].max()) + sum(size for (start, stop), size in spans.items() if start <= a and b <= stop)
            for a, b in parts
        ]
        return np.maximum.reduce([np.broadcast_to(np.asarray(each, dtype=np.int64), len(kept)) for each in held])

    def layers(self, place: Occurrence) -> int:
        """Return the number of simultaneously live instances of a value: one for each trip of its forward loop, 1
        outside loops.
        """
        return 1 if place.loop < 0 else self.model.graph.loops[place.loop].trips

    def span(self, place: Occurrence) -> tuple[int, int]:
        """Return the op ids [first, last) between which a saved value is live, from its forward loop or op to the last
        recomputation.
        """
        graph = self.model.graph
        first = graph.tensors[place.value].producer if place.loop < 0 else graph.loops[place.loop].start
        last = max((graph.tensors[t].producer for t in place.recomputed), default=len(graph.ops))
        return max(first, 0), last if place.recompute_loop < 0 else graph.loops[place.recompute_loop].stop

    def local_bytes(self, place: Occurrence, tensor: int | None = None) -> int:
        """Return the padded bytes on one device of one layer's value, or of `tensor`, which is recomputed for the
        value.
        """
        return _local_bytes(self.model, self.choices, place.value if tensor is None else tensor)


def spared_seconds(model: Model, choices: NDArray[np.int64]) -> float:
    """Return about how many seconds of a plan's step the best recomputation spares; 0 if it spares none.

    A loop over layers writes the values that the backward pass reads into stacks of all layers, which takes memory
    traffic. With recomputation the stacks hold only inputs of layers, and results of matmuls and kernels, or these
    are computed again where that takes less time. Kernels compute all other values again as they read them, from
    results that are about as large as the values.

    Eager steps have no stacks. On CPUs matmuls read values from memory only, so that computing them again spares
    nothing: no policy was faster in three steps.
    """
    if model.eager or model.mesh.topology.traits.shares_machine:
        return 0.0
    graph = model.graph
    stacks = {loop: found for loop in graph.loops if (found := _saved_stacks(graph, loop))}
    if not stacks:
        return 0.0
    traffic: dict[Place, float] = defaultdict(float)
    for each in memory_passes(model, choices):
        traffic[each.place] += each.size * each.times
    op_seconds: dict[int, float] = defaultdict(float)
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        if node.kind == "op":
            op_seconds[node.ref] += sum(float(seconds[choice]) for seconds in node.time.values())

    def saved_bytes(tensor: int, loop: Loop) -> float:
        """Return the bytes of one device in a stack of a tensor, of which only a part may be read: a sum's lane."""
        read = sum(_local_bytes(model, choices, t) for user in graph.users[tensor] for t in user.results)
        return min(_local_bytes(model, choices, tensor), read) * graph.trips(loop.id)

    moved, held = 0.0, 0.0
    for loop, found in stacks.items():
        for carry, op in found:
            places: list[Place] = [("op", op.id), *(("tensor", tensor) for tensor in dataclasses.astuple(carry))]
            moved += sum(traffic[place] for place in places)
            held += _local_bytes(model, choices, op.operands[1]) * graph.trips(loop.id)
    stacks_s = float(model.compute.memory_seconds(moved))
    needed_s = 0.0
    for loop, found in stacks.items():
        for results, maker in _sources(graph, loop, found):
            saved_s = stacks_s * sum(saved_bytes(each, loop) for each in results) / held
            needed_s += saved_s if maker is None else min(saved_s, op_seconds[maker.id])
    return max(0.0, stacks_s - needed_s)


def _saved_stacks(graph: OpGraph, loop: Loop) -> list[tuple[Carry, Op]]:
    """Return the stacks that a loop fills for another loop of its block, each with the op that writes one slice."""
    found = []
    for carry in loop.carries:
        op = graph.maker(carry.update)
        if op is None or op.kind != "dynamic_update_slice" or op.operands[0] != carry.body:
            continue
        readers = {user.loop for user in graph.users[carry.result]} - {-1, loop.id}
        if any(graph.loops[reader].parent == loop.parent for reader in readers):
            found.append((carry, op))
    return found


def _sources(
    graph: OpGraph, loop: Loop, stacks: Sequence[tuple[Carry, Op]]
) -> Iterable[tuple[Sequence[int], Op | None]]:
    """Yield the tensors of which ops other than matmuls and kernels compute all values of a loop's stacks.

    They are the results of a matmul or kernel, with that op, or a value that the loop carries, with None.
    """
    carried = {carry.body for carry in loop.carries} - {carry.body for carry, _ in stacks}
    waiting, seen = [op.operands[1] for _, op in stacks], set()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        maker = graph.maker(tensor)
        if maker is None or maker.loop != loop.id:
            if tensor in carried:
                yield (tensor,), None
            continue
        seen.update(maker.results)
        if maker.op_class is OpClass.HEAVY and maker.kind not in FOLDED_OPS:
            yield maker.results, maker
        waiting += maker.operands


def _local_bytes(model: Model, choices: NDArray[np.int64], tensor: int) -> int:
    """Return the padded bytes of a tensor on one device."""
    record = model.graph.tensors[tensor]
    local = tensor_spec(model, choices, tensor).local_shape(record.shape, dict(model.mesh.axes))
    return model.padding.shard_bytes(tensor, local, record.itemsize)


def _sets(inputs: Sequence[bool], can_offload: bool) -> tuple[Bools, Bools]:
    """Return masks of all sets, [sets, values]: the values that are saved, and those that are offloaded.

    Each value is recomputed, saved or, with `can_offload`, offloaded. A layer's input (True in `inputs`) is always
    saved unless it is offloaded, and is never marked as saved.
    """
    states = [
        (False, True) if is_input else (False, True, None) if can_offload else (False, True) for is_input in inputs
    ]
    grid = np.array(np.meshgrid(*[range(len(own)) for own in states], indexing="ij")).reshape(len(states), -1).T
    is_input = np.asarray(inputs)
    return (grid == 1) & ~is_input, np.where(is_input, grid == 1, grid == 2)


def _op_seconds(ledger: Ledger) -> Mapping[int, dict[Channel, float]]:
    """Return for every recomputed op its seconds by channel in one step, including the reshards at its ends; ops
    without rows are missing.
    """
    again = {op.id for op in ledger.model.graph.ops if AGAIN in op.name}
    op_seconds: dict[int, dict[Channel, float]] = defaultdict(lambda: defaultdict(float))
    for row in ledger.rows:
        if row.op in again:
            for channel, seconds in row.channels():
                op_seconds[row.op][channel] += seconds
    return op_seconds
