"""Plans on a refined mesh: they run and return the unplanned results."""

import pytest

from autoshard.exec import measure
from autoshard.planning import Options, read_asked
from autoshard.planning.plan_builder import make_plan
from tests.planning.programs import grouped_query


@pytest.mark.parametrize(
    ("kv", "batch", "seq", "mesh", "half", "by_hand"),
    [
        # An axis of one device splits no parameters.
        pytest.param(4, 8, 32, "data=1,model=8", "model(4 of 8)", "tensor_parallel", marks=pytest.mark.full),
        (2, 2, 126, "data=2,model=4", "model(2 of 4, outer)", "fsdp_tp"),
    ],
)
def test_half_of_an_axis_is_used_and_nothing_changes(
    kv: int, batch: int, seq: int, mesh: str, half: str, by_hand: str
) -> None:
    source = grouped_query(kv=kv, batch=batch, seq=seq)
    asked = read_asked({"x": "data,None,None"} if mesh == "data=2,model=4" else {})
    result = make_plan(source, Options(topology="cpu:8", mesh=mesh, time_limit=20, asked=asked))
    assert half in result.plan.arguments["p.k"].axes
    measurement = measure(source, result.plan, steps=1, check=True)
    assert measurement.check is not None and measurement.check.passed
    baseline = measure(source, result.baseline_plans[by_hand], steps=1, check=True)
    assert baseline.check is not None and baseline.check.passed
