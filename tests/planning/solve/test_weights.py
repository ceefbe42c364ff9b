"""Weights of the channels that compete in a block: cuts raise them towards the bound."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoshard.cost import HOST, IN_FLIGHT
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.solve import mesh_solve
from autoshard.planning.solve.problem_builder import weight_of
from autoshard.planning.solve.time_weights import (
    DUAL,
    Weighing,
    carried_weights,
    compute_weights,
    even_weights,
    normalise,
)
from autoshard.planning.solve.weight_search import search
from autoshard.planning.space.decision_model import EXPOSED, Channel
from autoshard.planning.space.plan_options import Limits
from autoshard.solver import Solution
from tests.planning import programs as made


EVEN = normalise({(-1, "compute"): 0.5, (-1, "x"): 0.25, (-1, "y"): 0.25, (0, "compute"): 0.5, (0, "x"): 0.5})
PAIR = normalise({(0, "compute"): 1.0, (0, "x"): 1.0})


def outcome(exposed: float, **seconds: float) -> Outcome:
    channels = {(-2, "exposed"): exposed}
    channels |= {(-1 if name[0] == "t" else 0, name[1:]): s for name, s in seconds.items()}
    return Outcome(channels, (), 0, 0, {})


def weighted(weights: Mapping[Channel, float], found: Outcome) -> float:
    """Return the weighted seconds of an outcome."""
    return sum(weight_of(weights, channel) * seconds for channel, seconds in found.channels.items())


def test_the_next_weights_give_the_best_choice_its_true_time():
    weighing = Weighing(EVEN)
    best = outcome(1.0, tcompute=3.0, tx=1.0, ty=2.0, lcompute=1.0, lx=4.0)
    assert best.step_time_s == pytest.approx(1.0 + 36 ** (1 / 3) + 65 ** (1 / 3))
    weighing.add_choice(best)
    weighing.add_choice(outcome(9.0, tcompute=3.0, tx=1.0, ty=2.0, lcompute=1.0, lx=4.0))
    weights = weighing.following(0.0)
    assert weights is not None
    assert weighted(weights, best) == pytest.approx(best.step_time_s, rel=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_weighted_seconds_are_never_above_the_true_time(seed: int):
    random = np.random.default_rng(seed)
    weights = normalise(dict(zip(EVEN, random.random(len(EVEN)), strict=True)))
    seconds = dict(zip(EVEN, random.random(len(EVEN)) ** 4, strict=True))
    found = Outcome({(-2, "exposed"): 1.0} | seconds, (), 0, 0, {})
    longest = sum(max(s for (block, _), s in seconds.items() if block == own) for own in (-1, 0))
    assert weighted(weights, found) <= found.step_time_s * (1 + 1e-12)
    assert 1.0 + longest <= found.step_time_s <= 1.0 + sum(seconds.values())


@pytest.mark.parametrize("seed", range(20))
def test_weighted_seconds_are_below_the_true_time_with_one_collective_in_flight(seed: int):
    random = np.random.default_rng(seed)
    names = [(-1, "compute"), (-1, IN_FLIGHT), (-1, HOST), (0, "compute"), (0, IN_FLIGHT)]
    weights = normalise(dict(zip(names, random.random(len(names)), strict=True)))
    lanes = [*EVEN, (-1, HOST)]
    seconds = dict(zip(lanes, random.random(len(lanes)) ** 4, strict=True))
    found = Outcome({EXPOSED: 1.0} | seconds, (), 0, 0, {}, one_in_flight=True)
    assert weighted(weights, found) <= found.step_time_s * (1 + 1e-12)
    weighing = Weighing(weights)
    weighing.add_choice(found)
    best = weighing.following(0.0)
    assert best is not None and weighted(best, found) == pytest.approx(found.step_time_s, rel=2e-3)


def test_links_that_take_turns_add_up_and_some_compute_covers_none_of_them():
    found = Outcome({(0, "compute"): 10.0, (0, "x"): 2.0, (0, "y"): 1.0}, (), 0, 0, {}, one_in_flight=True)
    assert found.step_time_s == pytest.approx(4.0 + (6.0**3 + 3.0**3) ** (1 / 3))
    assert dataclasses.replace(found, one_in_flight=False).step_time_s == pytest.approx(1009 ** (1 / 3))


def test_next_weights_are_positive_with_a_dual_norm_of_one():
    weighing = Weighing(EVEN)
    weighing.add_choice(outcome(0.0, tcompute=3.0, tx=1.0, lcompute=1.0, lx=4.0))
    weighing.add_choice(outcome(0.5, tcompute=1.0, tx=5.0, lcompute=3.0))
    for bound in (2.0, 2.5, 3.0):
        weights = weighing.following(1e-3)
        assert weights is not None and min(weights.values()) > 0
        for block in (-1, 0):
            assert sum(w**DUAL for (b, _), w in weights.items() if b == block) == pytest.approx(1.0)
        weighing.add_bound(weights, bound)


def test_two_choices_that_cut_each_other_share_the_weight():
    # No bound can be above that of even weights, at which both choices have the same weighted time.
    first, second = outcome(0.0, lcompute=4.0, lx=1.0), outcome(0.0, lcompute=1.0, lx=4.0)
    weighing = Weighing(PAIR)
    weighing.add_choice(first)
    weighing.add_choice(second)
    for _ in range(6):
        weights = weighing.following(1e-3)
        if weights is None:
            break
        weighing.add_bound(weights, min(weighted(weights, each) for each in (first, second)))
    assert weighing.bound_s == pytest.approx(5.0 * 0.5 ** (1 / DUAL), rel=2e-3)


def test_nothing_follows_when_no_weights_can_gain_enough():
    weighing = Weighing(PAIR)
    assert weighing.following(0.0) is None  # no outcome is known yet
    weighing.add_choice(outcome(1.0, lcompute=2.0, lx=1.0))  # 3.08 s
    weighing.add_bound(normalise({(0, "compute"): 0.9, (0, "x"): 0.1}), 2.95)
    assert weighing.following(0.2) is None
    assert weighing.following(0.05) is not None


def test_a_block_of_compute_alone_needs_no_weights():
    weighing = Weighing({(0, "compute"): 1.0})
    weighing.add_choice(outcome(1.0, lcompute=2.0))
    assert weighing.following(0.0) is None


def test_weights_from_another_mesh_serve_a_block_without_compute_of_its_own():
    node = SimpleNamespace(time={(0, "x"): None, (1, "compute"): None, (1, "x"): None})
    model = SimpleNamespace(nodes=[node], reshards=[], one_in_flight=False)
    assert carried_weights(model, {(0, "compute"): 0.8, (1, "compute"): 0.8}) == pytest.approx(  # type: ignore[arg-type]
        {(0, "x"): 1.0, (1, "compute"): 0.8, (1, "x"): (1.0 - 0.8**DUAL) ** (1 / DUAL)}
    )


def test_weights_of_compute_hide_nearly_all_communication():
    node = SimpleNamespace(time={(0, "x"): None, (1, "compute"): None, (1, "x"): None})
    model = SimpleNamespace(nodes=[node], reshards=[], one_in_flight=False)
    weights = compute_weights(model)  # type: ignore[arg-type]
    assert weights[0, "x"] == pytest.approx(1.0) and weights[1, "compute"] == pytest.approx(1.0, abs=1e-3)
    assert sum(weight**DUAL for (block, _), weight in weights.items() if block == 1) == pytest.approx(1.0)


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
