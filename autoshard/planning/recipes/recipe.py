"""Recipes, the outcome of each considered recipe, and the words and figures that a plan reports about them."""

import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from autoshard.base.units import format_seconds
from autoshard.planning.price.remat_forecast import RematForecast
from autoshard.planning.space.plan_options import OFFLOADED, REMATS
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
    SKIPPED = "not looked at: enough other pipelines were"
    DOMINATED = "not looked at: a more promising one of as many stages is slower"
    PARTLY_UNFIT = "not looked at further: it fits on none of the first meshes"
    REFUSED = "cannot be"


SLOWER = (RecipeOutcome.ARITHMETIC, RecipeOutcome.UNMOVED)
"""Verdicts of recipes that are slower than the best one so far by a lower bound that ignores memory."""

TIGHT = 0.8
"""Share of the memory limit from which a lack of memory may slow a plan down. Recipes with more microbatches, or with
state on the hosts, are tried only from this share on.
"""

RISKY = 0.005
"""Least share of the step that nearly full memory is expected to add, from which on a verdict states it apart."""

OTHERS = 4
"""Most values of a choice, other than the chosen one, that the plan's words name."""

_LESS_MEMORY = {"remat": 1, "microbatches": 1, "batch": -1, "host": 1}
"""Options of a source that the planner may choose, mapped to 1 if later values need less memory and to -1 if they need
more.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One value for each choice."""

    choices: tuple[tuple[str, Any], ...]
    """(name, value) of each choice; None as a value leaves the choice at its default."""

    def __str__(self) -> str:
        """Return the choices as text, such as `remat full, batch 8`; values of None are left out."""
        labelled = ((name.replace("_", " "), value) for name, value in self.choices)
        return ", ".join(f"{name} {value}" for name, value in labelled if value is not None)

    @property
    def arguments(self) -> dict[str, Any]:
        """The chosen values by name of their choice."""
        return dict(self.choices)

    def but(self, **instead: Any) -> "Recipe":
        """Return this recipe with some values replaced; new names are added."""
        return Recipe(tuple((self.arguments | instead).items()))


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeTried:
    """A considered recipe and its outcome."""

    recipe: Recipe
    outcome: RecipeOutcome
    reason: str = ""
    """Sentence of this row; empty where the outcome's own says all."""
    step_time_s: float | None = None
    """Step time in seconds of the recipe's best plan; None if no plan was made."""
    elements: int | None = None
    """Batch size in the unit that the model counts: tokens for a language model."""
    peak_bytes: int | None = None
    """Peak memory of one device in the best plan; None without a plan."""
    bound_s: float | None = None
    """Lower bound of the step time in seconds, known before planning."""
    expected_s: float | None = None
    """Step time in seconds with the expected cost of nearly full memory. Recipes are ranked by this figure per
    element.
    """
    held_bytes: int | None = None
    """Lower bound of the peak in bytes, used to decide if memory binds when `peak_bytes` is None."""
    forecast: RematForecast | None = None
    """Forecast from before planning, for a remat policy that the planner composed value by value."""
    eager_s: float | None = None
    """Step time in seconds in eager torch, for forms that run so; None if it is not known."""
    eager_bytes: int | None = None
    """Bytes of one device that the step needs in eager torch; None if they are not known."""
    unlimited_s: float = 0.0
    """Lower bound in seconds of a step with unlimited memory on every searched mesh; 0 if none is known."""
    skipped_meshes: int = 0
    """Number of meshes with an axis of stages that the search skipped for this recipe."""

    @property
    def verdict(self) -> str:
        """Reason for the rejection of the recipe: that of the row, else the outcome's; empty for a planned one without
        its own.
        """
        return self.reason or self.outcome.value

    @property
    def per_element_s(self) -> float:
        """Expected seconds per element of the batch, by which recipes are compared; per step if elements are unknown.

        They are those of eager torch where these are known, and infinite without a plan.
        """
        if self.expected_s is None:
            return math.inf
        return (self.expected_s if self.eager_s is None else self.eager_s) / (self.elements or 1)

    @property
    def shown_s(self) -> float | None:
        """Step time in seconds that reports state: that of eager torch where it is known; None without a plan."""
        return self.step_time_s if self.eager_s is None else self.eager_s

    def beats(self, other: "RecipeTried", beaten_by_s: float) -> bool:
        """Return True if a planned recipe is better than the best one so far.

        A step whose time in eager torch is known beats one without: only the former can be compared with others.

        - `beaten_by_s`: seconds per element below which it is.
        """
        if (self.eager_s is None) != (other.eager_s is None):
            return other.eager_s is None
        return self.per_element_s < beaten_by_s


