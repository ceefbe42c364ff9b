"""Long sequences with grouped query heads: every device computes its own part of attention."""

import math

import pytest

from autoshard.planning import Options, make_plan
from experiments.quality import long_context


@pytest.mark.full
def test_more_devices_than_heads_of_keys_share_attention() -> None:
    program = long_context.program(layers=1, batch=4, seq=4096)
    plan = make_plan(program, Options(topology="v5p:4x4x4", mesh="data=4,model=16", time_limit=30)).plan
    attention = [call for call in plan.calls if call.name.startswith("splash_mha_")]
    assert {call.name.split("_")[2] for call in attention} == {"fwd", "dkv", "dq"}
    for call in attention:
        used = {axis for spec in (*call.operands, *call.results) for axis in spec.axes} | set(call.summed)
        assert math.prod(plan.mesh[axis] for axis in used) == 64
    assert not any("splash" in line for line in plan.warnings)
