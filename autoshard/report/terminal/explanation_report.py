"""Report of one tensor's spec, of the limits of a plan, and of its alternatives."""

import math
from collections import defaultdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_seconds
from autoshard.planning import (
    WAITS_FOR_HOST,
    Alternative,
    Collective,
    Explanation,
    Plan,
    Prediction,
    axis_words,
    parameter_of,
    spec_text,
)
from autoshard.report.display import clean, fold, readable
from autoshard.report.figures import ordered_baselines
from autoshard.report.schedule_picture import schedule_report
from autoshard.report.terminal.compute_limits import compute_limits


SHOWN = 10
"""Most alternatives that the report shows; the rest is counted."""

HOW = {
    "solved": "everything else chosen again",
    "held": "everything else as it is",
    "completed": "other arguments as they are",
    "inexpressible": "the form cannot hold it",
    "impossible": "its neighbours exclude it",
    "unpriced": "not priced within the time limit",
    "unsolved": "needs other decisions too: add --solve",
}
"""Words for the values of `Alternative.how`."""


def explanation_report(found: Explanation, plan: Plan | None = None) -> RenderableType:
    """Return the report of a tensor's spec: its source, every other spec with its price, and the pipeline of its
    `plan`.

    Without a plan or a pipeline, the last part is left out.
    """
    pipeline = None if plan is None else schedule_report(plan)
    explained = _explained(found)
    return explained if pipeline is None else Group(explained, Text(), Text("Pipeline", style="bold"), pipeline)


def _explained(found: Explanation) -> RenderableType:
    """Return the report of a tensor's spec without the pipeline; at most `SHOWN` alternatives and the chosen spec are
    listed.
    """
    lines: list[RenderableType] = [
        Text.assemble(
            (clean(found.name), "bold"), f" ({found.role}) is split ", (spec_text(found.spec, found.shape), "cyan")
        )
    ]
    if found.fixed:
        lines.append(Text(f"Fixed: {clean(found.fixed)}", style="yellow"))
    if found.alike:
        lines.append(Text(f"Stands for {len(found.alike)} more of this shape and spec, to {clean(found.alike[-1])}."))
    if found.shares:
        more = f" and {len(found.shares) - 3} more" if len(found.shares) > 3 else ""
        lines.append(Text(f"Has one spec with {', '.join(clean(n) for n in found.shares[:3])}{more}."))
    if not found.alternatives:
        lines.append(Text("It is a constant or of one element: there is nothing to choose."))
        return Group(*lines)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column, right in (("spec", 0), ("step", 1), ("against it", 1), ("peak", 1), ("adds, removes", 0)):
        table.add_column(column, justify="right" if right else "left", no_wrap=bool(right))
    for one in found.alternatives[: SHOWN + 1]:
        table.add_row(
            Text(spec_text(one.spec, found.shape), style="cyan" if one.chosen else ""),
            "-" if one.step_time_s is None else format_seconds(one.step_time_s),
            _delta(one),
            "-" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            Text(_what(one)),
        )
    lines.append(Padding(table, (1, 0, 0, 2)))
    if any(one.how == "held" for one in found.alternatives):
        solved = any(one.how == "solved" and not one.chosen for one in found.alternatives)
        rest = f"without it, {HOW['solved']}" if solved else "--solve chooses the rest again"
        lines.append(Text(f"  * {HOW['held']}; {rest}", style="dim"))
    if any(one.how == "completed" for one in found.alternatives):
        line = f"  * within --for {found.form}: {HOW['completed']}; --solve searches their specs too"
        lines.append(Text(line, style="dim"))
    rest = len(found.alternatives) - SHOWN - 1
    if rest > 0:
        lines.append(Text(f"  and {rest} more that are slower", style="dim"))
    return Group(*lines)


