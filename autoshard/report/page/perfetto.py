"""Steps as a trace for ui.perfetto.dev (Chrome's trace event format, JSON): predicted, compiled, measured.

Each of the three is a process of the trace. Format: "Trace Event Format", Google, 2016 (events X, C, M; times in
microseconds).
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.base.files import MOST_DATA_BYTES, read_json
from autoshard.errors import UserError
from autoshard.planning import Plan
from autoshard.report.display import clean, readable


PREDICTED, COMPILED, MEASURED = 1, 2, 3
"""Numbers of the trace's processes; each process of a profile has a number from `MEASURED` on."""

Event = dict[str, Any]
"""Event of the trace format: `ph`, `name`, `pid`, `tid`, `ts` in microseconds, `args`."""


def perfetto_trace(
    plan: Plan, compiled: Mapping[str, Any] | None = None, profile: Sequence[Event] | None = None
) -> dict[str, Any]:
    """Build the trace as a JSON value: tracks of compute and waiting, of links and of pipeline stages, and memory
    counters.

    Each link of each block has its own track; memory is a counter by kind.

    - `compiled`: output of `autoshard compile --json`; the estimate of the compiled program, laid out in time, is a
      second process.
    - `profile`: events of a measured profile (see `read_profile`), which are further processes.

    Raises `UserError` if the plan or the compiled program has no timeline, or if the profile has no event with a
    duration.
    """
    events = [*_predicted(plan), *(_compiled(compiled) if compiled else ()), *(_measured(profile) if profile else ())]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def perfetto_json(plan: Plan, compiled: Mapping[str, Any] | None = None, profile: Sequence[Event] | None = None) -> str:
    """Return the trace of `perfetto_trace` as text for a file."""
    return json.dumps(perfetto_trace(plan, compiled, profile), separators=(",", ":"), allow_nan=False)


