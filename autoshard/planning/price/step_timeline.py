"""Timeline of the predicted step: the span of each op and collective, and the memory at each moment."""

import bisect
import dataclasses
import functools
import itertools
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import overlapped_seconds
from autoshard.planning.price.evaluate import live_buffers
from autoshard.planning.price.reshard_times import cluster_names
from autoshard.planning.price.step_ledger import Ledger
from autoshard.planning.record.plan_parts import HeldTensors, Span, Timeline
from autoshard.planning.record.spec import patterns
from autoshard.planning.space.decision_model import EXPOSED, Model, Node


SAMPLES = 240
"""Approximate number of moments at which memory is stored; the peak is always one of them."""

MOST_HELD = 300
"""Largest number of tensors that are listed, largest first."""
SMALLEST = 1e-3
"""Least share of the largest tensor's bytes for a tensor to be listed."""

SHORTEST = 1e-5
"""Share of the step below which a span is laid out but not stored."""


@dataclasses.dataclass(slots=True)
class _Block:
    """Clock of a loop or of the top level: its start, and the busy seconds so far of its compute and links."""

    start: float
    """Seconds from the start of the step."""
    compute: float = 0.0
    links: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    """Busy seconds by lane: a link, or the host's memory."""


def make_timeline(ledger: Ledger) -> Timeline:
    """Lay out one schedule of the step that takes the predicted time, with the memory at sampled moments.

    Ops are in program order. All trips of a loop are drawn as one, so a span is as long as its op in all trips
    together. A hidden collective overlaps with its block's compute, on its link. An exposed one delays compute. Compute
    waits at the end of a block for as long as its links delay it (`smooth_max`). Spans shorter than `SHORTEST` of the
    step are not stored.
    """
    jobs = sorted(_jobs(ledger), key=lambda job: (job[0], job[1]))
    blocks: dict[int, _Block] = {}
    last = {block: moment for moment, _, block, *_ in jobs}
    clock = 0.0
    one_in_flight = ledger.model.one_in_flight
    spans: list[Span] = []
    starts: list[tuple[int, float]] = []
    for moment, jobs_at_moment in itertools.groupby(jobs, key=lambda job: job[0]):
        for _, _, block, lane, name, seconds in jobs_at_moment:
            state = blocks.setdefault(block, _Block(clock))
            starts.append((moment, clock))
            if lane in ("compute", EXPOSED[1]):
                spans.append(Span(name, lane, clock, seconds, block))
                clock += seconds
                state.compute += seconds if lane == "compute" else 0.0
            else:
                spans.append(Span(name, lane, state.start + state.links[lane], seconds, block))
                state.links[lane] += seconds
        for block in [b for b in blocks if b >= 0 and last[b] == moment]:
            spans += (wait := _wait(blocks[block], block, clock, one_in_flight))
            clock += sum(span.seconds for span in wait)
    if -1 in blocks:
        spans += (wait := _wait(blocks[-1], -1, clock, one_in_flight))
        clock += sum(span.seconds for span in wait)
    stored = tuple(span for span in spans if span.seconds >= SHORTEST * clock)
    return Timeline(clock, stored, *_Sampler(ledger.model, ledger.choices).sampled(starts, clock))


def _wait(block: _Block, number: int, clock: float, one_in_flight: bool) -> list[Span]:
    """Return a list with the span in which compute waits at the block's end, named after the slowest link. It is empty
    if nothing is on the links.
    """
    link, _ = max(block.links.items(), key=lambda item: item[1], default=("", 0.0))
    lanes = {(number, lane): seconds for lane, seconds in block.links.items()} | {(number, "compute"): block.compute}
    seconds = float(overlapped_seconds(lanes, one_in_flight)) - block.compute
    return [Span(f"waiting for {link}", EXPOSED[1], clock, seconds, number)] if seconds > 0 else []


_Job = tuple[int, int, int, str, str, float]
"""(op id, order at the op, block, lane, name, seconds of the whole step)."""


def _jobs(ledger: Ledger) -> list[_Job]:
    """Return the jobs of a ledger: one for all collectives inside an op, else one for each row and lane.

    Reshards of an op's operands come before its work, those of its results after it. Jobs without time, and negative
    ones, are left out.
    """
    model, graph = ledger.model, ledger.model.graph
    inside: dict[tuple[int, int, str], float] = defaultdict(float)
    jobs: list[_Job] = []
    for row in ledger.rows:
        where = row.where
        if isinstance(where, Node) and row.axes:
            inside[row.op, row.block, row.cause] += row.exposed_s
            continue
        if isinstance(where, Node):
            moment, turn, name = _moment(model, where, row.block), 1, row.cause
        else:
            moment = row.op if row.op >= 0 else _moment(model, model.nodes[where.source], row.block)
            turn = 2 if where.tensor in graph.ops[moment].results else 0
            name = f"{row.kind} over {', '.join(row.axes)}: {row.cause}" if row.axes else f"layout of {row.cause}"
        jobs += [(moment, turn, row.block, lane, name, s) for (_, lane), s in sorted(row.channels()) if s > 0]
    # An op waits for its own collectives before those of its operands.
    waits = [(op, 0, block, EXPOSED[1], f"inside {name}", s) for (op, block, name), s in inside.items() if s > 0]
    return waits + jobs


