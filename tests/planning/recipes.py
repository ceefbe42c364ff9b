"""Topology and mesh of the tests of recipes, and the rows of a plan about the recipes that were tried."""

from typing import Any

from autoshard.planning import PlanResult, Recipe


ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=2,model=4", "time_limit": 20}


def tried(result: PlanResult) -> dict[str, dict[str, Any]]:
    """Return the plan's row for every recipe, by the recipe's text."""
    rows = result.plan.provenance["recipe"]["tried"]
    return {str(Recipe(tuple(row["choices"].items()))): row for row in rows}