def _delta(one: Alternative) -> str:
    """Return the signed seconds of an alternative against the plan, with `*` if all other decisions are fixed.

    It is `chosen` for the plan's own spec, and `-` if unknown.
    """
    if one.chosen or one.delta_s is None:
        return "chosen" if one.chosen else "-"
    sign = "+" if one.delta_s >= 0 else "-"
    return f"{sign}{format_seconds(abs(one.delta_s))}{'' if one.how == 'solved' else '*'}"


def _what(one: Alternative) -> str:
    """Return the largest collective that an alternative adds, and the change that would make it win.

    It is empty for the chosen spec, and the reason if the alternative is impossible.
    """
    if one.chosen:
        return ""
    if one.step_time_s is None:
        return HOW[one.how]
    added = [f"{c.kind} over {', '.join(c.axes)}" for c in one.collectives[:1]]
    if added and added[0] in one.wins_if:
        added = []
    return "; ".join([*added, one.wins_if])


def alternatives(plan: Plan) -> list[dict[str, Any]]:
    """Return every alternative to the plan with a known time or bound, as one dict each.

    Alternatives are recipes, meshes and baselines, in this order. Unknown figures are None. If a recipe has another
    batch, compare times per element. A dict has these entries:

    - `group`, `name`: kind of alternative (`recipes`, `meshes`, `baselines`) and its name.
    - `step_s`, `bound_s`: step time and lower bound in seconds.
    - `peak_bytes`: peak of one device.
    - `fits`: True if it fits in memory.
    - `foreseen`: True if the figures of a recipe are a forecast.
    - `per_element_s`: seconds per element of a batch.
    - `why`: reason against it in words.
    """
    rows = [*_recipes(plan), *_meshes(plan)]
    for name, row in ordered_baselines(plan):
        reason = " ".join(why_not(plan, name))
        rows.append(_row("baselines", name, row.compared_s, None, row.peak_bytes, row.fits, reason))
    return [row for row in rows if row["step_s"] is not None or row["bound_s"] is not None]


def chosen_per_element(plan: Plan) -> float | None:
    """Return the chosen recipe's seconds per element of a batch; None if recipes do not differ in their batch."""
    return next((row.get("seconds_per_element") for row in _tried(plan) if not row.get("verdict")), None)


def _tried(plan: Plan) -> tuple[dict[str, Any], ...]:
    """Return the recipes in a plan's provenance, each as a dict; empty for a plan of one given recipe."""
    return plan.recipe.tried if plan.recipe is not None else ()


def _recipes(plan: Plan) -> list[dict[str, Any]]:
    """Return the rows of recipes that were not chosen; for an unplanned one with its forecast, if there is one."""
    rows = []
    for row in _tried(plan):
        if not row.get("verdict"):
            continue
        foreseen = row.get("foreseen") if row.get("step_time_s") is None else None
        figures = foreseen or row
        name = ", ".join(f"{name} {value}" for name, value in row["choices"].items() if value is not None)
        times = (figures.get("step_time_s"), row.get("bound_s"), figures.get("peak_bytes"))
        alternative = _row("recipes", name, *times, None, row["verdict"])
        rows.append(alternative | {"foreseen": foreseen is not None, "per_element_s": row.get("seconds_per_element")})
    return rows


def _meshes(plan: Plan) -> list[dict[str, Any]]:
    """Return the rows of all meshes but the chosen one, which is the first."""
    return [
        _row("meshes", row.mesh.replace(",", ", "), row.step_time_s, row.bound_s, None, None, row.verdict)
        for row in plan.meshes[1:]
    ]


def _row(
    group: str, name: str, step: float | None, bound: float | None, peak: int | None, fits: bool | None, why: str
) -> dict[str, Any]:
    """Return an alternative as a dict of `alternatives`, neither forecast nor with a time per element.

    Times that are infinite become None, and texts are cleaned and shortened.

    - `group`, `name`: kind of alternative and its name.
    - `step`, `bound`: step time and lower bound in seconds.
    - `peak`, `fits`: bytes of one device, and True if they fit.
    - `why`: reason against it.
    """
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


