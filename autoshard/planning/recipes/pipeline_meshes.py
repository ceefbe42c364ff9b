"""Meshes worth planning a pipeline on, bounded by similar pipelines that compute in larger microbatches.

Smaller microbatches and more rounds make no tick faster per example:

- an op on half of a batch takes at least half as long;
- a parameter gathered once more is sent once more;
- a mesh that splits a small batch evenly splits one twice as large evenly too.

So a pipeline is bounded by one with as many stages, fewer microbatches and one round. The bound is that pipeline's time
without its bubble, stretched by the bubble of the first one. The bounding program is priced on every mesh with an axis
of stages (`planning/space/derived_axes.py`). Message passing between decisions bounds it, regardless of memory. On the
remaining meshes the pipeline with twice as many microbatches is bounded next. The meshes with the lowest bounds are
planned; a good plan on one of them prunes most others.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

from autoshard.base.workers import WorkerCrew
from autoshard.cost import Mesh, Topology, candidate_meshes
from autoshard.errors import UserError
from autoshard.planning.mesh.mesh_attempt import Incumbent, MeshAttempts, unusable
from autoshard.planning.price.analysed_program import Task, share
from autoshard.planning.recipes.pipeline_recipes import pipeline_of, promise
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried, elements_of
from autoshard.planning.solve.problem_builder import Weights, least_compute
from autoshard.planning.space.derived_axes import with_stages
from autoshard.program import Pipeline, Program


GPIPE = "gpipe"
"""Schedule of all bounding pipelines: one round."""
MOST_PAIRS = 120_000_000
"""Most pairs of pipeline alternatives that one search prices. The limit counts work, not time, so that the same input
gives the same plan. Pipelines whose stages are slices are priced first, then those of few stages, and among them those
with a small bubble.
"""
BOUNDING_PAIRS = 30_000_000
"""Most pairs among `MOST_PAIRS` that the bounds from one pipeline may use."""
AT_ONCE = 12_000_000
"""Most pairs of the meshes on which one pipeline is planned. At least one mesh is planned."""
EVERY = 8_000_000
"""Pairs up to which every pipeline is considered. After them, for each number of stages, only pipelines more promising
than a slower planned one are considered.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class StagedMeshes:
    """Meshes with an axis of stages on which a pipeline may beat the best plan."""

    meshes: tuple[Mesh, ...]
    """Meshes to plan on, in order of their bounds; empty if no plan of the pipeline can win."""
    bound_s: float
    """Lower bound in seconds of a step on every mesh with such an axis."""
    program: Program | None
    """A program of as many stages; None if none was made."""
    skipped_meshes: int = 0
    """Number of further meshes that the search skipped, since it had priced enough others."""
    dominated: bool = False
    """True if no mesh is searched since a more promising pipeline of as many stages is slower than the best plan."""

    def row(self, recipe: Recipe, least_s: float, elements: int | None) -> RecipeTried:
        """Return the row of a pipeline that is not planned: dominated, skipped, or slower on every staged mesh.

        - `recipe`: recipe of the pipeline.
        - `least_s`: lower bound in seconds per element of the batch.
        - `elements`: elements of the batch, used only if no program was made; None if unknown.
        """
        elements = elements if self.program is None else elements_of(self.program)
        bound_s = max(self.bound_s, least_s * (elements or 0))
        outcome = (
            RecipeOutcome.DOMINATED
            if self.dominated
            else RecipeOutcome.SKIPPED
            if self.skipped_meshes
            else RecipeOutcome.UNSTAGED
        )
        return RecipeTried(recipe, outcome, elements=elements, bound_s=bound_s)


