"""Recipes that only the plan of another one suggests."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

from autoshard.cost import Topology
from autoshard.plan.model._choices import FULL
from autoshard.plan.price._again import price_again
from autoshard.plan.price._foresee import Foreseen, foresee
from autoshard.plan.price._reading import read_program
from autoshard.plan.record._plan import Plan
from autoshard.plan.write._recipe import Recipe, RecipeTried, elements_of
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
        if not other.verdict.startswith("does not fit"):
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
        if search.tried[-1].verdict.startswith("cannot be"):  # JAX functions, batches that are not divided so
            search.tried.pop()


def _held_apart(plan: Plan, slices: int) -> list[int]:
    """In how many groups devices may hold examples: by slice, and by the axes that split the batch or, where examples
    come whole, by the first axes of the mesh."""
    batches = [spec for name, spec in plan.arguments.items() if plan.roles[name] == Role.BATCH and spec.dims]
    split = {axis for spec in batches for axis in spec.dims[0]}
    counts = [prod(plan.mesh[axis] for axis in split)] if split else list(accumulate(plan.mesh.values(), mul))
    return sorted({n for n in (slices, *counts) if n > 1})
