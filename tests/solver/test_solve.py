import numpy as np
import pytest
from hypothesis import given, settings
from random_problems import brute_force, make_problem, problems

from autoshard.errors import UserError
from autoshard.solver import FORBIDDEN, Problem, Status, evaluate, solve


def check(problem: Problem) -> None:
    best = brute_force(problem)
    answer = solve(problem, time_limit=20)
    judged = evaluate(problem, answer.choices)
    assert answer.cost == judged.cost
    if best is None:
        assert answer.status is Status.INFEASIBLE
        assert not judged.feasible
        assert answer.stats["excess"] == judged.excess
    else:
        assert answer.status is Status.OPTIMAL
        assert judged.feasible
        assert answer.cost == best
        assert answer.lower_bound == best


@settings(max_examples=200, deadline=None)
@given(problems(memory=False))
def test_optimal_without_memory(problem):
    check(problem)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_optimal_with_memory(problem):
    check(problem)


@settings(max_examples=60, deadline=None)
@given(problems(negative=True))
def test_optimal_with_negative_costs(problem):
    check(problem)


@settings(max_examples=60, deadline=None)
@given(problems(most_nodes=8))
def test_optimal_with_more_nodes(problem):
    check(problem)


def test_memory_forces_the_dearer_choice():
    problem = make_problem([[0, 5], [0, 7]], [], [(0, 0, 2, [10, 1]), (1, 1, 3, [10, 1])], 12)
    answer = solve(problem)
    assert (answer.cost, answer.status) == (5, Status.OPTIMAL)
    assert answer.choices.tolist() == [1, 0]
    assert answer.gap == 0


def test_infeasible_memory_names_the_smallest_excess():
    problem = make_problem([[0, 5], [0, 7]], [], [(0, 0, 4, [10, 6]), (1, 3, 9, [10, 5])], 8)
    answer = solve(problem)
    assert answer.status is Status.INFEASIBLE
    assert (answer.stats["excess"], answer.stats["excess_time"]) == (3, 3)
    assert answer.choices.tolist() == [1, 1]
    assert answer.gap == float("inf")


def test_all_forbidden_is_infeasible():
    problem = make_problem([[0, 0], [0, 0]], [(0, 1, [FORBIDDEN] * 4)])
    assert solve(problem).status is Status.INFEASIBLE


def test_the_statuses_are_sentences():
    assert str(Status.OPTIMAL) == "the choices are proven optimal"
    assert all(" " in status for status in Status)


def test_a_bad_hint_does_not_hurt():
    problem = make_problem([[3, 1]], [])
    answer = solve(problem, hint=np.array([0]))
    assert answer.cost == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"time_limit": 0.0}, "the time limit is 0 s; it must be more than 0"),
        ({"time_limit": float("nan")}, "the time limit is nan s; it must be more than 0"),
        ({"threads": 0}, "0 threads were asked for; at least 1 is needed"),
        ({"hint": np.array([0, 0])}, "there are 2 choices for 1 nodes; one whole number per node is needed"),
        ({"hint": np.array([4])}, "node 0 was given alternative 4, but it has alternatives 0 to 1"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(UserError) as caught:
        solve(make_problem([[3, 1]], []), **arguments)
    assert str(caught.value) == sentence