def read_profile(path: pathlib.Path) -> list[Event]:
    """Return the events of a profile in Chrome's trace format, also gzipped.

    `autoshard measure --profile` and JAX write such files. The events are a list, or under `traceEvents` of an object;
    entries that are no objects are dropped.

    Raises `UserError` for a file that cannot be read or is no trace.
    """
    try:
        value = read_json(path, MOST_DATA_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{path} is no trace ({error}); give what `autoshard measure --profile` wrote.") from error
    events = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(events, list):
        raise UserError(f"{path} has no `traceEvents`; give what `autoshard measure --profile` wrote.")
    return [event for event in events if isinstance(event, dict)]


def _predicted(plan: Plan) -> list[Event]:
    """Return the events of the plan's timeline: spans, stages, and memory.

    Raises `UserError` if the plan has no timeline.
    """
    timeline = plan.timeline
    if timeline is None:
        raise UserError("the plan has no timeline: it was saved by an older autoshard; make it again.")
    spans = [(span.name, span.lane, span.block, span.start_s, span.seconds) for span in timeline.spans]
    events = _spans(PREDICTED, f"{clean(plan.program_name, 80)}, predicted", spans)
    events += _stages(plan)
    for index, moment in enumerate(timeline.moments_s):
        memory = {kind: sizes[index] for kind, sizes in timeline.memory.items()}
        events.append(_event(PREDICTED, "C", "memory of one device (bytes)", moment * 1e6, memory))
    return events


FIRST_STAGE = 1000
"""Number of the first stage's track, below the tracks of links."""


def _stages(plan: Plan) -> list[Event]:
    """Return a track for each stage of a pipeline: forward and backward work by microbatch; the bubble is blank.

    The list is empty without a pipeline.
    """
    events: list[Event] = []
    pipeline = plan.pipeline
    for stage, row in enumerate(pipeline.timetable().rows if pipeline else ()):
        track = FIRST_STAGE + stage
        events.append(_event(PREDICTED, "M", "thread_name", 0.0, {"name": f"stage {stage}"}, track))
        events.append(_event(PREDICTED, "M", "thread_sort_index", 0.0, {"sort_index": track}, track))
        for work in row:
            kind = "backward" if work.backward else "forward"
            start, shown = (pipeline.before_s if pipeline else 0.0) + work.start_s, {"chunk": work.chunk}
            event = _event(PREDICTED, "X", f"{kind} {work.microbatch}", start * 1e6, shown, track)
            events.append(event | {"cat": kind, "dur": (work.end_s - work.start_s) * 1e6})
    return events


def _compiled(figures: Mapping[str, Any]) -> list[Event]:
    """Return the events of the compiled program's estimate.

    Raises `UserError` if it has no spans.
    """
    rows = (figures.get("time") or {}).get("spans")
    if not rows:
        raise UserError("the compiled program has no timeline; give the output of `autoshard compile --json`.")
    spans = [(row["name"], row["lane"], None, row["start_s"], row["seconds"]) for row in rows]
    return _spans(COMPILED, "compiled, estimated from its schedule", spans)


def _measured(profile: Sequence[Event]) -> list[Event]:
    """Return the spans, metadata and counters of a profile, moved so that its first span starts at 0.

    Processes without spans are left out, and the others are numbered from `MEASURED` on.

    Raises `UserError` if no event has a duration.
    """
    timed = [e for e in profile if e.get("ph") == "X" and isinstance(e.get("ts"), (int, float)) and "pid" in e]
    if not timed:
        raise UserError("the profile holds no events with a duration; record it again.")
    start = min(event["ts"] for event in timed)
    numbers = {pid: MEASURED + k for k, pid in enumerate(dict.fromkeys(event["pid"] for event in timed))}
    events = []
    for event in profile:
        if event.get("pid") not in numbers or event.get("ph") not in ("X", "M", "C"):
            continue
        new = {**event, "pid": numbers[event["pid"]]}
        if "ts" in new:
            new["ts"] -= start
        if new.get("name") == "process_name":
            new["args"] = {"name": f"measured, {clean(str((event.get('args') or {}).get('name', '')), 80)}"}
        if new.get("name") != "process_sort_index":
            events.append(new)
    return events


_Row = tuple[str, str, int | None, float, float]
"""A span: (name, lane, block or None, start in seconds, seconds)."""


def _spans(process: int, title: str, spans: Iterable[_Row]) -> list[Event]:
    """Return a process with a track for compute and waiting, and a track for each link (of each block, if it is known).

    - `process`, `title`: number and name of the process.
    """
    tracks: dict[tuple[str, int | None], int] = {("", None): 1}
    events = []
    for name, lane, block, start, seconds in spans:
        own = lane not in ("compute", "exposed")
        track = tracks.setdefault((lane, block) if own else ("", None), len(tracks) + 1)
        shown = {"name": clean(name, 1000), "lane": lane}
        event = _event(process, "X", clean(_short(name), 200), start * 1e6, shown, track)
        events.append(event | {"cat": lane, "dur": seconds * 1e6})
    names = [_event(process, "M", "process_name", 0.0, {"name": title})]
    for (lane, block), track in tracks.items():
        link = f"link {lane}" + ("" if block is None else f", {_block(block)}")
        words = link if lane else "compute, and communication it waits for"
        names.append(_event(process, "M", "thread_name", 0.0, {"name": words}, track))
        names.append(_event(process, "M", "thread_sort_index", 0.0, {"sort_index": track}, track))
    return names + events


def _event(process: int, phase: str, name: str, microseconds: float, arguments: Event, track: int = 0) -> Event:
    """Return one event; `phase` is X for a span, M for metadata, C for a counter.

    A span also needs its duration `dur`, which the caller adds.
    """
    return {"ph": phase, "name": name, "pid": process, "tid": track, "ts": microseconds, "args": arguments}


def _short(name: str) -> str:
    """Simplify the part after the colon of `all-gather over data: jit(f)/...` for people."""
    head, colon, cause = name.partition(": ")
    return f"{head}: {readable(cause)}" if colon else readable(name)


def _block(block: int) -> str:
    """Return the name of a block for people; a negative number is outside loops."""
    return "outside loops" if block < 0 else f"loop {block}"
