"""What no choice on a mesh can go below, known before anything is solved: bytes, and seconds."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autoshard.cost import Calibration, Mesh
from autoshard.graph import OpGraph
from autoshard.plan.model._axis_parts import axis_parts_of
from autoshard.plan.model._model import EXPOSED, Model, Node
from autoshard.plan.model._stage_axis import stage_axis
from autoshard.plan.price._nodes import NodePricer
from autoshard.plan.price._reading import Reading
from autoshard.plan.solve._build import Kept
from autoshard.program import Program


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
