"""A plan as one self-contained HTML page, which needs no network and no other file."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoshard.base.units import format_bytes, format_count, format_seconds
from autoshard.cost import Topology, make_mesh
from autoshard.planning import MeshTried, Plan, Prediction, axis_words, mesh_words
from autoshard.report.display import breakable, clean, readable
from autoshard.report.figures import (
    best_baseline,
    compiled_figures,
    fixed_lines,
    learned_line,
    mesh_notes,
    ordered_baselines,
    recipe_heading,
    recipe_line,
)
from autoshard.report.page.ops_page import BOUNDS, link_loads, memory_data, ops_data, ops_summary, roofs, timeline_data
from autoshard.report.schedule_picture import schedule_picture
from autoshard.report.terminal.argument_tree import module_trees
from autoshard.report.terminal.explanation_report import (
    alternatives,
    cause_text,
    chosen_per_element,
    step_limits,
    why_not,
)
from autoshard.report.terminal.plan_difference import difference, figure_name, figure_text, sent_text


if TYPE_CHECKING:
    import jinja2

DRAWN_DEVICES = 8192
"""Maximum number of chips that the page draws; of a larger topology it draws only the first ones."""

MEMORY_KINDS = ("parameters", "frozen_parameters", "optimizer_state", "gradients", "activations", "gathered")
MEMORY_KINDS += ("temporaries", "batch")
"""Kinds of memory in the order in which they are stacked; others follow by name."""
DIFFERENCES = 200
"""Number of differences that a comparison lists; the rest is counted."""
COLLECTIVES = 100
"""Number of rows that are listed; the rest is summed, so that the page stays fast."""


def html_report(
    plan: Plan,
    compare: Plan | None = None,
    measured: Mapping[str, Any] | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as text.

    - `compare`: another plan to compare with.
    - `compiled`: output of `autoshard compile --json` for the plan; by default the figures saved in the plan.
    - `measured`: output of `autoshard measure --json` for the plan.
    """
    prediction = plan.prediction
    named = [("this plan", "prediction", prediction)]
    if compare is not None:
        named.append((f"compared: {compare.program_name} on {mesh_words(compare.mesh)}", "", compare.prediction))
    named += [(name, f"baselines.{name}", row) for name, row in ordered_baselines(plan)]
    slowest = max(row.step_time_s for _, _, row in named)
    # Bars end at three times the plan's length, so that one very slow baseline does not shrink the others.
    scale = min(slowest, 3 * prediction.step_time_s) if prediction.step_time_s > 0 else slowest
    loads, timeline = link_loads(plan), timeline_data(plan)
    others = [row | {"id": number} for number, row in enumerate(alternatives(plan))]
    return (
        environment()
        .get_template("report.html")
        .render(
            plan=plan,
            devices=math.prod(plan.mesh.values()),
            best=best_baseline(plan),
            bars=[
                {
                    "name": name,
                    "key": key,
                    "own": key == "prediction",
                    "prediction": row,
                    "time": _time_bar(row, scale),
                    "why": why_not(plan, name) if name in plan.baselines else (),
                }
                for name, key, row in named
            ],
            lies=_layout(plan),
            schedule=schedule_picture(plan),
            memory=_memory_bar(plan),
            memory_chart=_memory_chart(plan),
            communication=sorted(prediction.collectives, key=lambda c: -c.seconds)[:COLLECTIVES],
            more_communication=sorted(prediction.collectives, key=lambda c: -c.seconds)[COLLECTIVES:],
            ops=ops_summary(plan),
            links=loads,
            timeline=timeline is not None,
            alternatives=others,
            cause=functools.partial(cause_text, plan),
            recipe=recipe_line(plan),
            prices=learned_line(plan),
            meshes=_meshes(plan),
            mesh_notes=" ".join(mesh_notes(plan)),
            recipe_heading=recipe_heading(plan),
            binds=step_limits(plan),
            fixed=fixed_lines(plan),
            compare=compare and _comparison(plan, compare),
            compiled=(compiled or plan.compiled) and _compilation(compiled or compiled_figures(plan)),
            measured=measured and _measurement(plan, measured),
            provenance=_flat(plan.provenance),
            data=script_json(
                _page_data(plan) | {"links": loads, "timeline": timeline, "whatIf": _what_if(plan, others)}
            ),
        )
    )


@functools.cache
def environment() -> "jinja2.Environment":
    """Return Jinja templates that escape everything, with filters for units and names; the same object in each call.

    A template that reads an undefined name raises.
    """
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__.rpartition(".")[0]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "count": format_count,
        "axis_words": axis_words,
        "breakable": breakable,
        "clean": clean,
        "file_line": lambda line: line.rpartition("/")[2],
        "mesh_words": mesh_words,
        "readable": readable,
        "words": lambda kind: kind.replace("_", " "),
        "percent": lambda share: f"{share:.1%}",
        "css": lambda kind: kind.replace("_", "-"),
    }
    made.filters |= filters
    return made


HOPELESS = 2.0
"""Step time over the plan's above which a mesh is folded away, as are meshes without a plan."""


