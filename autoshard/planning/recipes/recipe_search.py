"""Search over recipes: plans the program under each recipe that may win, and returns the best one with its plan."""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoshard.base.shared_results import sharing_results
from autoshard.cost import Topology, candidate_meshes
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.forms.eager_memory import needed_by_eager_torch, refused_by_eager_torch
from autoshard.planning.forms.export_forms import form_named
from autoshard.planning.forms.held_recipes import holds_remat
from autoshard.planning.mesh.mesh_attempt import Incumbent, unusable
from autoshard.planning.mesh.mesh_search import PrunedByBound
from autoshard.planning.mesh_choice import EarlierRecipes
from autoshard.planning.plan_builder import PlanResult, Running, given_mesh, make_plan, priced_with
from autoshard.planning.price.analysed_program import Task, analyse_program, least_seconds
from autoshard.planning.price.on_chip_memory import on_chip_room
from autoshard.planning.price.remat_forecast import RematForecast
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.recipes import pipeline_recipes
from autoshard.planning.recipes.pipeline_meshes import PipelineMeshes, StagedMeshes
from autoshard.planning.recipes.pipeline_recipes import Arithmetic, with_skipped_meshes
from autoshard.planning.recipes.recipe import (
    Recipe,
    RecipeOutcome,
    RecipeTried,
    beaten_row,
    elements_of,
    slack_row,
    unfit_row,
)
from autoshard.planning.recipes.recipe_follow_ups import (
    MemoryPruning,
    add_gradient_groups,
    compose_remat,
    is_composed,
    why_more,
)
from autoshard.planning.recipes.recipe_order import LEAST_GAIN, in_order
from autoshard.planning.recipes.recipe_report import SearchedMeshes, report_recipes
from autoshard.planning.recipes.remat_mixtures import mix_remats
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.infeasible import state_bytes
from autoshard.planning.solve.problem_builder import Floors, floors
from autoshard.planning.space.attention_exchange import splits_sequence
from autoshard.planning.space.derived_axes import find_axis_parts
from autoshard.planning.space.plan_options import AUTO, FULL, OFFLOADED, Options
from autoshard.planning.space.spec_constraints import program_mesh
from autoshard.program import INPUT, Choices, Program


TABLES = 400_000_000
"""Most bytes of reshard path tables that one recipe passes on to the next."""

PROGRAMS = 4
"""Most programs of recipes that a search stores, since it may come back to a recipe."""

UNLIMITED = 1024
"""Memory of a sketch, in memories of a device: more than any step that is offloaded to fit needs."""

Make = Callable[..., Program]
"""Function from the choices of a recipe, by name, to its program."""


