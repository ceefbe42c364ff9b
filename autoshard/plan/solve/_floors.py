"""What no choice on a mesh can go below, known before anything is solved: bytes, and seconds."""

import numpy as np

from autoshard.cost import Calibration, Mesh
from autoshard.plan.model._axis_parts import axis_parts_of
from autoshard.plan.model._model import EXPOSED, Model
from autoshard.plan.price._nodes import NodePricer
from autoshard.plan.price._reading import Reading
from autoshard.plan.solve._build import Kept
from autoshard.program import Program


def least_bytes(model: Model, kept: Kept) -> int:
    """No choice among `kept` holds less at its peak: at every time each decision by itself holds its least."""
    change = np.zeros(len(model.graph.ops) + 2, dtype=np.int64)
    for node, mine in zip(model.nodes, kept, strict=True):
        for term in node.memory:
            least = term.usage[mine].min(initial=np.iinfo(np.int64).max)
            change[term.start] += least
            change[term.stop] -= least
    return int(np.cumsum(change).max()) + model.fixed_bytes


def least_seconds(
    program: Program, reading: Reading, mesh: Mesh, memory_limit: int, calibration: Calibration | None = None
) -> float:
    """No plan on the mesh takes less: every op by itself computes as fast as it can, and nothing moves.

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
    return total
