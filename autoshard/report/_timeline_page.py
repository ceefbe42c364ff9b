"""The predicted step laid out in time, as the page of a plan draws it."""

from typing import Any

from autoshard.plan import WAITS_FOR_HOST, Plan
from autoshard.report._names import clean, readable


MAIN = "compute, and what it waits for"


def timeline_data(plan: Plan) -> dict[str, Any] | None:
    """Rows of spans: what the device does and waits for, then each link of each loop. None for a plan without any.

    `names` are those of spans; a span is [number of its name, kind, start, seconds], its kind `compute`, a kind of
    collective or `other`. In a loop a span is all its trips together.
    """
    timeline = plan.timeline
    if timeline is None or not timeline.spans or timeline.end_s <= 0:
        return None
    names: dict[str, int] = {}
    rows: dict[tuple[str, int], list[list[Any]]] = {("", 0): []}
    for span in timeline.spans:
        main = span.lane in ("compute", "exposed")
        name = names.setdefault(_shown(span.name), len(names))
        kind = "compute" if span.lane == "compute" else span.name.partition(" over ")[0]
        kind = kind if " over " in span.name or span.lane == "compute" else "other"
        key = ("", 0) if main else (span.lane, span.block)
        rows.setdefault(key, []).append([name, kind, span.start_s, span.seconds])
    return {
        "end": timeline.end_s,
        "names": list(names),
        "rows": [
            {"name": MAIN if not lane else clean(f"{_link(lane)}, {_block(block)}", 80), "spans": spans}
            for (lane, block), spans in rows.items()
        ],
    }


def _shown(name: str) -> str:
    """`all-gather over data: jit(f)/...` with the part after the colon as people read it."""
    if name == WAITS_FOR_HOST:
        return name
    head, colon, cause = name.partition(": ")
    return clean(f"{head}: {readable(cause)}" if colon else readable(name), 200)


def _link(lane: str) -> str:
    return lane if lane == "host memory" else f"link {lane}"


def _block(block: int) -> str:
    return "outside loops" if block < 0 else f"loop {block}"