def _meshes(plan: Plan) -> tuple[list[tuple[int, MeshTried]], list[tuple[int, MeshTried]]]:
    """Return the meshes that were tried, with their numbers: those near the plan's step time, and all others."""
    most = HOPELESS * plan.prediction.step_time_s
    near: list[tuple[int, MeshTried]] = []
    far: list[tuple[int, MeshTried]] = []
    for number, each in enumerate(plan.meshes):
        hopeless = number > 0 and (each.step_time_s is None or each.step_time_s > most)
        (far if hopeless else near).append((number, each))
    return near, far


def _layout(plan: Plan) -> str:
    """Describe the physical axes of each mesh axis; empty for a plan with another device order than
    `make_mesh` gives.
    """
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    return mesh.describe() if mesh.device_order == plan.device_order else ""


def _time_bar(prediction: Prediction, scale: float) -> dict[str, Any]:
    """Return widths in percent of `scale` seconds, with exposed communication by kind and axes, longest first.

    Exposed time that no collective explains is a last part of kind `other`. `cut` is True for a step longer than the
    scale. All widths are 0 for a scale of 0.
    """

    def width(seconds: float) -> float:
        """Return the percent of the bar that some seconds have."""
        return round(100 * seconds / scale, 3) if scale > 0 else 0.0

    exposed: dict[tuple[str, str], float] = {}
    for collective in prediction.collectives:
        if collective.waited_s > 0:
            key = (collective.kind, ", ".join(axis_words(collective.axes)))
            exposed[key] = exposed.get(key, 0.0) + collective.waited_s
    listed = sum(exposed.values())
    # In plans of older versions the hidden part of a collective is unknown, so their sum may exceed the exposed time.
    shrink = min(1.0, prediction.exposed_comm_s / listed) if listed > 0 else 0.0
    parts = [
        {"kind": kind, "label": f"{kind} over {axes}", "seconds": seconds * shrink, "width": width(seconds * shrink)}
        for (kind, axes), seconds in sorted(exposed.items(), key=lambda item: -item[1])
    ]
    rest = prediction.exposed_comm_s - sum(part["seconds"] for part in parts)
    # A smaller rest is a rounding error of the sum.
    if rest > 1e-9 * max(prediction.step_time_s, 1e-12):
        known = prediction.collectives and all(c.exposed_s is not None for c in prediction.collectives)
        label = "other exposed communication" if parts else "exposed communication"
        label = "waiting for links that are busy for longer than concurrent compute" if known else label
        parts.append({"kind": "other", "label": label, "seconds": rest, "width": width(rest)})
    return {
        "compute": width(prediction.compute_s),
        "hidden": width(min(prediction.hidden_comm_s, prediction.compute_s)),
        "exposed": parts,
        # The margin is for rounding errors of a bar that ends at the scale.
        "cut": scale > 0 and prediction.step_time_s > scale * 1.0001,
    }


def _memory_bar(plan: Plan) -> dict[str, Any]:
    """Return the parts of memory at the peak by kind, and the place of the limit, in percent of the bar.

    The bar's length is the larger of peak and limit.
    """
    memory = plan.prediction.memory
    total = max(plan.memory_limit_bytes, plan.prediction.peak_bytes, 1)
    kinds = [kind for kind in MEMORY_KINDS if kind in memory] + sorted(set(memory) - set(MEMORY_KINDS))
    return {
        "parts": [
            {"kind": kind, "bytes": memory[kind], "width": round(100 * memory[kind] / total, 3)}
            for kind in kinds
            if memory[kind] > 0
        ],
        "limit": round(100 * plan.memory_limit_bytes / total, 3),
    }


CHART_WIDTH, CHART_HEIGHT = 1000, 180
"""Size of the chart in its own coordinates; the page scales it."""


def _memory_chart(plan: Plan) -> dict[str, Any] | None:
    """Return areas of memory by kind, stacked, over moments in program order at equal distances.

    The axis is not seconds: one matmul may last as long as a thousand ops in which memory rises and falls. `limit_y` is
    None if the limit is above the chart. The result is None without a timeline of at least two moments.
    """
    timeline = plan.timeline
    if timeline is None or len(timeline.moments_s) < 2:
        return None
    count = len(timeline.moments_s)
    kinds = [kind for kind in MEMORY_KINDS if kind in timeline.memory]
    kinds += sorted(set(timeline.memory) - set(kinds))
    totals = [sum(sizes[i] for sizes in timeline.memory.values()) for i in range(count)]
    peak = max(totals)
    # A limit far above the peak would flatten the chart, so it is outside of the chart then.
    top = plan.memory_limit_bytes if peak > 0.4 * plan.memory_limit_bytes else 1.1 * peak
    top = max(top, peak, 1)

    def point(index: int, size: float) -> str:
        """Return a point of the chart, `x,y` in its own coordinates, for a moment and bytes."""
        return f"{index * CHART_WIDTH / (count - 1):.1f},{CHART_HEIGHT - size * CHART_HEIGHT / top:.1f}"

    areas = []
    below = [0] * count
    for kind in kinds:
        above = [low + size for low, size in zip(below, timeline.memory[kind], strict=True)]
        upper = [point(i, size) for i, size in enumerate(above)]
        lower = [point(i, size) for i, size in reversed(list(enumerate(below)))]
        areas.append({"kind": kind, "points": " ".join(upper + lower)})
        below = above
    at = totals.index(peak)
    return {
        "areas": areas,
        "moments": count,
        "peak_x": round(at * CHART_WIDTH / (count - 1), 1),
        "peak_y": round(CHART_HEIGHT - peak * CHART_HEIGHT / top, 1),
        "limit_y": round(CHART_HEIGHT - plan.memory_limit_bytes * CHART_HEIGHT / top, 1)
        if plan.memory_limit_bytes <= top
        else None,
        "top": top,
        "peak_share": at / (count - 1),
    }


