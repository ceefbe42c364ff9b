"""The trace is in the format that Perfetto reads, and is the plan's own timeline."""

import dataclasses
import json
from collections import defaultdict

import pytest

from autoshard import UserError
from autoshard.plan import Plan
from autoshard.report import perfetto_json, perfetto_trace


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