def elements_of(program: Program) -> int:
    """Return the tokens of a program, or else the number of elements of its largest batch argument; at least 1."""
    sizes = (math.prod(a.shape) for a in program.arguments if a.role is Role.BATCH)
    return program.tokens or max(sizes, default=1) or 1


def beaten_row(
    recipe: Recipe, bound_s: float, elements: int, least_bytes: int, unlimited_s: float = 0.0
) -> RecipeTried:
    """Return the row of a recipe that is slower than the best one on every mesh.

    Only lower bounds of its step are known: `bound_s`, and `unlimited_s` with unlimited memory, in seconds.
    `least_bytes` is a lower bound of the peak of all its plans, and stands in for the peak.
    """
    row = RecipeTried(recipe, RecipeOutcome.BEATEN, elements=elements, bound_s=bound_s, held_bytes=least_bytes)
    return dataclasses.replace(row, unlimited_s=unlimited_s)


def implied_row(recipe: Recipe, other: RecipeTried) -> RecipeTried:
    """Return the row of a recipe that is slower because `other` is, which computes less; its reason names the choices
    in which `other` differs.
    """
    reason = f"not planned: {difference(other.recipe, recipe)} is slower in every case"
    return RecipeTried(recipe, RecipeOutcome.IMPLIED, reason)


def needs_no_less(recipe: Recipe, other: Recipe) -> bool:
    """Return True if a recipe of a source needs at least as much memory as another one, as far as their choices show.

    Values of `_LESS_MEMORY` are compared in their order, `OFFLOADED` after all `REMATS`; any other choice must be
    equal. Microbatches may be more if the batch is larger and each microbatch is no smaller. Both recipes must have the
    same choices.
    """
    mine, theirs = recipe.arguments, other.arguments
    batches, parts = ([choices.get(name, 1) for choices in (mine, theirs)] for name in ("batch", "microbatches"))
    # A larger batch needs as much memory at a time if its microbatches are no smaller.
    as_much = batches[0] >= batches[1] and batches[0] * parts[1] >= batches[1] * parts[0]
    orders = {"remat": (*REMATS, OFFLOADED), "host": HOSTS}
    for name, value in mine.items():
        if value == theirs[name] or as_much and name in ("batch", "microbatches"):
            continue
        pair = [value, theirs[name]]
        if name in orders:
            if any(each not in orders[name] for each in pair):  # a policy by value
                return False
            pair = [orders[name].index(each) for each in pair]
        if name not in _LESS_MEMORY or (pair[0] - pair[1]) * _LESS_MEMORY[name] > 0:
            return False
    return True


def difference(recipe: Recipe, other: Recipe) -> str:
    """Return the choices of a recipe that differ from those of another one, as text; values of None are left out."""
    theirs = other.arguments
    changed = [(name, value) for name, value in recipe.choices if theirs.get(name) != value]
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed if value is not None)


def shortened(words: str) -> str:
    """Return words on a recipe in which lists of three or more names, as in `keep=q_proj/k_proj/v_proj`, are counted.

    The plan file and the line on the chosen recipe have all names.
    """
    return re.sub(r"(?<==)[^,\s/]+(?:/[^,\s/]+){2,}", lambda found: f"{found[0].count('/') + 1} values", words)


def verdict_of(row: RecipeTried, best: RecipeTried) -> str:
    """Return the reason for which a recipe was rejected; empty for the best one.

    A recipe whose own verdict is empty is reported by how much slower it is than the best, per element if their batches
    differ. One whose memory may be short is also reported by its expected time. A beaten one is reported by its bound.
    """
    if row.outcome is RecipeOutcome.BEATEN and row.bound_s is not None and row.elements:
        excess = row.bound_s / row.elements / best.per_element_s - 1
        return f"at least {excess:.1%} {RecipeOutcome.BEATEN.value}" if excess >= 5e-4 else "no faster on any mesh"
    if row.verdict or row is best or row.step_time_s is None:
        return row.verdict
    if row.eager_s is None and best.eager_s is not None:
        return "its time in eager torch is not known"
    excess = row.per_element_s / best.per_element_s - 1
    each = "" if row.elements == best.elements else " for each element of the batch"
    if row.eager_s is not None:
        return f"{excess:.1%} slower{each} in eager torch"
    assert best.step_time_s is not None
    foreseen = row.step_time_s / (row.elements or 1) / (best.step_time_s / (best.elements or 1)) - 1
    if excess - foreseen > RISKY:
        if foreseen < -5e-4:
            return f"{-foreseen:.1%} faster{each}, {excess:.1%} slower if memory is short"
        return f"{max(foreseen, 0.0):.1%} slower{each}, {excess:.1%} if memory is short"
    return f"{excess:.1%} slower{each}"


