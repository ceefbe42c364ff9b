"""What a time limit counts, and that it ends a solve."""

import itertools
import subprocess
import sys
import time

import numpy as np
from random_problems import make_problem

from autoshard.solver import Problem, Status, processor_seconds, solve


COUNT = 30
LEAST = np.full(COUNT, 2)
"""Choices that take no memory."""


def hard_problem(count: int = COUNT) -> Problem:
    """Every node beside every other, dear to agree with; memory for half of what each would like."""
    costs = [[0, 3, 5]] * count
    edges = [(a, b, [7, 2, 1, 2, 7, 3, 1, 3, 7]) for a in range(count) for b in range(a + 1, count)]
    terms = [(node, 0, 2, [4, 2, 0]) for node in range(count)]
    return make_problem(costs, edges, terms, 2 * count)


def test_waiting_does_not_count_and_work_does() -> None:
    began = processor_seconds()
    time.sleep(0.5)
    assert processor_seconds() - began < 0.4
    while processor_seconds() - began < 0.5:  # it goes on
        sum(range(1000))


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
