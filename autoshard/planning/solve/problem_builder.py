"""From priced decisions to the `Problem` that the solver takes, and the floors of every choice on a mesh."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Calibration, Mesh
from autoshard.graph import OpGraph
from autoshard.planning.price.analysed_program import Reading
from autoshard.planning.price.node_prices import NodePricer
from autoshard.planning.space.decision_model import EXPOSED, Channel, Decisions, Model, Node, Reshard
from autoshard.planning.space.derived_axes import axis_parts_of, stage_axis
from autoshard.program import Program
from autoshard.solver import FORBIDDEN, Link, Network, Problem, Term


Weights = Mapping[Channel, float]
"""Weight of every compute and link channel; those of one block are non-negative and sum to one."""

Allowed = Mapping[int, NDArray[np.bool_]]
"""Node -> which of its alternatives may be chosen."""

Kept = Sequence[NDArray[np.int64]]
"""For every node the alternatives that are left, ascending."""


DEAREST = FORBIDDEN - 4096
"""Picoseconds that stand for about as many or more: allowed, but choices that come to so much are out of range. What
floats make of it stays below `FORBIDDEN`."""


def kept_of(model: Decisions, allowed: Allowed | None) -> Kept:
    """The alternatives that may be chosen."""
    allowed = allowed or {}
    return [
        np.flatnonzero(allowed[n]) if n in allowed else np.arange(len(node.states))
        for n, node in enumerate(model.nodes)
    ]


def entries(model: Decisions, kept: Kept) -> int:
    """Numbers in the edge tables of `build_problem`."""
    return sum(len(kept[reshard.source]) * len(kept[reshard.target]) for reshard in model.reshards)


def linked_reshards(model: Decisions, weights: Weights) -> list[int]:
    """The reshards that are links of `build_network`, in their order: those that cost or forbid anything."""
    return [
        number
        for number, reshard in enumerate(model.reshards)
        if reshard.forbidden is not None or any(_weight(weights, c) > 0 for c in reshard.costs)
    ]


def build_network(model: Decisions, weights: Weights, memory_limit: int | None, kept: Kept) -> Network:
    """What `build_problem` would write out, in short; alternatives that are not in `kept` are closed."""
    costs, links, terms = [], [], []
    for node, mine in zip(model.nodes, kept, strict=True):
        seconds = sum((_weight(weights, c) * t for c, t in node.time.items()), np.zeros(len(node.states)))
        cost = np.full(len(node.states), float(FORBIDDEN))
        cost[mine] = _picoseconds(seconds[mine])
        costs.append(cost)
    shared: dict[tuple[object, ...], NDArray[np.float64]] = {}
    for number in linked_reshards(model, weights):
        reshard = model.reshards[number]
        parts = [(_weight(weights, c), t) for c, t in reshard.costs.items() if _weight(weights, c) > 0]
        ends = (reshard.source, reshard.target, reshard.rows, reshard.columns)
        if len(parts) == 1 and reshard.forbidden is None:
            weight, table = parts[0]
            scale = weight * reshard.trips * 1e12
            links.append(Link(*ends, _at_most(table, scale), scale))
            continue
        own = -1 if reshard.forbidden is None else len(links)
        key = (reshard.trips, *((weight, id(table)) for weight, table in parts), own)
        if key not in shared:
            table = sum(
                (weight * t for weight, t in parts), np.zeros((len(reshard.path.source), len(reshard.path.target)))
            )
            table = _at_most(table, reshard.trips * 1e12)
            shared[key] = table if reshard.forbidden is None else np.where(reshard.forbidden, float(FORBIDDEN), table)
        links.append(Link(*ends, shared[key], reshard.trips * 1e12))
    if memory_limit is not None:
        terms = [Term(n, t.start, t.stop, t.usage) for n, node in enumerate(model.nodes) for t in node.memory]
    return Network(costs, links, terms, _usage_limit(model, memory_limit))


def build_problem(model: Decisions, weights: Weights, memory_limit: int | None, kept: Kept | None = None) -> Problem:
    """The `Problem` whose objective is exposed communication plus the weighted channels of every block.

    With weights that are non-negative and sum to one in every block the objective bounds the plan's true time
    (`exposed + max over the channels` per block) from below. Times of `DEAREST` and more stand in it as `DEAREST`.
    With `kept` only these alternatives are in it. A program that leaves nothing to decide (all scalars) has a Problem
    of one node with one alternative, which stands for none.
    """
    kept = kept_of(model, None) if kept is None else kept
    costs, offsets = [], [0]
    for node, mine in zip(model.nodes, kept, strict=True):
        seconds = sum((_weight(weights, c) * t for c, t in node.time.items()), np.zeros(len(node.states)))
        costs.append(_picoseconds(seconds[mine]))
        offsets.append(offsets[-1] + len(mine))
    if not costs:
        costs, offsets = [np.zeros(1, dtype=np.int64)], [0, 1]
    edge_costs, edge_offsets, edge_nodes = [], [0], []
    written: dict[tuple[object, ...], NDArray[np.int64] | None] = {}
    for reshard in model.reshards:
        ends = reshard.rows[kept[reshard.source]], reshard.columns[kept[reshard.target]]
        weighted = [(_weight(weights, c), t) for c, t in reshard.costs.items()]
        key = (*(end.tobytes() for end in ends), reshard.trips, id(reshard.forbidden))
        key = (*key, *((weight, id(table)) for weight, table in weighted))
        if key not in written:
            written[key] = _edge_costs(reshard, weighted, *ends)
        full = written[key]
        if full is None:
            continue
        edge_costs.append(full)
        edge_offsets.append(edge_offsets[-1] + len(full))
        edge_nodes.append((reshard.source, reshard.target))
    term_nodes, intervals, usages, term_offsets = [], [], [], [0]
    for number, node in enumerate(model.nodes):
        for term in node.memory:
            term_nodes.append(number)
            intervals.append((term.start, term.stop))
            usages.append(term.usage[kept[number]])
            term_offsets.append(term_offsets[-1] + len(kept[number]))
    return Problem(
        node_offsets=np.array(offsets, dtype=np.int64),
        node_costs=_flat(costs),
        edge_nodes=np.array(edge_nodes, dtype=np.int64).reshape(-1, 2),
        edge_offsets=np.array(edge_offsets, dtype=np.int64),
        edge_costs=_flat(edge_costs),
        term_nodes=np.array(term_nodes, dtype=np.int64),
        term_intervals=np.array(intervals, dtype=np.int64).reshape(-1, 2),
        term_offsets=np.array(term_offsets, dtype=np.int64),
        term_usages=_flat(usages),
        usage_limit=_usage_limit(model, memory_limit),
    )


def _edge_costs(
    reshard: Reshard,
    weighted: Sequence[tuple[float, NDArray[np.float64]]],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """The costs of a reshard between alternatives with the rows `first` and the columns `second` of its tables.

    They are flat; None if there are none.
    """
    rows, place = np.unique(first, return_inverse=True)
    columns, across = np.unique(second, return_inverse=True)
    part = np.ix_(rows, columns)
    parts = (weight * reshard.trips * table[part] for weight, table in weighted)
    cost = _picoseconds(sum(parts, np.zeros((len(rows), len(columns)))))
    if reshard.forbidden is not None:
        cost = np.where(reshard.forbidden[part], FORBIDDEN, cost)
    return cost[place][:, across].ravel() if cost.any() else None


def _usage_limit(model: Decisions, memory_limit: int | None) -> int | None:
    return None if memory_limit is None else max(0, memory_limit - model.fixed_bytes)


def _weight(weights: Weights, channel: Channel) -> float:
    return 1.0 if channel == EXPOSED else weights.get(channel, 0.0)


def _picoseconds(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(_at_most(np.asarray(seconds), 1e12) * 1e12).astype(np.int64)


def _at_most(costs: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """The same array where `scale` times it is nowhere above `DEAREST`.

    Raises `ArithmeticError` for what is not a number.
    """
    most = DEAREST / max(scale, 1e-300)
    if (costs <= most).all():
        return costs
    if np.isnan(costs).any():
        raise ArithmeticError("a price is not a number")
    return np.minimum(costs, most)


def _flat(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Floors:
    """What no plan on a mesh goes below."""

    seconds: float
    bytes: int


def least_bytes(model: Model, kept: Kept) -> int:
    """No choice among `kept` holds less at its peak: at every time each decision by itself holds its least."""
    return _least_bytes(model.graph, model.nodes, kept) + model.fixed_bytes


def _least_bytes(graph: OpGraph, nodes: Sequence[Node], kept: Kept) -> int:
    change = np.zeros(len(graph.ops) + 2, dtype=np.int64)
    for node, mine in zip(nodes, kept, strict=True):
        for term in node.memory:
            least = term.usage[mine].min(initial=np.iinfo(np.int64).max)
            change[term.start] += least
            change[term.stop] -= least
    return int(np.cumsum(change).max())


def floors(
    program: Program,
    reading: Reading,
    mesh: Mesh,
    memory_limit: int,
    calibration: Calibration | None = None,
    staged: bool = False,
) -> Floors:
    """Every op by itself computes as fast as it can, every value holds its least, and nothing moves.

    It prices decisions but no pairs of them, so it can be had on any mesh. With `staged` an axis `stage` stands for
    the stages of a pipeline alone.
    """
    where = (stage_axis(reading, mesh) if staged else None) or mesh
    graph, parts = reading.graph, axis_parts_of(reading.groups, mesh)
    pricer = NodePricer(program, graph, reading.structure, reading.liveness, where, memory_limit, parts, calibration)
    pricer.add_clusters()
    for op in reading.structure.heavy:
        pricer.add_heavy(reading.graph.ops[op])
    total = 0.0
    for node in pricer.nodes:
        own = [seconds for (block, what), seconds in node.time.items() if what == "compute" or (block, what) == EXPOSED]
        if own:
            total += float(np.min(sum(own)))
    every = [np.arange(len(node.states)) for node in pricer.nodes]
    return Floors(total, _least_bytes(reading.graph, pricer.nodes, every))


def least_seconds(
    program: Program,
    reading: Reading,
    mesh: Mesh,
    memory_limit: int,
    calibration: Calibration | None = None,
    staged: bool = False,
) -> float:
    """No plan on the mesh takes less."""
    return floors(program, reading, mesh, memory_limit, calibration, staged).seconds


def least_compute(
    program: Program, reading: Reading, mesh: Mesh, calibration: Calibration | None = None, enough: float = math.inf
) -> float:
    """Seconds that matmuls and kernels take at least on a mesh with an axis of stages, no further than `enough`.

    A mesh that cannot split them is known by a few of them.
    """
    graph = reading.graph
    where = stage_axis(reading, mesh) or mesh
    pricer = NodePricer(
        program, graph, reading.structure, reading.liveness, where, 0, axis_parts_of(reading.groups, mesh), calibration
    )
    ops = [graph.ops[number] for number in reading.structure.heavy if graph.ops[number].flops]
    total = 0.0
    for op in sorted(ops, key=lambda each: -each.flops * graph.trips(each.loop)):
        pricer.add_heavy(op)
        total += float(pricer.nodes[-1].time[op.loop, "compute"].min())
        if total >= enough:
            break
    return total
