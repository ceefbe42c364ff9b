"""Compilation of the planner's kernels into numba's cache, so that the first large plan does not wait for it.

python -m autoshard.planning.warm_planner
"""

import importlib

import numpy as np

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.planning.price.reshard_paths import PathPrices
from autoshard.planning.space.decision_model import Path, link_names
from autoshard.planning.space.overlap import Overlap
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.solver.warm_solver import warm as solver_warm


def warm() -> None:
    """Compile the kernels of pricing by pricing one small path; numba caches the result."""
    mesh = make_mesh(Topology.parse("v5e:2x2"), {"data": 2, "model": 2})
    whole, split = np.array([[WHOLE, WHOLE]]), np.array([[0, 1]])
    path = Path((256, 256), split, whole, (256, 256), whole, split, 2, 2)
    PathPrices(Collectives(mesh), link_names(mesh)).compiled(path, Overlap.NONE)


def ready() -> None:
    """Load the modules and kernels of pricing and solving, and compile kernels that numba's cache lacks."""
    importlib.import_module("autoshard.planning.mesh.mesh_attempt")
    solver_warm()
    warm()


if __name__ == "__main__":
    warm()
