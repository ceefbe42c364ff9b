"""Ops and live memory of a plan add up to its prediction and to its own memory chart."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import HOST
from autoshard.graph import OpClass
from autoshard.planning import Plan
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.op_prices import MOST_ROWS, planned_ops, price_ops
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.price.step_timeline import make_timeline
from autoshard.planning.record.plan_files import plan_from_json, plan_to_json
from autoshard.program import trace
from tests.graph.programs import f32
from tests.planning import programs


@pytest.mark.parametrize(("name", "topology", "mesh"), programs.CASES)
def test_the_rows_add_up_to_the_prediction(name: str, topology: str, mesh: str):
    model = programs.model(name, topology, mesh)
    rng = np.random.default_rng(0)
    for _ in range(5):
        choices = programs.random_choices(model, rng)
        outcome, rows = evaluate(model, choices), planned_ops(ledger := itemise(model, choices), price_ops(ledger))
        assert len(rows) <= MOST_ROWS + 1
        assert sum(row.compute_s for row in rows) == pytest.approx(outcome.compute_s, rel=1e-9)
        host = sum(seconds for (_, what), seconds in outcome.channels.items() if what == HOST)
        assert sum(row.host_s for row in rows) == pytest.approx(host, rel=1e-9)
        sent = sum(each.seconds for each in outcome.collectives)
        assert sum(row.sent_s for row in rows) == pytest.approx(sent, rel=1e-9)
        waited = sum(each.exposed_s or 0.0 for each in outcome.collectives)
        assert sum(row.waited_s for row in rows) == pytest.approx(waited, rel=1e-9)
        assert all(row.compute_s > 0 or row.bound != "compute" for row in rows)
        assert all(row.flops >= 0 and row.moved_bytes >= 0 and row.waited_s <= row.sent_s * (1 + 1e-9) for row in rows)


def test_elementwise_ops_move_what_they_read_and_write():
    def fn(x):
        wide = jnp.tanh(x)
        return wide, jnp.sin(wide).astype(jnp.bfloat16)

    count = 8192 * 4096
    model = programs.model_of(trace(fn, (f32(8192, 4096),)), "v5e:2x2", "data=4")
    assert all((node.states[0] < 0).all() for node in model.nodes)
    ledger = itemise(model, np.zeros(len(model.nodes), dtype=np.int64))
    rows = planned_ops(ledger, price_ops(ledger))
    # The second result is written by the same fusion, from operands that the first one has read.
    assert {row.kind: row.moved_bytes for row in rows} == pytest.approx({"tanh": 8 * count, "convert": 2 * count})
    assert all(row.flops == 0 and row.bound == "memory" for row in rows)


@pytest.mark.parametrize(("name", "topology", "mesh"), [("matmul", "cpu:8", "data=4,model=2"), *programs.CASES])
def test_collectives_of_a_result_are_those_of_the_op_that_makes_it(name: str, topology: str, mesh: str):
    model, rng, inside = programs.model(name, topology, mesh), np.random.default_rng(0), set()
    for _ in range(8):
        prices = price_ops(itemise(model, programs.random_choices(model, rng)))
        assert all(op < 0 or tensor not in model.graph.ops[op].results for tensor, op in prices.moved)
        inside |= {op for op, collectives in prices.inside.items() if collectives}
    heavy = [op.id for op in model.graph.ops if op.op_class is OpClass.HEAVY and op.flops]
    assert inside & set(heavy[:1])


@pytest.mark.parametrize(("name", "topology", "mesh"), programs.CASES)
def test_no_op_runs_faster_than_the_chip(name: str, topology: str, mesh: str):
    model = programs.model(name, topology, mesh)
    peak = max(model.compute.topology.peak_flops(dtype) for dtype in ("bf16", "f32"))
    prices = price_ops(itemise(model, programs.random_choices(model, np.random.default_rng(1))))
    for place, seconds in prices.compute.items():
        assert prices.work[place].flops <= peak * seconds * (1 + 1e-9)


@pytest.mark.parametrize(("name", "topology", "mesh"), programs.CASES)
def test_what_is_not_split_does_all_flops_of_the_program(name: str, topology: str, mesh: str):
    """Price a plan with nothing split: each device performs all FLOPs of the program."""
    model = programs.model(name, topology, mesh)
    assert all((node.states[0] < 0).all() for node in model.nodes)
    prices = price_ops(itemise(model, np.zeros(len(model.nodes), dtype=np.int64)))
    heavy = [op for op in model.graph.ops if op.op_class is OpClass.HEAVY and op.flops > 0]
    done = {op.id: prices.work["op", op.id].flops for op in heavy}
    assert any(done.values())
    for op in heavy:
        # A product of two tensors of the same dims is no matmul and does not use the matrix unit.
        assert done[op.id] in (0.0, pytest.approx(op.flops * model.graph.trips(op.loop), rel=1e-9)), op.name


@pytest.mark.parametrize(("name", "topology", "mesh"), programs.CASES)
def test_what_is_stored_is_what_the_chart_shows(name: str, topology: str, mesh: str):
    model = programs.model(name, topology, mesh)
    choices = programs.random_choices(model, np.random.default_rng(2))
    timeline = make_timeline(itemise(model, choices))
    assert timeline.held
    small = 0
    for moment in range(len(timeline.moments_s)):
        for kind, sizes in timeline.memory.items():
            listed = sum(row.bytes for row in timeline.held if row.kind == kind and row.first <= moment <= row.last)
            rest = sizes[moment] - listed - (model.fixed_bytes if kind == "temporaries" else 0)
            assert rest >= 0, (moment, kind)
            small = max(small, rest)
    # The omitted values are small in comparison with the peak.
    assert small <= 0.05 * max(sum(column) for column in zip(*timeline.memory.values(), strict=True))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return programs.planned("wide mlp", "v5e:4x4", "data=4,model=4").plan


def test_a_plan_keeps_its_ops_and_is_the_same_again(plan: Plan):
    assert plan.ops and plan.timeline is not None and plan.timeline.held
    again = plan_from_json(plan_to_json(plan))
    assert again.ops == plan.ops and again.timeline == plan.timeline
    assert plan_to_json(again) == plan_to_json(plan)
    assert {row.bound for row in plan.ops} <= {"compute", "memory", "network", "overhead", "host"}
    assert plan.ops[0].flops > 0 and plan.ops[0].compute_s + plan.ops[0].sent_s >= plan.ops[1].compute_s
