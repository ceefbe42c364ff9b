"""Cuts into stages, and their bounds, against a search of all cuts."""

import dataclasses
import itertools

import numpy as np
import pytest

from autoshard.cost import Schedule, make_schedule
from autoshard.planning.stages.stage_cut import NoCutError, SegmentCosts, best_cut, cut_memory, cut_seconds


def some_costs(seed: int, count: int, trains: bool = True) -> SegmentCosts:
    dice = np.random.default_rng(seed)
    forward = dice.uniform(0.2, 3, count)
    kept = dice.uniform(0, 5, count)
    sums = np.concatenate([[0.0], np.cumsum(kept)])
    return SegmentCosts(
        forward_s=forward,
        backward_s=forward * dice.uniform(1, 3, count) * trains,
        update_s=dice.uniform(0, 2, count),
        hand_over_s=dice.uniform(0, 0.6, count - 1),
        fixed_bytes=dice.uniform(0, 10, count),
        working_bytes=dice.uniform(0, 4, count),
        kept_bytes=np.maximum(0, sums[None, :] - sums[:-1, None]),
        may_cut=np.array([True, *(dice.uniform(size=count - 1) > 0.15)]),
        trains=trains,
    )


def all_cuts(costs: SegmentCosts, schedule: Schedule) -> list[tuple[int, ...]]:
    places = [k for k in range(1, len(costs.forward_s)) if costs.may_cut[k]]
    return [(0, *more) for more in itertools.combinations(places, schedule.chunks - 1)]


CASES = [
    (text, stages, count)
    for text in ("1f1b", "gpipe", "interleaved:2")
    for stages, count in ((2, 2), (2, 6), (3, 3), (3, 9), (4, 4))
    if text != "interleaved:2" or stages < 4
]


@pytest.mark.parametrize(("text", "stages", "count"), CASES)
def test_the_best_of_all_cuts_is_found(text: str, stages: int, count: int) -> None:
    schedule = make_schedule(text, stages, count)
    for seed in range(3):
        costs = some_costs(seed, 9)
        best = best_cut(costs, schedule, leaves=10**6)
        every = {cut: cut_seconds(costs, schedule, cut) for cut in all_cuts(costs, schedule)}
        assert best.step_time_s == pytest.approx(min(every.values()))
        assert every[best.begins] == best.step_time_s
        assert best.bound_s == pytest.approx(best.step_time_s), "the search came to its end"


@pytest.mark.parametrize(("text", "stages", "count"), CASES)
def test_memory_limits_hold_and_no_other_cut_within_them_is_faster(text: str, stages: int, count: int) -> None:
    schedule = make_schedule(text, stages, count)
    costs = some_costs(7, 9)
    every = {cut: cut_memory(costs, schedule, cut) for cut in all_cuts(costs, schedule)}
    needs = sorted(map(max, every.values()))
    limit = needs[len(needs) // 4]
    best = best_cut(costs, schedule, limit, leaves=10**6)
    fitting = [cut_seconds(costs, schedule, cut) for cut, memory in every.items() if max(memory) <= limit]
    assert max(best.memory_bytes) <= limit and best.memory_bytes == every[best.begins]
    assert best.step_time_s == pytest.approx(min(fitting))
    with pytest.raises(NoCutError):
        best_cut(costs, schedule, needs[0] * 0.999)


@pytest.mark.parametrize(("text", "stages", "count"), CASES)
def test_runs_that_may_not_be_are_no_chunks(text: str, stages: int, count: int) -> None:
    schedule, costs = make_schedule(text, stages, count), some_costs(3, 9)
    forbidden = np.random.default_rng(5).uniform(size=(9, 10)) < 0.3
    costs = dataclasses.replace(costs, forbidden=forbidden)
    every = {
        cut: cut_seconds(costs, schedule, cut)
        for cut in all_cuts(costs, schedule)
        if not any(forbidden[i, j] for i, j in itertools.pairwise((*cut, 9)))
    }
    if every:
        assert best_cut(costs, schedule, leaves=10**6).step_time_s == pytest.approx(min(every.values()))
    else:
        with pytest.raises(NoCutError):
            best_cut(costs, schedule)


def test_the_bound_of_a_search_that_is_cut_off_holds() -> None:
    for text, seed in itertools.product(("1f1b", "gpipe", "interleaved:2"), range(4)):
        schedule, costs = make_schedule(text, 3, 6), some_costs(seed, 11)
        best = min(cut_seconds(costs, schedule, cut) for cut in all_cuts(costs, schedule))
        found = best_cut(costs, schedule, leaves=3)
        assert found.bound_s <= best * (1 + 1e-12) <= found.step_time_s * (1 + 1e-9)


def test_a_forward_pass_alone_is_cut_in_equal_parts() -> None:
    costs = some_costs(0, 8, trains=False)
    costs = dataclasses.replace(
        costs, forward_s=np.ones(8), hand_over_s=np.zeros(7), may_cut=np.ones(8, bool), update_s=np.zeros(8)
    )
    cut = best_cut(costs, Schedule("1f1b", 4, 4))
    assert cut.begins == (0, 2, 4, 6) and cut.step_time_s == 2 * 7


def test_more_stages_than_places_cannot_be() -> None:
    with pytest.raises(NoCutError, match="3 places"):
        best_cut(dataclasses.replace(some_costs(0, 3), may_cut=np.ones(3, bool)), Schedule("1f1b", 4, 4))
