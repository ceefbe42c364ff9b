"""What else was possible, as a plan knows it: other recipes, other meshes and the baselines, beside what was chosen."""

import math
from typing import Any

from autoshard.plan import Plan
from autoshard.report._binding import why_not
from autoshard.report._names import clean


def alternatives(plan: Plan) -> list[dict[str, Any]]:
    """Every alternative of which a time or a bound is known: its group and name, step time (or what it takes at
    least), bytes of one device at the peak, seconds for an element of a batch, and in words why it was not chosen.

    What is not known is None. Where a recipe has another batch, times compare by element.
    """
    found = [*_recipes(plan), *_meshes(plan)]
    for name, row in sorted(plan.baselines.items(), key=lambda item: (not item[1].fits, item[1].step_time_s)):
        said = " ".join(why_not(plan, name))
        found.append(_row("baselines", name, row.step_time_s, None, row.peak_bytes, row.fits, said))
    return [row for row in found if row["step_s"] is not None or row["bound_s"] is not None]


def chosen_per_element(plan: Plan) -> float | None:
    """Seconds of the chosen recipe for one element of a batch; None where recipes do not differ in their batch."""
    return next((row.get("seconds_per_element") for row in _tried(plan) if not row.get("verdict")), None)


def _tried(plan: Plan) -> list[dict[str, Any]]:
    return (plan.provenance.get("recipe") or {}).get("tried", [])


def _recipes(plan: Plan) -> list[dict[str, Any]]:
    """Where a recipe was not planned, with what was foreseen of it if it was."""
    found = []
    for row in _tried(plan):
        if not row.get("verdict"):
            continue
        foreseen = row.get("foreseen") if row.get("step_time_s") is None else None
        known = foreseen or row
        name = ", ".join(f"{name} {value}" for name, value in row["choices"].items() if value is not None)
        times = (known.get("step_time_s"), row.get("bound_s"), known.get("peak_bytes"))
        made = _row("recipes", name, *times, None, row["verdict"])
        found.append(made | {"foreseen": foreseen is not None, "per_element_s": row.get("seconds_per_element")})
    return found


def _meshes(plan: Plan) -> list[dict[str, Any]]:
    """All but the chosen one, which is the first."""
    return [
        _row("meshes", row.mesh.replace(",", ", "), row.step_time_s, row.bound_s, None, None, row.verdict)
        for row in plan.meshes[1:]
    ]


def _row(
    group: str, name: str, step: float | None, bound: float | None, peak: int | None, fits: bool | None, why: str
) -> dict[str, Any]:
    return {
        "group": group,
        "name": clean(name, 120),
        "step_s": step if step is not None and math.isfinite(step) else None,
        "bound_s": bound if bound is not None and math.isfinite(bound) else None,
        "peak_bytes": peak,
        "fits": fits,
        "why": clean(why, 600),
        "foreseen": False,
        "per_element_s": None,
    }
