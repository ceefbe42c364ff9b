"""The plan of the best recipe, with words and rows about the other recipes and about searched meshes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autoshard.planning.plan_builder import PlanResult
from autoshard.planning.recipes.pipeline_recipes import pipeline_words
from autoshard.planning.recipes.recipe import Recipe, RecipeTried, figures_of, line_of, verdict_of
from autoshard.planning.record.plan_parts import MeshTried
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import original_mesh


MeshKey = tuple[tuple[str, int], ...]
"""Axes of a mesh with their sizes, without cuts."""


class SearchedMeshes:
    """Rows of the meshes that were searched for some of the recipes, by chosen mesh."""

    def __init__(self) -> None:
        """Start without rows."""
        self._rows: dict[MeshKey, tuple[Recipe, tuple[MeshTried, ...]]] = {}

    def add(self, recipe: Recipe, plan: Plan) -> None:
        """Store the rows of a recipe's plan if its mesh was searched.

        The first search that chose a mesh counts. Later ones are pruned by the best recipe, and solve fewer meshes.
        """
        if plan.meshes:
            self._rows.setdefault(_key(plan), (recipe, plan.meshes))

    def complete(self, plan: Plan) -> Plan:
        """Return a plan with the rows of the search that chose its mesh, if it has none of its own.

        A composed recipe is planned on the mesh of another one. `meshes_of` in the plan's recipe names the latter.
        """
        if plan.meshes or _key(plan) not in self._rows:
            return plan
        recipe, rows = self._rows[_key(plan)]
        chosen = {**plan.provenance["recipe"], "meshes_of": recipe.arguments}
        return dataclasses.replace(plan, meshes=rows, provenance={**plan.provenance, "recipe": chosen})


def _key(plan: Plan) -> MeshKey:
    """Return the key of a plan's mesh."""
    return tuple(original_mesh(plan.mesh).items())


def report_recipes(
    best: tuple[RecipeTried, PlanResult],
    tried: Sequence[RecipeTried],
    meshes: SearchedMeshes,
    stacks: Sequence[int],
    wall_s: Mapping[str, float],
) -> tuple[Recipe, PlanResult]:
    """Return the best recipe and its plan.

    The words and the provenance of the plan, and of its candidates, report the outcomes of all recipes.

    - `tried`: rows of all recipes, that of `best` included.
    - `meshes`: meshes that were searched for some of them.
    - `stacks`: numbers of layers in the program's stacks.
    - `wall_s`: wall time in seconds of each phase, over all recipes.
    """
    row, result = best
    rows = sorted(tried, key=lambda each: (each is not row, each.per_element_s, each.bound_s or math.inf))
    rows = [dataclasses.replace(each, reason=verdict_of(each, row)) for each in rows]
    varied = len({each.elements for each in rows if each.step_time_s is not None}) > 1
    lines = tuple(filter(None, (line_of(row.recipe, rows), pipeline_words(row, rows, stacks))))
    figures = [figures_of(each, rows, varied) for each in rows]

    def with_recipes(plan: Plan) -> Plan:
        """Add the recipes to the words and the provenance of a plan, and searched meshes."""
        recipes = {"recipe": {"chosen": row.recipe.arguments, "tried": figures}}
        plan = dataclasses.replace(plan, words=(*plan.words, *lines), provenance=plan.provenance | recipes)
        return meshes.complete(plan)

    candidates = tuple(dataclasses.replace(each, plan=with_recipes(each.plan)) for each in result.candidates)
    return row.recipe, dataclasses.replace(
        result, plan=with_recipes(result.plan), candidates=candidates, wall_s=dict(wall_s)
    )
