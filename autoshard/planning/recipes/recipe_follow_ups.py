"""Recipes derived from the plan of another recipe, and recipes pruned since memory cannot pay for their
recomputation.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

from autoshard.base.units import format_seconds
from autoshard.cost import Mesh, Topology, make_mesh
from autoshard.planning.plan_builder import Running
from autoshard.planning.price.analysed_program import Task, analyse_program, reprice
from autoshard.planning.price.remat_forecast import RematForecast, forecast_remat
from autoshard.planning.recipes.recipe import (
    SLOWER,
    Recipe,
    RecipeOutcome,
    RecipeTried,
    difference,
    elements_of,
    implied_row,
)
from autoshard.planning.record.plan_parts import NEARLY_FULL
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.problem_builder import least_seconds
from autoshard.planning.space.derived_axes import find_axis_parts
from autoshard.planning.space.plan_options import FULL, OFFLOADED, REMATS
from autoshard.program import Choices, Program, Role


LESS_ROOM = 0.93
"""Share of the memory that the next policy may use after a forecast that turned out not to fit."""

RETRIES = 2
"""Most plans of a policy composed value by value. If a forecast fit but its plan does not, the policy is composed again
for less memory.
"""

WORTH_PLANNING = 0.005
"""Least relative gain for which a forecast policy is planned: about the error of forecast times. Gradient groups are
planned if the best plan waits at least this share of its step for communication.
"""


class Made(Protocol):
    """The result of planning one recipe."""

    @property
    def plan(self) -> Plan:
        """The plan of the recipe."""
        ...

    @property
    def spared_s(self) -> float:
        """Seconds of the step that the best recomputation would spare, by forecast."""
        ...

    @property
    def unconstrained_bound_s(self) -> float:
        """Lower bound in seconds of all plans on every searched mesh, ignoring the memory limit."""
        ...


class Search(Protocol):
    """The recipes considered so far, and a method that plans more."""

    topology: Topology
    running: Running
    tried: list[RecipeTried]
    """Rows of the recipes considered so far, in order."""
    full: dict[Recipe, tuple[Program, Plan]]
    """Programs and plans of the recipes whose layers recompute everything."""
    composed: dict[Recipe, Plan]
    """Plans of `full` from which a policy was composed."""
    computed_s: dict[Recipe, float]
    """Least seconds of the arithmetic of each recipe that was bounded."""
    mesh_of: dict[Recipe, Mapping[str, int]]
    """Mesh of the plan of each planned recipe."""
    layers: int | None
    """Number of layers of the program; None if unknown."""
    savable: tuple[str, ...]
    """Names of values that a policy may save."""

    @property
    def limit(self) -> int:
        """Memory limit of a device in bytes."""
        ...

    def sketch(self, recipe: Recipe, mesh: Mapping[str, int]) -> tuple[Program, Plan]:
        """Return a recipe's program and its plan on a mesh without a memory limit; adds no row."""
        ...

    @property
    def best(self) -> tuple[RecipeTried, Made] | None:
        """Recipe with the least predicted time an element of the batch, among those that fit, and its plan; None if
        none fits.
        """
        ...

    def plan(
        self, recipe: Recipe, forecast: RematForecast | None = None, *, force: bool = False, **instead: Any
    ) -> bool:
        """Plan a recipe with the options `instead` and return True if it is the new best.

        - `forecast`: forecast of its remat policy; None if there is none.
        - `force`: True skips all pruning checks.

        Adds a row to `tried` in any case.
        """
        ...


def why_more(plain: Made, choices: Choices) -> str:
    """Return the reason to try other recipes though the plain step fits; empty if there is none.

    The reasons are nearly full memory, and open recomputation that is forecast to spare `NEARLY_FULL` of the step.
    Stacks of saved values may take more time than computing the values again.
    """
    prediction = plain.plan.prediction
    if prediction.nearly_full:
        return "The plain step nearly fills memory"
    if len(choices.get("remat", ())) > 1 and plain.spared_s > NEARLY_FULL * prediction.step_time_s:
        return f"Recomputation may spare {format_seconds(plain.spared_s)} of {format_seconds(prediction.step_time_s)}"
    return ""


def is_composed(search: Search, remats: Sequence[str]) -> bool:
    """Return True if the policy of the best recipe names values; `remats` are the policies that it may begin with."""
    assert search.best is not None
    return search.best[0].recipe.arguments.get("remat") not in (None, *remats, OFFLOADED)


