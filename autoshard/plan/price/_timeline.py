"""The predicted step laid out in time: when each part of it runs, and what memory holds meanwhile."""

import dataclasses
import itertools
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.model._model import EXPOSED, HOST, Model, link_names
from autoshard.plan.model._overlap import lanes
from autoshard.plan.price._predict import (
    cluster_names,
    memory_events,
    relayout_seconds,
    reshard_cause,
    reshard_overlap,
    reshard_steps,
)
from autoshard.plan.record._parts import WAITS_FOR_HOST, Span, Timeline


SAMPLES = 240
"""Memory is kept at about as many moments; the peak is always one of them."""

SHORTEST = 1e-5
"""Spans shorter than this share of the step are laid out, but not kept."""


@dataclasses.dataclass(slots=True)
class _Block:
    """One loop, or the top level: where its compute and its links have got to, in seconds."""

    start: float
    compute: float = 0.0
    links: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))


def make_timeline(model: Model, choices: NDArray[np.int64]) -> Timeline:
    """One way to run the step in the time that `predict` says.

    Ops stand in program order; all trips of a loop are drawn as one, so that a span is as long as its op in all
    trips together. A hidden collective runs beside its block's compute on its link; an exposed one holds up compute.
    Where a block's links take longer than its compute, compute waits at the block's end.
    """
    jobs = sorted([*_computes(model, choices), *_collectives(model, choices)], key=lambda job: (job[0], job[1]))
    blocks: dict[int, _Block] = {}
    last = {block: moment for moment, _, block, *_ in jobs}
    clock = 0.0
    spans: list[Span] = []
    starts: list[tuple[int, float]] = []
    for moment, together in itertools.groupby(jobs, key=lambda job: job[0]):
        for _, _, block, lane, name, seconds in together:
            here = blocks.setdefault(block, _Block(clock))
            starts.append((moment, clock))
            if lane in ("compute", EXPOSED[1]):
                spans.append(Span(name, lane, clock, seconds, block))
                clock += seconds
                here.compute += seconds if lane == "compute" else 0.0
            else:
                spans.append(Span(name, lane, here.start + here.links[lane], seconds, block))
                here.links[lane] += seconds
        for block in [b for b in blocks if b >= 0 and last[b] == moment]:
            spans += (wait := _wait(blocks[block], block, clock))
            clock += sum(span.seconds for span in wait)
    if -1 in blocks:
        spans += (wait := _wait(blocks[-1], -1, clock))
        clock += sum(span.seconds for span in wait)
    kept = tuple(span for span in spans if span.seconds >= SHORTEST * clock)
    moments, memory = _sampled(model, choices, starts, clock)
    return Timeline(clock, kept, moments, memory)


def _wait(block: _Block, number: int, clock: float) -> list[Span]:
    """Compute waits for the block's slowest link at the block's end, if that takes longer than the compute."""
    link, busy = max(block.links.items(), key=lambda item: item[1], default=("", 0.0))
    seconds = busy - block.compute
    name = WAITS_FOR_HOST if link == HOST else f"waiting for {link}"
    return [Span(name, EXPOSED[1], clock, seconds, number)] if seconds > 0 else []


_Job = tuple[int, int, int, str, str, float]
"""(op id, order at it, block, lane, name, seconds of the whole step)."""


def _computes(model: Model, choices: NDArray[np.int64]) -> list[_Job]:
    jobs: list[_Job] = []
    for number, node in enumerate(model.nodes):
        for (block, what), seconds in node.time.items():
            spent = float(seconds[int(choices[number])])
            if what == EXPOSED[1] and spent > 0:
                op = model.graph.ops[node.ref]
                jobs.append((op.id, 0, op.loop, what, f"inside {node.name}", spent))
            elif what in ("compute", HOST) and spent > 0:
                jobs.append((_moment(model, number, block), 1, block, what, node.name, spent))
    return jobs


def _collectives(model: Model, choices: NDArray[np.int64]) -> list[_Job]:
    jobs: list[_Job] = []
    link_of, named = link_names(model.mesh), cluster_names(model)
    for reshard in model.reshards:
        moment = reshard.op if reshard.op >= 0 else _moment(model, reshard.source, reshard.block)
        if again := relayout_seconds(model, reshard, choices):
            jobs.append(
                (moment, 0, reshard.block, "compute", f"layout of {reshard_cause(model, reshard, named)}", again)
            )
        overlap = reshard_overlap(model, reshard, choices)
        for kind, axes, size, seconds in reshard_steps(model, reshard, choices):
            where = lanes(model.collectives, link_of, overlap, kind, axes, size, reshard.block)
            name = f"{kind} over {', '.join(axes)}: {reshard_cause(model, reshard, named)}"
            for (_, lane), share in sorted(where.items()):
                jobs.append((moment, 0, reshard.block, lane, name, seconds * share * reshard.trips))
    return jobs


def _moment(model: Model, number: int, block: int) -> int:
    """The op at which a node's work in a block is drawn: its own, or the first that makes one of its tensors there."""
    node = model.nodes[number]
    if node.kind == "op":
        return node.ref
    tensors = model.structure.clusters[node.ref].tensors if node.kind == "cluster" else (node.ref,)
    makers = [model.graph.tensors[t].producer for t in tensors if model.graph.tensors[t].producer >= 0]
    inside = [op for op in makers if model.graph.ops[op].loop == block]
    if inside or block < 0:
        return min(inside or makers, default=0)
    return model.graph.loops[block].start


def _sampled(
    model: Model, choices: NDArray[np.int64], starts: list[tuple[int, float]], end: float
) -> tuple[tuple[float, ...], dict[str, tuple[int, ...]]]:
    """Moments in seconds, and the bytes of each kind from then on; of each group of moments the fullest is kept."""
    held: dict[str, int] = defaultdict(int)
    held["temporaries"] = model.fixed_bytes
    states: dict[int, dict[str, int]] = {}
    for moment, size, kind in memory_events(model, choices):
        held[kind] += size
        states[moment] = max(states.get(moment, {}), dict(held), key=lambda state: sum(state.values()))
    moments = sorted(states)
    stride = -(-len(moments) // SAMPLES) or 1
    chosen = [
        max(moments[i : i + stride], key=lambda moment: sum(states[moment].values()))
        for i in range(0, len(moments), stride)
    ]
    kinds = sorted({kind for moment in chosen for kind, size in states[moment].items() if size})
    times = []
    clock, index = 0.0, 0
    for moment in chosen:
        while index < len(starts) and starts[index][0] <= moment:
            clock = max(clock, starts[index][1])
            index += 1
        times.append(min(clock, end))
    return tuple(times), {kind: tuple(states[moment].get(kind, 0) for moment in chosen) for kind in kinds}
