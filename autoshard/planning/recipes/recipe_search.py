"""What a person decides beside mesh and sharding, decided with them: a program in several recipes, the best taken."""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoshard.cost import Topology, candidate_meshes
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.mesh.mesh_attempt import Rival, unusable
from autoshard.planning.mesh.mesh_search import Beaten
from autoshard.planning.plan_builder import Before, PlanResult, given_mesh, make_plan, priced_with
from autoshard.planning.price.analysed_program import Task, least_seconds, read_program
from autoshard.planning.price.remat_forecast import Foreseen
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.recipes import pipeline_recipes
from autoshard.planning.recipes.pipeline_meshes import PipelineMeshes, StagedMeshes
from autoshard.planning.recipes.pipeline_recipes import Arithmetic, on_some
from autoshard.planning.recipes.recipe import (
    Recipe,
    RecipeOutcome,
    RecipeTried,
    beaten,
    difference,
    eased,
    elements_of,
    figures_of,
    line_of,
    needs_no_less,
    verdict_of,
)
from autoshard.planning.recipes.recipe_follow_ups import Roomy, by_value, mix, offload_inputs, sum_late
from autoshard.planning.recipes.recipe_order import LEAST_GAIN, in_order
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.problem_builder import Floors, floors
from autoshard.planning.space.attention_exchange import splits_sequence
from autoshard.planning.space.derived_axes import find_axis_parts
from autoshard.planning.space.plan_options import AUTO, FULL, REMATS, Options
from autoshard.planning.space.spec_constraints import program_mesh
from autoshard.program import Choices, Program


TABLES = 400_000_000
"""Bytes of tables of paths that are kept from one recipe to the next."""

Make = Callable[..., Program]
"""From the choices of a recipe, by name, to its program."""


def plan_remat(make: Callable[[str], Program], options: Options, **running: Any) -> PlanResult:
    """The plan of the program that computes as much again as is fastest within memory.

    `make` gives the program for a remat policy, or a mixture of two (`full:12+dots`: the first 12 layers, and the
    rest). `running` is what `make_plan` takes beside the options. Raises `InfeasibleError` if none fits.
    """
    return plan_recipes(lambda remat: make(remat), {"remat": REMATS}, options, of_source=True, **running)[1]


def plan_recipes(
    make: Make, choices: Choices, options: Options, *, of_source: bool = False, **running: Any
) -> tuple[Recipe, PlanResult]:
    """The recipe with the least expected time for each element of the batch that fits, and its plan.

    `make` gives the program of a recipe; `choices` has the values of each choice, of which those that compute less
    should come first: of equal times the earlier is taken. `running` is what `make_plan` takes beside the options.
    Every recipe is planned with its own mesh and sharding, but for one whose arithmetic alone, or whose ops with
    nothing moved between them, take longer on every mesh than the best one yet, and one whose values fit on no mesh,
    however they are split. Where meshes are looked for, those that cannot beat the best recipe are not solved, nor is
    an axis cut in two on them.
    With `of_source` choices are those of `source_choices`, of which more is known: what needs more memory than a recipe
    that does not fit is not tried; neither are more microbatches, or state on the hosts, where memory does not bind,
    larger batches when twice as much gains less than `LEAST_GAIN`, nor a ring where the plan without splits no
    sequence. What layers keep or send to their hosts is chosen value by value, foreseen from the plan of `full` and
    then planned. Where that is not faster, a remat policy is mixed with each that computes less and does not fit, in as
    few layers as are still faster for it. The plan says in its words what others came to, and in its provenance
    (`recipe`) all of them; wall times are those of all.

    Raises the `InfeasibleError` of the last recipe if none fits, not even with the inputs of layers on their hosts.
    """
    tried = RecipeSearch(make, options, running, of_source)
    tried.counts = tuple(choices.get("microbatches", ()))
    for recipe in in_order(choices, tried):
        tried.consider(recipe)
    if tried.best is None:
        if tried.refused is None:  # nothing was planned: the last one says what would help
            tried.plan(tried.tried[-1].recipe, whatever=True)
        assert tried.refused is not None
        if not of_source or not offload_inputs(tried, choices.get("remat", ())):
            raise tried.refused
    if of_source:
        if not by_value(tried, choices.get("remat", ())):
            mix(tried, choices.get("remat", ()))
        if None in choices.get("gradient_groups", ()):
            sum_late(tried)
    return tried.told()