def compose_remat(search: Search, remats: Sequence[str]) -> bool:
    """Plan the policy forecast to be best among the values that layers may save or offload; return True if it is the
    new best.

    The policy is forecast from the plan of the best recipe with full recomputation. If that was pruned and `remats`
    has `full`, it is planned first. This replaces its row in `search.tried`, and may make it the best. If the best
    recipe offloads layer inputs since `full` does not fit, `full` is planned without a memory limit. Nothing is planned
    if the best recipe recomputes nothing, and would gain too little from unlimited memory.

    The forecast policy is planned on that plan's mesh if it is faster than the best recipe by `WORTH_PLANNING`. A
    plan that does not fit is retried for less memory, at most `RETRIES` plans in all. One that nearly fills memory, and
    is slower for that, is planned with axes cut in two.

    Return False without planning it if there is no plan of full recomputation, or no value can be saved. The same holds
    for a plan from which a policy was composed before, and for steps of eager torch, whose prices know no such policy.

    - `search`: must have a best recipe.
    """
    assert search.best is not None
    row, made = search.best
    if row.eager_s is not None:
        return False
    if row.recipe.arguments.get("remat") == REMATS[0]:
        # A policy that computes more gains no more than unlimited memory and less traffic do.
        expected_s = made.plan.prediction.expected_s
        if expected_s - made.unconstrained_bound_s + made.spared_s < WORTH_PLANNING * expected_s:
            return False
    base = row.recipe.but(remat=FULL)
    if base not in search.full and FULL in remats:
        mesh = dict(search.best[1].plan.mesh)
        if search.best[0].recipe.arguments["remat"] == OFFLOADED:
            search.full[base] = search.sketch(base, mesh)
        else:  # it was known to be slower
            search.tried = [each for each in search.tried if each.recipe != base]
            search.plan(base, force=True, mesh=mesh, refine_axes=False)
    if base not in search.full:
        return False
    program, plan = search.full[base]
    if not program.savable or search.composed.get(base) is plan:
        return False
    search.composed[base] = plan
    reading = analyse_program(program, search.topology, search.running.kept)
    model, choices = reprice(plan, program, reading)
    has_parts = find_axis_parts(reading.graph, reading.structure, reading.groups, model.mesh) is not None
    room = search.limit
    # Without GPUs no compiler confirms that values reach the host in time: they are offloaded where they must be.
    offloads = not search.topology.traits.described or "offload" in str(search.best[0].recipe.arguments.get("remat"))
    for _ in range(RETRIES):
        forecast = forecast_remat(model, choices, room, offloads)
        beat_s = (1 - WORTH_PLANNING) * search.best[0].per_element_s
        if forecast is None or forecast.expected_s / elements_of(program) >= beat_s:
            return False
        recipe, mesh = base.but(remat=str(forecast.policy)), dict(plan.mesh)
        better = search.plan(recipe, forecast, mesh=mesh, refine_axes=False)
        row = search.tried[-1]
        if row.step_time_s is not None and not better and row.expected_s != row.step_time_s and has_parts:
            # Memory is nearly full: parts of an axis may need less.
            better = search.plan(recipe, forecast, mesh=mesh)
            search.tried.pop(-1 if search.tried[-1].step_time_s is None else -2)
        if row.step_time_s is not None:
            return better
        room = int(min(room, forecast.peak_bytes) * LESS_ROOM)
    return False


def add_gradient_groups(search: Search) -> None:
    """Plan the best recipe with gradients summed over devices once for all microbatches, on its mesh.

    A gradient group is the devices of one slice, or those at one position of the axes that split the batch. Nothing is
    done for a step of one microbatch, which sums gradients once already. The same holds for a plan that waits for
    communication less than `WORTH_PLANNING` of its step. Refused recipes leave no row.
    """
    assert search.best is not None
    row, result = search.best
    if row.recipe.arguments.get("microbatches") == 1:
        return
    if result.plan.prediction.exposed_comm_s < WORTH_PLANNING * result.plan.prediction.step_time_s:
        return
    for groups in _gradient_group_counts(result.plan, search.topology.slices):
        search.plan(row.recipe.but(gradient_groups=groups), mesh=dict(result.plan.mesh), refine_axes=False)
        if search.tried[-1].outcome is RecipeOutcome.REFUSED:  # JAX functions, batches that are not divided so
            search.tried.pop()