@dataclasses.dataclass(frozen=True, slots=True)
class BoundingPipeline:
    """A pipeline of one round, with the lower bounds that it gives for others."""

    task: Task
    """Planning task of its program."""
    pipeline: Pipeline
    bounds: dict[Mesh, float]
    """Lower bound in seconds of a step without its bubble, for each mesh bounded so far. A bound is only as tight as
    was needed.
    """
    pairs: dict[Mesh, int] = dataclasses.field(default_factory=dict)
    """Pairs of alternatives on each mesh that was priced."""

    @property
    def spent(self) -> int:
        """The pairs of alternatives on all priced meshes together."""
        return sum(self.pairs.values())

    @property
    def layers(self) -> int:
        """The number of layers of the largest stack, which is cut."""
        return max(self.task.program.stacks)

    def stretch(self, other: Pipeline) -> float:
        """Return the least ratio of another pipeline's step to this one's step without its bubble.

        The bounds shrink the time outside of the stages by this pipeline's bubble. The ratio stretches it by the
        other's, which is no larger, so that time is not overestimated. More layers may run outside of the other's
        stages; the ratio ignores their time.
        """
        layers = self.layers
        staged = (layers - other.outside(layers)) / (layers - self.pipeline.outside(layers))
        return staged / (1 - other.bubble(layers))

    def bound_meshes(
        self,
        meshes: Sequence[Mesh],
        beat_s: float,
        weights: Weights | None,
        ended: Callable[[], bool],
        crew: WorkerCrew,
    ) -> None:
        """Bound the meshes that have no bound yet (in place), until `ended` returns True.

        - `beat_s`: seconds of the best step; a bound is refined only until it reaches this time.
        - `weights`: time weights of the best plan; with None no mesh is priced, and its floor is its bound.
        - `ended`: True once the search may price no more; meshes after that stay without a bound.
        - `crew`: workers that price all remaining meshes at once; the choice of meshes does not depend on them.
        """
        # Floors and bounds include the bubble; `bounds` stores them without it.
        useful = 1 - self.pipeline.bubble(self.layers)
        floors: dict[Mesh, float] = {}
        for mesh in meshes:
            if mesh in self.bounds or ended():
                continue
            floor = self._floor(mesh, beat_s / useful)
            if floor < beat_s / useful and weights is not None:
                floors[mesh] = floor
                self.pairs[mesh] = MeshAttempts(self.task, math.inf).pairs(mesh)
            else:
                self.bounds[mesh] = useful * floor
        if not floors or weights is None:
            return
        share(crew, self.task.program, self.task.reading)
        rival = Incumbent(beat_s / useful, sys.maxsize, weights)
        priced_bounds = crew.map(_priced_bound, list(floors), lambda mesh: (self.task, mesh, rival))
        for (mesh, floor), bound in zip(floors.items(), priced_bounds, strict=True):
            self.bounds[mesh] = useful * max(floor, bound)

    def _floor(self, mesh: Mesh, enough_s: float) -> float:
        """Return a lower bound in seconds of all plans on a mesh, without pricing the mesh; infinite for an unusable
        mesh.

        The bound need not be tightened beyond `enough_s` seconds.
        """
        task = self.task
        if unusable(task.reading, mesh):
            return math.inf
        return least_compute(task.program, task.reading, mesh, task.calibration, enough_s)


def _priced_bound(task: Task, mesh: Mesh, rival: Incumbent) -> float:
    """Return a lower bound in seconds of all plans on a mesh, from the prices of its ops and reshards; 0 if there is
    none.
    """
    trials = MeshAttempts(task, math.inf, True)
    trial = trials.bound(mesh, rival)
    return trials.bounded(mesh) if trial is None else trial.bound_s or 0.0