class RecipeSearch:
    """The recipes considered so far."""

    def __init__(self, make: Make, options: Options, running: Mapping[str, Any], of_source: bool) -> None:
        self.make, self.options, self.running, self.of_source = make, options, dict(running), of_source
        self.topology = Topology.parse(options.topology)
        self.slices = self.topology.slices
        self.best: tuple[RecipeTried, PlanResult] | None = None
        self.layers: int | None = None
        self.savable: tuple[str, ...] = ()
        self.stacks: tuple[int, ...] | None = None
        self.arithmetic: dict[Recipe, Arithmetic] = {}
        self.tried: list[RecipeTried] = []
        self.wall: dict[str, float] = {}
        self.splits: dict[Recipe, bool] = {}
        """Of recipes that were planned, whether an attention's sequence is split."""
        self.full: dict[Recipe, tuple[Program, Plan]] = {}
        """Programs whose layers compute everything again, and their plans."""
        self.refused: InfeasibleError | None = None
        problem = self.running.pop("save_problem", None)
        self.problem = None if problem is None else Path(problem)
        self.tables = PathTables(TABLES)
        if running.get("crew") is not None:
            running["crew"].share("tables", self.tables)
        self.counts: tuple[int, ...] = ()
        """Microbatches that may be chosen."""
        self.pipelines = PipelineMeshes(self.topology, make, self._task, running.get("crew"))
        self.roomy = Roomy(self.topology)

    def least(self, **some: Any) -> float:
        """Seconds of an element in the best recipe with these choices."""
        return min(
            (each.per_element_s for each in self.tried if some.items() <= each.recipe.arguments.items()),
            default=math.inf,
        )

    def consider(self, recipe: Recipe) -> None:
        """Plan it, unless it is known already that it is not the best."""
        known = self._known(recipe) if self.of_source else None
        if known is not None:
            self.tried.append(known)
        else:
            self.plan(recipe)

    def _known(self, recipe: Recipe) -> RecipeTried | None:
        """Return the row of a recipe that need not be planned; None if it must."""
        for other in self.tried:
            if other.outcome is RecipeOutcome.UNFIT and needs_no_less(recipe, other.recipe):
                reason = f"does not fit: {difference(other.recipe, recipe)} does not"
                return RecipeTried(recipe, RecipeOutcome.UNFIT, reason)
        if recipe.arguments.get("exchange") == "ring" and self.splits.get(recipe.but(exchange=AUTO)) is False:
            return RecipeTried(recipe, RecipeOutcome.UNSPLIT)
        if pipeline_recipes.pipeline_of(recipe) is not None:
            if self._in_stages(recipe) >= self._beaten_by_s(recipe):
                return RecipeTried(recipe, RecipeOutcome.BUBBLE)
            return self.roomy.slower(recipe, self.tried)
        return eased(recipe, self.tried, self.limit)

    @property
    def cut(self) -> int:
        """Layers of the stack that stages are cut from; 0 if none is known."""
        return max(self.stacks or (), default=0)

    @property
    def limit(self) -> int:
        """Bytes of a device."""
        return self.topology.usable_bytes if self.options.memory_limit is None else self.options.memory_limit

    def plan(self, recipe: Recipe, foreseen: Foreseen | None = None, *, whatever: bool = False, **instead: Any) -> bool:
        """Whether it is the best so far; `whatever` is known of it, it is planned."""
        staged = self._staged(recipe, instead)
        if staged is not None and not staged.meshes and not whatever:
            self.tried.append(staged.row(recipe, self._in_stages(recipe), self.best and self.best[0].elements))
            return False
        try:
            program = self.make(**recipe.arguments)
        except InfeasibleError:
            raise
        except UserError as error:
            if not self.of_source or not self.tried:
                raise
            self.tried.append(RecipeTried(recipe, RecipeOutcome.REFUSED, f"cannot be: {error}"))
            return False
        self.layers, self.savable, self.stacks = program.layers, program.savable, program.stacks
        elements = elements_of(program)
        options = dataclasses.replace(self.options, **instead)
        beat_s = self._beaten_by_s(recipe) * elements
        bound, least, outcome = self._bound(recipe, program, options, beat_s, staged)
        stages = recipe.arguments["stages"] if staged is not None and staged.meshes else 0
        row = None if outcome is None else RecipeTried(recipe, outcome)
        if self.of_source and row is None and not whatever:
            row = self.roomy.why_not(recipe, self._task(program, stages))
        if row is not None and not whatever:
            self.tried.append(dataclasses.replace(row, elements=elements, bound_s=bound, held_bytes=least))
            return False
        problem = None if self.problem is None else self.problem.with_name(f".{self.problem.name}")
        before = Before(None if whatever else self._rival(recipe, elements), self.tables)
        if staged is not None and staged.meshes:
            before = dataclasses.replace(before, stages=stages, meshes=staged.meshes)
        floor = self._in_stages(recipe) * elements
        unlooked = (0, 0.0) if staged is None else (staged.unlooked, max(floor, staged.bound_s))
        try:
            made = make_plan(program, options, save_problem=problem, before=before, **self.running)
        except Beaten as error:
            self.pipelines.slower(recipe, self.cut)
            self.tried.append(on_some(beaten(recipe, error.bound_s, elements, least), *unlooked))
            return False
        except InfeasibleError as error:
            self.refused = error
            row = RecipeTried(recipe, RecipeOutcome.UNFIT, elements=elements, bound_s=bound, foreseen=foreseen)
            self.tried.append(on_some(row, *unlooked))
            return False
        except UserError as error:
            if not self.of_source or not self.tried:
                raise
            self.tried.append(
                RecipeTried(recipe, RecipeOutcome.REFUSED, f"cannot be: {error}", elements=elements, bound_s=bound)
            )
            return False
        self.wall = {k: self.wall.get(k, 0.0) + made.wall_s.get(k, 0.0) for k in {**self.wall, **made.wall_s}}
        self.splits[recipe] = splits_sequence(made.plan.axis_roles)
        found = made.plan.prediction
        times = found.step_time_s, elements, found.peak_bytes, bound, found.expected_s
        row = on_some(RecipeTried(recipe, RecipeOutcome.PLANNED, "", *times, None, foreseen), *unlooked)
        self.tried.append(row)
        if self.of_source:
            self.roomy.add(recipe, self._task(program, stages), made.plan.mesh, found.expected_s - made.free_s)
            if recipe.arguments.get("remat") == FULL:
                self.full[recipe] = program, made.plan
        if better := row.per_element_s < self._beaten_by_s(recipe):
            self.best = row, made
        else:
            self.pipelines.slower(recipe, self.cut)
        if problem is not None and self.problem is not None:
            if better:
                os.replace(problem, self.problem)
            else:
                problem.unlink(missing_ok=True)
        return better

    def _rival(self, recipe: Recipe, elements: int) -> Rival | None:
        """What a step of so many elements must beat, with whatever number of axes."""
        if self.best is None:
            return None
        return Rival(self._beaten_by_s(recipe) * elements, sys.maxsize, self.best[1].weights)

    def _beaten_by_s(self, recipe: Recipe) -> float:
        """Seconds of an element that a recipe must stay below to be the best; a larger batch must gain something."""
        if self.best is None:
            return math.inf
        row = self.best[0]
        batch, other = (each.arguments.get("batch", 0) for each in (recipe, row.recipe))
        return row.per_element_s * (1 - LEAST_GAIN if self.of_source and batch > other else 1)

    def _task(self, program: Program, stages: int) -> Task:
        reading = read_program(program, self.topology.backend, bool(self.running.get("kept")))
        figures = priced_with(self.options, self.topology).calibration
        return Task(program, reading, self.options.asked, self.limit, self.options.seed, figures, self.tables, stages)

    def _staged(self, recipe: Recipe, instead: Mapping[str, Any]) -> StagedMeshes | None:
        """Meshes for a pipeline, if they are to be looked for."""
        mesh = instead.get("mesh", self.options.mesh)
        if (
            not self.of_source
            or pipeline_recipes.pipeline_of(recipe) is None
            or given_mesh(self.topology, mesh) is not None
        ):
            return None
        if self.pipelines.outdone(recipe, self.cut):
            return StagedMeshes((), 0.0, None, outdone=True)
        best = None if self.best is None else self.best[1].weights
        counts = self.counts or (recipe.arguments["microbatches"],)
        return self.pipelines.of(recipe, counts, lambda p: self._beaten_by_s(recipe) * elements_of(p), best)

    def _in_stages(self, recipe: Recipe) -> float:
        """Seconds of an element below which no plan of a pipeline is, by arithmetic and bubble; 0 if not known."""
        pipeline, alone = (
            pipeline_recipes.pipeline_of(recipe),
            self.arithmetic.get(pipeline_recipes.without_pipeline(recipe)),
        )
        if pipeline is None or alone is None:
            return 0.0
        return alone.in_stages(pipeline, self.cut)

    def _bound(
        self, recipe: Recipe, program: Program, options: Options, beat_s: float, staged: StagedMeshes | None
    ) -> tuple[float, int, RecipeOutcome | None]:
        """Return seconds and bytes that no plan goes below, and the outcome if these rule the recipe out."""
        reading = read_program(program, self.topology.backend, bool(self.running.get("kept")))
        figures = priced_with(options, self.topology).calibration
        bound = least_seconds(reading.graph, self.topology, figures)
        if program.stacks and recipe.arguments.get("stages") == 1:
            alone = pipeline_recipes.arithmetic_of(reading.graph, bound, elements_of(program), max(program.stacks))
            self.arithmetic.setdefault(pipeline_recipes.without_pipeline(recipe), alone)
        if bound >= beat_s:
            return bound, 0, RecipeOutcome.ARITHMETIC
        if staged is not None:
            return max(bound, staged.bound_s), 0, None
        if reading.graph.regions or reading.graph.constraints:  # not every mesh serves them
            return bound, 0, None
        given = given_mesh(self.topology, options.mesh, program_mesh(reading.graph, self.topology.num_devices))
        found: list[Floors] = []
        for mesh in reversed(candidate_meshes(self.topology)) if given is None else (given,):
            if given is None and unusable(reading, mesh):
                continue
            found.append(floors(program, reading, mesh, self.limit, figures))
            if found[-1].bytes <= self.limit and found[-1].seconds < beat_s:
                return bound, found[-1].bytes, None  # it may fit and be faster: others say no more
            parts = find_axis_parts(reading.graph, reading.structure, reading.groups, mesh)
            if parts is not None and options.refine_axes:
                found.append(floors(program, reading, parts.mesh, self.limit, figures))
        if not found:
            return bound, 0, None
        bound = max(bound, min(each.seconds for each in found))
        least = min(each.bytes for each in found)
        if least > self.limit:
            return bound, least, RecipeOutcome.UNFIT
        return bound, least, RecipeOutcome.UNMOVED if bound >= beat_s else None

    def told(self) -> tuple[Recipe, PlanResult]:
        """The best one, which says what the others came to."""
        assert self.best is not None
        row, made = self.best
        rows = sorted(self.tried, key=lambda each: (each is not row, each.per_element_s, each.bound_s or math.inf))
        rows = [dataclasses.replace(each, reason=verdict_of(each, row)) for each in rows]
        varied = len({each.elements for each in rows if each.step_time_s is not None}) > 1
        lines = tuple(
            filter(None, (line_of(row.recipe, rows), pipeline_recipes.pipeline_words(row, rows, self.stacks or ())))
        )
        figures = [figures_of(each, rows, varied) for each in rows]

        def told(plan: Plan) -> Plan:
            said = {"recipe": {"chosen": row.recipe.arguments, "tried": figures}}
            return dataclasses.replace(plan, words=(*plan.words, *lines), provenance=plan.provenance | said)

        offered = tuple(dataclasses.replace(each, plan=told(each.plan)) for each in made.candidates)
        return row.recipe, dataclasses.replace(made, plan=told(made.plan), candidates=offered, wall_s=self.wall)
