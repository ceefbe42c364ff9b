"""Recipes whose plans are not short of memory, and those that would compute more again only to need less of it."""

import dataclasses
from collections.abc import Mapping

from autoshard.cost import Mesh, Topology, make_mesh
from autoshard.plan.model._choices import REMATS
from autoshard.plan.price._task import Task
from autoshard.plan.solve._floors import least_seconds
from autoshard.plan.write._recipe import SLOWER, Recipe, RecipeTried, difference
from autoshard.plan.write._stages import BUBBLE, UNSTAGED


_WHATEVER_FITS = (*SLOWER, BUBBLE, UNSTAGED)
"""Verdicts of what is slower than the best yet by a bound that holds whatever fits into memory."""


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

    def why_not(self, recipe: Recipe, task: Task) -> str:
        """Why a recipe need not be planned, since one that computes less has all the memory it can use; else empty."""
        for each in self._planned:
            if not _computes_more(recipe, each.recipe):
                continue
            more_s = _compute_s(task, each.mesh) - each.compute_s
            if more_s > 0:
                self._dearer.add((each.recipe.arguments["remat"], recipe.arguments["remat"]))
            if more_s > each.gain_s:
                return f"not planned: more memory gains less with {difference(each.recipe, recipe)} than this computes"
        return ""

    def slower(self, recipe: Recipe, tried: list[RecipeTried]) -> str:
        """Why a recipe need not be looked at, since one that computes less is too slow whatever fits; else empty."""
        for other in tried:
            if other.verdict in _WHATEVER_FITS and _computes_more(recipe, other.recipe):
                if (other.recipe.arguments["remat"], recipe.arguments["remat"]) in self._dearer:
                    return f"not planned: {difference(other.recipe, recipe)} is slower whatever fits"
        return ""


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
