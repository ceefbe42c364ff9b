"""One program in several variants (what is rematerialised): planned each, the best taken."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import InfeasibleError
from autoshard.plan._make import PlanResult, make_plan
from autoshard.plan._plan import Plan
from autoshard.program import Program
from autoshard.units import format_seconds


def plan_variants(
    variants: Mapping[str, Callable[[], Program]], what: str = "remat", **options: Any
) -> tuple[str, PlanResult]:
    """The name and the plan of the variant with the least expected step that fits; `options` are those of `make_plan`.

    Memory decides both what is computed again and how tensors are split, so every variant is planned with its own
    sharding. Of equal times the earlier variant is taken: name those that compute less first. The plan says in its
    words, and in its provenance under `what`, what the others came to; wall times are those of all of them.

    Raises the `InfeasibleError` of the last variant if none fits.
    """
    best: tuple[str, PlanResult] | None = None
    said: dict[str, str] = {}
    wall: dict[str, float] = {}
    refused: InfeasibleError | None = None
    for name, make in variants.items():
        try:
            made = make_plan(make(), **options)
        except InfeasibleError as error:
            refused = error
            said[name] = "does not fit"
            continue
        step = made.plan.prediction.expected_s
        said[name] = format_seconds(made.plan.prediction.step_time_s)
        wall = {phase: wall.get(phase, 0.0) + s for phase, s in {**dict.fromkeys(wall, 0.0), **made.wall_s}.items()}
        if best is None or step < best[1].plan.prediction.expected_s:
            best = name, made
    if best is None:
        assert refused is not None
        raise refused
    name, made = best
    others = ", ".join(f"{other} {text}" for other, text in said.items() if other != name)
    line = f"{what} {name}" + (f" (instead: {others})" if others else "")

    def told(plan: Plan) -> Plan:
        return dataclasses.replace(plan, words=(*plan.words, line), provenance=plan.provenance | {what: said})

    offered = tuple(dataclasses.replace(each, plan=told(each.plan)) for each in made.candidates)
    return name, dataclasses.replace(made, plan=told(made.plan), candidates=offered, wall_s=wall)
