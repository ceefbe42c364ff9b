"""Mixtures of two recomputation policies that are forecast from steps in eager torch."""

import dataclasses
from typing import Any

import pytest

from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried
from autoshard.planning.recipes.remat_mixtures import mix_remats


REMATS = ("none", "dots", "full")
LIMIT = 100


def row(remat: str, parts: int, seconds: float, size: int) -> RecipeTried:
    """Return the row of a recipe with seconds and bytes in eager torch, which has 90 bytes."""
    recipe = Recipe((("remat", remat), ("microbatches", parts)))
    planned = dataclasses.replace(
        RecipeTried(recipe, RecipeOutcome.PLANNED), step_time_s=seconds, expected_s=seconds, peak_bytes=size
    )
    found = planned if size <= 90 else RecipeTried(recipe, RecipeOutcome.UNFIT)
    return dataclasses.replace(found, eager_s=seconds, eager_bytes=size)


class Searched:
    """Search whose recipes are known, and whose mixtures take the bytes of `sizes` in turn."""

    limit, layers = LIMIT, 32

    def __init__(self, tried: list[RecipeTried], sizes: list[int]) -> None:
        self.tried, self.sizes = tried, sizes
        self.best = min(((each, None) for each in tried), key=lambda pair: pair[0].per_element_s)
        self.mesh_of = {each.recipe: {"data": each.recipe.arguments["microbatches"]} for each in tried}
        self.planned: list[tuple[str, Any]] = []

    def plan(self, recipe: Recipe, **instead: Any) -> bool:
        self.planned.append((str(recipe), instead["mesh"]))
        self.tried.append(row(recipe.arguments["remat"], recipe.arguments["microbatches"], 1.0, self.sizes.pop(0)))
        return True


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [([88], [10]), ([92, 88], [10, 12]), ([92, 92], [10, 12])],
)
def test_the_layers_that_recompute_are_forecast_from_memory(sizes: list[int], layers: list[int]) -> None:
    """Plan mixtures of a recipe that is not the best: 25 of the 80 bytes by which they differ are too many."""
    rows = [row("none", 2, 2.0, 115), row("dots", 2, 2.4, 35), row("none", 4, 2.3, 60), row("full", 2, 3.0, 20)]
    search = Searched(rows, sizes)
    mix_remats(search, REMATS)  # type: ignore[arg-type]
    assert search.planned == [(f"remat dots:{count}+none, microbatches 2", {"data": 2}) for count in layers]


def test_a_mixture_that_gains_too_little_is_not_planned() -> None:
    """Forecast 2.125 s for the mixture, where another recipe takes 2.13 s."""
    search = Searched([row("none", 2, 2.0, 115), row("dots", 2, 2.4, 35), row("none", 4, 2.13, 60)], [])
    mix_remats(search, REMATS)  # type: ignore[arg-type]
    assert not search.planned