@sharing_results()
def plan_recipes(
    make: Make,
    choices: Choices,
    options: Options,
    running: Running | None = None,
    *,
    of_source: bool = False,
    first_if_fits: bool = False,
) -> tuple[Recipe, PlanResult]:
    """Return the recipe that fits and has the least expected time per element of the batch, with its plan.

    - `make`: gives the program of a recipe.
    - `choices`: values of each choice. Values that compute less should come first, since the earlier recipe wins a
      tie.
    - `options`, `running`: options of each plan, and circumstances that change none.
    - `of_source`: True if the choices are those of `source_choices`, which allow more pruning (below).
    - `first_if_fits`: True if the plan of the first recipe is the answer, without words on recipes, wherever it fits.
      It is not if nearly full memory adds a fiftieth to the step, or recomputation spares one, by forecast.

    Every recipe is planned with its own mesh and sharding. A recipe is skipped if a lower bound on every mesh
    exceeds the best time so far, or if its values fit on no mesh. The bound is the time of its arithmetic, or of its
    ops without any communication. A search over meshes solves no mesh that cannot beat the best recipe, and cuts no
    axis in two on it.

    With `of_source` these recipes are skipped too:

    - recipes that need at least the memory of one that does not fit;
    - more microbatches, or state on the hosts, if memory does not bind;
    - larger batches, once doubling the batch gains less than `LEAST_GAIN`;
    - a ring exchange, if the plan without it splits no sequence;
    - more recomputation, if it costs more than the memory that it frees can save (`MemoryPruning`);
    - pipelines, and their meshes, that bounds or the limits of `PipelineMeshes` exclude.

    With `of_source` the search then composes a remat policy value by value, before it considers more microbatches. It
    forecasts the policy from the plan of `full` and plans it. If that policy is not faster, the search mixes the
    best policy with each one that computes less and does not fit. A mixture uses the slower policy in as few layers as
    still pay. At last, gradient groups are tried if they are open.

    The plan's words report the other recipes, and its provenance (`recipe`) lists all of them. Wall times cover all
    recipes.

    Raises the last planned recipe's `InfeasibleError` if no recipe fits, and `UserError` as `RecipeSearch.plan` does.
    """
    form = None if options.form is None else form_named(options.form)
    if of_source and "remat" in choices:
        choices = {**choices, "remat": tuple(each for each in choices["remat"] if holds_remat(form, each))}
    search = RecipeSearch(make, options, running or Running(), of_source)
    search.counts = tuple(choices.get("microbatches", ()))
    by_value = of_source and holds_remat(form, OFFLOADED)
    composes = by_value and "batch" not in choices and "stages" not in choices
    parts: int | None = None
    for recipe in in_order(choices, search):
        if composes and search.best is not None and recipe.arguments.get("microbatches") != parts:
            composes = False
            compose_remat(search, choices.get("remat", ()))
        parts = recipe.arguments.get("microbatches")
        if of_source and not holds_remat(form, recipe.arguments.get("remat")):
            continue
        search.consider(recipe)
        if first_if_fits and len(search.tried) == 1:
            if search.best is not None:
                if not (why := why_more(search.best[1], choices)):
                    return recipe, search.best[1]
                search.say(f"{why}; trying {', '.join(choices)}")
                continue
            state, room = state_bytes(search.make(**recipe.arguments)), search.limit * search.topology.num_devices
            if state > room and len(choices.get("host", ())) < 2:
                # No recipe holds less state, so the one of least activations says what would help.
                search.plan(Recipe(tuple((name, values[-1]) for name, values in choices.items())), force=True)
                break
            search.say(f"The plain step does not fit; trying {', '.join(choices)}")
    if search.best is None:
        if search.refused is None:  # nothing was planned: the last one says what would help
            search.plan(search.tried[-1].recipe, force=True)
        assert search.refused is not None
        raise search.refused
    if of_source:
        remats = choices.get("remat", ())
        composed = is_composed(search, remats) or (by_value and compose_remat(search, remats))
        if not composed and holds_remat(form, f"{FULL}:1+none"):
            mix_remats(search, remats)
        if None in choices.get("gradient_groups", ()):
            add_gradient_groups(search)
    assert search.best is not None
    return report_recipes(search.best, search.tried, search.meshes, search.stacks or (), search.wall)


