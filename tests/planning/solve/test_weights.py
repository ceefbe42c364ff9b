"""Weights of the channels that compete in a block: cuts raise them towards the bound."""

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.solve import mesh_solve
from autoshard.planning.solve.time_weights import FLOOR, Weighing, carried_weights, even_weights, normalise
from autoshard.planning.solve.weight_search import search
from autoshard.planning.space.plan_options import Limits
from autoshard.solver import Solution
from tests.planning import programs as made


EVEN = {(-1, "compute"): 0.5, (-1, "x"): 0.25, (-1, "y"): 0.25, (0, "compute"): 0.5, (0, "x"): 0.5}


def outcome(exposed: float, **seconds: float) -> Outcome:
    channels = {(-2, "exposed"): exposed}
    channels |= {(-1 if name[0] == "t" else 0, name[1:]): s for name, s in seconds.items()}
    return Outcome(channels, (), 0, 0, {})


def test_one_choice_moves_all_weight_to_what_is_longest_in_each_block():
    weighing = Weighing(EVEN)
    weighing.add_choice(outcome(1.0, tcompute=3.0, tx=1.0, ty=2.0, lcompute=1.0, lx=4.0))
    weights = weighing.following(0.0)
    assert weights is not None
    assert weights[(-1, "compute")] == pytest.approx(1 - 2 * FLOOR)
    assert weights[(0, "x")] == pytest.approx(1 - FLOOR)


def test_weights_are_positive_and_those_of_a_block_sum_to_one():
    weighing = Weighing(EVEN)
    weighing.add_choice(outcome(0.0, tcompute=3.0, tx=1.0, lcompute=1.0, lx=4.0))
    weighing.add_bound(EVEN, 2.0)
    weighing.add_choice(outcome(0.5, tcompute=1.0, tx=5.0, lcompute=3.0))
    weights = weighing.following(1e-3)
    assert weights is not None and min(weights.values()) > 0
    for block in (-1, 0):
        assert sum(w for (b, _), w in weights.items() if b == block) == pytest.approx(1.0)


def test_two_choices_that_cut_each_other_share_the_weight():
    # For all weights, one of the two outcomes is not above 2.5. The next weights lie there.
    weighing = Weighing({(0, "compute"): 0.5, (0, "x"): 0.5})
    weighing.add_choice(outcome(0.0, lcompute=4.0, lx=1.0))
    weighing.add_choice(outcome(0.0, lcompute=1.0, lx=4.0))
    weights = weighing.following(0.0)
    assert weights == pytest.approx({(0, "compute"): 0.5, (0, "x"): 0.5})


def test_nothing_follows_when_no_weights_can_gain_enough():
    weighing = Weighing({(0, "compute"): 0.5, (0, "x"): 0.5})
    assert weighing.following(0.0) is None  # no outcome is known yet
    weighing.add_choice(outcome(1.0, lcompute=2.0, lx=1.0))
    weighing.add_bound({(0, "compute"): 0.9, (0, "x"): 0.1}, 2.9)
    assert weighing.following(0.2) is None
    assert weighing.following(0.05) is not None


def test_a_block_of_compute_alone_needs_no_weights():
    weighing = Weighing({(0, "compute"): 1.0})
    weighing.add_choice(outcome(1.0, lcompute=2.0))
    assert weighing.following(0.0) is None


def test_weights_from_another_mesh_serve_a_block_without_compute_of_its_own():
    model = SimpleNamespace(nodes=[SimpleNamespace(time={(0, "x"): None, (1, "compute"): None, (1, "x"): None})])
    model.reshards = []
    assert carried_weights(model, {(0, "compute"): 0.8, (1, "compute"): 0.8}) == pytest.approx(  # type: ignore[arg-type]
        {(0, "x"): 1.0, (1, "compute"): 0.8, (1, "x"): 0.2}
    )


@pytest.mark.parametrize(("limit", "share"), [(None, 1.0), (1 << 34, 0.5)])
def test_a_first_solve_has_the_whole_time_if_none_may_follow(
    limit: int | None, share: float, monkeypatch: pytest.MonkeyPatch
):
    limits: list[float] = []
    solve = mesh_solve.solve

    def noted(*problem: Any, time_limit: float, **how: Any) -> Solution:
        """Note the time limit of a solve."""
        limits.append(time_limit)
        return solve(*problem, time_limit=time_limit, **how)

    monkeypatch.setattr(mesh_solve, "solve", noted)
    model = made.model("mixed")
    mesh_solve.solve_within(model, normalise(even_weights(model)), mesh_solve.Terms(limit, 60.0, 0))
    assert limits == [60.0 * share]


@pytest.mark.full
def test_the_bound_of_a_search_comes_near_the_plan():
    model = made.model("decoder", "v5e:2x4", "data=2,model=4", 1 << 34)
    searched = search(model, [], Limits(1 << 34, 300.0, 0), lambda line: None)
    assert searched.bound_s <= searched.best.outcome.step_time_s * (1 + 1e-9)
    assert searched.bound_s >= 0.97 * searched.best.outcome.step_time_s
