"""Recipes, what came of each that was considered, and how a plan tells it."""

import dataclasses
import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any

from autoshard.base.units import format_seconds
from autoshard.planning.price.remat_forecast import Foreseen
from autoshard.planning.space.plan_options import REMATS
from autoshard.program import HOSTS, Program, Role


class RecipeOutcome(enum.Enum):
    """Result of considering one recipe; the value is its sentence in reports, unless the row has one of its own."""

    PLANNED = ""
    UNFIT = "does not fit"
    BEATEN = "slower on every mesh"
    UNSTAGED = "slower on every mesh with an axis of stages"
    ARITHMETIC = "not planned: slower by its arithmetic alone"
    BUBBLE = "not planned: slower by its arithmetic and its bubble alone"
    UNMOVED = "not planned: slower even if nothing had to be moved"
    SLACK = "not planned: memory does not bind"
    IMPLIED = "not planned: a recipe that computes less is slower"
    UNSPLIT = "not planned: the best plan without it splits no sequence"
    UNLOOKED = "not looked at: enough other pipelines were"
    OUTDONE = "not looked at: a more promising one of as many stages is slower"
    PARTLY_UNFIT = "not looked at further: it fits on none of the first meshes"
    REFUSED = "cannot be"


SLOWER = (RecipeOutcome.ARITHMETIC, RecipeOutcome.UNMOVED)
"""Outcomes of recipes that are slower than the best one by a bound that ignores memory."""

TIGHT = 0.8
"""Share of the memory limit from which a plan may be slower for lack of memory: more microbatches, and state on
the hosts, are then tried."""

_LESS_MEMORY = {"remat": 1, "microbatches": 1, "batch": -1, "host": 1}
"""Options of a source that the planner may choose: 1 if values that come later need less memory, -1 if more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One value of each choice."""

    choices: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        said = ((name.replace("_", " "), value) for name, value in self.choices)
        return ", ".join(f"{name} {value}" for name, value in said if value is not None)

    @property
    def arguments(self) -> dict[str, Any]:
        """The values by name."""
        return dict(self.choices)

    def but(self, **instead: Any) -> "Recipe":
        """The same with other values."""
        return Recipe(tuple((self.arguments | instead).items()))


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeTried:
    """A recipe, and what came of it."""

    recipe: Recipe
    outcome: RecipeOutcome
    reason: str = ""
    """Sentence of this row; empty where the outcome's own says all."""
    step_time_s: float | None = None
    """Step time of the best plan for it; None if none was made."""
    elements: int | None = None
    """Size of the batch in what the model counts: tokens of a language model."""
    peak_bytes: int | None = None
    bound_s: float | None = None
    """A step takes no less, as was known before planning."""
    expected_s: float | None = None
    """The step with what nearly full memory is expected to cost: what recipes are ranked by, for each element."""
    held_bytes: int | None = None
    """What tells whether memory binds where there is no peak."""
    foreseen: Foreseen | None = None
    """What it was expected to come to before it was planned, of a policy that the planner made value by value."""
    unlooked: int = 0
    """How many meshes with an axis of stages were not looked at for it."""

    @property
    def verdict(self) -> str:
        """Sentence that says why the recipe was not chosen; empty for the chosen one."""
        return self.reason or self.outcome.value

    @property
    def per_element_s(self) -> float:
        """What recipes are compared by; infinite without a plan."""
        if self.expected_s is None:
            return math.inf
        return self.expected_s / (self.elements or 1)


def elements_of(program: Program) -> int:
    """Elements of the batch's largest argument, or tokens where the program says how many."""
    sizes = (math.prod(a.shape) for a in program.arguments if a.role is Role.BATCH)
    return program.tokens or max(sizes, default=1) or 1


def beaten(recipe: Recipe, bound_s: float, elements: int, least_bytes: int) -> RecipeTried:
    """A recipe that is not faster than the best one on any mesh: how much slower is only bounded.

    `least_bytes` is what none of its plans goes below, and held to be its peak.
    """
    return RecipeTried(recipe, RecipeOutcome.BEATEN, elements=elements, bound_s=bound_s, held_bytes=least_bytes)


def implied(recipe: Recipe, other: RecipeTried) -> RecipeTried:
    """Return the row of a recipe that is slower because `other` is, which computes less."""
    reason = f"not planned: {difference(other.recipe, recipe)} is slower whatever fits"
    return RecipeTried(recipe, RecipeOutcome.IMPLIED, reason)


