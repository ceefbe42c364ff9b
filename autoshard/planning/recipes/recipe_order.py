"""Order in which recipes are considered: recipes whose outcome prunes most others are first."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from autoshard.cost import Topology
from autoshard.planning.recipes import pipeline_recipes
from autoshard.planning.recipes.recipe import Recipe
from autoshard.planning.space.plan_options import FULL, OFFLOADED, PARTS
from autoshard.program import Choices


LEAST_GAIN = 0.01
"""Least relative gain per element of a larger batch; a smaller gain ends the search for larger batches."""


class Tried(Protocol):
    """Facts about the recipes considered so far."""

    of_source: bool
    """True if the choices are those of `source_choices` (remat, microbatches, batch, ...), whose values have a known
    order.
    """
    stacks: tuple[int, ...] | None
    """Numbers of layers in the program's stacks; None until they are known."""
    topology: Topology
    """Devices that are planned for."""

    @property
    def offloads_inputs(self) -> bool:
        """True if the hosts may hold the layers' inputs; False until the program is known."""
        ...

    @property
    def best(self) -> object | None:
        """The best recipe; None if none could be planned."""
        ...

    def least(self, **some: Any) -> float:
        """Return the least seconds per element among the recipes with these choices; infinite if none was planned."""
        ...


def in_order(choices: Choices, tried: Tried) -> Iterator[Recipe]:
    """Yield all recipes lazily, in the order of their choices; outcomes in `tried` decide which follow.

    For a source, fewer microbatches come first. While no recipe fits, each number of them ends with the policy
    `OFFLOADED`, since more microbatches gather split parameters more often. A batch of a source starts at its first
    value and grows as long as the gain per element reaches `LEAST_GAIN`. Smaller batches follow, the largest first,
    only until a recipe fits. Pipelines are in the order of `pipeline_recipes.in_order`, and those that are not
    sensible are left out.
    """
    names = [name for name in choices if name != "batch" or not tried.of_source]
    others = list(itertools.product(*(choices[name] for name in names)))
    staged = set(PARTS) <= set(names)
    if not staged and tried.of_source and "microbatches" in names:  # the first recipe is the others' incumbent
        place = names.index("microbatches")
        others.sort(key=lambda values: choices["microbatches"].index(values[place]))

    def ordered() -> Iterable[tuple[Any, ...]]:
        """Return the values of all choices but the batch, ordered by stages if there are any."""
        if not staged:
            return others
        return pipeline_recipes.in_order(
            others, names, tried.topology.slices, lambda: max(tried.stacks or (), default=0)
        )

    def recipes(**batch: Any) -> Iterator[Recipe]:
        """Yield the sensible recipes of one batch size, or of all without one."""
        counts = choices.get("microbatches", ())
        rows = (Recipe((*batch.items(), *zip(names, values, strict=True))) for values in ordered())
        if staged:
            rows = (each for each in rows if pipeline_recipes.is_sensible(each.arguments, counts, tried.stacks))
        part = "batch" if staged else "microbatches"
        searched = tried.of_source and FULL in choices.get("remat", ())
        for _, group in itertools.groupby(rows, key=lambda recipe: recipe.arguments.get(part)):
            considered = []
            for recipe in group:
                considered.append(recipe)
                yield recipe
            if not searched:
                continue
            # The first one has the state on the devices, the last one needs the least memory.
            for recipe in dict.fromkeys(each.but(remat=OFFLOADED) for each in (considered[0], considered[-1])):
                if tried.best is None and tried.offloads_inputs:
                    yield recipe

    if len(names) == len(choices):
        yield from recipes()
        return
    batches = choices["batch"]
    growing = [b for b in batches if b >= batches[0]]
    previous_s = math.inf
    for batch in growing:
        yield from recipes(batch=batch)
        per_element_s = tried.least(batch=batch)
        if per_element_s > previous_s * (1 - LEAST_GAIN) or math.isinf(per_element_s):
            break
        previous_s = per_element_s
    for batch in sorted((b for b in batches if b < batches[0]), reverse=True):
        if tried.best is not None:
            return
        yield from recipes(batch=batch)
