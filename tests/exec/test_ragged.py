"""Ragged dots on shards: rows, contracted dims and columns are split, forward and backward, and equal one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.exec import plan_mesh, read_collectives, wire_by_axis
from autoshard.exec.apply.calls_on_shards import lower_for_compiler
from autoshard.graph import FactorKind, read_graph
from autoshard.planning import Options, PlanResult, make_plan
from autoshard.program import Program, trace
from tests.exec.planned_programs import assert_close, f32


ROWS, INNER, COLUMNS, GROUPS = 4096, 64, 128, 5
SIZES = np.array([700, 0, 1900, 3, 1493], np.int32)
"""Rows of each group: some groups cross the borders between parts of 512 rows."""


def step(weights: Any, x: Any, sizes: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = jax.nn.relu(jax.lax.ragged_dot(x, weights["up"], sizes))
        return jnp.mean((jax.lax.ragged_dot(hidden, weights["down"], sizes) - x) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


@functools.cache
def experts() -> Program:
    weights = {"down": f32(GROUPS, COLUMNS, INNER), "up": f32(GROUPS, INNER, COLUMNS)}
    args = (weights, f32(ROWS, INNER), jax.ShapeDtypeStruct((GROUPS,), jnp.int32))
    return trace(step, args, name="experts", roles={"sizes": "other"})


@functools.cache
def planned() -> PlanResult:
    return make_plan(experts(), Options(topology="cpu:8", mesh="data=2,model=4"))


def test_only_groups_stay_whole() -> None:
    dots = [op for op in read_graph(experts().module).ops if op.opaque is not None]
    assert [op.opaque.target for op in dots if op.opaque] == ["ragged_dot"] * 5
    for op in dots:
        assert op.rule is not None
        assert op.rule.kinds[3] is FactorKind.NEED_REPLICATION and FactorKind.NEED_REPLICATION not in op.rule.kinds[:3]
        assert op.rule.kinds.count(FactorKind.REDUCTION) == 1
        assert op.flops == 2 * ROWS * INNER * COLUMNS


@pytest.mark.few(3)
@pytest.mark.parametrize("which", ["", "data_parallel", "fsdp", "tensor_parallel", "fsdp_tp"])
def test_it_runs_as_planned(which: str) -> None:
    program, result = experts(), planned()
    plan = result.baseline_plans[which] if which else result.plan
    rng = np.random.default_rng(0)
    weights = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in program.args[0].items()}
    given = (weights, rng.normal(size=(ROWS, INNER)).astype(np.float32), SIZES)
    compiled = plan.lower(step, *program.args).compile()
    placed = jax.tree.unflatten(jax.tree.structure(given), plan.in_shardings)
    found, wanted = compiled(*jax.device_put(given, placed)), jax.jit(step)(*given)
    assert_close(found, wanted, 1e-5)
    wire = wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))
    for axis, size in plan.prediction.wire_bytes.items():
        assert wire.get(axis, 0) == pytest.approx(size, abs=64)
    if which == "data_parallel":
        by_rows = [call for call in plan.calls if call.operands[0].dims[0] == ("data", "model")]
        assert len(by_rows) >= 3
        assert {call.summed for call in by_rows} == {(), ("data", "model")}, "gradients of matrices are summed"


def test_tpus_get_a_ragged_dot_of_shards() -> None:
    program = experts()
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4")).baseline_plans["data_parallel"]
    bodies = lower_for_compiler(program, plan, "tpu")
    assert len(bodies) == 5
    assert all(b"ragged_dot" in body for body in bodies.values())