def needs_no_less(recipe: Recipe, other: Recipe) -> bool:
    """Whether a recipe of a source needs at least the memory of another."""
    mine, theirs = recipe.arguments, other.arguments
    batches, parts = ([choices.get(name, 1) for choices in (mine, theirs)] for name in ("batch", "microbatches"))
    # A larger batch in more parts, of which each is no smaller, holds as much at once.
    as_much = batches[0] >= batches[1] and batches[0] * parts[1] >= batches[1] * parts[0]
    for name, value in mine.items():
        if value == theirs[name] or as_much and name in ("batch", "microbatches"):
            continue
        order = {"remat": REMATS.index, "host": HOSTS.index}.get(name, int) if name in _LESS_MEMORY else None
        if order is None or (order(value) - order(theirs[name])) * _LESS_MEMORY[name] > 0:
            return False
    return True


def difference(recipe: Recipe, other: Recipe) -> str:
    """What one recipe has otherwise than another."""
    theirs = other.arguments
    changed = [(name, value) for name, value in recipe.choices if theirs.get(name) != value]
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed if value is not None)


def verdict_of(row: RecipeTried, best: RecipeTried) -> str:
    """Why a recipe was not taken; empty for the best."""
    if row.outcome is RecipeOutcome.BEATEN and row.bound_s is not None and row.elements:
        more = row.bound_s / row.elements / best.per_element_s - 1
        return f"at least {more:.1%} {RecipeOutcome.BEATEN.value}" if more >= 5e-4 else "no faster on any mesh"
    if row.verdict or row is best or row.step_time_s is None:
        return row.verdict
    more = row.per_element_s / best.per_element_s - 1
    each = "" if row.elements == best.elements else " for each element of the batch"
    return f"{more:.1%} slower{each}"


def line_of(chosen: Recipe, rows: Sequence[RecipeTried]) -> str:
    """One sentence of the plan's words: what was chosen, and of one choice what each other value would take."""
    said = [name for name, _ in chosen.choices if any(row.recipe.arguments[name] is not None for row in rows)]
    if len(said) > 1:
        planned = [row for row in rows if row.step_time_s is not None]
        next_best = f"; next best: {planned[1].recipe}, {planned[1].verdict}" if len(planned) > 1 else ""
        return f"recipe {chosen} (of {len(rows)}{next_best})"
    name = (said or [chosen.choices[0][0]])[0]
    others = ", ".join(
        f"{row.recipe.arguments[name] or 1} "
        f"{row.verdict if row.step_time_s is None else format_seconds(row.step_time_s)}"
        for row in rows[1:]
    )
    value = chosen.arguments[name] or 1
    return f"{name.replace('_', ' ')} {value}" + (f" (instead: {others})" if others else "")


def figures_of(row: RecipeTried, rows: Sequence[RecipeTried], varied: bool) -> dict[str, Any]:
    """A row for the plan file; `frontier`: no other recipe is both faster and smaller."""
    figures = {
        "choices": row.recipe.arguments,
        "verdict": row.verdict,
        "step_time_s": row.step_time_s,
        "peak_bytes": row.peak_bytes,
        "bound_s": row.bound_s,
        "frontier": row.peak_bytes is not None
        and not any(
            other.peak_bytes is not None
            and (other.peak_bytes, other.per_element_s) != (row.peak_bytes, row.per_element_s)
            and other.peak_bytes <= row.peak_bytes
            and other.per_element_s <= row.per_element_s
            for other in rows
        ),
    }
    if row.foreseen is not None:
        figures["foreseen"] = {"step_time_s": row.foreseen.step_time_s, "peak_bytes": row.foreseen.peak_bytes}
    if varied and row.step_time_s is not None and row.elements:
        figures["seconds_per_element"] = row.step_time_s / row.elements
    return figures


def eased(recipe: Recipe, tried: Sequence[RecipeTried], limit: int) -> RecipeTried | None:
    """Return a row for a recipe that only eases memory and need not be planned after those `tried`, else None.

    A device has `limit` bytes.
    """
    eases = [n for n, first in (("microbatches", 1), ("host", HOSTS[0])) if recipe.arguments.get(n, first) != first]
    for name, other in itertools.product(eases, tried):
        if other.recipe != recipe.but(**{name: other.recipe.arguments[name]}):
            continue
        held = other.held_bytes if other.peak_bytes is None else other.peak_bytes
        if other.outcome in SLOWER:
            return implied(recipe, other)
        if (held is not None and held < TIGHT * limit) or other.outcome is RecipeOutcome.SLACK:
            return RecipeTried(
                recipe, RecipeOutcome.SLACK, f"{RecipeOutcome.SLACK.value} with {difference(other.recipe, recipe)}"
            )
    return None
