"""Construction of the solver's `Problem` from priced decisions, and lower bounds for every plan on a mesh."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import HOST, IN_FLIGHT, Calibration, Mesh, Topology, covering_share
from autoshard.graph import OpGraph
from autoshard.planning.price.analysed_program import AnalysedProgram
from autoshard.planning.price.node_prices import NodePricer
from autoshard.planning.price.on_chip_memory import ARGUMENTS, on_chip_room
from autoshard.planning.space.decision_model import EXPOSED, Channel, Decisions, Model, Node, Reshard
from autoshard.planning.space.derived_axes import axis_parts_of, stage_axis
from autoshard.program import Program
from autoshard.solver import FORBIDDEN, Link, Network, Problem, Term


Weights = Mapping[Channel, float]
"""Weight of every compute and link channel; in each block they are non-negative, with a dual norm of one."""

Allowed = Mapping[int, NDArray[np.bool_]]
"""Mask of the alternatives that may be chosen, by node."""

Kept = Sequence[NDArray[np.int64]]
"""Remaining alternatives of every node, ascending."""


MAX_COST = FORBIDDEN - 4096
"""Picoseconds to which larger costs are clipped.

A clipped alternative may be chosen, but choices that cost as much are out of range. Float rounding of this value stays
below `FORBIDDEN`.
"""


def kept_of(model: Decisions, allowed: Allowed | None) -> Kept:
    """Return the alternatives of every node that may be chosen: all for a node without a mask."""
    allowed = allowed or {}
    return [
        np.flatnonzero(allowed[n]) if n in allowed else np.arange(len(node.states))
        for n, node in enumerate(model.nodes)
    ]


def entries(model: Decisions, kept: Kept) -> int:
    """Return the number of entries in the edge tables of `build_problem`, those of reshards without costs included."""
    return sum(len(kept[reshard.source]) * len(kept[reshard.target]) for reshard in model.reshards)


def linked_reshards(model: Decisions, weights: Weights) -> list[int]:
    """Return the numbers of the reshards that are links of `build_network`, ascending.

    These are the reshards that forbid a pair, or have a channel with a positive weight.
    """
    return [
        number
        for number, reshard in enumerate(model.reshards)
        if reshard.forbidden is not None or any(weight_of(weights, c) > 0 for c in reshard.costs)
    ]


def build_network(model: Decisions, weights: Weights, memory_limit: int | None, kept: Kept) -> Network:
    """Build the compact form of the `Problem` of `build_problem`; alternatives that are not in `kept` are closed.

    - `weights`: weight of each channel.
    - `memory_limit`: bytes of one device; None for no limit, and then without memory terms.
    - `kept`: remaining alternatives of every node.
    """
    costs, links, terms = [], [], []
    for node, alternatives in zip(model.nodes, kept, strict=True):
        seconds = sum((weight_of(weights, c) * t for c, t in node.time.items()), np.zeros(len(node.states)))
        cost = np.full(len(node.states), float(FORBIDDEN))
        cost[alternatives] = _picoseconds(seconds[alternatives])
        costs.append(cost)
    shared: dict[tuple[object, ...], NDArray[np.float64]] = {}
    for number in linked_reshards(model, weights):
        reshard = model.reshards[number]
        parts = [(weight_of(weights, c), t) for c, t in reshard.costs.items() if weight_of(weights, c) > 0]
        ends = (reshard.source, reshard.target, reshard.rows, reshard.columns)
        if len(parts) == 1 and reshard.forbidden is None:
            weight, table = parts[0]
            scale = weight * reshard.trips * 1e12
            links.append(Link(*ends, _at_most(table, scale), scale))
            continue
        forbidding_link = -1 if reshard.forbidden is None else len(links)
        key = (reshard.trips, *((weight, id(table)) for weight, table in parts), forbidding_link)
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
    """Build the `Problem` whose objective is exposed communication plus the weighted channels of every block.

    If the weights are those of `normalise`, the objective bounds the plan's true time from below.
    The true time is `exposed + max over the channels` for each block. Times above `MAX_COST` are clipped to `MAX_COST`.
    A program without decisions (all scalars) has a Problem of one node with one alternative, which stands for no node.

    - `weights`: weight of each channel.
    - `memory_limit`: bytes of one device; None for no limit.
    - `kept`: remaining alternatives of every node; default: all.
    """
    kept = kept_of(model, None) if kept is None else kept
    costs, offsets = [], [0]
    for node, alternatives in zip(model.nodes, kept, strict=True):
        seconds = sum((weight_of(weights, c) * t for c, t in node.time.items()), np.zeros(len(node.states)))
        costs.append(_picoseconds(seconds[alternatives]))
        offsets.append(offsets[-1] + len(alternatives))
    if not costs:
        costs, offsets = [np.zeros(1, dtype=np.int64)], [0, 1]
    edge_costs, edge_offsets, edge_nodes = [], [0], []
    tables: dict[tuple[object, ...], NDArray[np.int64] | None] = {}
    for reshard in model.reshards:
        ends = reshard.rows[kept[reshard.source]], reshard.columns[kept[reshard.target]]
        weighted = [(weight_of(weights, c), t) for c, t in reshard.costs.items()]
        key = (*(end.tobytes() for end in ends), reshard.trips, id(reshard.forbidden))
        key = (*key, *((weight, id(table)) for weight, table in weighted))
        if key not in tables:
            tables[key] = _edge_costs(reshard, weighted, *ends)
        edge_table = tables[key]
        if edge_table is None:
            continue
        edge_costs.append(edge_table)
        edge_offsets.append(edge_offsets[-1] + len(edge_table))
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
    """Return the flat costs of a reshard between two lists of alternatives; None if all costs are 0.

    - `weighted`: weight and seconds table of each channel.
    - `first`, `second`: row and column of the tables for each alternative of the source and of the target.
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
    """Return the memory limit minus the bytes that no choice changes, at least 1; None for no limit."""
    return None if memory_limit is None else max(1, memory_limit - model.fixed_bytes)


