"""Serving points as a table, as figures for scripts, and as one self-contained HTML page."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.files import read_json
from autoshard.base.units import format_bytes, format_count, format_seconds
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.report.display import OneLine, clean
from autoshard.report.page.html_report import environment, script_json
from autoshard.serving.serving_check import CheckedStep
from autoshard.serving.serving_exports import vllm_commands, vllm_notes
from autoshard.serving.serving_model import ServingPoint
from autoshard.serving.serving_plan import ServingPlan


_COLUMNS = ("tensor", "attn", "experts", "engines", "batch", "chunk", "first", "each", "tok/s", "GiB")
"""Columns of the table of serving points; `_note` explains them."""


def serving_figures(plan: ServingPlan, checked: Sequence[CheckedStep] = ()) -> dict[str, Any]:
    """Return the object that `autoshard serve-plan --json` prints, all points included; times in seconds.

    Absent limits are None. `checked` are the results of `check_serving`, empty without a check.
    """
    topology = Topology.parse(plan.topology)
    return {
        "model": plan.config,
        "topology": plan.topology,
        "chip": topology.chip.name,
        "chips": topology.num_chips,
        "input": plan.asked.input,
        "output": plan.asked.output,
        "weights": plan.asked.weights,
        "cache": plan.asked.cache,
        "sample": plan.asked.sample,
        "first_limit_s": _bounded(plan.limits.first_s),
        "token_limit_s": _bounded(plan.limits.token_s),
        "gap_limit_s": _bounded(plan.limits.gap_s),
        "best": _figures(plan.best),
        "commands": vllm_commands(plan),
        "notes": vllm_notes(plan),
        "checked": [_checked_figures(step) for step in checked],
        "frontier": [_figures(point) for point in plan.frontier],
        "points": [
            _figures(point)
            | {"prompt_s": point.prompt_s, "decode_s": point.decode_s, "added_s": point.added_s, "sent_s": point.sent_s}
            | {"commands": vllm_commands(plan, point)}
            for point in plan.points
        ],
    }


def _bounded(seconds: float) -> float | None:
    """Return a finite limit unchanged, and None for an infinite one, which JSON cannot express."""
    return seconds if math.isfinite(seconds) else None


def _figures(point: ServingPoint) -> dict[str, Any]:
    """Return the figures of a point; degrees of engines for prompts are 0 without such engines."""
    return {
        "tensor": point.engine.tensor,
        "attention": point.engine.attention,
        "experts": point.engine.experts,
        "engines": point.engines,
        "prompt_engines": point.prompt_engines,
        "prompt_tensor": point.prompts.tensor if point.prompts else 0,
        "prompt_attention": point.prompts.attention if point.prompts else 0,
        "prompt_experts": point.prompts.experts if point.prompts else 0,
        "batch": point.batch,
        "chunk": point.chunk,
        "first_s": point.first_s,
        "token_s": point.token_s,
        "gap_s": point.gap_s,
        "tokens_per_s": point.tokens_per_s,
        "peak_bytes": point.peak_bytes,
    }


def _checked_figures(step: CheckedStep) -> dict[str, Any]:
    """Return the seconds and bytes of a checked step by closed form and of both plans; None for a missing plan."""
    figures: dict[str, Any] = {"kind": step.kind, "sequences": step.sequences, "length": step.length}
    figures |= {"failed": list(step.failed)}
    figures |= {"estimate_s": step.estimate.step_time_s, "estimate_bytes": step.estimate.peak_bytes}
    for name, plan in (("planned", step.laid_out), ("free", step.free)):
        figures[f"{name}_s"] = None if plan is None else plan.prediction.step_time_s
        figures[f"{name}_bytes"] = None if plan is None else plan.prediction.peak_bytes
    return figures


def serving_report(plan: ServingPlan, checked: Sequence[CheckedStep] = ()) -> RenderableType:
    """Return the table of the frontier of throughput against the time of a token, and the best point's commands.

    The best point is marked, and has a row even if it is not on the frontier. Results of a check follow, if given.
    """
    shown = plan.frontier if plan.best in plan.frontier else (*plan.frontier, plan.best)
    cells = [_cells(point) for point in shown]
    # Degrees that are 1 in all rows are omitted.
    columns = [name for name in _COLUMNS if name not in ("attn", "experts") or any(row[name] != "1" for row in cells)]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for point, row in zip(shown, cells, strict=True):
        best = point == plan.best
        table.add_row("*" if best else "", *(row[name] for name in columns), style="bold" if best else "")
    asked = plan.asked
    head = f"{clean(plan.config)} on {plan.topology}: {asked.input} tokens in, {asked.output} out"
    stored = (("weights", asked.weights), ("cache", asked.cache))
    head += "".join(f", {what} {dtype}" for what, dtype in stored if dtype != "bf16")
    head += "" if asked.sample == "greedy" else f", sampling {asked.sample.replace(',', ' and ')}"
    limits = (("first token", plan.limits.first_s), ("each token", plan.limits.token_s), ("gap", plan.limits.gap_s))
    head += "".join(f", {what} within {format_seconds(most)}" for what, most in limits if math.isfinite(most))
    lines: list[RenderableType] = [Text(head, style="bold"), Text(), table, Text()]
    lines.append(Text(_note(plan, columns), style="dim"))
    for note in vllm_notes(plan):
        lines += [Text(), Text(note)]
    for command in vllm_commands(plan):
        lines += [Text(), OneLine(command)]
    if checked:
        lines += [Text(), *_checks(checked)]
    return Group(*lines)


def _checks(checked: Sequence[CheckedStep]) -> list[RenderableType]:
    """Return the table of checked steps: closed form, plan with the point's splits, free plan, with seconds and bytes.

    A legend and the reasons for missing plans follow.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("step", no_wrap=True)
    for name in ("sequences", "by closed form", "planned so", "planned freely"):
        table.add_column(name, justify="right")

    def cell(seconds: float, size: float) -> str:
        """Return the step time above the bytes of a device."""
        return f"{format_seconds(seconds)}\n{format_bytes(size)}"

    for step in checked:
        plans = [
            "none" if each is None else cell(each.prediction.step_time_s, each.prediction.peak_bytes)
            for each in (step.laid_out, step.free)
        ]
        estimate = cell(step.estimate.step_time_s, step.estimate.peak_bytes)
        table.add_row(f"{step.kind}, {step.length} tokens", str(step.sequences), estimate, *plans)
    note = "planned so: traced programs with weights, cache and inputs split as above; freely: on the same mesh."
    failures = dict.fromkeys(text for step in checked for text in step.failed)
    return [table, Text(), Text(note, style="dim"), *(Text(f"Not planned: {text}") for text in failures)]


