"""Time limits: the time that they count, and the end of a solve."""

import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from random_problems import make_problem

from autoshard.base.on_thread import OnThread
from autoshard.solver import Problem, Status, evaluate, processor_seconds, solve
from autoshard.solver import solve_problem as module
from autoshard.solver.elimination import Elimination
from autoshard.solver.flat_graph import flatten
from autoshard.solver.reductions import reduce
from autoshard.solver.residual_graph import build
from autoshard.solver.search.local_search import LocalSearch


COUNT = 30
LEAST = np.full(COUNT, 2)
"""Choices that need no memory."""


def hard_problem(count: int = COUNT) -> Problem:
    """Connect all nodes by costly edges, with memory for half of the nodes' preferred usage."""
    costs = [[0, 3, 5]] * count
    edges = [(a, b, [7, 2, 1, 2, 7, 3, 1, 3, 7]) for a in range(count) for b in range(a + 1, count)]
    terms = [(node, 0, 2, [4, 2, 0]) for node in range(count)]
    return make_problem(costs, edges, terms, 2 * count)


def test_waiting_does_not_count_and_work_does() -> None:
    began = processor_seconds()
    time.sleep(0.5)
    assert processor_seconds() - began < 0.4
    while processor_seconds() - began < 0.5:  # the process continues to work
        sum(range(1000))


@pytest.mark.heavy
def test_work_of_a_child_counts_once_it_has_ended() -> None:
    began = processor_seconds()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert processor_seconds() - began >= 0.29


def test_the_limit_is_of_the_clock_that_is_given() -> None:
    leaps = itertools.count(step=100)
    cut = solve(hard_problem(), time_limit=50, iterations=4, hint=LEAST, clock=lambda: float(next(leaps)))
    assert cut.status is Status.FEASIBLE and cut.lower_bound < cut.cost


def test_the_exact_solve_is_ended_by_processor_seconds() -> None:
    began = processor_seconds()
    cut = solve(hard_problem(), time_limit=1.0, iterations=1000, hint=LEAST, clock=processor_seconds)
    assert cut.status is Status.FEASIBLE and cut.lower_bound < cut.cost
    assert processor_seconds() - began >= 0.9


class Slow:
    """A clock like a slow machine's: every call of it adds a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.heavy
def test_reducing_leaves_time_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elimination, "plan", staticmethod(lambda graph: None))
    monkeypatch.setattr(module, "_SMALL", -1)
    chain = make_problem(
        [[0, 3, 5]] * 400,
        [(n, n + 1, [7, 2, 1, 2, 7, 3, 1, 3, 7]) for n in range(399)],
        [(n, n, n + 3, [4, 2, 0]) for n in range(0, 400, 2)],
        7,
    )
    whole, clock = build(chain), Slow()
    reduce(whole)
    cut = solve(chain, time_limit=400.0, clock=clock, threads=1)
    assert cut.stats["reduced_nodes"] > len(whole.costs)
    assert cut.status in (Status.FEASIBLE, Status.OPTIMAL) and evaluate(chain, cut.choices).feasible
    assert cut.stats["moves"] > 0
    assert clock.now < 400 + 30  # only calls of the clock, and no long step


def test_what_was_reduced_until_then_is_the_same_problem() -> None:
    chain = make_problem([[0, 3, 5]] * 40, [(n, n + 1, [7, 2, 1, 2, 7, 3, 1, 3, 7]) for n in range(39)])
    best = solve(chain).cost
    for looks in (0, 5, 20, 60, 100):
        graph, left = build(chain), itertools.count(looks, -1)
        reduce(graph, lambda left=left: next(left) <= 0)
        plan = Elimination.plan(graph)
        assert plan is not None
        found = plan.solve(graph.costs)
        assert found is not None
        value, choices = found
        assert value + graph.offset == best == evaluate(chain, graph.restore(choices)).cost
        assert plan.solve(graph.costs, lambda: True) is None or not graph.costs


def test_a_climb_ends_when_it_is_due() -> None:
    graph = build(hard_problem())
    _, flat = flatten(graph)
    climber = LocalSearch(flat, 0)
    climber.start(LEAST)
    asked = itertools.count(1)
    climber.run_until(lambda: next(asked) >= 3, np.zeros(len(flat.capacity)))
    assert next(asked) == 4 and 0 < climber.moves <= 3 * 50


def test_a_call_on_a_thread_is_done_once_it_has_returned() -> None:
    go = threading.Event()
    call = OnThread(lambda: go.wait() and "returned")
    assert not call.done() and call.result(lambda: True) is None
    go.set()
    assert call.result() == "returned" and call.done()
