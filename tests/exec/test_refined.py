"""Plans on a refined mesh run, and give what the unplanned program gives."""

import pytest

from autoshard.exec import measure
from autoshard.plan._make import make_plan
from tests.plan.programs import grouped_query


@pytest.mark.parametrize(("kv", "batch", "mesh"), [(4, 8, "data=1,model=8"), (2, 2, "data=2,model=4")])
def test_half_of_an_axis_is_used_and_nothing_changes(kv: int, batch: int, mesh: str) -> None:
    source = grouped_query(kv=kv, batch=batch, seq=30)
    result = make_plan(source, topology="cpu:8", mesh=mesh, time_limit=20)
    half = [axis for axis in result.plan.mesh if axis.startswith(f"model({kv} of ")]
    assert any(axis in result.plan.arguments["p.k"].axes for axis in half)
    found = measure(source, result.plan, steps=1, check=True)
    assert found.check is not None and found.check.passed
    baseline = measure(source, result.baseline_plans["tensor_parallel"], steps=1, check=True)
    assert baseline.check is not None and baseline.check.passed