def _moment(model: Model, node: Node, block: int) -> int:
    """Return the op at which a node's work in a block is drawn.

    This is the node's own op, or the first op in the block that computes one of its tensors. Without one it is the
    start of the loop; at the top level, the first op that computes any of its tensors, else 0.
    """
    if node.kind == "op":
        return node.ref
    tensors = model.structure.clusters[node.ref].tensors if node.kind == "cluster" else (node.ref,)
    producers = [model.graph.tensors[t].producer for t in tensors if model.graph.tensors[t].producer >= 0]
    inside = [op for op in producers if model.graph.ops[op].loop == block]
    if inside or block < 0:
        return min(inside or producers, default=0)
    return model.graph.loops[block].start


class _Sampler:
    """Memory over the step: the live buffers at sampled moments."""

    def __init__(self, model: Model, choices: NDArray[np.int64]) -> None:
        self.model, self.buffers = model, live_buffers(model, choices)
        both = [
            event
            for number, each in enumerate(self.buffers)
            for event in ((each.start, each.size, number), (each.stop, -each.size, number))
        ]
        self.events = sorted(both, key=lambda event: event[:2])

    def states(self) -> dict[int, tuple[int, dict[str, int]]]:
        """Return for each moment its event with the most live bytes, and the bytes by kind after this event."""
        held: dict[str, int] = defaultdict(int)
        held["temporaries"] = total = self.model.fixed_bytes
        fullest: dict[int, tuple[int, dict[str, int]]] = {}
        most = 0
        for at, (moment, size, number) in enumerate(self.events):
            held[self.buffers[number].kind] += size
            total += size
            if moment not in fullest or total > most:
                fullest[moment], most = (at, dict(held)), total
        return fullest

    def sampled(
        self, starts: list[tuple[int, float]], end: float
    ) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]], tuple[HeldTensors, ...]]:
        """Return the sampled moments in seconds, the bytes of each kind from each moment on, and the live buffers.

        Moments are cut into at most `SAMPLES` groups of neighbours, and the fullest of each group is sampled. `starts`
        has (op id, seconds) of the jobs, and `end` is the length of the step in seconds.
        """
        states = self.states()
        moments = sorted(states)
        stride = -(-len(moments) // SAMPLES) or 1
        chosen = [
            max(moments[i : i + stride], key=lambda moment: sum(states[moment][1].values()))
            for i in range(0, len(moments), stride)
        ]
        kinds = sorted({kind for moment in chosen for kind, size in states[moment][1].items() if size})
        times = []
        clock, index = 0.0, 0
        for moment in chosen:
            while index < len(starts) and starts[index][0] <= moment:
                clock = max(clock, starts[index][1])
                index += 1
            times.append(min(clock, end))
        memory = {kind: tuple(states[moment][1].get(kind, 0) for moment in chosen) for kind in kinds}
        return tuple(times), memory, self.live_tensors([states[moment][0] for moment in chosen])

    def live_tensors(self, chosen: list[int]) -> tuple[HeldTensors, ...]:
        """Return the buffers that are live after the chosen events, grouped by name, kind and lifetime, the largest
        first.

        `chosen` has positions in `events`, in order. At most `MOST_HELD` groups are listed, none below `SMALLEST` of
        the largest.
        """
        added: dict[int, int] = {}
        names = {each.tensor: self.name(each.tensor) for each in self.buffers}
        shared = patterns(names.values())
        grouped: dict[tuple[str, str, int, int], list[int]] = defaultdict(lambda: [0, 0])
        for at, (_, size, number) in enumerate(self.events):
            each = self.buffers[number]
            if number not in added and size >= 0:
                added[number] = at
                continue
            # Live after event k if allocated at k or before, and freed after k.
            first, last = bisect.bisect_left(chosen, added.get(number, at)), bisect.bisect_left(chosen, at) - 1
            if each.size > 0 and first <= last:
                entry = grouped[shared[names[each.tensor]], each.kind, first, last]
                entry[0] += 1
                entry[1] += each.size
        rows = [HeldTensors(name, kind, count, size, *ends) for (name, kind, *ends), (count, size) in grouped.items()]
        rows.sort(key=lambda row: (-row.bytes, row.first, row.last, row.name, row.kind))
        most = max((row.bytes for row in rows), default=0)
        return tuple(row for row in rows[:MOST_HELD] if row.bytes >= SMALLEST * most)

    def name(self, tensor: int) -> str:
        """Return the name of a tensor: that of its argument, its own, or that of its cluster; empty if there is none,
        and for -1.
        """
        cluster = self.model.structure.cluster_of[tensor] if tensor >= 0 else -1
        return self.arguments.get(tensor) or self.model.graph.tensors[tensor].name or self.named.get(cluster, "")

    @functools.cached_property
    def arguments(self) -> dict[int, str]:
        """Names of arguments by tensor, including the tensors in which loops carry them."""
        graph = self.model.graph
        names = {t: a.name for t, a in zip(graph.arguments, self.model.program.arguments, strict=True)}
        return {c.body: names[c.init] for loop in graph.loops for c in loop.carries if c.init in names} | names

    @functools.cached_property
    def named(self) -> dict[int, str]:
        """Names of clusters, as `cluster_names` gives them."""
        return cluster_names(self.model)
