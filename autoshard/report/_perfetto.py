"""The predicted step as a trace for ui.perfetto.dev (Chrome's trace event format, JSON).

Format: "Trace Event Format", Google, 2016 (events X, C, M; times in microseconds).
"""

import json
from typing import Any

from autoshard.errors import UserError
from autoshard.plan import Plan
from autoshard.report._names import clean, readable


PREDICTED = 1
"""The process of the prediction; other processes may stand beside it."""


def perfetto_trace(plan: Plan) -> dict[str, Any]:
    """The trace as a JSON value: compute and exposed communication on one track, each link of each block on its own,
    memory by kind as a counter. `UserError` if the plan was saved without a timeline."""
    timeline = plan.timeline
    if timeline is None:
        raise UserError("the plan has no timeline: it was saved by an older autoshard; make it again.")
    tracks: dict[tuple[str, int], int] = {("", 0): 1}
    events: list[dict[str, Any]] = []
    for span in timeline.spans:
        own = span.lane not in ("compute", "exposed")
        track = tracks.setdefault((span.lane, span.block) if own else ("", 0), len(tracks) + 1)
        events.append(
            {
                "ph": "X",
                "name": clean(_short(span.name), 200),
                "cat": span.lane,
                "pid": PREDICTED,
                "tid": track,
                "ts": span.start_s * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"name": clean(span.name, 1000), "lane": span.lane},
            }
        )
    for index, moment in enumerate(timeline.moments_s):
        held = {kind: sizes[index] for kind, sizes in timeline.memory.items()}
        events.append(_event("C", "memory of one device (bytes)", moment * 1e6, held))
    names = [_event("M", "process_name", 0.0, {"name": f"{clean(plan.program_name, 80)}, predicted"})]
    for (lane, block), track in tracks.items():
        title = "compute, and communication it waits for" if not lane else f"link {lane}, {_block(block)}"
        names.append(_event("M", "thread_name", 0.0, {"name": title}) | {"tid": track})
        names.append(_event("M", "thread_sort_index", 0.0, {"sort_index": track}) | {"tid": track})
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def perfetto_json(plan: Plan) -> str:
    return json.dumps(perfetto_trace(plan), separators=(",", ":"), allow_nan=False)


def _event(phase: str, name: str, microseconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PREDICTED, "tid": 0, "ts": microseconds, "args": arguments}


def _short(name: str) -> str:
    """`all-gather over data: jit(f)/...` with the part after the colon as people read it."""
    head, colon, cause = name.partition(": ")
    return f"{head}: {readable(cause)}" if colon else readable(name)


def _block(block: int) -> str:
    return "outside loops" if block < 0 else f"loop {block}"
