"""Exact solves in a process of their own, which is killed if a solve does not end in time."""

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from random_problems import make_problem
from test_clock import LEAST, hard_problem

from autoshard.solver import Problem, Status, evaluate, processor_seconds, solve
from autoshard.solver import exact_solves as module
from autoshard.solver.exact_solves import Exact, solve_in_process
from autoshard.solver.mip_rows import solve_mip
from autoshard.solver.residual_graph import Graph, build


def small_problem() -> Problem:
    """Build a problem that reductions and elimination do not finish: the memory limit is below the preferred usage."""
    return make_problem(*hard_parts(6))


def hard_parts(count: int) -> tuple:
    costs = [[0, 3 + node, 5] for node in range(count)]
    edges = [(a, b, [7, 2, 1, 2, 7, 3, 1, 3, 7]) for a in range(count) for b in range(a + 1, count)]
    return costs, edges, [(node, 0, 2, [4, 2, 0]) for node in range(count)], 2 * count


def job(graph: Graph, **changes) -> Exact:
    fields = {"deadline": time.monotonic() + 60, "clock": time.monotonic, "seed": 0, "cutoff": None, "nodes": None}
    return Exact(graph, times=list(range(len(graph.capacity))), **(fields | changes))


def never() -> bool:
    return False


@pytest.fixture
def none_waits():
    """Fixture without idle processes of earlier tests, and without leftovers for later ones."""
    module._end()
    yield
    module._end()