def _comparison(plan: Plan, other: Plan) -> dict[str, Any]:
    """Return the differences between this plan (first) and another (second), with lists of at most
    `DIFFERENCES` rows.
    """
    changes = difference(plan, other)
    return {
        "plan": other,
        "rows": [(figure_name(key), figure_text(key, a), figure_text(key, b)) for key, a, b in changes.figures],
        "specs": changes.specs[:DIFFERENCES],
        "more": max(len(changes.specs) - DIFFERENCES, 0),
        "different": len(changes.specs),
        "shared": changes.shared,
        "renamed": changes.renamed,
        "only": [len(changes.only_first), len(changes.only_second)],
        "inside": changes.inside[:DIFFERENCES],
        "more_inside": max(len(changes.inside) - DIFFERENCES, 0),
        "collectives": [(kind, axes, sent_text(a), sent_text(b)) for kind, axes, a, b in changes.collectives],
    }


def _compilation(compiled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict, the seconds of the compiler, and rows (name, predicted, compiled) of text.

    Absent figures are blank, and rows without a compiled figure are left out.
    """
    peak, step, wire = (compiled.get(key) or {} for key in ("peak_bytes", "step_time_s", "wire_bytes"))
    error = step.get("error")
    schedule = "step time, by the compiler's schedule" + (f" +- {error:.0%}" if error else "")
    rows = [
        ("memory of a device at the peak", format_bytes, peak.get("predicted"), peak.get("compiled")),
        ("memory that the program reserves", format_bytes, None, peak.get("reserved")),
        (schedule, format_seconds, step.get("predicted"), step.get("estimated")),
    ]
    rows += [
        (f"on the wire over {clean(axis)}", format_bytes, both["predicted"], both["compiled"])
        for axis, both in wire.items()
    ]
    return {
        "verdict": compiled.get("verdict", ""),
        "compile_s": compiled.get("compile_s"),
        "rows": [
            (name, "" if predicted is None else shown(predicted), shown(found))
            for name, shown, predicted, found in rows
            if found is not None
        ],
    }


def _measurement(plan: Plan, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return measured figures and the ratio of the measured to the predicted step time; None for absent ones."""
    step = measured.get("step_time_s")
    ratio = step / plan.prediction.step_time_s if step and plan.prediction.step_time_s > 0 else None
    collectives = measured.get("collectives") or {}
    wire = collectives.get("wire_bytes") or {}
    return {
        "step_time_s": step,
        "ratio": ratio,
        "max_rel_diff": measured.get("max_rel_diff"),
        "wire": [(axis, both["predicted"], both["compiled"]) for axis, both in wire.items()],
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return rows (dotted key, text) of nested mappings; values that are no text become JSON."""
    rows = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            rows += _flat(item, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item, default=str)))
    return rows


def _page_data(plan: Plan) -> dict[str, Any]:
    """Return the data that the page's script draws, except links, timeline and alternatives.

    If all physical axes have size 1, the last one is drawn.
    """
    topology = Topology.parse(plan.topology)
    axes = [axis for axis in topology.physical_axes if axis.size > 1] or list(topology.physical_axes[-1:])
    return {
        "mesh": list(plan.mesh.items()),
        "deviceOrder": plan.device_order,
        "physical": [{"name": a.name, "size": a.size, "kind": a.kind, "wrap": a.wrap} for a in axes],
        "drawn": DRAWN_DEVICES,
        "trees": [tree.to_json() for tree in module_trees(plan)],
        "step": plan.prediction.step_time_s,
        "memory": memory_data(plan),
        "ops": ops_data(plan),
        "bounds": BOUNDS,
        "roofs": roofs(plan),
    }


def _what_if(plan: Plan, others: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of the page's what-if view: the plan's figures and its alternatives."""
    own = plan.prediction
    return {
        "step": own.step_time_s,
        "peak": own.peak_bytes,
        "limit": plan.memory_limit_bytes,
        "perElement": chosen_per_element(plan),
        "alternatives": others,
    }


def script_json(data: Any) -> str:
    """Return data as JSON for a script element.

    `<`, `>`, `&` and Unicode's line separators are escaped, so that a name cannot close the element.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
