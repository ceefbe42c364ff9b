"""Which meshes are worth planning a pipeline on: known for all of its schedules from the one with fewest microbatches.

Smaller microbatches and more rounds make no tick faster for each example in it: an op on half of a batch takes at least
half as long, parameters that are gathered once more are moved once more, and what splits a small batch evenly splits
twice as much. So no pipeline of as many stages takes less than the one with fewest microbatches, once through the
stages, would without its bubble. Its program is priced on every mesh with an axis of stages, and bounded by messages
between decisions, whatever fits into memory.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.cost import Calibration, Mesh, Topology, candidate_meshes
from autoshard.errors import UserError
from autoshard.plan.mesh._trial import Rival, Trials, unusable
from autoshard.plan.model._asked import Asked
from autoshard.plan.model._stage_axis import with_stages
from autoshard.plan.price._path_tables import PathTables
from autoshard.plan.price._reading import read_program
from autoshard.plan.price._task import Task
from autoshard.plan.solve._floors import least_compute
from autoshard.plan.write._recipe import Recipe
from autoshard.plan.write._stages import pipeline_of, without_pipeline
from autoshard.program import Program


UNSTAGED = "slower on every mesh, even without its bubble"


@dataclasses.dataclass(frozen=True, slots=True)
class StagedMeshes:
    """Meshes with an axis of stages that pipelines may be planned on, and what all others take at least."""

    meshes: tuple[Mesh, ...]
    bounds: tuple[float, ...]
    """Seconds that no step of any of the pipelines goes below on each of them."""
    others_s: float
    """The same of all that are left out; infinite if none is."""

    @property
    def bound_s(self) -> float:
        """On any mesh."""
        return min((*self.bounds, self.others_s))

    def below(self, beat_s: float) -> tuple[Mesh, ...]:
        """Those that may take less than that."""
        return tuple(mesh for mesh, bound in zip(self.meshes, self.bounds, strict=True) if bound < beat_s)


class PipelineMeshes:
    """Finds them, once for each number of stages and whatever else a recipe says."""

    def __init__(
        self, topology: Topology, asked: Asked, limit: int, figures: Calibration, tables: PathTables
    ) -> None:
        self.topology, self.asked, self.limit, self.figures, self.tables = topology, asked, limit, figures, tables
        self.known: dict[tuple[Recipe, int], StagedMeshes | None] = {}

    def of(
        self, recipe: Recipe, make: Callable[..., Program], counts: Sequence[int], rival: Rival | None
    ) -> StagedMeshes | None:
        """The meshes for a pipeline that must beat the `rival`; None if its simplest kin cannot be made.

        `make` gives the program of a recipe, `counts` are the microbatches that may be chosen.
        """
        pipeline = pipeline_of(recipe)
        assert pipeline is not None
        key = without_pipeline(recipe), pipeline.stages
        if key not in self.known:
            fewest = min(count for count in counts if count % pipeline.stages == 0 or len(counts) == 1)
            simplest = recipe.but(schedule="gpipe", microbatches=fewest)
            try:
                program = make(**simplest.arguments)
            except UserError:
                self.known[key] = None
            else:
                kin = pipeline_of(simplest)
                assert kin is not None
                self.known[key] = self._found(program, kin.stages, 1 - kin.bubble(max(program.stacks)), rival)
        return self.known[key]

    def _found(self, program: Program, stages: int, useful: float, rival: Rival | None) -> StagedMeshes:
        """`useful` is the share of the program's ticks that is no bubble."""
        beat_s = math.inf if rival is None else rival.step_s
        reading = read_program(program, self.topology.backend)
        task = Task(program, reading, self.asked, self.limit, 0, self.figures, self.tables, stages)
        trials = Trials(task, math.inf, True)
        loose = None if rival is None else dataclasses.replace(rival, step_s=beat_s / useful)
        kept: dict[Mesh, float] = {}
        others_s = math.inf
        for mesh in with_stages(candidate_meshes(self.topology), stages):
            if unusable(program, reading, mesh):
                continue
            bound = useful * least_compute(program, reading, mesh, self.figures, beat_s / useful)
            if bound < beat_s and loose is not None:
                found = trials.bound(mesh, loose)
                bound = max(bound, useful * ((found and found.bound_s) or trials.bounded(mesh)))
                trials.forget()
            if bound < beat_s:
                kept[mesh] = bound
            else:
                others_s = min(others_s, bound)
        return StagedMeshes(tuple(kept), tuple(kept.values()), others_s)
