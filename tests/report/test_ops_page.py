"""The op table of a plan's page shows the plan's ops, and adds up to its prediction."""

import dataclasses
import json
import re

import pytest

from autoshard.cost import Topology
from autoshard.planning import Plan
from autoshard.report import html_report
from autoshard.report.page.ops_page import memory_data, ops_data, ops_summary, roofs


def page_data(text: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_the_rows_add_up_to_the_step(plan: Plan):
    rows = ops_data(plan)
    own = plan.prediction
    assert sum(row["compute_s"] for row in rows) == pytest.approx(own.compute_s)
    assert sum(row["waited_s"] for row in rows) == pytest.approx(own.exposed_comm_s)
    assert sum(row["time_s"] for row in rows) == pytest.approx(own.step_time_s)
    assert [row["time_s"] for row in rows] == sorted((row["time_s"] for row in rows), reverse=True)
    summary = ops_summary(plan)
    assert summary is not None and summary["share"] == pytest.approx(1.0)
    assert rows[0]["name"] == "mlp/dot_general (backward, in a loop)" and rows[-1]["name"].startswith("the rest")


def test_the_page_has_what_the_plan_keeps(plan: Plan):
    data = page_data(html_report(plan))
    assert data["ops"] == ops_data(plan)
    assert data["roofs"] == {"flops": {"bf16": 459e12}, "bytes": 2.8e12, "chip": "v5p"}


def test_roofs_are_those_of_the_dtypes_of_parameters(plan: Plan):
    topology = Topology.parse("h100:8")
    both = dataclasses.replace(
        plan, topology="h100:8", dtypes={name: "int8" if "mlp" in name else "float32" for name in plan.dtypes}
    )
    assert roofs(both)["flops"] == {name: topology.peak_flops(name) for name in ("bf16", "f32", "int8")}


def test_a_plan_without_ops_has_a_page_without_them(plan: Plan):
    older = dataclasses.replace(plan, ops=())
    assert ops_summary(older) is None and "h-ops" not in html_report(older)


def test_memory_is_that_of_the_chart(plan: Plan):
    data = memory_data(plan)
    assert data is not None and plan.timeline is not None
    assert data["kinds"] == {kind: list(sizes) for kind, sizes in plan.timeline.memory.items()}
    assert data["held"][0] == ["add (forward, in a loop)", "activations", 32, 19 * 2**30, 1, 2]
    assert memory_data(dataclasses.replace(plan, timeline=None)) is None
