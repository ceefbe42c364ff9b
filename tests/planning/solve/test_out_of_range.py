"""Times beyond exact integers are refused, not wrapped and not treated as forbidden."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard.errors import OutOfRangeError
from autoshard.planning.solve.mesh_solve import OUT_OF_RANGE, Terms, solve_within
from autoshard.planning.solve.problem_builder import MAX_COST, build_network, build_problem, kept_of
from autoshard.planning.solve.time_weights import even_weights
from autoshard.solver import FORBIDDEN, evaluate, prune
from tests.planning import programs as made


def slower(model: Any, factor: float) -> Any:
    """Scale all times of a model by a factor."""
    nodes = [
        dataclasses.replace(node, time={channel: factor * time for channel, time in node.time.items()})
        for node in model.nodes
    ]
    reshards = [dataclasses.replace(reshard, trips=factor * reshard.trips) for reshard in model.reshards]
    return SimpleNamespace(nodes=nodes, reshards=reshards, fixed_bytes=model.fixed_bytes)


@pytest.mark.parametrize("factor", [1e9, 1e15, 1e25, 1e280])
def test_costs_stay_apart_from_what_is_forbidden(factor: float):
    model = made.model("mlp")
    weights = even_weights(model)
    usual, long = build_problem(model, weights, None), build_problem(slower(model, factor), weights, None)
    for before, after in ((usual.node_costs, long.node_costs), (usual.edge_costs, long.edge_costs)):
        assert ((before == FORBIDDEN) == (after == FORBIDDEN)).all()
        allowed = after[after != FORBIDDEN]
        assert ((allowed >= 0) & (allowed < MAX_COST + 1024)).all()
    assert factor < 1e12 or long.edge_costs[long.edge_costs < FORBIDDEN].max() >= OUT_OF_RANGE
    network = build_network(slower(model, factor), weights, None, kept_of(model, None))
    for cost in network.costs:
        assert (cost < FORBIDDEN).all()
    narrowed = prune(network)
    assert narrowed.choices is None or narrowed.bound <= evaluate(long, narrowed.choices).cost


def test_a_program_that_takes_months_is_refused():
    model = made.model("mlp")
    terms = Terms(None, 30.0, 0)
    weights = even_weights(model)
    solved = solve_within(slower(model, 1e6), weights, terms)
    assert 0 < solved.solution.lower_bound <= solved.solution.cost < OUT_OF_RANGE
    with pytest.raises(OutOfRangeError, match="11 days of one step"):
        solve_within(slower(model, 1e13), weights, terms)


@pytest.mark.parametrize("trips", [1, 2**31 - 1])
def test_loops_within_loops_are_not_wrapped(trips: int):
    def step(x: Any, w: Any) -> Any:
        def repeat(count: int, call: Any) -> Any:
            return lambda x: jax.lax.fori_loop(0, count, lambda _, x: call(x), x)

        return repeat(trips, repeat(trips, lambda x: x @ w))(x)

    program = autoshard.trace(step, (jax.ShapeDtypeStruct((64, 64), "float32"),) * 2)
    if trips == 1:
        plan = autoshard.plan(program, topology="v5e:2x2", mesh="data=4")
        assert 0 < plan.lower_bound <= plan.objective < 1e12
        return
    with pytest.raises(OutOfRangeError, match="plan fewer iterations of its loops") as caught:
        autoshard.plan(program, topology="v5e:2x2", mesh="data=4")
    assert "\n" not in str(caught.value)


def test_what_is_not_a_number_is_an_error_of_ours():
    model = made.model("mlp")
    with pytest.raises(ArithmeticError, match="not a number"):
        build_problem(slower(model, np.nan), even_weights(model), None)