def _gradient_group_counts(plan: Plan, slices: int) -> list[int]:
    """Return the numbers of gradient groups worth trying, rising and above 1; empty if there are none.

    One is the number of slices, one the product of all axes that split the first dim of batches. If no axis splits
    it, the products of the mesh's first axes are used, one more axis each time.
    """
    batches = [spec for name, spec in plan.arguments.items() if plan.roles[name] == Role.BATCH and spec.dims]
    split = {axis for spec in batches for axis in spec.dims[0]}
    counts = [prod(plan.mesh[axis] for axis in split)] if split else list(accumulate(plan.mesh.values(), mul))
    return sorted({n for n in (slices, *counts) if n > 1})


_WHATEVER_FITS = (*SLOWER, RecipeOutcome.BUBBLE, RecipeOutcome.UNSTAGED)
"""Verdicts of recipes that are slower than the best one so far by a lower bound that ignores memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    """A recipe of a source that was planned."""

    recipe: Recipe
    mesh: Mesh
    compute_s: float
    """Seconds of its ops on that mesh without any communication."""
    gain_s: float
    """Most seconds that a step could save with unlimited memory."""


class MemoryPruning:
    """Pruning of recipes whose extra recomputation costs more than the memory it frees can save."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._planned: list[_Planned] = []
        self._dearer: set[tuple[str, str]] = set()
        """Pairs of remat policies of which the second computes for longer than the first."""

    def add(self, recipe: Recipe, task: Task, sizes: Mapping[str, int], gain_s: float) -> None:
        """Record a recipe that was planned on a mesh with these axis sizes.

        - `recipe`, `task`: the recipe, recorded only if its policy is one of `REMATS`, and its planning task.
        - `sizes`: axis sizes of the mesh by name.
        - `gain_s`: most seconds that its step could save with unlimited memory.
        """
        if recipe.arguments.get("remat") in REMATS:
            mesh = make_mesh(self._topology, sizes)
            self._planned.append(_Planned(recipe, mesh, _compute_s(task, mesh), gain_s))

    def why_not(self, recipe: Recipe, task: Task) -> RecipeTried | None:
        """Return a row if a planned recipe that computes less could gain less from memory than this one computes more,
        else None.

        Records which remat policies compute for longer than others.
        """
        for each in self._planned:
            if not _computes_more(recipe, each.recipe):
                continue
            more_s = _compute_s(task, each.mesh) - each.compute_s
            if more_s > 0:
                self._dearer.add((each.recipe.arguments["remat"], recipe.arguments["remat"]))
            if more_s > each.gain_s:
                reason = (
                    f"not planned: more memory gains less with {difference(each.recipe, recipe)} than this computes"
                )
                return RecipeTried(recipe, RecipeOutcome.IMPLIED, reason)
        return None

    def slower(self, recipe: Recipe, tried: list[RecipeTried], beat_s: float) -> RecipeTried | None:
        """Return a row if a recipe in `tried` that computes less is too slow regardless of memory, else None. The
        policies must be known to differ in compute time (`why_not`).

        - `beat_s`: seconds per element from which on a recipe is too slow.
        """
        for other in tried:
            is_slower = other.outcome in _WHATEVER_FITS or other.unlimited_s / (other.elements or 1) >= beat_s
            if is_slower and _computes_more(recipe, other.recipe):
                if (other.recipe.arguments["remat"], recipe.arguments["remat"]) in self._dearer:
                    return implied_row(recipe, other)
        return None


def _computes_more(recipe: Recipe, other: Recipe) -> bool:
    """Return True if two recipes differ in remat only, with policies of `REMATS`, and the first one recomputes more."""
    mine, theirs = recipe.arguments.get("remat"), other.arguments.get("remat")
    if mine not in REMATS or theirs not in REMATS or recipe != other.but(remat=mine):
        return False
    return REMATS.index(mine) > REMATS.index(theirs)


def _compute_s(task: Task, mesh: Mesh) -> float:
    """Return the least seconds of a step's ops on a mesh without any communication, over all plans."""
    return least_seconds(
        task.program, task.reading, mesh, task.memory_limit, task.calibration, staged=bool(task.stages)
    )