def run(code: str) -> str:
    parts = f"COSTS, EDGES, TERMS, LIMIT = {hard_parts(6)!r}\n"
    before = "import sys\nsys.path.insert(0, 'tests/solver')\n"
    command = [sys.executable, "-c", parts + before + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


SOLVE = """
from random_problems import make_problem
from autoshard.solver import solve, solve_problem
exact = solve_problem.solve_in_process
def counted(job, due):
    print("exact")
    return exact(job, due)
solve_problem.solve_in_process = counted
answer = solve(make_problem(COSTS, EDGES, TERMS, LIMIT))
print(answer.status.name, answer.cost)
print([m for m in ("ortools",) if m in sys.modules and m not in BEFORE])
"""


def expected() -> list[str]:
    answer = solve(small_problem())
    assert answer.status is Status.OPTIMAL
    return ["exact", f"OPTIMAL {answer.cost}", "[]"]


@pytest.mark.heavy
def test_ortools_is_not_loaded_where_the_user_is():
    assert run(f"BEFORE = ()\n{SOLVE}").splitlines() == expected()


@pytest.mark.heavy
def test_it_is_solved_after_ortools_was_imported():
    before = "from ortools.linear_solver import pywraplp\nBEFORE = ('ortools',)\n"
    assert run(f"{before}{SOLVE}").splitlines() == expected()


@pytest.mark.heavy
def test_ortools_can_be_imported_after_a_solve():
    after = "from ortools.linear_solver import pywraplp\nprint(pywraplp.Solver.CreateSolver('GLOP') is not None)"
    assert run(f"BEFORE = ()\n{SOLVE}{after}").splitlines() == [*expected(), "True"]


@pytest.mark.heavy
def test_a_process_is_saved_for_the_next_solve(none_waits):
    graph = build(small_problem())
    first = solve_in_process(job(graph), never)
    (_, kept), = module._idle  # fmt: skip
    again = solve_in_process(job(graph), never)
    assert [process for _, process in module._idle] == [kept]
    assert first is not None and first == again and first.finished
    assert first.choices is not None and evaluate(small_problem(), graph.restore(first.choices)).feasible


@pytest.mark.heavy
def test_a_process_of_another_is_left_alone(none_waits):
    graph = build(small_problem())
    first = solve_in_process(job(graph), never)
    (_, theirs), = module._idle  # fmt: skip
    module._idle[:] = [(os.getpid() + 1, theirs)]
    try:
        assert solve_in_process(job(graph), never) == first
        assert all(process is not theirs for _, process in module._idle)
        assert theirs._worker.alive
    finally:
        theirs.end()


@pytest.mark.heavy
def test_a_process_that_does_not_stop_is_ended(none_waits, monkeypatch):
    monkeypatch.setattr(module, "_HURRY_S", 0.0)
    looks = itertools.count()
    assert solve_in_process(job(build(hard_problem())), lambda: next(looks) > 3) is None
    assert not module._idle


@pytest.mark.heavy
def test_a_process_that_is_asked_answers_and_is_ended(none_waits, monkeypatch):
    monkeypatch.setattr(module, "_HURRY_S", 60.0)
    looks = itertools.count()
    cut = solve_in_process(job(build(hard_problem())), lambda: next(looks) > 3)
    assert cut is not None and not cut.finished and cut.stopped
    assert not module._idle
    whole = solve_in_process(job(build(small_problem())), never)
    assert whole is not None and whole.finished
    assert len(module._idle) == 1


@pytest.mark.heavy
def test_a_process_whose_limit_comes_is_preserved(none_waits):
    cut = solve_in_process(job(build(hard_problem()), deadline=time.monotonic() + 3.0), never)
    assert cut is not None and not cut.finished and not cut.stopped
    assert len(module._idle) == 1


@pytest.mark.heavy
def test_a_clock_that_only_this_process_knows_ends_a_solve(none_waits, monkeypatch):
    monkeypatch.setattr(module, "_HURRY_S", 60.0)
    ticks = itertools.count()
    cut = solve_in_process(job(build(hard_problem()), clock=lambda: float(next(ticks)), deadline=3.0), never)
    assert cut is not None and not cut.finished


@pytest.mark.heavy
@pytest.mark.parametrize(
    "clock", [time.monotonic, processor_seconds, pytest.param(lambda: time.monotonic(), marks=pytest.mark.full)]
)
def test_what_was_found_until_then_is_preserved(none_waits, monkeypatch, clock):
    monkeypatch.setattr(module, "_HURRY_S", 60.0)
    problem = hard_problem(24)
    graph = build(problem)
    began, seconds = clock(), 2.0 if clock is processor_seconds else 4.0
    cut = solve_in_process(job(graph, clock=clock, deadline=began + seconds), never)
    assert cut is not None and not cut.finished and cut.choices is not None
    judged = evaluate(problem, graph.restore(cut.choices))
    assert judged.feasible
    assert 0 < cut.bound + graph.offset <= judged.cost
    assert cut.stopped == (clock is not time.monotonic)
    assert clock() - began >= seconds - 0.1


@pytest.mark.heavy
def test_what_went_wrong_there_is_raised_here(none_waits):
    graph = build(small_problem())
    with pytest.raises(ValueError) as here:
        solve_mip(graph, deadline=1e9, clock=time.monotonic, seed=0, cutoff=None, times=[10**6])
    with pytest.raises(ValueError) as there:
        solve_in_process(dataclasses.replace(job(graph), times=[10**6]), never)
    assert str(there.value) == str(here.value)


@pytest.mark.heavy
def test_a_process_that_dies_is_reported(none_waits):
    problem = small_problem()
    solve(problem)
    (_, process), = module._idle  # fmt: skip
    process._worker._process.kill()
    process._worker._process.wait()
    with pytest.raises(RuntimeError, match="ended unexpectedly"):
        solve_in_process(job(build(problem)), never)
    assert solve(problem).status is Status.OPTIMAL


@pytest.mark.heavy
def test_work_there_counts_once(none_waits):
    began = processor_seconds()
    solve_in_process(job(build(small_problem())), never)
    worked = processor_seconds() - began
    assert worked > 0.05  # at least it has imported scipy
    module._end()
    assert abs(processor_seconds() - began - worked) < 0.5 * worked


@pytest.mark.heavy
def test_the_same_answer_twice():
    choices = [solve(hard_problem(8), iterations=4, hint=LEAST[:8]).choices for _ in range(2)]
    assert np.array_equal(*choices)


def test_feasible_choices_of_a_solve_that_was_ended_are_not_called_infeasible():
    stop = threading.Event()
    stop.set()
    problem = make_problem(*hard_parts(14))
    cut = solve(problem, stop=stop)
    assert evaluate(problem, cut.choices).feasible
    assert cut.status is Status.FEASIBLE and cut.lower_bound <= cut.cost
