"""The schedule of a pipeline as a picture: a row for each stage, forward and backward work, and the bubble between."""

import dataclasses
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from autoshard.base.units import format_seconds
from autoshard.cost import ZERO_BUBBLE, StageWork, Timetable
from autoshard.planning import Plan, PlannedPipeline


ROWS = 16
"""Stages that are drawn in a terminal; the rest is counted."""
WIDEST = 120
"""Maximum characters of a row."""
BOXES = 6000
"""Pieces of work above which the page joins consecutive pieces of one kind."""
HEIGHT, GAP = 22, 4
"""Pixels of a row of the page's picture, and of the gap between two rows."""
LETTER = 1.0
"""Percent of the picture's width that a letter needs."""

FORWARD, BACKWARD, WEIGHTS, BUBBLE = "█", "▒", "░", "·"


def schedule_report(plan: Plan) -> RenderableType | None:
    """Return the plan's pipeline for a terminal; None if it has none."""
    return None if plan.pipeline is None else _Drawn(plan.pipeline)


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """Renderable of a pipeline's schedule for rich: its words, then a row for each stage and a legend.

    The rows and the legend are left out if fewer than 20 characters remain for a row, or if the step takes no time.
    """

    pipeline: PlannedPipeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = self.pipeline.timetable()
        label = len(f"  stage {self.pipeline.stages - 1} ")
        yield Text("\n").join(Text(f"  {line}") for line in self.pipeline.words())
        width = min(options.max_width, WIDEST) - label - 1
        if width < 20 or drawn.step_time_s <= 0:
            return
        lines = [
            Text(f"  stage {stage}".ljust(label)).append_text(_row(drawn, row, width))
            for stage, row in enumerate(drawn.rows[:ROWS])
        ]
        left = len(drawn.rows) - ROWS
        yield Group(*lines, *([Text(f"  and {left} more", style="dim")] if left > 0 else []))
        yield Text.assemble(
            "  ",
            (FORWARD, "cyan"),
            " forward of a microbatch   ",
            *([(BACKWARD, "blue"), " backward   "] if self.pipeline.trains else []),
            *([(WEIGHTS, "blue"), " gradients of weights   "] if self.pipeline.schedule == ZERO_BUBBLE else []),
            (BUBBLE, "dim"),
            " bubble",
        )


def _row(drawn: Timetable, row: tuple[StageWork, ...], width: int) -> Text:
    """Return the row of a stage; each piece of two or more characters begins with the last digit of its microbatch.

    - `drawn`: the timetable, for its step time.
    - `row`: pieces of work of the stage.
    - `width`: characters of the row.
    """
    cells = [(BUBBLE, "dim")] * width
    scale = width / drawn.step_time_s
    for work in row:
        first, last = round(work.start_s * scale), round(work.end_s * scale)
        mark, style = (BACKWARD, "blue") if work.backward else (FORWARD, "cyan")
        if work.weights:
            mark = WEIGHTS
        for place in range(first, min(last, width)):
            cells[place] = (mark, style)
        if last - first >= 2:
            cells[first] = (str(work.microbatch % 10), style)
    return Text.assemble(*cells)


def schedule_picture(plan: Plan) -> dict[str, Any] | None:
    """Return the picture for the page: boxes of each stage with place and width in percent, words, and total height.

    Heights are in pixels, `seconds` is the step time. Above `BOXES` pieces, consecutive ones of one kind are joined.
    None without a pipeline, or if the step takes no time.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        return None
    drawn = pipeline.timetable()
    if drawn.step_time_s <= 0:
        return None
    scale = 100 / drawn.step_time_s
    joins = sum(map(len, drawn.rows)) > BOXES
    rows = []
    for stage, row in enumerate(drawn.rows):
        pieces = _joined(row) if joins else [(work, str(work.microbatch)) for work in row]
        boxes = [_box(work, label, scale, pipeline.rounds > 1) for work, label in pieces]
        rows.append({"stage": stage, "y": stage * (HEIGHT + GAP), "boxes": boxes, "modules": _modules(pipeline, stage)})
    return {
        "rows": rows,
        "height": len(rows) * (HEIGHT + GAP),
        "row": HEIGHT,
        "words": pipeline.words(),
        "trains": pipeline.trains,
        "seconds": drawn.step_time_s,
        "bubble": pipeline.bubble(drawn),
    }


def _joined(row: tuple[StageWork, ...]) -> list[tuple[StageWork, str]]:
    """Join consecutive pieces of one kind that have no bubble between them; return (piece, empty label) for each."""
    joined: list[tuple[StageWork, str]] = []
    for work in row:
        before = joined[-1][0] if joined else None
        # Gaps below a billionth of the time are rounding errors.
        if before and before.backward == work.backward and work.start_s - before.end_s < 1e-9 * work.end_s:
            joined[-1] = dataclasses.replace(before, end_s=work.end_s), ""
        else:
            joined.append((work, ""))
    return joined


def _box(work: StageWork, label: str, scale: float, chunks: bool) -> dict[str, Any]:
    """Return place, width, label and tooltip of one piece of work.

    The label is empty if the box is too narrow for it; a joined piece has none, and its tooltip names no microbatch.

    - `scale`: percent of the picture per second.
    - `chunks`: True to name the chunk in the tooltip.
    """
    x, width = work.start_s * scale, (work.end_s - work.start_s) * scale
    kind = "backward" if work.backward else "forward"
    of = f" of microbatch {work.microbatch}" + (f", chunk {work.chunk}" if chunks else "") if label else ""
    return {
        "kind": kind,
        "x": round(x, 3),
        "width": round(width, 3),
        "middle": round(x + width / 2, 3),
        "label": label if width > LETTER * len(label) else "",
        "title": f"{kind}{of}: {format_seconds(work.end_s - work.start_s)} from {format_seconds(work.start_s)}",
    }


def _modules(pipeline: PlannedPipeline, stage: int) -> str:
    """Return the first and last modules of a stage's chunks as text; empty if the plan does not name them."""
    named = [chunk.modules for chunk in pipeline.chunks[stage :: pipeline.stages] if chunk.modules]
    return ", ".join(" to ".join(dict.fromkeys(modules)) for modules in named)
