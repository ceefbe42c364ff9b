"""Which meshes are worth planning a pipeline on, known from pipelines that are like it and compute in larger parts.

Smaller microbatches and more rounds make no tick faster for each example in it: an op on half of a batch takes at least
half as long, parameters that are gathered once more are moved once more, and what splits a small batch evenly splits
twice as much. So a pipeline takes at least as long as one of as many stages with fewer microbatches, once through the
stages, would without its bubble, stretched by its own. That one's program is priced on every mesh with an axis of
stages (`planning/space/derived_axes.py`) and bounded by messages between decisions, whatever fits into memory;
then the one with twice as many microbatches on those meshes that are left. Of these the ones with the lowest bounds are
planned; a good plan on one of them rules out most others.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

from autoshard.base.workers import Crew
from autoshard.cost import Mesh, Topology, candidate_meshes
from autoshard.errors import UserError
from autoshard.planning.mesh.mesh_attempt import Rival, Trials, unusable
from autoshard.planning.price.analysed_program import Task, share
from autoshard.planning.recipes.pipeline_recipes import pipeline_of, promise
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried, elements_of
from autoshard.planning.solve.problem_builder import Weights, least_compute
from autoshard.planning.space.derived_axes import with_stages
from autoshard.program import Pipeline, Program


GPIPE = "gpipe"
MOST_PAIRS = 120_000_000
"""Pairs of alternatives of pipelines that are looked at in one search: work, not time, so that the same input gives the
same plan. Pipelines whose stages are slices come first, then those of few stages, and among them those with little
bubble."""
KIN_PAIRS = 30_000_000
"""Of these, the most for bounds from one pipeline."""
AT_ONCE = 12_000_000
"""Pairs of the meshes on which one pipeline is planned, and of at least one mesh."""
EVERY = 8_000_000
"""Pairs up to which every pipeline is looked at; after them, of each number of stages, only more promising ones than
what has been planned in vain."""


@dataclasses.dataclass(frozen=True, slots=True)
class StagedMeshes:
    """Meshes with an axis of stages on which a pipeline may take less than it must."""

    meshes: tuple[Mesh, ...]
    bound_s: float
    """A step takes no less on any mesh with such an axis."""
    program: Program | None
    """One of as many stages; None if none was made."""
    unlooked: int = 0
    """How many more meshes there are that are not looked at, since enough others were."""
    outdone: bool = False
    """Whether none is looked at, since a more promising pipeline of as many stages is slower than the best plan."""

    def row(self, recipe: Recipe, least_s: float, elements: int | None) -> RecipeTried:
        """What is said of a pipeline that is not planned.

        No plan takes less than `least_s` for each of the `elements` of the batch, which its program says if there is
        one.
        """
        elements = elements if self.program is None else elements_of(self.program)
        bound_s = max(self.bound_s, least_s * (elements or 0))
        outcome = (
            RecipeOutcome.OUTDONE
            if self.outdone
            else RecipeOutcome.UNLOOKED
            if self.unlooked
            else RecipeOutcome.UNSTAGED
        )
        return RecipeTried(recipe, outcome, elements=elements, bound_s=bound_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Kin:
    """A pipeline that goes once through its stages, as far as others are bounded by it."""

    task: Task
    pipeline: Pipeline
    bounds: dict[Mesh, float]
    """Seconds of a step that are no bubble, below which none is, of the meshes looked at; no further than was
    needed."""
    pairs: dict[Mesh, int] = dataclasses.field(default_factory=dict)
    """Pairs of alternatives of the meshes that were priced."""

    @property
    def spent(self) -> int:
        """Pairs of all meshes that were priced."""
        return sum(self.pairs.values())

    @property
    def layers(self) -> int:
        """Of the stack that is cut."""
        return max(self.task.program.stacks)

    def stretch(self, other: Pipeline) -> float:
        """How much longer another pipeline, that is bounded by this one, takes at least than what is no bubble here.

        Its bubble is no larger, so what stands outside of the stages is stretched by no more than the bubble here.
        More layers may stand outside, of which nothing is said.
        """
        layers = self.layers
        staged = (layers - other.outside(layers)) / (layers - self.pipeline.outside(layers))
        return staged / (1 - other.bubble(layers))

    def look(
        self, meshes: Sequence[Mesh], beat_s: float, weights: Weights | None, ended: Callable[[], bool], crew: Crew
    ) -> None:
        """Bound those of the meshes that are not bounded yet, one after the other until it has `ended`, and no further
        than needed to know that they take no less than `beat_s`.

        Those that must be priced for that are by the whole crew at once; which they are does not depend on it.
        """
        useful = 1 - self.pipeline.bubble(self.layers)
        floors: dict[Mesh, float] = {}
        for mesh in meshes:
            if mesh in self.bounds or ended():
                continue
            floor = self._floor(mesh, beat_s / useful)
            if floor < beat_s / useful and weights is not None:
                floors[mesh] = floor
                self.pairs[mesh] = Trials(self.task, math.inf).pairs(mesh)
            else:
                self.bounds[mesh] = useful * floor
        if not floors or weights is None:
            return
        share(crew, self.task.program, self.task.reading)
        rival = Rival(beat_s / useful, sys.maxsize, weights)
        found = crew.map(_priced_bound, list(floors), lambda mesh: (self.task, mesh, rival))
        for (mesh, floor), bound in zip(floors.items(), found, strict=True):
            self.bounds[mesh] = useful * max(floor, bound)

    def _floor(self, mesh: Mesh, enough_s: float) -> float:
        """Seconds that no plan on the mesh takes less than, without prices."""
        task = self.task
        if unusable(task.reading, mesh):
            return math.inf
        return least_compute(task.program, task.reading, mesh, task.calibration, enough_s)


def _priced_bound(task: Task, mesh: Mesh, rival: Rival) -> float:
    """Seconds that no plan on the mesh takes less than, by what its ops and moves cost."""
    trials = Trials(task, math.inf, True)
    trial = trials.bound(mesh, rival)
    return trials.bounded(mesh) if trial is None else trial.bound_s or 0.0


class PipelineMeshes:
    """Finds meshes for the pipelines of one program."""

    def __init__(
        self,
        topology: Topology,
        make: Callable[..., Program],
        task: Callable[[Program, int], Task],
        crew: Crew | None = None,
    ) -> None:
        """`make` gives the program of a recipe, `task` what is to be planned of a program with so many stages."""
        self.topology, self.make, self.task, self.crew = topology, make, task, crew or Crew()
        self.kin: dict[Recipe, Kin | None] = {}
        self.planned = 0
        """Pairs of alternatives of pipelines that were found to be worth planning."""
        self.in_vain: dict[int, float] = {}
        """Number of stages -> the least promise of a pipeline that was planned and is slower than the best plan."""

    @property
    def spent(self) -> int:
        """Pairs of alternatives that were looked at."""
        return self.planned + sum(kin.spent for kin in self.kin.values() if kin is not None)

    @property
    def ended(self) -> bool:
        """Whether no more is looked at."""
        return self.spent >= MOST_PAIRS

    def slower(self, recipe: Recipe, layers: int) -> None:
        """Take note that the pipeline of a recipe fits and is slower than the best plan."""
        pipeline = pipeline_of(recipe)
        if pipeline is not None and layers:
            known = self.in_vain.get(pipeline.stages, math.inf)
            self.in_vain[pipeline.stages] = min(known, promise(pipeline, layers))

    def outdone(self, recipe: Recipe, layers: int) -> bool:
        """Whether its pipeline need not be looked at for what became of a more promising one."""
        pipeline = pipeline_of(recipe)
        known = None if pipeline is None else self.in_vain.get(pipeline.stages)
        if pipeline is None or known is None or self.spent < EVERY:
            return False
        return promise(pipeline, layers) >= known

    def of(
        self, recipe: Recipe, counts: Sequence[int], beat: Callable[[Program], float], weights: Weights | None
    ) -> StagedMeshes | None:
        """The meshes for the pipeline of a recipe; None if none has such an axis, if those like it cannot be made, and
        if the program names axes itself.

        `counts` are all microbatches that may be chosen, `beat` says what a step must take less than, `weights` are
        those of the best plan yet. What is looked at after `MOST_PAIRS` is as far as it is known by then.
        """
        pipeline = pipeline_of(recipe)
        assert pipeline is not None
        left = with_stages(candidate_meshes(self.topology), pipeline.stages)
        others_s, least_s, unlooked = math.inf, 0.0, 0
        program, kin = None, None
        if not left:
            return None
        for count in _fewer(pipeline, counts):
            if not left or program is not None and (count, GPIPE) == (pipeline.microbatches, pipeline.schedule):
                break
            like = recipe.but(schedule=GPIPE, microbatches=count)
            if self.ended and like not in self.kin:
                break
            kin = self._kin(like)
            if kin is None:
                return None
            program = kin.task.program
            beat_s, slower = beat(program), kin.stretch(pipeline)
            kin.look(left, beat_s, weights, lambda kin=kin: self.ended or kin.spent >= KIN_PAIRS, self.crew)
            bounds = {mesh: slower * kin.bounds.get(mesh, 0.0) for mesh in left}
            others_s = min((others_s, *(bound for bound in bounds.values() if bound >= beat_s)))
            left = tuple(mesh for mesh, bound in bounds.items() if bound < beat_s)
            least_s = min((others_s, *bounds.values()))
            if unpriced := [mesh for mesh in left if weights is not None and mesh not in kin.bounds]:
                left, unlooked = tuple(mesh for mesh in left if mesh in kin.bounds), unlooked + len(unpriced)
            few = _first(sorted(left, key=bounds.__getitem__), kin)
            left, unlooked = few, unlooked + len(left) - len(few)
            if sum(kin.pairs.get(mesh, 0) for mesh in left) <= AT_ONCE and weights is not None:
                break  # to plan them takes no longer than to know more
        if self.ended:
            left, unlooked = (), unlooked + len(left)
        if kin is not None:
            self.planned += sum(kin.pairs.get(mesh, 0) for mesh in left)
        return StagedMeshes(left, least_s, program, unlooked)

    def _kin(self, recipe: Recipe) -> Kin | None:
        if recipe not in self.kin:
            pipeline = pipeline_of(recipe)
            assert pipeline is not None
            try:
                program = self.make(**recipe.arguments)
            except UserError:
                self.kin[recipe] = None
            else:
                task = self.task(program, pipeline.stages)
                fixed = task.reading.graph.regions or task.reading.graph.constraints  # not every mesh serves them
                self.kin[recipe] = None if fixed else Kin(task, pipeline, {})
        return self.kin[recipe]


def _first(meshes: Sequence[Mesh], kin: Kin) -> tuple[Mesh, ...]:
    """As many of the meshes as are planned at once, at least one."""
    found: list[Mesh] = []
    pairs = 0
    for mesh in meshes:
        pairs += kin.pairs.get(mesh, 0)
        if found and pairs > AT_ONCE:
            break
        found.append(mesh)
    return tuple(found)


def _fewer(pipeline: Pipeline, counts: Sequence[int]) -> list[int]:
    """Microbatches that may be chosen and are fewer than those of a pipeline, by a whole number of times; its own last.

    They are as many as there are stages, or a multiple, where there is a choice.
    """
    fewer = {n for n in counts if pipeline.microbatches % n == 0 and n % pipeline.stages == 0}
    return sorted({*fewer, pipeline.microbatches})
