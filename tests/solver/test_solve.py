import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import brute_force, make_problem, problems

from autoshard.errors import UserError
from autoshard.solver import FORBIDDEN, Problem, Status, Useful, evaluate, solve


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


def test_the_smallest_excess_is_not_looked_for_where_nobody_asks():
    problem = make_problem([[0, 5], [0, 7]], [], [(0, 0, 4, [10, 6]), (1, 3, 9, [10, 5])], 8)
    answer = solve(problem, useful=Useful(nearest=False))
    assert (answer.status, answer.lower_bound) == (Status.INFEASIBLE, FORBIDDEN)
    assert len(answer.choices) == 0 and "excess" not in answer.stats


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


def test_a_limit_of_all_64_bits_is_none():
    problem = make_problem([[3, 1]], [], [(0, 0, 4, [10, 2**62])], 2**63 - 1)
    assert (solve(problem).cost, solve(problem).status) == (1, Status.OPTIMAL)


def test_usages_that_no_64_bits_hold_are_refused():
    problem = make_problem([[3, 1]] * 4, [], [(node, 0, 4, [0, 2**62]) for node in range(4)], 2**63 - 1)
    with pytest.raises(UserError) as caught:
        solve(problem)
    assert str(caught.value) == (
        f"the usages of the problem add up to {2**64} at some time; up to {2**62 - 1} they are reckoned exactly: "
        "give them and the limit in larger units"
    )


def test_allowed_costs_that_only_add_up_to_what_is_forbidden_are_refused():
    """Refuse such costs, but not as infeasible: every choice and every pair is allowed."""
    dear = make_problem([[9 * 10**17], [2 * 10**17, 3 * 10**17]], [])
    with pytest.raises(UserError, match=r"add up to as much as 12\d+, and no choices.*divide all costs by 2$"):
        solve(dear)
    assert solve(make_problem([[9 * 10**17], [10**16, 3 * 10**17]], [])).cost == 91 * 10**16
    never = make_problem([[9 * 10**17], [2 * 10**17, 3 * 10**17]], [(0, 1, [FORBIDDEN, FORBIDDEN])])
    assert solve(never).status is Status.INFEASIBLE
    full = make_problem([[9 * 10**17], [2 * 10**17, 3 * 10**17]], [], [(0, 0, 2, [5])], 4)
    assert solve(full).status is Status.INFEASIBLE


def test_costs_too_far_apart_are_refused():
    problem = make_problem([[6 * 10**17], [6 * 10**17], [-(2**63)]], [(0, 1, [7 * 10**17])])
    assert solve(problem).cost == 19 * 10**17 - 2**63
    wide = make_problem([[-(10**18), FORBIDDEN - 1], [0, 5]], [(0, 1, [FORBIDDEN, FORBIDDEN, 0, 0])])
    with pytest.raises(UserError, match=r"the costs of the problem lie up to 20\d+ apart.*divide all costs by 3$"):
        solve(wide)
    hinted = solve(wide, hint=np.array([1, 0]))
    assert (hinted.status, hinted.cost, hinted.lower_bound) == (Status.FEASIBLE, FORBIDDEN - 1, -(10**18))


@settings(max_examples=80, deadline=None)
@given(problems(most_nodes=6), st.integers(-3, 3))
def test_a_bound_that_is_enough_ends_it_and_holds(problem: Problem, more: int) -> None:
    best = brute_force(problem)
    if best is None:
        return
    enough = best + more
    answer = solve(problem, time_limit=20, useful=Useful(enough))
    assert answer.lower_bound <= best
    if len(answer.choices):
        judged = evaluate(problem, answer.choices)
        assert judged.feasible and judged.cost == answer.cost >= best
    if answer.cost != best or not len(answer.choices):
        assert more <= 0 and answer.lower_bound >= enough, "what costs less was found, or is said not to be"


@settings(max_examples=80, deadline=None)
@given(problems(most_nodes=6), st.sampled_from([0.01, 0.3]))
def test_a_gap_that_is_accepted_ends_it_and_both_ends_hold(problem: Problem, gap: float) -> None:
    best = brute_force(problem)
    answer = solve(problem, time_limit=20, useful=Useful(gap=gap))
    if best is None:
        assert answer.status is Status.INFEASIBLE
        return
    judged = evaluate(problem, answer.choices)
    assert judged.feasible and judged.cost == answer.cost
    assert answer.lower_bound <= best <= answer.cost
    assert answer.cost - answer.lower_bound <= gap * abs(answer.cost)


def test_a_hint_within_the_accepted_gap_of_the_first_bound_is_the_answer() -> None:
    problem = make_problem([[100, 101], [7, 9]], [(0, 1, [0, 1, 1, 0])])
    hint = np.array([1, 1])
    assert solve(problem, hint=hint).cost == 107
    near = solve(problem, hint=hint, useful=Useful(gap=0.05))
    assert (near.cost, near.lower_bound, near.status) == (110, 107, Status.FEASIBLE)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [("node_costs", (2, 1), "[n]"), ("edge_nodes", (4,), "[n, 2]"), ("edge_nodes", (1, 3), "[n, 2]")],
)
def test_arrays_of_another_shape_are_refused(name, shape, wanted):
    problem = make_problem([[0, 1], [2, 3]], [(0, 1, [0, 1, 2, 3])])
    wrong = dataclasses.replace(problem, **{name: np.zeros(shape, dtype=np.int64)})
    with pytest.raises(UserError) as caught:
        solve(wrong)
    assert str(caught.value) == f"Problem.{name} has shape {list(shape)}; it must have shape {wanted}"
