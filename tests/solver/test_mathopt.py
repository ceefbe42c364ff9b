"""Mixed integer programs through MathOpt: proven results, and results of a stopped run."""

import itertools
import math
import os
import tempfile

import numpy as np
import pytest
from test_clock import hard_problem

from autoshard.solver import evaluate, processor_seconds
from autoshard.solver.clocks import Due, never
from autoshard.solver.flat_graph import flatten
from autoshard.solver.mathopt import IntegerProgram, Minimum, _last, _Log
from autoshard.solver.residual_graph import build
from autoshard.solver.search.milp_worker import PartJob, PartSolver


WEIGHTS, WORTH = np.array([3.0, 4.0, 2.0]), np.array([5.0, 6.0, 3.0])


def knapsack() -> IntegerProgram:
    """Build a knapsack of three things. The first and the last fit and are worth most, 8."""
    program = IntegerProgram(-WORTH, 3)
    program.add(np.array([-np.inf]), np.array([5.5]), np.zeros(3, dtype=int), np.array([2, 0, 1]), WEIGHTS[[2, 0, 1]])
    return program


def minimise(program: IntegerProgram, due: Due = never, **changes) -> Minimum:
    asked = {"seed": 0, "seconds": math.inf, "cutoff": None, "nodes": None, "start": None}
    return program.minimise(**(asked | changes), due=due)


def test_the_best_is_found_and_proven():
    outcome = minimise(knapsack())
    assert outcome.finished and not outcome.stopped and not outcome.infeasible
    assert outcome.values.round(6).tolist() == [1, 0, 1]
    assert outcome.bound == pytest.approx(-8)


def test_variables_after_the_binaries_may_be_parts():
    program = IntegerProgram(-WORTH, 0)
    program.add(np.array([-np.inf]), np.array([5.5]), np.zeros(3, dtype=int), np.arange(3), WEIGHTS)
    assert minimise(program).bound == pytest.approx(-(5 + 2.5 * 1.5))


def test_rows_that_come_later_hold_too():
    program = knapsack()
    program.add(np.zeros(1), np.zeros(1), np.zeros(1, dtype=int), np.array([0]), np.ones(1))
    assert minimise(program).values.round(6).tolist() == [0, 1, 0]


def test_nothing_as_dear_as_the_cutoff_is_looked_for():
    assert minimise(knapsack(), cutoff=-8.5).infeasible
    assert minimise(knapsack(), cutoff=-7.5).values.round(6).tolist() == [1, 0, 1]


def test_a_contradiction_is_infeasible():
    program = knapsack()
    program.add(np.full(1, 4.0), np.full(1, 4.0), np.zeros(3, dtype=int), np.arange(3), np.ones(3))
    outcome = minimise(program)
    assert outcome.infeasible and outcome.bound == math.inf


def test_the_last_whole_solution_of_a_file_is_read():
    first, second = "Objective -3\n# Columns -1\n 1 2\n", "Objective -8\n# Columns -2\n 1 0\n 0.5 12\n"
    zero = "Objective 0\n# Columns -0\n"
    with tempfile.TemporaryFile() as file:
        for text in (first + second, first + second + zero):
            found = {}
            for length in range(len(text) + 1):
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), text[:length].encode(), 0)
                values = _last(file.fileno(), 13)
                found[length] = None if values is None else {int(n): values[n] for n in np.flatnonzero(values)}
            kinds = [kind for kind, _ in itertools.groupby(found[length] for length in sorted(found))]
            assert kinds == [None, {2: 1.0}, {0: 1.0, 12: 0.5}, {}][: 3 + text.endswith(zero)]
            assert found[len(first)] == {2: 1.0} and found[len(first) - 1] is None


def test_the_bound_is_read_from_the_log():
    log = _Log()
    log(["        Nodes      |    B&B Tree     |            Objective Bounds              |  Dynamic Constraints |"])
    log([" J       0       0         0   0.00%   -inf            125695.096679      Large        0      0      0"])
    log(["25.0% inactive integer columns, restarting", "  Gap               0% 12 3"])
    assert log.bound == -math.inf
    log([" T       0       0         0   0.00%   0               7.149762264      100.00%        0      0      0"])
    assert log.bound == 0
    log(["         17       5         6  31.25%   -1.5e+03        7.149762264      100.00%        0      0      0"])
    assert log.bound == 0
    log(["         20       5         6  31.25%   7.149762264     8.2              100.00%        0      0      0"])
    assert 7.1497 < log.bound < 7.149762264


@pytest.mark.heavy
def test_a_worker_that_was_stopped_goes_on_with_the_next_part():
    problem = hard_problem()
    graph = build(problem)
    names, flat = flatten(graph)
    slack = np.zeros(len(flat.cost))
    job = PartJob(
        slack=slack,
        gap=math.inf,
        best=None,
        cutoff=None,
        entries=40_000,
        provable=0,
        prices=np.ones(len(flat.capacity)),
        seconds=1.0,
        proof_seconds=1.0,
        nodes=None,
        clock=processor_seconds,
        seed=0,
    )
    worker = PartSolver(graph, names, flat)
    try:
        for _ in range(2):
            worker.start(job)
            answer = worker.answer()
            assert answer.stopped and not answer.finished and answer.chosen is not None
            choices = dict(zip(names, answer.chosen.tolist(), strict=True))
            judged = evaluate(problem, graph.restore(choices))
            assert judged.feasible and 0 < answer.bound + graph.offset <= judged.cost
    finally:
        worker.end()
