"""What differs between two plans."""

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan import Plan, mesh_words
from autoshard.report._names import clean
from autoshard.units import format_bytes, format_seconds


FIGURES = ("step_time_s", "compute_s", "hidden_comm_s", "exposed_comm_s", "peak_bytes", "mfu", "fits")
SHOWN = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Two plans side by side."""

    figures: tuple[tuple[str, Any, Any], ...]
    """(field of `Prediction`, in the first, in the second)."""
    settings: tuple[tuple[str, str, str], ...]
    """What was asked for differently: program, topology, mesh, memory limit."""
    specs: tuple[tuple[str, str, str], ...]
    """(argument, spec in the first, spec in the second), where both have the argument and the specs differ."""
    shared: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def difference(first: Plan, second: Plan) -> Difference:
    """Compare two plans; they may be of different meshes, topologies, or even programs."""
    both = [name for name in first.arguments if name in second.arguments]
    settings = []
    for name, a, b in (
        ("program", first.program_name, second.program_name),
        ("program fingerprint", first.program_fingerprint[:12], second.program_fingerprint[:12]),
        ("topology", first.topology, second.topology),
        ("mesh", _mesh(first), _mesh(second)),
        ("memory limit", format_bytes(first.memory_limit_bytes), format_bytes(second.memory_limit_bytes)),
    ):
        if a != b:
            settings.append((name, a, b))
    return Difference(
        figures=tuple((key, getattr(first.prediction, key), getattr(second.prediction, key)) for key in FIGURES),
        settings=tuple(settings),
        specs=tuple(
            (name, str(first.arguments[name]), str(second.arguments[name]))
            for name in both
            if first.arguments[name] != second.arguments[name]
        ),
        shared=len(both),
        only_first=tuple(name for name in first.arguments if name not in second.arguments),
        only_second=tuple(name for name in second.arguments if name not in first.arguments),
    )


def _mesh(plan: Plan) -> str:
    return mesh_words(plan.mesh).replace(", ", ",")


def figure_text(key: str, value: Any) -> str:
    """One of `FIGURES` as people read it."""
    if value is None:
        return "-"
    if key == "fits":
        return "yes" if value else "no"
    if key == "mfu":
        return f"{value:.1%}"
    return format_bytes(value) if key.endswith("_bytes") else format_seconds(value)


def figure_name(key: str) -> str:
    return "MFU" if key == "mfu" else key.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def difference_figures(found: Difference) -> dict[str, Any]:
    """The JSON object of `autoshard diff --json`."""
    return {
        "figures": {key: {"first": a, "second": b} for key, a, b in found.figures},
        "settings": {name: {"first": a, "second": b} for name, a, b in found.settings},
        "specs": {name: {"first": a, "second": b} for name, a, b in found.specs},
        "shared": found.shared,
        "only_first": list(found.only_first),
        "only_second": list(found.only_second),
    }


def difference_report(found: Difference) -> RenderableType:
    """The difference for a terminal: what it costs first, then what it is."""
    figures = Table.grid(padding=(0, 3, 0, 0))
    for key, a, b in found.figures:
        ratio = f"{b / a:.2f}x" if key.endswith("_s") and a and b else ""
        figures.add_row(figure_name(key), figure_text(key, a), figure_text(key, b), Text(ratio, style="dim"))
    for name, a, b in found.settings:
        figures.add_row(Text(name, style="yellow"), Text(clean(a, 30)), Text(clean(b, 30)), "")
    specs = Table.grid(padding=(0, 2, 0, 2))
    for name, a, b in found.specs[:SHOWN]:
        specs.add_row(Text(clean(name, 44), no_wrap=True), Text(a), Text(f"-> {b}"))
    count = f"{len(found.specs)} of {found.shared} common arguments are split differently"
    only = [(len(found.only_first), "first"), (len(found.only_second), "second")]
    only_text = "".join(f"; {n} {'is' if n == 1 else 'are'} only in the {which}" for n, which in only if n)
    parts: list[RenderableType] = [figures, Text(), Text(f"{count}{only_text}.", style="bold"), specs]
    if len(found.specs) > SHOWN:
        parts.append(Text(f"  and {len(found.specs) - SHOWN} more", style="dim"))
    return Group(*parts)
