"""The engine for large problems, applied to small ones."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from random_problems import brute_force, make_problem, problems

from autoshard.solver import FORBIDDEN, Problem, Status, evaluate, solve
from autoshard.solver import solve_problem as module
from autoshard.solver.elimination import Elimination
from autoshard.solver.flat_graph import flatten
from autoshard.solver.mip_rows import usage_profile
from autoshard.solver.reductions import reduce
from autoshard.solver.residual_graph import InfeasibleGraph, OverLimit, build, table_entries
from autoshard.solver.search.block_kernels import minimise, plan
from autoshard.solver.search.local_search import LocalSearch
from autoshard.solver.search.message_kernels import price_memory
from autoshard.solver.search.message_passing import Dual
from autoshard.solver.search.search_kernels import _block_cost, _grow, _residual


def hard_problem(nodes: int, seed: int, hops: tuple[int, ...] = (1, 2, 7), alternatives: int = 4) -> Problem:
    """Build a ring with chords. Each node's memory overlaps with its neighbours', so that no reduction finishes it."""
    random = np.random.default_rng(seed)
    costs = random.integers(0, 1000, (nodes, alternatives)).tolist()
    edges = []
    for node in range(nodes):
        for hop in hops:
            table = random.integers(0, 1000, alternatives * alternatives)
            edges.append((node, (node + hop) % nodes, table.tolist()))
    terms = []
    for node in range(nodes):
        usage = random.integers(0, 100, alternatives)
        usage[random.integers(alternatives)] = 0
        terms.append((node, node, node + 12, usage.tolist()))
    return make_problem(costs, edges, terms, 400)


@settings(max_examples=100, deadline=None)
@given(problems(most_nodes=5))
def test_the_dual_bound_never_passes_the_optimum(problem):
    best = brute_force(problem)
    graph = build(problem)
    try:
        reduce(graph)
    except (InfeasibleGraph, OverLimit):
        assert best is None
        return
    if best is None or not graph.costs:
        return
    _, flat = flatten(graph)
    dual = Dual(flat)
    dual.ascend(30, best - graph.offset, 1.0)
    assert dual.bound + graph.offset <= best
    slack = dual.slack()
    assert slack.min() >= -1e-6 * abs(best) - 1e-6


@settings(max_examples=100, deadline=None)
@given(problems(memory=False))
def test_elimination_finds_the_optimum_of_the_unreduced_graph(problem):
    best = brute_force(problem)
    graph = build(problem)
    plan = Elimination.plan(graph)
    assert plan is not None
    found = plan.solve(graph.costs)
    assert found is not None
    value, choices = found
    if best is None:
        assert value >= FORBIDDEN
    else:
        assert value + graph.offset == best
        assert evaluate(problem, graph.restore(choices)).cost == best


@settings(max_examples=100, deadline=None)
@given(problems(most_nodes=5))
def test_projected_choices_are_no_dearer(problem):
    graph = build(problem)
    try:
        reduce(graph)
    except (InfeasibleGraph, OverLimit):
        return
    answer = solve(problem)
    # Choices other than the optimum: the first allowed alternative of each node.
    for choices in (answer.choices, np.zeros(problem.num_nodes, dtype=np.int64)):
        judged = evaluate(problem, choices)
        if judged.feasible:
            projected = graph.project(choices)
            assert projected is not None
            again = evaluate(problem, graph.restore(projected))
            assert again.feasible
            assert again.cost <= judged.cost


def test_the_climber_keeps_its_books():
    graph = build(hard_problem(60, 1))
    reduce(graph)
    names, flat = flatten(graph)
    dual = Dual(flat)
    climber = LocalSearch(flat, 0)
    climber.penalty = 10.0
    climber.start(dual.ascend(5, 1e6, 1.0))
    climber.run(dual.prices, 20)
    now = climber.chosen.copy()
    cost, excess = climber._state[0], climber._state[1]
    climber.start(now)
    assert climber._state[0] == pytest.approx(cost)
    assert climber._state[1] == pytest.approx(excess)
    over = usage_profile(graph, dict(zip(names, now.tolist(), strict=True))) - graph.capacity
    assert over[over > 0].sum() == excess


def test_the_cheapest_of_all_starts_is_preserved():
    _, flat = flatten(build(make_problem([[10, 20, 15]], [])))
    climber = LocalSearch(flat, 0)
    for choice in (0, 1, 2):
        climber.start(np.array([choice]))
        assert climber.cost == 0 and climber.best.tolist() == [0]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_worth_most_gets_the_memory_that_there_is(seed):
    """Compare with a knapsack: all nodes of a ring prefer memory, and the limit allows half of it."""
    random, count = np.random.default_rng(seed), 30
    costs = [[0, int(cost)] for cost in random.integers(1, 1000, count)]
    edges = [(node, (node + 1) % count, random.integers(0, 30, 4).tolist()) for node in range(count)]
    terms = [(node, 0, 1, [int(usage), 0]) for node, usage in enumerate(random.integers(5, 15, count))]
    problem = make_problem(costs, edges, terms, 150)
    graph = build(problem)
    names, flat = flatten(graph)
    climber = LocalSearch(flat, 0)
    climber.penalty = 100.0
    climber.start(np.ones(len(names), dtype=np.int64))
    climber.run(np.zeros(len(flat.capacity)), 10)
    best = solve(problem)
    assert best.status is Status.OPTIMAL and best.cost <= climber.cost + graph.offset <= 1.1 * best.cost


def test_memory_costs_its_price_at_every_time_of_its_term():
    terms = [(0, 0, 2, [3, 5]), (1, 1, 3, [7, 0]), (1, 0, 1, [1, 2])]
    _, flat = flatten(build(make_problem([[0, 20], [0, 40]], [], terms, 6)))
    assert flat.capacity.tolist() == [6, 6], "the last two times are one"
    unary = np.zeros(4)
    assert price_memory(flat, np.array([1.0, 10.0]), unary) == 11 * 6
    assert unary.tolist() == [3 * 11, 20 + 5 * 11, 7 * 10 + 1, 40 + 2]


def test_entries_are_those_of_the_table_of_every_edge():
    edges = [(0, 1, [0] * 6), (1, 2, [0] * 12), (1, 0, [0] * 6)]
    assert table_entries(build(make_problem([[0] * 2, [0] * 3, [0] * 4], edges))) == 6 + 12


def test_what_is_forbidden_stays_so_in_every_table():
    whole = hard_problem(12, 0)
    random = np.random.default_rng(0)
    closed = random.random(len(whole.edge_costs)) < 0.2
    graph = build(dataclasses.replace(whole, edge_costs=np.where(closed, FORBIDDEN, whole.edge_costs + 500)))
    reduce(graph)
    tables = [table for near in graph.edges.values() for table in near.values()]
    assert any((table == FORBIDDEN).any() for table in tables)
    assert all(((table < 10**9) | (table == FORBIDDEN)).all() for table in tables)


def test_a_block_is_minimised_exactly_for_any_fixed_members():
    """Solve blocks of dense graphs exactly, where some members are fixed and others were eliminated into them."""
    late = 0
    for seed in range(12):
        graph = build(hard_problem(40, seed, hops=(1, 2, 3, 5, 11)))
        names, flat = flatten(graph)
        count = len(names)
        climber = LocalSearch(flat, seed)
        climber.start(np.random.default_rng(seed).integers(0, np.diff(flat.node_at)))
        work = climber._work
        for inside in range(3, 43, 2):
            work.mark[:] = inside
            work.members[:] = np.random.default_rng(inside).permutation(count)
            work.spot[work.members] = np.arange(count)
            done, slots = plan(flat, work, count, inside)
            kept = set(np.flatnonzero(work.fate == 2).tolist())
            assert 0 < done == count - len(kept)
            late += len(kept) > 0
            assert not kept & set(work.up[:done].ravel().tolist())
            prices = np.zeros(len(flat.capacity))
            _residual(flat, work, climber.chosen, climber._used, prices, 0.0, done, inside)
            work.value[:] = work.base
            work.trial[:] = 10**6  # leftovers of an earlier block
            least = minimise(flat, work, done, slots, False)
            assert least == pytest.approx(_block_cost(flat, work, work.trial, done, inside), rel=1e-9)
    assert late > 100


@pytest.mark.parametrize("broken", [False, True])
def test_the_members_of_a_block_are_different_marked_and_in_their_places(broken):
    graph = build(hard_problem(40, 0))
    _, flat = flatten(graph)
    climber = LocalSearch(flat, 0)
    climber.start(np.zeros(40, dtype=np.int64))
    work, sizes = climber._work, set()
    for turn in range(1, 200):
        goal = 2 + turn % 20
        size = _grow(flat, work, climber._used, broken, goal, 2 * turn + 1)
        members = work.members[:size].tolist()
        assert 0 < size <= goal and len(set(members)) == size
        assert sorted(members) == np.flatnonzero(work.mark == 2 * turn + 1).tolist()
        assert work.spot[members].tolist() == list(range(size))
        sizes.add(size)
    assert len(sizes) > 10


@pytest.fixture
def engine_only(monkeypatch):
    """Fixture without shortcuts: elimination and the small exact solve are switched off."""
    monkeypatch.setattr(Elimination, "plan", staticmethod(lambda graph: None))
    monkeypatch.setattr(module, "_SMALL", -1)


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize("seed", [0, 1])
def test_the_engine_proves_what_the_exact_solve_proves(seed, engine_only):
    problem = hard_problem(12, seed)
    answer = solve(problem, time_limit=60)
    assert answer.status is Status.OPTIMAL
    assert evaluate(problem, answer.choices).feasible
    assert "moves" in answer.stats


@pytest.mark.heavy
def test_engine_and_exact_solve_agree(monkeypatch):
    problem = hard_problem(12, 3)
    exact = solve(problem)
    assert exact.status is Status.OPTIMAL
    monkeypatch.setattr(Elimination, "plan", staticmethod(lambda graph: None))
    monkeypatch.setattr(module, "_SMALL", -1)
    assert solve(problem).cost == exact.cost


@pytest.mark.heavy
def test_the_same_seed_and_iterations_give_the_same_answer(engine_only):
    problem = hard_problem(30, 5, hops=(1, 2))
    one, two = (solve(problem, seed=3, iterations=3) for _ in range(2))
    assert one.choices.tolist() == two.choices.tolist()
    assert (one.cost, one.lower_bound, one.status) == (two.cost, two.lower_bound, two.status)


@pytest.mark.full
@pytest.mark.heavy
def test_one_thread_does_the_same_work(engine_only):
    problem = hard_problem(12, 0)
    assert solve(problem, time_limit=60, threads=1).status is Status.OPTIMAL


@pytest.mark.heavy
def test_a_feasible_hint_is_never_lost(engine_only):
    problem = hard_problem(30, 6, hops=(1, 2))
    first = solve(problem, iterations=2)
    again = solve(problem, hint=first.choices, iterations=1)
    assert again.cost <= first.cost