def _cells(point: ServingPoint) -> dict[str, str]:
    """Return the text of each of `_COLUMNS` for a point; the chunk is blank if prompts have their own engines."""
    engines = str(point.engines)
    if point.prompts is not None:
        kind = "" if point.prompts == point.engine else f"x{point.prompts.devices}"
        engines = f"{point.prompt_engines}{kind}+{point.engines - point.prompt_engines}"
    return {
        "tensor": str(point.engine.tensor),
        "attn": str(point.engine.attention),
        "experts": str(point.engine.experts),
        "engines": engines,
        "batch": str(point.batch),
        "chunk": "" if point.prompt_engines else str(point.chunk),
        "first": format_seconds(point.first_s),
        "each": format_seconds(point.token_s),
        "tok/s": format_count(point.tokens_per_s),
        "GiB": f"{point.peak_bytes / 2**30:.1f}",
    }


def _note(plan: ServingPlan, columns: list[str]) -> str:
    """Return the legend of the table, without the columns that are omitted."""
    best, gap = plan.best, format_seconds(plan.best.gap_s)
    text = f"* most tokens within the limits, with no more than {gap} between two. first: until a first token, where "
    text += "nobody else waits; each: a further one, on the mean; chunk: tokens of prompts in a step; GiB of a device. "
    if "attn" in columns:
        text += "attn: groups of `tensor` devices, each with its sequences (data-parallel attention). "
    if "experts" in columns:
        text += "experts: parts of whole experts. "
    if any(point.prompt_engines for point in (*plan.frontier, best)):
        text += "2+6: two engines for prompts, six to decode; 2x4+6: two of another kind, of 4 devices. "
    return text + "By closed form, no plan."


