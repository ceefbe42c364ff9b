"""The trace is in the format that Perfetto reads, and is the plan's own timeline."""

import dataclasses
import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

from autoshard import UserError
from autoshard.planning import Plan
from autoshard.report import perfetto_json, perfetto_trace, read_profile


def test_every_event_has_what_the_format_asks_for(plan: Plan):
    trace = json.loads(perfetto_json(plan))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= set(event)
        assert event["ph"] in "XCM"
        assert ("dur" in event) == (event["ph"] == "X")
    titles = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert titles == {1: "compute, and communication it waits for", 2: "link data, loop 0"}
    assert {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"} == set(titles)


def test_the_spans_are_those_of_the_timeline(plan: Plan):
    assert plan.timeline is not None
    events = [event for event in perfetto_trace(plan)["traceEvents"] if event["ph"] == "X"]
    assert [(e["ts"] / 1e6, e["dur"] / 1e6) for e in events] == [
        pytest.approx((span.start_s, span.seconds)) for span in plan.timeline.spans
    ]
    assert events[1]["name"] == "linear/dot_general (forward, in a loop)"
    assert events[3]["name"] == "reduce-scatter over model: add (in a loop)"
    tracks = defaultdict(list)
    for event in events:
        tracks[event["tid"]].append(event)
    for track in tracks.values():
        ends = 0.0
        for event in sorted(track, key=lambda event: event["ts"]):
            assert event["ts"] >= ends - 1e-6
            ends = event["ts"] + event["dur"]


def test_the_counter_reaches_the_peak(plan: Plan):
    counters = [event for event in perfetto_trace(plan)["traceEvents"] if event["ph"] == "C"]
    assert [event["ts"] for event in counters] == [0.0, 0.11e6, 1.32e6, 3.22e6]
    assert max(sum(event["args"].values()) for event in counters) == pytest.approx(plan.prediction.peak_bytes, abs=8)


def test_a_plan_without_a_timeline_says_what_to_do(plan: Plan):
    with pytest.raises(UserError, match="saved by an older autoshard; make it again"):
        perfetto_trace(dataclasses.replace(plan, timeline=None))


COMPILED = {
    "time": {
        "spans": [
            {"name": "fusion.7", "lane": "compute", "start_s": 0.0, "seconds": 2.0},
            {"name": "all-gather-start.1", "lane": "x", "start_s": 0.5, "seconds": 1.0},
            {"name": "waiting for all-gather", "lane": "exposed", "start_s": 2.0, "seconds": 0.25},
        ]
    }
}
PROFILE = [
    {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/device:TPU:0"}},
    {"ph": "M", "pid": 701, "name": "process_sort_index", "args": {"sort_index": 701}},
    {"ph": "M", "pid": 5, "name": "process_name", "args": {"name": "idle"}},
    {"ph": "X", "pid": 701, "tid": 9, "ts": 1000.5, "dur": 3.0, "name": "dot.1"},
    {"ph": "X", "pid": 702, "tid": 9, "ts": 1002.5, "dur": 1.0, "name": "dot.1"},
    {},
]


def test_the_compiled_program_is_a_second_process(plan: Plan):
    events = perfetto_trace(plan, COMPILED)["traceEvents"]
    predicted = perfetto_trace(plan)["traceEvents"]
    assert [event for event in events if event["pid"] == 1] == predicted
    second = [event for event in events if event["pid"] == 2]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in second if e["ph"] == "X"] == [
        ("fusion.7", 1, 0.0, 2e6),
        ("all-gather-start.1", 2, 0.5e6, 1e6),
        ("waiting for all-gather", 1, 2e6, 0.25e6),
    ]
    assert [e["args"]["name"] for e in second if e["name"] in ("process_name", "thread_name")] == [
        "compiled, estimated from its schedule",
        "compute, and communication it waits for",
        "link x",
    ]


def test_a_profile_begins_with_its_first_event_in_processes_of_its_own(plan: Plan):
    events = perfetto_trace(plan, COMPILED, PROFILE)["traceEvents"]
    assert [e for e in events if e["pid"] in (1, 2)] == perfetto_trace(plan, COMPILED)["traceEvents"]
    assert [e for e in events if e["pid"] >= 3] == [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "measured, /device:TPU:0"}},
        {"ph": "X", "pid": 3, "tid": 9, "ts": 0.0, "dur": 3.0, "name": "dot.1"},
        {"ph": "X", "pid": 4, "tid": 9, "ts": 2.0, "dur": 1.0, "name": "dot.1"},
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_a_profile_is_read_packed_or_not(tmp_path: Path, packed: bool):
    text = json.dumps({"traceEvents": PROFILE}).encode()
    (tmp_path / "p").write_bytes(gzip.compress(text) if packed else text)
    assert read_profile(tmp_path / "p") == PROFILE


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{}", "has no `traceEvents`; give what `autoshard measure --profile` wrote."),
        (b"no", "is no trace"),
        (b"\x1f\x8bxx", "is no trace .*cut off or damaged"),
        (None, "cannot read .*: No such file or directory."),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes | None, sentence: str):
    if content is not None:
        (tmp_path / "p").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_profile(tmp_path / "p")


def test_an_empty_profile_and_an_empty_estimate_are_refused(plan: Plan):
    with pytest.raises(UserError, match="no events with a duration"):
        perfetto_trace(plan, profile=[{"ph": "M"}])
    with pytest.raises(UserError, match="has no timeline; give the output of `autoshard compile --json`"):
        perfetto_trace(plan, {"time": None})