def step_limits(plan: Plan) -> tuple[str, ...]:
    """Return sentences on the limits of step time and memory, on gains of compiler flags, and on the bound."""
    return (*_time(plan), *compute_limits(plan), *_memory(plan), *_flag_sets(plan), *_gaps(plan))


def _time(plan: Plan) -> list[str]:
    """Return sentences on the limits of the step time; none for a step without time.

    For a plan by stages the sentence is on the bubble. Below 0.5 % of exposed communication, compute is the limit.
    """
    prediction = plan.prediction
    total = prediction.compute_s + prediction.exposed_comm_s
    if total <= 0:
        return []
    share = prediction.exposed_comm_s / total
    if plan.by_stage and plan.pipeline is not None:
        bubble = plan.pipeline.bubble()
        return [f"{bubble:.1%} of the time in the stages is bubble; inside of them {share:.1%} is communication."]
    # Below half a percent, a printed share would round to 0 or 1 %.
    if share < 0.005:
        return ["Compute sets the step time: hardly any communication is exposed."]
    worst = _worst_exposed(plan, prediction)
    costliest = f"; the costliest is {worst}" if worst else ""
    lines = [f"Exposed communication is {share:.0%} of the step{costliest}."]
    spans = [span for span in plan.timeline.spans if span.name.startswith("waiting for ")] if plan.timeline else []
    for on_host, words in (
        (True, "transfers from and to the hosts' memory that compute does not hide"),
        (False, "collectives that compute covers in part"),
    ):
        waits = sum(span.seconds for span in spans if (span.name == WAITS_FOR_HOST) is on_host)
        # Shorter waits are not worth a sentence, like communication above.
        if waits > 0.005 * total:
            lines.append(f"The step waits {format_seconds(waits)} of it for {words}.")
    return lines


def _flag_sets(plan: Plan) -> list[str]:
    """Return a sentence on the set of compiler flags that gains most for this plan; empty if the plan has none."""
    gains = plan.origin.flag_sets
    if not gains:
        return []
    name, step = min(gains.items(), key=lambda item: (item[1], item[0]))
    share = 1.0 - step / plan.prediction.step_time_s
    return [
        f"With --xla-flags {name} this plan takes {format_seconds(step)}, {share:.0%} less; one made so may take less."
    ]