class RecipeSearch:
    """State of a search: the recipes considered so far and the best one."""

    def __init__(self, make: Make, options: Options, running: Running, of_source: bool) -> None:
        """Start a search without recipes, and share its path tables with the crew."""
        self.make: Make = functools.lru_cache(PROGRAMS)(make)
        self.options, self.running, self.of_source = options, running, of_source
        self.topology = Topology.parse(options.topology)
        self.best: tuple[RecipeTried, PlanResult] | None = None
        self.layers: int | None = None
        self.savable: tuple[str, ...] = ()
        self.stacks: tuple[int, ...] | None = None
        self.arithmetic: dict[Recipe, Arithmetic] = {}
        self.tried: list[RecipeTried] = []
        self.wall: dict[str, float] = {}
        self.meshes = SearchedMeshes()
        self.mesh_of: dict[Recipe, Mapping[str, int]] = {}
        self.splits: dict[Recipe, bool] = {}
        """True for each planned recipe that splits the sequence of an attention."""
        self.full: dict[Recipe, tuple[Program, Plan]] = {}
        """Programs and plans of the recipes whose layers recompute everything."""
        self.composed: dict[Recipe, Plan] = {}
        self.computed_s: dict[Recipe, float] = {}
        self.refused: InfeasibleError | None = None
        self.problem = None if running.save_problem is None else Path(running.save_problem)
        self.tables = PathTables(TABLES)
        if running.crew is not None:
            running.crew.share("tables", self.tables)
        self.is_gathered = options.form is not None and form_named(options.form).gathers
        """True for a form whose eager steps gather parameters, and need more memory than compiled ones."""
        self.counts: tuple[int, ...] = ()
        """Numbers of microbatches that may be chosen."""
        self.pipelines = PipelineMeshes(self.topology, self.make, self._task, running.crew)
        self.memory_pruning = MemoryPruning(self.topology)

    def say(self, text: str) -> None:
        """Report progress, if anyone listens."""
        if self.running.progress is not None:
            self.running.progress(text)

    def least(self, **some: Any) -> float:
        """Return the least seconds per element among the recipes with these choices; infinite if none of them was
        planned.
        """
        return min(
            (each.per_element_s for each in self.tried if some.items() <= each.recipe.arguments.items()),
            default=math.inf,
        )

    def consider(self, recipe: Recipe) -> None:
        """Plan a recipe, or record its row without planning if a search of a source already knows that it is not the
        best.
        """
        known = self._known(recipe) if self.of_source else None
        if known is not None:
            self.tried.append(known)
        else:
            self.plan(recipe)

    def _known(self, recipe: Recipe) -> RecipeTried | None:
        """Return the row of a recipe that need not be planned, from the rows of others; None if it must be.

        The reasons, in order: another recipe's memory does not fit, or a part of it; a ring exchange splits no
        sequence. A pipeline is then excluded by its bubble or by its recomputation, any other recipe by slack memory.
        """
        unfit = unfit_row(recipe, self.tried, self.limit, on_chip_room(self.topology, self.limit))
        if unfit is not None:
            return unfit
        if recipe.arguments.get("exchange") == "ring" and self.splits.get(recipe.but(exchange=AUTO)) is False:
            return RecipeTried(recipe, RecipeOutcome.UNSPLIT)
        beat_s = self._beaten_by_s(recipe)
        slower = self.memory_pruning.slower(recipe, self.tried, beat_s)
        if pipeline_recipes.pipeline_of(recipe) is not None:
            return RecipeTried(recipe, RecipeOutcome.BUBBLE) if self._in_stages(recipe) >= beat_s else slower
        return slower or slack_row(recipe, self.tried, self.limit, beat_s)

    @property
    def offloads_inputs(self) -> bool:
        """True if the hosts may hold the layers' inputs."""
        return INPUT in self.savable and self.topology.traits.compiles_ahead

    @property
    def cut(self) -> int:
        """The number of layers of the stack that is cut into stages; 0 if no stack is known."""
        return max(self.stacks or (), default=0)

    @property
    def limit(self) -> int:
        """The memory limit of a device in bytes: the option, else the chip's usable bytes."""
        return self.topology.usable_bytes if self.options.memory_limit is None else self.options.memory_limit

    def plan(
        self, recipe: Recipe, forecast: RematForecast | None = None, *, force: bool = False, **instead: Any
    ) -> bool:
        """Plan a recipe and return True if it is the new best; add a row with its outcome to `tried`.

        - `forecast`: forecast of the recipe, recorded in its row.
        - `force`: if True, skip all pruning checks and plan the recipe in any case, without a rival.
        - `instead`: options that replace those of the search.

        A new best replaces `best`, and its problem the file of `save_problem`. Attributes `layers`, `savable` and
        `stacks` become those of the recipe's program.

        Raises `UserError` if the recipe cannot be made or planned. For a source, only the first recipe raises it.
        Raises `InfeasibleError` if `make` does; a plan that does not fit gives a row and sets `refused`.
        """
        staged = self._staged(recipe, instead)
        if staged is not None and not staged.meshes and not force:
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
        if self.of_source and row is None and not force:
            row = self.memory_pruning.why_not(recipe, self._task(program, stages))
        if row is not None and not force:
            self.tried.append(dataclasses.replace(row, elements=elements, bound_s=bound, held_bytes=least))
            return False
        problem = None if self.problem is None else self.problem.with_name(f".{self.problem.name}")
        before = EarlierRecipes(None if force else self._rival(recipe, elements), self.tables)
        if staged is not None and staged.meshes:
            before = dataclasses.replace(before, stages=stages, meshes=staged.meshes)
        floor = self._in_stages(recipe) * elements
        skipped_meshes = (0, 0.0) if staged is None else (staged.skipped_meshes, max(floor, staged.bound_s))
        try:
            running = dataclasses.replace(self.running, save_problem=problem)
            result = make_plan(program, options, running, before=before)
        except PrunedByBound as error:
            self.pipelines.record_slower(recipe, self.cut)
            row = beaten_row(recipe, error.bound_s, elements, least, error.unconstrained_bound_s)
            self.tried.append(with_skipped_meshes(row, *skipped_meshes))
            return False
        except InfeasibleError as error:
            self.refused = error
            row = RecipeTried(recipe, RecipeOutcome.UNFIT, elements=elements, bound_s=bound, forecast=forecast)
            self.tried.append(with_skipped_meshes(row, *skipped_meshes))
            return False
        except UserError as error:
            if not self.of_source or not self.tried:
                raise
            self.tried.append(
                RecipeTried(recipe, RecipeOutcome.REFUSED, f"cannot be: {error}", elements=elements, bound_s=bound)
            )
            return False
        self.wall = {k: self.wall.get(k, 0.0) + result.wall_s.get(k, 0.0) for k in {**self.wall, **result.wall_s}}
        self.splits[recipe] = splits_sequence(result.plan.axis_roles)
        self.meshes.add(recipe, result.plan)
        self.mesh_of[recipe] = result.plan.mesh
        prediction = result.plan.prediction
        eager = (prediction.eager_step_time_s, prediction.eager_peak_bytes) if self.of_source else (None, None)
        needed = needed_by_eager_torch(result.plan, self.limit) if self.is_gathered and self.of_source else ""
        if needed:
            reason = f"does not fit: eager torch needs {needed}"
            row = RecipeTried(recipe, RecipeOutcome.UNFIT, reason, elements=elements, bound_s=bound)
            self.tried.append(dataclasses.replace(row, eager_s=eager[0], eager_bytes=eager[1]))
            self.refused = InfeasibleError(refused_by_eager_torch(str(recipe), options.form, needed, self.limit))
            return False
        times = prediction.step_time_s, elements, prediction.peak_bytes, bound, prediction.expected_s
        unlimited_s = result.unconstrained_bound_s
        row = RecipeTried(recipe, RecipeOutcome.PLANNED, "", *times, None, forecast, *eager, unlimited_s)
        row = with_skipped_meshes(row, *skipped_meshes)
        self.tried.append(row)
        if self.of_source:
            freed_s = prediction.expected_s - result.unconstrained_bound_s
            self.memory_pruning.add(recipe, self._task(program, stages), result.plan.mesh, freed_s)
            if recipe.arguments.get("remat") == FULL:
                self.full[recipe] = program, result.plan
        if better := self.best is None or row.beats(self.best[0], self._beaten_by_s(recipe)):
            self.best = row, result
        else:
            self.pipelines.record_slower(recipe, self.cut)
        if problem is not None and self.problem is not None:
            if better:
                os.replace(problem, self.problem)
            else:
                problem.unlink(missing_ok=True)
        return better

    def sketch(self, recipe: Recipe, mesh: Mapping[str, int]) -> tuple[Program, Plan]:
        """Return a recipe's program and its plan on a mesh without a memory limit; adds no row."""
        program = self.make(**recipe.arguments)
        options = dataclasses.replace(
            self.options, mesh=dict(mesh), refine_axes=False, memory_limit=self.topology.usable_bytes * UNLIMITED
        )
        running = dataclasses.replace(self.running, save_problem=None)
        return program, make_plan(program, options, running, before=EarlierRecipes(None, self.tables)).plan

    def _rival(self, recipe: Recipe, elements: int) -> Incumbent | None:
        """Return the incumbent that a step with this many elements must beat, with any number of axes; None while no
        recipe was planned. More axes than the best plan has are not known to save time.
        """
        if self.best is None:
            return None
        best = self.best[1]
        return Incumbent(self._beaten_by_s(recipe) * elements, sys.maxsize, best.weights, len(best.plan.mesh), 0.0)

    def _beaten_by_s(self, recipe: Recipe) -> float:
        """Return the seconds per element below which a recipe becomes the best; infinite without a best one.

        For a source, a batch larger than the best one's must gain at least `LEAST_GAIN`.
        """
        if self.best is None:
            return math.inf
        row = self.best[0]
        batch, other = (each.arguments.get("batch", 0) for each in (recipe, row.recipe))
        return row.per_element_s * (1 - LEAST_GAIN if self.of_source and batch > other else 1)

    def _task(self, program: Program, stages: int) -> Task:
        """Return the planning task of a program, with an axis of `stages` (0 for no such axis)."""
        reading = analyse_program(program, self.topology, self.running.kept)
        figures = priced_with(self.options, self.topology).calibration
        return Task(program, reading, self.options.asked, self.limit, self.options.seed, figures, self.tables, stages)

    def _staged(self, recipe: Recipe, instead: Mapping[str, Any]) -> StagedMeshes | None:
        """Return the meshes worth planning for a recipe's pipeline.

        None if no search for such meshes applies: no source, no pipeline, a given mesh, or one of the reasons of
        `PipelineMeshes.of`. A dominated pipeline has no meshes. `instead` may give a mesh.
        """
        mesh = instead.get("mesh", self.options.mesh)
        if (
            not self.of_source
            or pipeline_recipes.pipeline_of(recipe) is None
            or given_mesh(self.topology, mesh) is not None
        ):
            return None
        if self.pipelines.dominated(recipe, self.cut):
            return StagedMeshes((), 0.0, None, dominated=True)
        best = None if self.best is None else self.best[1].weights
        counts = self.counts or (recipe.arguments["microbatches"],)
        return self.pipelines.of(recipe, counts, lambda p: self._beaten_by_s(recipe) * elements_of(p), best)

    def _in_stages(self, recipe: Recipe) -> float:
        """Return a lower bound, in seconds per element, of all plans of a recipe's pipeline: arithmetic and bubble.

        Return 0 if no bound is known: without a pipeline, or before the same recipe without one was considered.
        """
        pipeline = pipeline_recipes.pipeline_of(recipe)
        arithmetic = self.arithmetic.get(pipeline_recipes.without_pipeline(recipe))
        if pipeline is None or arithmetic is None:
            return 0.0
        return arithmetic.in_stages(pipeline, self.cut)

    def _bound(
        self, recipe: Recipe, program: Program, options: Options, beat_s: float, staged: StagedMeshes | None
    ) -> tuple[float, int, RecipeOutcome | None]:
        """Return lower bounds of all plans, seconds of a step and bytes of the peak, and the outcome that rules the
        recipe out.

        The outcome is None if the recipe may win. Meshes are bounded only until one may fit and be faster: the bytes
        are then a bound for that mesh alone. Bytes are 0 if no mesh was bounded.

        - `recipe`, `program`: recipe and its program; the arithmetic of one without stages is stored.
        - `options`: options with which it would be planned.
        - `beat_s`: step time in seconds that the recipe must beat.
        - `staged`: meshes of its pipeline; None if it has none.
        """
        reading = analyse_program(program, self.topology, self.running.kept)
        figures = priced_with(options, self.topology).calibration
        bound = self.computed_s[recipe] = least_seconds(reading.graph, self.topology, figures)
        if program.stacks and recipe.arguments.get("stages") == 1:
            arithmetic = pipeline_recipes.arithmetic_of(reading.graph, bound, elements_of(program), max(program.stacks))
            self.arithmetic.setdefault(pipeline_recipes.without_pipeline(recipe), arithmetic)
        if bound >= beat_s:
            return bound, 0, RecipeOutcome.ARITHMETIC
        if staged is not None:
            return max(bound, staged.bound_s), 0, None
        if reading.graph.regions or reading.graph.constraints:  # not every mesh serves them
            return bound, 0, None
        given = given_mesh(self.topology, options.mesh, program_mesh(reading.graph, self.topology.num_devices))
        mesh_floors: list[Floors] = []
        for mesh in reversed(candidate_meshes(self.topology)) if given is None else (given,):
            if given is None and unusable(reading, mesh):
                continue
            mesh_floors.append(floors(program, reading, mesh, self.limit, figures))
            if mesh_floors[-1].bytes <= self.limit and mesh_floors[-1].seconds < beat_s:
                return bound, mesh_floors[-1].bytes, None  # it may fit and be faster: others say no more
            parts = find_axis_parts(reading.graph, reading.structure, reading.groups, mesh)
            if parts is not None and options.refine_axes:
                mesh_floors.append(floors(program, reading, parts.mesh, self.limit, figures))
        if not mesh_floors:
            return bound, 0, None
        bound = max(bound, min(each.seconds for each in mesh_floors))
        least = min(each.bytes for each in mesh_floors)
        if least > self.limit:
            return bound, least, RecipeOutcome.UNFIT
        return bound, least, RecipeOutcome.UNMOVED if bound >= beat_s else None
