"""Mixtures of two recomputation policies, each for a part of the layers."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from autoshard.planning.forms.eager_memory import EAGER_SHARE
from autoshard.planning.price.on_chip_memory import on_chip_room
from autoshard.planning.recipes.recipe import RecipeOutcome, RecipeTried
from autoshard.planning.recipes.recipe_follow_ups import RETRIES, WORTH_PLANNING, Search


FINENESS = 16
"""Resolution of a mixture: its number of layers is searched to within one part in this many of all layers."""


def mix_remats(search: Search, remats: Sequence[str]) -> None:
    """Plan mixtures of a remat policy with one that computes less and does not fit.

    Mixtures are forecast from steps in eager torch that are known, and the best one is planned. Without such steps
    `search_mixtures` finds them. Nothing is done if the number of layers is unknown.

    - `search`: must have a best recipe.
    - `remats`: policies, those that compute less first.
    """
    assert search.best is not None
    if search.layers is None:
        return
    mixture = min(_mixtures(search, remats, search.layers), key=lambda each: each.per_element_s, default=None)
    if mixture is None:
        search_mixtures(search, remats, search.layers)
        return
    if mixture.per_element_s >= (1 - WORTH_PLANNING) * search.best[0].per_element_s:
        return
    for _ in range(RETRIES):
        policy = f"{mixture.slow.recipe.arguments['remat']}:{mixture.slow_layers}+{mixture.fast}"
        recipe, mesh = mixture.slow.recipe.but(remat=policy), search.mesh_of[mixture.slow.recipe]
        search.plan(recipe, mesh=dict(mesh), refine_axes=False)
        more = mixture.slow_layers + max(1, search.layers // FINENESS)
        if search.tried[-1].outcome is not RecipeOutcome.UNFIT or more >= search.layers:
            return
        mixture = dataclasses.replace(mixture, slow_layers=more)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of two policies, with the time that is forecast for it."""

    slow: RecipeTried
    """Row of the planned recipe with the policy that computes more."""
    fast: str
    """The policy that computes less."""
    slow_layers: int
    """Number of the first layers, which have the slower policy."""
    per_element_s: float
    """Forecast seconds per element of the batch in eager torch."""


def _mixtures(search: Search, remats: Sequence[str], layers: int) -> Iterator[Mixture]:
    """Yield the mixture of each planned recipe with each faster policy for which eager torch lacks memory.

    Seconds and bytes of eager torch are linear in the number of layers with a policy.
    """
    room = EAGER_SHARE * search.limit
    for slow in search.tried:
        if slow.outcome is not RecipeOutcome.PLANNED or slow.recipe.arguments.get("remat") not in remats:
            continue
        for fast in remats[: remats.index(slow.recipe.arguments["remat"])]:
            other = next((each for each in search.tried if each.recipe == slow.recipe.but(remat=fast)), None)
            if other is None or other.outcome is not RecipeOutcome.UNFIT:
                continue
            if None in (slow.eager_s, slow.eager_bytes, other.eager_s, other.eager_bytes):
                continue
            more_bytes = (other.eager_bytes or 0) - (slow.eager_bytes or 0)
            if more_bytes <= 0:
                continue
            share = math.ceil(layers * ((other.eager_bytes or 0) - room) / more_bytes) / layers
            seconds = (1 - share) * (other.eager_s or 0.0) + share * (slow.eager_s or 0.0)
            if 0 < share < 1:
                yield Mixture(slow, fast, round(share * layers), seconds / (slow.elements or 1))


def search_mixtures(search: Search, remats: Sequence[str], layers: int) -> None:
    """Plan mixtures of the best recipe's remat policy with each policy that computes less and does not fit, on the best
    mesh.

    A binary search finds the fewest layers with the slower policy whose plan is a new best, to within `FINENESS`.
    Fewer recomputing layers are faster until short memory forces other splits of the tensors. If a mixture is slower
    although its memory is not nearly full, recomputing is not what costs time, and no other mixture is planned. Nor is
    one whose other layers spare too little arithmetic (`WORTH_PLANNING`), or whose part of their memory does not fit.
    Nothing is done for a best policy that is not in `remats`.

    - `search`: must have a best recipe, and exactly one row for each faster policy in its place, else `ValueError`.
    - `remats`: policies, those that compute less first.
    - `layers`: number of layers.
    """
    assert search.best is not None
    row, result = search.best
    slow = row.recipe.arguments.get("remat")
    if slow not in remats:
        return
    mesh = dict(result.plan.mesh)
    room = search.limit + on_chip_room(search.topology, search.limit)
    for fast in remats[: remats.index(slow)]:
        (fast_row,) = (each for each in search.tried if each.recipe == row.recipe.but(remat=fast))
        if fast_row.outcome is not RecipeOutcome.UNFIT:
            continue
        more_s = search.computed_s[row.recipe] - search.computed_s.get(fast_row.recipe, 0.0)
        too_few, enough = 0, layers
        while enough - too_few > max(1, layers // FINENESS):
            slow_layers = (too_few + enough) // 2
            saved_s = more_s * (layers - slow_layers) / layers
            if saved_s < WORTH_PLANNING * (search.best[0].step_time_s or 0.0):
                break
            if (fast_row.held_bytes or 0) * (layers - slow_layers) > room * layers:  # the other layers' part alone
                too_few = slow_layers
                continue
            mixed = row.recipe.but(remat=f"{slow}:{slow_layers}+{fast}")
            if search.plan(mixed, mesh=mesh, refine_axes=False):
                enough = slow_layers
                continue
            mixture = search.tried[-1]
            if mixture.step_time_s is not None and mixture.expected_s == mixture.step_time_s:
                break
            too_few = slow_layers
