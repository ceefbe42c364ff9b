"""Recipes that the plan of another one suggests, and recipes that memory rules out."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

from autoshard.cost import Mesh, Topology, make_mesh
from autoshard.planning.price.analysed_program import Task, price_again, read_program
from autoshard.planning.price.remat_forecast import Foreseen, foresee
from autoshard.planning.recipes.recipe import (
    SLOWER,
    Recipe,
    RecipeOutcome,
    RecipeTried,
    difference,
    elements_of,
    implied,
)
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.problem_builder import least_seconds
from autoshard.planning.space.plan_options import FULL, REMATS
from autoshard.program import INPUT, Program, Role


FINENESS = 16
"""A mixture is looked for to within one part in so many of the layers."""

LESS_ROOM = 0.93
"""Share of the memory that the next one may take."""

RETRIES = 2
"""How often a policy by value is planned: one that was foreseen to fit and does not is chosen anew with less room."""

WORTH_PLANNING = 0.005
"""A policy by value is planned if it is foreseen to be faster than the best recipe by this share: about what foreseen
times err by. So are groups of gradients, if the best plan waits that long for what is sent."""


class Made(Protocol):
    """What planning one gave."""

    @property
    def plan(self) -> Plan:
        """Its plan."""
        ...


class Search(Protocol):
    """The recipes considered so far, and a way to consider more."""

    topology: Topology
    running: dict[str, Any]
    """What `make_plan` takes beside the options."""
    tried: list[RecipeTried]
    full: dict[Recipe, tuple[Program, Plan]]
    """Programs whose layers compute everything again, and their plans."""
    layers: int | None
    savable: tuple[str, ...]

    @property
    def best(self) -> tuple[RecipeTried, Made] | None:
        """The best one, if any could be planned."""
        ...

    def plan(self, recipe: Recipe, foreseen: Foreseen | None = None, *, whatever: bool = False, **instead: Any) -> bool:
        """Whether it is the best so far; `whatever` is known of it, it is planned, with these options `instead`."""
        ...


def mix(search: Search, remats: Sequence[str]) -> None:
    """Adds mixtures of the best recipe's remat policy with those that compute less and do not fit, on its mesh.

    Fewer layers that compute again are faster until memory is so short that tensors must be split otherwise.
    """
    assert search.best is not None
    row, made = search.best
    slow = row.recipe.arguments.get("remat")
    if slow not in remats or search.layers is None:
        return
    mesh, layers = dict(made.plan.mesh), search.layers
    for fast in remats[: remats.index(slow)]:
        (other,) = (each for each in search.tried if each.recipe == row.recipe.but(remat=fast))
        if other.outcome is not RecipeOutcome.UNFIT:
            continue
        least, most = 0, layers
        while most - least > max(1, layers // FINENESS):
            count = (least + most) // 2
            if search.plan(row.recipe.but(remat=f"{slow}:{count}+{fast}"), mesh=mesh):
                most = count
            else:
                least = count


def by_value(search: Search, remats: Sequence[str]) -> bool:
    """Adds what is foreseen to be best of the values that layers may keep or send to their hosts; whether it is.

    It is foreseen from the plan of the best recipe with everything computed again, and planned on that one's mesh.
    """
    assert search.best is not None
    base = search.best[0].recipe.but(remat=FULL)
    if base not in search.full and FULL in remats:  # it was known to be slower
        search.tried = [each for each in search.tried if each.recipe != base]
        search.plan(base, whatever=True, mesh=dict(search.best[1].plan.mesh), refine_axes=False)
    if base not in search.full:
        return False
    program, plan = search.full[base]
    if not program.savable:
        return False
    kept = bool(search.running.get("kept"))
    model, choices = price_again(plan, program, read_program(program, search.topology.backend, kept))
    room = plan.memory_limit_bytes
    for _ in range(RETRIES):
        foreseen = foresee(model, choices, room)
        enough = (1 - WORTH_PLANNING) * search.best[0].per_element_s
        if foreseen is None or foreseen.expected_s / elements_of(program) >= enough:
            return False
        better = search.plan(base.but(remat=str(foreseen.policy)), foreseen, mesh=dict(plan.mesh), refine_axes=False)
        if search.tried[-1].step_time_s is not None:
            return better
        room = int(min(room, foreseen.peak_bytes) * LESS_ROOM)
    return False


def offload_inputs(search: Search, remats: Sequence[str]) -> bool:
    """Adds the recipe of least memory with the inputs of layers on their hosts, where no recipe fits; whether it
    does."""
    last = search.tried[-1].recipe
    if FULL not in remats or INPUT not in search.savable or not search.topology.traits.compiles_ahead:
        return False
    return search.plan(last.but(remat=f"{FULL},offload={INPUT}"))


def sum_late(search: Search) -> None:
    """Adds the best recipe with gradients that are summed over devices once for all microbatches, on its mesh.

    A group is what the devices of one slice hold, or those of one place on the axes that split the batch. A step of one
    microbatch sums once as it is, and a plan that waits for nothing gains nothing.
    """
    assert search.best is not None
    row, made = search.best
    if row.recipe.arguments.get("microbatches") == 1:
        return
    if made.plan.prediction.exposed_comm_s < WORTH_PLANNING * made.plan.prediction.step_time_s:
        return
    for groups in _held_apart(made.plan, search.topology.slices):
        search.plan(row.recipe.but(gradient_groups=groups), mesh=dict(made.plan.mesh), refine_axes=False)
        if search.tried[-1].outcome is RecipeOutcome.REFUSED:  # JAX functions, batches that are not divided so
            search.tried.pop()


def _held_apart(plan: Plan, slices: int) -> list[int]:
    """In how many groups devices may hold examples: by slice, and by the axes that split the batch or, where examples
    come whole, by the first axes of the mesh."""
    batches = [spec for name, spec in plan.arguments.items() if plan.roles[name] == Role.BATCH and spec.dims]
    split = {axis for spec in batches for axis in spec.dims[0]}
    counts = [prod(plan.mesh[axis] for axis in split)] if split else list(accumulate(plan.mesh.values(), mul))
    return sorted({n for n in (slices, *counts) if n > 1})


_WHATEVER_FITS = (*SLOWER, RecipeOutcome.BUBBLE, RecipeOutcome.UNSTAGED)
"""Outcomes of recipes that are slower than the best one by a bound that ignores memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    """A recipe of a source that was planned, or could have been."""

    recipe: Recipe
    mesh: Mesh
    compute_s: float
    """What its ops take on that mesh with nothing moved between them."""
    gain_s: float
    """A step could be faster by no more seconds if all memory were there."""


