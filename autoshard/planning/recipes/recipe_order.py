"""In which order recipes are considered: what decides most about others comes first."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from autoshard.planning.recipes import pipeline_recipes
from autoshard.planning.recipes.recipe import Recipe
from autoshard.planning.space.plan_options import PARTS
from autoshard.program import Choices


LEAST_GAIN = 0.01
"""A batch twice as large that is not faster by this share for each element ends the search for a larger one."""


class Tried(Protocol):
    """What is known of the recipes considered so far."""

    of_source: bool
    stacks: tuple[int, ...] | None
    """Layers of the program's stacks, once they are known."""
    slices: int
    """The number of slices of the topology."""

    @property
    def best(self) -> object | None:
        """The best one, if any could be planned."""
        ...

    def least(self, **some: Any) -> float:
        """Seconds of an element in the best recipe with these choices."""
        ...


def in_order(choices: Choices, tried: Tried) -> Iterator[Recipe]:
    """All recipes, fewer microbatches first; batches grow as long as that pays, and get smaller only if none fits."""
    names = [name for name in choices if name != "batch" or not tried.of_source]
    others = list(itertools.product(*(choices[name] for name in names)))
    staged = set(PARTS) <= set(names)
    if not staged and tried.of_source and "microbatches" in names:  # the first is what others are held against
        place = names.index("microbatches")
        others.sort(key=lambda values: choices["microbatches"].index(values[place]))

    def ordered() -> Iterable[tuple[Any, ...]]:
        if not staged:
            return others
        return pipeline_recipes.in_order(others, names, tried.slices, lambda: max(tried.stacks or (), default=0))

    def recipes(**batch: Any) -> Iterator[Recipe]:
        for values in ordered():
            recipe = Recipe((*batch.items(), *zip(names, values, strict=True)))
            counts = choices.get("microbatches", ())
            if not staged or pipeline_recipes.is_sensible(recipe.arguments, counts, tried.stacks):
                yield recipe

    if len(names) == len(choices):
        yield from recipes()
        return
    batches = choices["batch"]
    growing = [b for b in batches if b >= batches[0]]
    before = math.inf
    for batch in growing:
        yield from recipes(batch=batch)
        now = tried.least(batch=batch)
        if now > before * (1 - LEAST_GAIN) or math.isinf(now):
            break
        before = now
    for batch in sorted((b for b in batches if b < batches[0]), reverse=True):
        if tried.best is not None:
            return
        yield from recipes(batch=batch)