def line_of(chosen: Recipe, rows: Sequence[RecipeTried]) -> str:
    """Return a sentence for the plan's words on the chosen recipe and its alternatives.

    `rows` begins with the chosen recipe, the others by rank. If several choices were open, the sentence names the next
    best recipe, else the time or verdict of at most `OTHERS` other values.
    """
    open_choices = [name for name, _ in chosen.choices if any(row.recipe.arguments[name] is not None for row in rows)]
    if len(open_choices) > 1:
        planned = [row for row in rows if row.step_time_s is not None]
        best = planned[1] if len(planned) > 1 else None
        next_best = f"; next best: {shortened(str(best.recipe))}, {best.verdict}" if best is not None else ""
        return f"recipe {chosen} (of {len(rows)}{next_best})"
    name = (open_choices or [chosen.choices[0][0]])[0]
    others = ", ".join(
        f"{shortened(str(row.recipe.arguments[name] or 1))} "
        f"{row.verdict if row.shown_s is None else format_seconds(row.shown_s)}"
        for row in rows[1 : OTHERS + 1]
    )
    others += f", and {len(rows) - OTHERS - 1} more" if len(rows) > OTHERS + 1 else ""
    value = chosen.arguments[name] or 1
    return f"{name.replace('_', ' ')} {value}" + (f" (instead: {others})" if others else "")


def figures_of(row: RecipeTried, rows: Sequence[RecipeTried], varied: bool) -> dict[str, Any]:
    """Return a row for the plan file. Its `frontier` is True if no other recipe is both as fast and as small.

    Speed is per element; rows without a plan are not on the frontier, and rows with equal figures are so together. With
    `varied`, batches differ, and the row has seconds per element too.
    """
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
    if row.eager_s is not None:
        figures["eager_step_time_s"] = row.eager_s
    if row.forecast is not None:
        figures["foreseen"] = {"step_time_s": row.forecast.step_time_s, "peak_bytes": row.forecast.peak_bytes}
    if varied and row.step_time_s is not None and row.elements:
        figures["seconds_per_element"] = (row.shown_s or 0.0) / row.elements
    return figures


def unfit_row(recipe: Recipe, tried: Sequence[RecipeTried], limit: int, on_chip: int) -> RecipeTried | None:
    """Return a row for a recipe that cannot fit since another one of `tried` does not; None if it may fit.

    Either the other one needs no more memory, or it has larger microbatches, and a part of its memory does not fit
    either. With k times as many microbatches, no value becomes smaller than a k-th of its size.

    - `limit`: bytes of one device.
    - `on_chip`: most bytes of values that may be in on-chip memory, which do not count.
    """
    count = recipe.arguments.get("microbatches")
    for other in tried:
        if other.outcome is not RecipeOutcome.UNFIT:
            continue
        part, theirs = "", other.recipe.arguments.get("microbatches")
        if not needs_no_less(recipe, other.recipe):
            if not count or not theirs or count <= theirs or other.recipe != recipe.but(microbatches=theirs):
                continue
            if (other.held_bytes or 0) * theirs <= (limit + on_chip) * count:
                continue
            part = f"1/{count // theirs} of the memory with "
        reason = f"does not fit: {part}{difference(other.recipe, recipe)} does not"
        return RecipeTried(recipe, RecipeOutcome.UNFIT, reason)
    return None


def slack_row(recipe: Recipe, tried: Sequence[RecipeTried], limit: int, beat_s: float = math.inf) -> RecipeTried | None:
    """Return a row for a recipe that only frees memory and need not be planned; None if it must be.

    The recipe is compared with those `tried` that differ in microbatches or state on the hosts only. It need not be
    planned if one of them is slower regardless of memory, or needs less than `TIGHT` of `limit` (bytes of one device).
    A recipe that also offloads the inputs of layers counts for the second: what to store is chosen later, by value.

    - `beat_s`: seconds per element of the best recipe; a recipe that takes as long with unlimited memory is slower.
    """
    eases = [n for n, first in (("microbatches", 1), ("host", HOSTS[0])) if recipe.arguments.get(n, first) != first]
    for name, other in itertools.product(eases, tried):
        theirs = recipe.but(**{name: other.recipe.arguments[name]})
        offloaded = recipe.arguments.get("remat") in REMATS and other.recipe == theirs.but(remat=OFFLOADED)
        if other.recipe != theirs and not offloaded:
            continue
        peak_bytes = other.held_bytes if other.peak_bytes is None else other.peak_bytes
        is_slower = other.outcome in SLOWER or other.unlimited_s / (other.elements or 1) >= beat_s
        if is_slower and not offloaded:
            return implied_row(recipe, other)
        if (peak_bytes is not None and peak_bytes < TIGHT * limit) or other.outcome is RecipeOutcome.SLACK:
            return RecipeTried(
                recipe, RecipeOutcome.SLACK, f"{RecipeOutcome.SLACK.value} with {difference(other.recipe, recipe)}"
            )
    return None