class Roomy:
    """What layers compute again gives memory for time. Where memory gains less than computing again costs, none is."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._planned: list[_Planned] = []
        self._dearer: set[tuple[str, str]] = set()
        """(remat, remat) of which the second computes for longer than the first."""

    def add(self, recipe: Recipe, task: Task, sizes: Mapping[str, int], gain_s: float) -> None:
        """A recipe that was planned, on a mesh of these sizes."""
        if recipe.arguments.get("remat") in REMATS:
            mesh = make_mesh(self._topology, sizes)
            self._planned.append(_Planned(recipe, mesh, _compute_s(task, mesh), gain_s))

    def why_not(self, recipe: Recipe, task: Task) -> RecipeTried | None:
        """Return a row if a recipe that computes less has all the memory that it can use, else None."""
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

    def slower(self, recipe: Recipe, tried: list[RecipeTried]) -> RecipeTried | None:
        """Return a row if a recipe that computes less is too slow with any memory, else None."""
        for other in tried:
            if other.outcome in _WHATEVER_FITS and _computes_more(recipe, other.recipe):
                if (other.recipe.arguments["remat"], recipe.arguments["remat"]) in self._dearer:
                    return implied(recipe, other)
        return None


def _computes_more(recipe: Recipe, other: Recipe) -> bool:
    """Whether a recipe is another one but for what it computes again, which is more."""
    mine, theirs = recipe.arguments.get("remat"), other.arguments.get("remat")
    if mine not in REMATS or theirs not in REMATS or recipe != other.but(remat=mine):
        return False
    return REMATS.index(mine) > REMATS.index(theirs)


def _compute_s(task: Task, mesh: Mesh) -> float:
    return least_seconds(
        task.program, task.reading, mesh, task.memory_limit, task.calibration, staged=bool(task.stages)
    )
