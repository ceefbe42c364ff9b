"""Compiled step times outside of the band of times that a plan states."""

import re
from collections import defaultdict

from autoshard.base.units import format_seconds
from autoshard.exec.hlo.schedule_clock import COMPUTE
from autoshard.exec.hlo.schedule_estimate import Estimate, decided
from autoshard.planning import USUAL, Plan


def outside_band(plan: Plan, timed: Estimate) -> list[str]:
    """Return a sentence if the compiled step takes another time than the plan states, with the ops that differ most.

    The plan states a factor for ops whose time is less sure than usual (`Plan.time_within`). For other plans it is
    `USUAL`, if the estimator's error leaves the difference decided.
    """
    predicted, found = plan.prediction.step_time_s, timed.step_time_s
    factor = plan.time_within or USUAL
    if predicted <= 0 or found <= 0 or max(predicted / found, found / predicted) <= factor:
        return []
    if plan.time_within is None and not decided(found, predicted, timed.error):
        return []
    compiled, foreseen = defaultdict[str, float](float), defaultdict[str, float](float)
    compiled["exposed communication"] = timed.exposed_comm_s
    foreseen["exposed communication"] = plan.prediction.exposed_comm_s
    for span in timed.spans:
        if span.lane == COMPUTE:
            compiled[_operation(span.name)] += span.seconds
    for op in plan.ops:
        foreseen[_operation(op.name)] += op.compute_s
    longer = {name: (compiled[name] - foreseen[name]) * (1 if found > predicted else -1) for name in compiled}
    worst = max(longer, key=lambda name: longer[name])
    stated = "that the plan states" if plan.time_within is not None else "that is usual"
    return [
        f"the compiled step takes {format_seconds(found)}, and not the {format_seconds(predicted)} of the plan within "
        f"a factor {factor:.1f} {stated}: most of the difference is {worst}, {format_seconds(compiled[worst])} as "
        f"compiled and {format_seconds(foreseen[worst])} in the plan"
    ]


def _operation(name: str) -> str:
    """Return the last part of an op's source name, without the number that the compiler adds."""
    return re.sub(r"\.\d+$", "", name.rsplit("/", 1)[-1]) or "small ops"