def _worst_exposed(plan: Plan, prediction: Prediction) -> str:
    """Return the kind of collective and the axes that expose most communication, with seconds and its largest cause.

    Causes that differ in the number of a layer alone are one. The share of a cause of at most half is stated.

    `prediction` is that of the plan, or of a baseline. Empty if nothing is exposed.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in prediction.collectives:
        if collective.waited_s > 0:
            groups.setdefault((collective.kind, collective.axes), []).append(collective)
    if not groups:
        return ""
    (kind, axes), members = max(groups.items(), key=lambda item: sum(c.waited_s for c in item[1]))
    total = sum(c.waited_s for c in members)
    waited = defaultdict[str, float](float)
    for collective in members:
        waited[cause_text(plan, collective) if collective.cause else ""] += collective.waited_s
    families = [(name, sum(waited[text] for text in family)) for name, family in fold(waited)]
    name, seconds = max(families, key=lambda item: item[1])
    share = seconds / total
    most = "" if len(families) == 1 else ", chiefly" if share > 0.5 else f", {share:.0%} of it"
    cause = f"{most} for {name}" if name else ""
    return f"{kind} over {' x '.join(axis_words(axes))}, {format_seconds(total)}{cause}"


def cause_text(plan: Plan, collective: Collective) -> str:
    """Return the cause of a collective for readers: `gradient of params.up` for a sum that is named after state."""
    role = plan.roles.get(collective.cause)
    if collective.kind not in ("reduce-scatter", "all-reduce") or role not in ("parameter", "optimizer_state"):
        return readable(collective.cause)
    parameter = parameter_of(collective.cause, plan.shapes, plan.roles) if role == "optimizer_state" else None
    return f"gradient of {readable(parameter or collective.cause)}"


def _memory(plan: Plan) -> list[str]:
    """Return a sentence on the memory peak, its largest kind and the bytes that are left or missing.

    Empty if the kinds are unknown.
    """
    prediction = plan.prediction
    if not prediction.memory:
        return []
    kind, size = max(prediction.memory.items(), key=lambda item: item[1])
    where = f" at {readable(prediction.peak_at)}" if prediction.peak_at else ""
    room = plan.memory_limit_bytes - prediction.peak_bytes
    remainder = f"{format_bytes(room)} is left" if room >= 0 else f"{format_bytes(-room)} is missing"
    words = kind.replace("_", " ") + (" hold" if kind.endswith("s") else " holds")
    return [f"Memory peaks{where}, where {words} most ({format_bytes(size)}); {remainder}."]


def _gaps(plan: Plan) -> list[str]:
    """Return one sentence on the solver gap and the plan gap; for a plan by stages on the plan gap alone."""
    if plan.by_stage:
        return [
            f"The step is within {plan.plan_gap:.1%} of a lower bound for all cuts between modules by this schedule, "
            "under the prices of the plan inside of stages."
        ]
    solver = "is optimal" if plan.solver_gap <= 0 else f"is within {plan.solver_gap:.2%} of optimal (solver gap)"
    return [
        f"The solution of the Problem {solver}; the predicted step time is within {plan.plan_gap:.1%} of a certified "
        "lower bound for every plan on this mesh (plan gap)."
    ]


def why_not(plan: Plan, name: str) -> tuple[str, ...]:
    """Return sentences with the reasons for which the plan was preferred to its baseline `name`.

    They state if it does not fit and by how many bytes, and the larger source of its extra time. A baseline at most 0.5
    % slower counts as equally fast. Times in eager torch have no parts, and a baseline without one is not compared.
    """
    own, other = plan.prediction, plan.baselines[name]
    sentences = []
    if not other.fits and other.peak_bytes <= plan.memory_limit_bytes:
        sentences.append(f"It does not fit: eager torch needs {format_bytes(other.eager_peak_bytes or 0)} a device.")
    elif not other.fits:
        over = other.peak_bytes - plan.memory_limit_bytes
        kind, size = max(other.memory.items(), key=lambda item: item[1], default=("", 0))
        most = f", of which {kind.replace('_', ' ')} take {format_bytes(size)}" if kind else ""
        sentences.append(
            f"It does not fit: it needs {format_bytes(other.peak_bytes)} a device{most}, {format_bytes(over)} too much."
        )
    if own.eager_step_time_s is not None and other.eager_step_time_s is None:
        return (*sentences, f"The {plan.origin.form} form cannot hold it with this recipe.")
    slower = other.compared_s - own.compared_s
    # Differences below half a percent are far below the error of a prediction.
    if slower <= 0.005 * own.compared_s:
        faster = f"it would be {format_seconds(-slower)} faster" if slower < 0 else "it is about as fast as the plan"
        sentences.append(f"By time alone {faster}.")
        return tuple(sentences)
    if own.eager_step_time_s is not None:
        return (*sentences, f"It is {slower / own.compared_s:.1%} slower in eager torch.")
    parts = {
        "compute": other.compute_s - own.compute_s,
        "exposed communication": other.exposed_comm_s - own.exposed_comm_s,
    }
    main, amount = max(parts.items(), key=lambda item: item[1])
    share = f"{slower / own.step_time_s:.1%} " if own.step_time_s else ""  # a program without ops takes no time
    sentence = f"It is {share}slower, chiefly by {format_seconds(amount)} more {main}"
    worst = _worst_exposed(plan, other)
    if main != "compute" and worst:
        sentence += f"; its costliest is {worst}"
    return (*sentences, sentence + ".")
