"""The analysis of a program that no mesh changes."""

import dataclasses

from autoshard.graph import Liveness, OpGraph, Structure
from autoshard.planning.space.dim_groups import Groups


@dataclasses.dataclass(frozen=True, slots=True)
class AnalysedProgram:
    """Mesh-independent analysis of a program."""

    graph: OpGraph
    """Ops and tensors of the program."""
    structure: Structure
    """Clusters, heavy ops and the edges between decisions."""
    liveness: Liveness
    """Buffers and fusions, as the backend's compiler makes them."""
    groups: Groups
    """Dim groups of the program."""
    eager: bool = False
    """True if a framework runs the step op by op, so that no compiler recomputes values where memory is short."""
