"""The timeline of a plan's page has every span of the plan, each in the row of its resource."""

import dataclasses

import pytest

from autoshard.planning import WAITS_FOR_HOST, Plan, Span
from autoshard.report.display import op_words
from autoshard.report.page.ops_page import MAIN, timeline_data


def test_every_span_is_in_its_row(plan: Plan):
    data, timeline = timeline_data(plan), plan.timeline
    assert data is not None and timeline is not None and data["end"] == timeline.end_s
    assert [(row["name"], len(row["spans"])) for row in data["rows"]] == [(MAIN, 4), ("link data, loop 0", 1)]
    spans = [span for row in data["rows"] for span in row["spans"]]
    assert sum(span[3] for span in spans) == pytest.approx(sum(span.seconds for span in timeline.spans))
    assert [span[1] for span in data["rows"][0]["spans"]] == ["compute", "compute", "reduce-scatter", "compute"]
    assert data["names"][data["rows"][1]["spans"][0][0]] == "all-gather over data: model.layers.*.mlp.up_proj.weight"
    assert "linear matmul (backward, in a loop)" in data["names"]


def test_waits_and_links_of_several_loops_have_their_own(plan: Plan):
    assert plan.timeline is not None
    spans = (
        Span("waiting for data", "exposed", 0.0, 1.0, 0),
        Span(WAITS_FOR_HOST, "exposed", 1.0, 1.0, 0),
        Span("all-reduce over data: loss", "data", 0.0, 1.0, -1),
        Span("to host", "host memory", 0.0, 1.0, 2),
    )
    data = timeline_data(dataclasses.replace(plan, timeline=dataclasses.replace(plan.timeline, spans=spans)))
    assert data is not None
    assert [row["name"] for row in data["rows"]] == [MAIN, "link data, outside loops", "host memory, loop 2"]
    assert [span[1] for row in data["rows"] for span in row["spans"]] == ["other", "other", "all-reduce", "other"]


def test_a_plan_without_spans_has_none(plan: Plan):
    assert plan.timeline is not None
    assert timeline_data(dataclasses.replace(plan, timeline=None)) is None
    assert timeline_data(dataclasses.replace(plan, timeline=dataclasses.replace(plan.timeline, spans=()))) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jit(step)/transpose(jvp(Block))/up/dot_general", "Block up matmul (backward)"),
        ("jit(step)/jvp()/BTNH,BSNH->BNTS/dot_general", "matmul (forward)"),
        ("jit(step)/jvp()/while/body/reduce_max", "maximum (forward, in a loop)"),
        ("model.layers.*.mlp.up_proj.weight", "model.layers.*.mlp.up_proj.weight"),
    ],
)
def test_names_are_words(name: str, words: str):
    assert op_words(name) == words
