"""What no choice on a mesh can go below, known before anything is solved: bytes, and seconds."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.cost import Calibration, Mesh
from autoshard.graph import OpGraph
from autoshard.plan.model._axis_parts import axis_parts_of
from autoshard.plan.model._model import EXPOSED, Model, Node
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
    program: Program, reading: Reading, mesh: Mesh, memory_limit: int, calibration: Calibration | None = None
) -> Floors:
    """Every op by itself computes as fast as it can, every value holds its least, and nothing moves.

    It prices decisions but no pairs of them, so it can be had on any mesh.
    """
    axis_parts = axis_parts_of(reading.groups, mesh)
    pricer = NodePricer(
        program, reading.graph, reading.structure, reading.liveness, mesh, memory_limit, axis_parts, calibration
    )
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
    program: Program, reading: Reading, mesh: Mesh, memory_limit: int, calibration: Calibration | None = None
) -> float:
    """No plan on the mesh takes less."""
    return floors(program, reading, mesh, memory_limit, calibration).seconds
