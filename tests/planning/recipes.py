"""Where recipes are planned in tests, and what a plan says of those that were tried."""

from typing import Any

from autoshard.planning import PlanResult, Recipe


ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=2,model=4", "time_limit": 20}


def tried(result: PlanResult) -> dict[str, dict[str, Any]]:
    """What the plan says of every recipe, by its text."""
    rows = result.plan.provenance["recipe"]["tried"]
    return {str(Recipe(tuple(row["choices"].items()))): row for row in rows}