_COUNTS = ("tensor", "attention", "experts", "engines", "prompt_engines", "batch", "chunk")
_COUNTS += ("prompt_tensor", "prompt_attention", "prompt_experts")
"""Fields of a point in JSON that are whole numbers of 0 or more."""
_AMOUNTS = ("first_s", "token_s", "gap_s", "tokens_per_s", "peak_bytes", "prompt_s", "decode_s")
"""Fields of a point in JSON that are numbers above 0."""
_PARTS = ("added_s", "sent_s")
"""Seconds of parts of a step that may be zero."""
_AGAIN = "make it again with `autoshard serve-plan ... --json`"
"""The end of errors about damaged files."""


def read_serving(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the object that `autoshard serve-plan --json` printed into a file.

    None for a folder, a file that cannot be read or is no JSON, and JSON without all of `model`, `topology`,
    `frontier` and `points`.

    Raises `UserError` if points, chips, lengths or limits are damaged or of an older version. Other fields, such as
    `best` and `frontier`, are not checked.
    """
    if Path(path).is_dir():
        return None
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or not {"model", "frontier", "points", "topology"} <= set(value):
        return None
    for name, kind in (("model", str), ("topology", str), ("chip", str), ("chips", int), ("points", list)):
        if not isinstance(value.get(name), kind):
            raise UserError(f"{path} has no `{name}` of the right type; {_AGAIN}.")
    for number, point in enumerate(value["points"]):
        if not isinstance(point, dict) or not _is_point(point):
            raise UserError(f"`points.{number}` in {path} is no way to serve; {_AGAIN}.")
    for name in ("input", "output", "first_limit_s", "token_limit_s", "gap_limit_s"):
        if not _is_amount(value.get(name)) and not (value.get(name) is None and name.endswith("_s")):
            raise UserError(f"`{name}` in {path} is no number; {_AGAIN}.")
    if not value["points"] or value["chips"] < 1:
        raise UserError(f"{path} holds no way to serve; {_AGAIN}.")
    return value


def _is_point(point: Mapping[str, Any]) -> bool:
    """Return True if an object of JSON has all counts, amounts, parts and commands of a point, in range."""
    commands = point.get("commands")
    return (
        all(isinstance(point.get(name), int) and _is_amount(point[name]) for name in _COUNTS)
        and all(_is_amount(point.get(name)) and (point[name] > 0) for name in _AMOUNTS)
        and all(_is_amount(point.get(name)) for name in _PARTS)
        and isinstance(commands, list)
        and all(isinstance(each, str) for each in commands)
    )


def _is_amount(value: Any) -> bool:
    """Return True for a number from 0 to below 1e300; False for booleans, NaN and infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e300


def serve_page(figures: Mapping[str, Any], prices: Mapping[str, float]) -> str:
    """Return the HTML page of `serving_figures`; `prices` (of a chip's hour, by chip) fill its field initially.

    A chip without a price leaves the field empty.
    """
    names = (*_COUNTS, *_AMOUNTS, *_PARTS, "commands")
    data = {
        "price": prices.get(figures["chip"]),
        "chips": figures["chips"],
        "output": figures["output"],
        "limits": [figures[f"{name}_limit_s"] for name in ("first", "token", "gap")],
        "points": [{name: point[name] for name in names} for point in figures["points"]],
    }
    return environment().get_template("serve.html").render(figures=figures, data=script_json(data))