class PipelineMeshes:
    """Search for the meshes of the pipelines of one program."""

    def __init__(
        self,
        topology: Topology,
        make: Callable[..., Program],
        task: Callable[[Program, int], Task],
        crew: WorkerCrew | None = None,
    ) -> None:
        """Create a search.

        - `topology`: devices on which the meshes are laid out.
        - `make`: gives the program of a recipe.
        - `task`: gives the planning task of a program with this number of stages.
        - `crew`: workers that price meshes at once.
        """
        self.topology, self.make, self.task, self.crew = topology, make, task, crew or WorkerCrew()
        self.bounding: dict[Recipe, BoundingPipeline | None] = {}
        self.planned = 0
        """Pairs of alternatives of the pipelines that were worth planning."""
        self.in_vain: dict[int, float] = {}
        """For each number of stages, the least `promise` of a planned pipeline that is slower than the best plan."""

    @property
    def spent(self) -> int:
        """The pairs of alternatives priced or planned so far."""
        return self.planned + sum(bounding.spent for bounding in self.bounding.values() if bounding is not None)

    @property
    def ended(self) -> bool:
        """True once the search may price no more: `MOST_PAIRS` pairs are spent."""
        return self.spent >= MOST_PAIRS

    def record_slower(self, recipe: Recipe, layers: int) -> None:
        """Record that the pipeline of a recipe was planned and is slower than the best plan. A recipe without one, or 0
        layers, does nothing.
        """
        pipeline = pipeline_of(recipe)
        if pipeline is not None and layers:
            least_promise = self.in_vain.get(pipeline.stages, math.inf)
            self.in_vain[pipeline.stages] = min(least_promise, promise(pipeline, layers))

    def dominated(self, recipe: Recipe, layers: int) -> bool:
        """Return True if a recipe's pipeline may be skipped since a more promising one was slower than the best plan.

        Only pipelines with as many stages are compared, and none before `EVERY` pairs are spent.
        """
        pipeline = pipeline_of(recipe)
        least_promise = None if pipeline is None else self.in_vain.get(pipeline.stages)
        if pipeline is None or least_promise is None or self.spent < EVERY:
            return False
        return promise(pipeline, layers) >= least_promise

    def of(
        self, recipe: Recipe, counts: Sequence[int], beat: Callable[[Program], float], weights: Weights | None
    ) -> StagedMeshes | None:
        """Return the meshes worth planning for the pipeline of a recipe, which must have one.

        Return None if no mesh has an axis of stages, if a bounding program cannot be made, or if the program names mesh
        axes itself.

        - `counts`: all numbers of microbatches that may be chosen.
        - `beat`: gives the seconds that a step of a program must beat.
        - `weights`: time weights of the best plan so far; None if there is none.

        Bounds come from pipelines of ever more microbatches, until the remaining meshes have at most `AT_ONCE` pairs.
        After `MOST_PAIRS` pairs no further mesh is priced or planned; such meshes count as skipped.
        """
        pipeline = pipeline_of(recipe)
        assert pipeline is not None
        meshes = with_stages(candidate_meshes(self.topology), pipeline.stages)
        pruned_s, least_s, skipped_meshes = math.inf, 0.0, 0
        program, bounding = None, None
        if not meshes:
            return None
        for count in _fewer(pipeline, counts):
            if not meshes or program is not None and (count, GPIPE) == (pipeline.microbatches, pipeline.schedule):
                break
            like = recipe.but(schedule=GPIPE, microbatches=count)
            if self.ended and like not in self.bounding:
                break
            bounding = self._bounding_pipeline(like)
            if bounding is None:
                return None
            program = bounding.task.program
            beat_s, stretch = beat(program), bounding.stretch(pipeline)
            bounding.bound_meshes(
                meshes,
                beat_s,
                weights,
                lambda bounding=bounding: self.ended or bounding.spent >= BOUNDING_PAIRS,
                self.crew,
            )
            bounds = {mesh: stretch * bounding.bounds.get(mesh, 0.0) for mesh in meshes}
            pruned_s = min((pruned_s, *(bound for bound in bounds.values() if bound >= beat_s)))
            meshes = tuple(mesh for mesh, bound in bounds.items() if bound < beat_s)
            least_s = min((pruned_s, *bounds.values()))
            if unpriced := [mesh for mesh in meshes if weights is not None and mesh not in bounding.bounds]:
                meshes, skipped_meshes = (
                    tuple(mesh for mesh in meshes if mesh in bounding.bounds),
                    skipped_meshes + len(unpriced),
                )
            first_meshes = _first(sorted(meshes, key=bounds.__getitem__), bounding)
            meshes, skipped_meshes = first_meshes, skipped_meshes + len(meshes) - len(first_meshes)
            if sum(bounding.pairs.get(mesh, 0) for mesh in meshes) <= AT_ONCE and weights is not None:
                break  # planning these meshes is as cheap as further bounds
        if self.ended:
            meshes, skipped_meshes = (), skipped_meshes + len(meshes)
        if bounding is not None:
            self.planned += sum(bounding.pairs.get(mesh, 0) for mesh in meshes)
        return StagedMeshes(meshes, least_s, program, skipped_meshes)

    def _bounding_pipeline(self, recipe: Recipe) -> BoundingPipeline | None:
        """Return the bounding pipeline of a recipe, which must have a pipeline; each is made once.

        None if its program cannot be made (`UserError`), or states constraints or manual regions, which not every mesh
        satisfies.
        """
        if recipe not in self.bounding:
            pipeline = pipeline_of(recipe)
            assert pipeline is not None
            try:
                program = self.make(**recipe.arguments)
            except UserError:
                self.bounding[recipe] = None
            else:
                task = self.task(program, pipeline.stages)
                fixed = task.reading.graph.regions or task.reading.graph.constraints  # not every mesh satisfies these
                self.bounding[recipe] = None if fixed else BoundingPipeline(task, pipeline, {})
        return self.bounding[recipe]


def _first(meshes: Sequence[Mesh], bounding: BoundingPipeline) -> tuple[Mesh, ...]:
    """Return the first meshes with at most `AT_ONCE` pairs together, at least one unless there is none."""
    first_meshes: list[Mesh] = []
    pairs = 0
    for mesh in meshes:
        pairs += bounding.pairs.get(mesh, 0)
        if first_meshes and pairs > AT_ONCE:
            break
        first_meshes.append(mesh)
    return tuple(first_meshes)


def _fewer(pipeline: Pipeline, counts: Sequence[int]) -> list[int]:
    """Return the numbers of microbatches to bound a pipeline with, in rising order, its own number last.

    The others are those of `counts` that divide it and are multiples of the number of stages.
    """
    fewer = {n for n in counts if pipeline.microbatches % n == 0 and n % pipeline.stages == 0}
    return sorted({*fewer, pipeline.microbatches})
