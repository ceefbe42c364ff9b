"""Whole plans against what XLA compiles of them for eight CPU devices: bytes on the wire by mesh axis."""

import pytest

from autoshard.exec import plan_mesh, read_collectives, wire_by_axis
from tests.plan import programs as made


SCALARS = 64
"""Bytes by which a plan may be off: sums of scalars are not decisions."""


@pytest.mark.parametrize(
    ("name", "mesh", "which"),
    [
        ("mlp", "data=4,model=2", "tensor_parallel"),
        ("mlp", "data=8", "fsdp"),
        ("two matmuls", "data=4,model=2", "fsdp_tp"),
        ("decoder", "data=4,model=2", "plan"),
        ("decoder", "data=4,model=2", "tensor_parallel_sp"),
        ("decoder", "data=4,model=2", "fsdp_tp_sp"),
        ("convolutions", "data=8", "data_parallel"),
        ("decoding", "data=4,model=2", "tensor_parallel"),
        ("mixed", "data=4,model=2", "tensor_parallel"),
        ("views", "data=4,model=2", "data_parallel"),
        ("spectrum", "data=4,model=2", "data_parallel"),
    ],
)
def test_predicted_bytes_are_those_on_the_wire(name: str, mesh: str, which: str) -> None:
    program, result = made.program(name), made.planned(name, "cpu:8", mesh)
    plan = result.plan if which == "plan" else result.baseline_plans[which]
    compiled = plan.lower(program.fn, *program.args, donate_argnums=program.donate_argnums).compile()
    found = wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))
    for axis, size in plan.prediction.wire_bytes.items():
        assert found.get(axis, 0) == pytest.approx(size, rel=0.01, abs=SCALARS)