def weight_of(weights: Weights, channel: Channel) -> float:
    """Return the weight of a channel: 1 for the exposed channel, 0 for a channel whose engine `weights` lacks.

    A block's `IN_FLIGHT` has the weight of all its links; then the weight of compute is for `covering_share` of it.
    """
    block, lane = channel
    if channel == EXPOSED:
        return 1.0
    if (block, IN_FLIGHT) not in weights or lane == HOST:
        return weights.get(channel, 0.0)
    share = covering_share(one_in_flight=True)
    return 1.0 - share + share * weights.get(channel, 0.0) if lane == "compute" else weights[block, IN_FLIGHT]


def _picoseconds(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Convert seconds to whole picoseconds, clipped to `MAX_COST`."""
    return np.rint(_at_most(np.asarray(seconds), 1e12) * 1e12).astype(np.int64)


def _at_most(costs: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Clip costs so that `scale` times a cost is at most `MAX_COST`; return the same array if none is above.

    Raises `ArithmeticError` for a cost that is not a number.
    """
    most = MAX_COST / max(scale, 1e-300)
    if (costs <= most).all():
        return costs
    if np.isnan(costs).any():
        raise ArithmeticError("a price is not a number")
    return np.minimum(costs, most)


def _flat(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the arrays joined end to end; an empty array for none."""
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Floors:
    """Lower bounds on the seconds and bytes of every plan on a mesh."""

    seconds: float
    """Bound on the step time: the sum of every decision's least compute and exposed time."""
    bytes: int
    """Bound on the peak of one device, without the bytes that no choice changes (`Decisions.fixed_bytes`)."""


def least_bytes(model: Model, kept: Kept) -> int:
    """Return a lower bound on the peak of all choices among `kept`, in bytes, fixed bytes included.

    At every moment each decision occupies its minimum; the bound is the largest sum of any moment.
    """
    return _least_bytes(model.graph, model.nodes, kept, model.mesh.topology) + model.fixed_bytes


def _least_bytes(graph: OpGraph, nodes: Sequence[Node], kept: Kept, topology: Topology) -> int:
    """Return the bound of `least_bytes` for some nodes, without the fixed bytes.

    At every moment the bytes of values that may be in on-chip memory are subtracted. Arguments and results are never
    there. Moments are numbers of ops, and each memory term is live from its `start` up to, not including, its `stop`.
    """
    change = np.zeros((2, len(graph.ops) + 2), dtype=np.int64)
    for node, mine in zip(nodes, kept, strict=True):
        for term in node.memory:
            least = term.usage[mine].min(initial=np.iinfo(np.int64).max)
            where = int(term.kind in ARGUMENTS or term.stop > len(graph.ops))
            change[where, term.start] += least
            change[where, term.stop] -= least
    values, outer = np.cumsum(change, axis=1)
    room = on_chip_room(topology, int((values + outer).max()))
    return int((np.maximum(0, values - room) + outer).max())


def floors(
    program: Program,
    reading: AnalysedProgram,
    mesh: Mesh,
    memory_limit: int,
    calibration: Calibration | None = None,
    staged: bool = False,
) -> Floors:
    """Return lower bounds for a mesh: ops computed at their fastest, tensors at their smallest, no reshards.

    Only decisions are priced, not pairs of them, so the bounds are cheap on any mesh.

    - `reading`: analysis of the program.
    - `memory_limit`: bytes of one device.
    - `calibration`: default: the calibration of the mesh's chip.
    - `staged`: if True, a mesh axis `stage` is reserved for the stages of a pipeline, if the program can be cut so.
    """
    where = (stage_axis(reading, mesh) if staged else None) or mesh
    graph, parts = reading.graph, axis_parts_of(reading.groups, mesh)
    pricer = NodePricer(program, graph, reading.structure, reading.liveness, where, memory_limit, parts, calibration)
    pricer.add_clusters()
    for op in reading.structure.heavy:
        pricer.add_heavy(reading.graph.ops[op])
    total = 0.0
    for node in pricer.nodes:
        own_s = [
            seconds for (block, what), seconds in node.time.items() if what == "compute" or (block, what) == EXPOSED
        ]
        if own_s:
            total += float(np.min(sum(own_s)))
    every = [np.arange(len(node.states)) for node in pricer.nodes]
    return Floors(total, _least_bytes(reading.graph, pricer.nodes, every, mesh.topology))


def least_seconds(
    program: Program,
    reading: AnalysedProgram,
    mesh: Mesh,
    memory_limit: int,
    calibration: Calibration | None = None,
    staged: bool = False,
) -> float:
    """Return a lower bound on the seconds of any plan on the mesh; the arguments are those of `floors`."""
    return floors(program, reading, mesh, memory_limit, calibration, staged).seconds


def least_compute(
    program: Program,
    reading: AnalysedProgram,
    mesh: Mesh,
    calibration: Calibration | None = None,
    enough: float = math.inf,
) -> float:
    """Return a lower bound on the seconds of matmuls and kernels on a mesh with a stage axis.

    The sum stops at `enough` seconds or more; it is then still a bound, but not the largest. Without a stage axis the
    whole mesh is priced.

    Ops with the most FLOPs over all trips are priced first, so few ops suffice for a mesh that cannot split them.

    - `reading`: analysis of the program.
    - `calibration`: default: the calibration of the mesh's chip.
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
