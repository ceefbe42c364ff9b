"""Where a plan's step spends its time, op by op, as a plan keeps it: few rows, whose sums are the prediction's."""

import dataclasses
import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpClass
from autoshard.plan.model._model import Model
from autoshard.plan.price._op_prices import OpPrices, Place, PlaceWork, price_ops
from autoshard.plan.price._predict import cluster_names
from autoshard.plan.record._parts import PlannedOp
from autoshard.plan.record._stacks import pattern
from autoshard.program import WEIGHTS


MOST_ROWS = 400
SHORTEST = 1e-5
"""Rows that are kept: as many of the longest, if they take this share of the step; the rest becomes one row."""


def planned_ops(model: Model, choices: NDArray[np.int64]) -> tuple[PlannedOp, ...]:
    """The ops of a step, the longest first. Their compute, traffic with hosts and communication add up to those of
    `evaluate` for the same choices. Raises ValueError if a forbidden pair was chosen."""
    prices = price_ops(model, choices)
    found: dict[tuple[str, ...], PlannedOp] = {}
    for each in _places(model, prices):
        key = _sort_key(each)
        found[key] = _together(found[key], each) if key in found else each
    rows = sorted(found.values(), key=lambda row: (-_seconds(row), *_sort_key(row)))
    least = SHORTEST * sum(map(_seconds, rows))
    kept = [row for row in rows[:MOST_ROWS] if _seconds(row) >= least]
    if rest := rows[len(kept) :]:
        small = dataclasses.replace(rest[0], name="", kind="", line="", parameter="")
        for row in rest[1:]:
            small = _together(small, row)
        kept.append(small)
    return tuple(kept)


def _sort_key(row: PlannedOp) -> tuple[str, ...]:
    return row.name, row.kind, row.line, row.parameter, row.bound


def _seconds(row: PlannedOp) -> float:
    return row.compute_s + row.host_s + row.sent_s


def _together(a: PlannedOp, b: PlannedOp) -> PlannedOp:
    summed = ("times", "compute_s", "host_s", "sent_s", "waited_s", "flops", "moved_bytes", "wire_bytes")
    return dataclasses.replace(a, **{name: getattr(a, name) + getattr(b, name) for name in summed})


def _places(model: Model, prices: OpPrices) -> list[PlannedOp]:
    """One row for each place where something takes time, in program order."""
    collectives: dict[Place, list[tuple[float, float, int]]] = defaultdict(list)
    for op, inside in prices.inside.items():
        collectives["op", op] += [(c.seconds, c.waited_s, c.wire_bytes) for c in inside]
    for (tensor, op), moved in prices.moved.items():
        place: Place = ("op", op) if op >= 0 else ("tensor", tensor)
        collectives[place] += [(c.seconds, c.waited_s, c.wire_bytes) for c in moved]
    rows, parameters = [], _parameters(model)
    for place in sorted({*prices.compute, *prices.host, *collectives}):
        sent, waited, wire = (sum(part) for part in zip(*collectives.get(place, [(0.0, 0.0, 0)]), strict=True))
        work, compute, host = prices.work.get(place, PlaceWork()), prices.compute.get(place, 0.0), prices.host
        name, kind, line, times = _said(model, place)
        parameter = parameters.get(place[1], "") if place[0] == "op" else ""
        seconds = (compute, host.get(place, 0.0), sent, waited)
        amounts = (work.flops, work.moved_bytes, int(wire))
        bound = _bound(work, compute, waited, host.get(place, 0.0))
        rows.append(PlannedOp(name, kind, line, parameter, times, *seconds, *amounts, bound))
    return rows


def _parameters(model: Model) -> dict[int, str]:
    """Of heavy ops, the parameter whose values they take, else the one whose gradient they make."""
    roles = {argument.name: argument.role for argument in model.program.arguments}
    named = {cluster: pattern(name) for cluster, name in cluster_names(model).items() if roles[name] in WEIGHTS}
    found = {}
    for op in model.graph.ops:
        if op.op_class is OpClass.HEAVY:
            clusters = (model.structure.cluster_of[tensor] for tensor in (*op.operands, *op.results))
            found[op.id] = next((named[cluster] for cluster in clusters if cluster in named), "")
    return found


def _said(model: Model, place: Place) -> tuple[str, str, str, int]:
    """Name, kind, line and executions of what is at a place."""
    what, number = place
    graph = model.graph
    if what == "op":
        op = graph.ops[number]
        kind = op.opaque.target if op.opaque else op.kind
        return pattern(op.name or op.kind), kind, op.line, math.ceil(graph.trips(op.loop))
    tensor = graph.tensors[number]
    return pattern(tensor.name or f"value {number}"), "copy", "", math.ceil(graph.trips(tensor.loop))


def _bound(work: PlaceWork, compute: float, waited: float, host: float) -> str:
    """What takes most of the time. Engines run beside each other: who is busy for half of the compute sets it."""
    if max(waited, host) > compute:
        return "network" if waited >= host else "host"
    if 2.0 * work.busy_s >= compute and work.busy_s > 0.0:
        return "compute"
    return "overhead" if 2.0 * work.overhead_s >= compute and work.overhead_s > 0.0 else "memory"
