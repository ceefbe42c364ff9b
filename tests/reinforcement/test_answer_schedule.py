"""Schedules of answers: every token once, the drained end, and random queues simulated step by step."""

import random

import numpy as np
import pytest

from autoshard.errors import UserError
from autoshard.reinforcement import answer_lengths, schedule_answers, steady_level


@pytest.mark.parametrize(("mean", "longest"), [(2000, 8000), (100, 8000), (4000, 8000), (7000, 8000), (500, 500)])
def test_lengths_have_the_mean_and_the_maximum(mean: int, longest: int):
    lengths = answer_lengths(4096, mean, longest)
    assert lengths.mean() == pytest.approx(mean, rel=1e-9)
    assert 0 < lengths.min() and lengths.max() <= longest
    if 4 * mean >= longest:  # an exponential of a much smaller mean hardly reaches the maximum
        assert lengths.max() > 0.98 * longest


def test_a_mean_of_half_the_maximum_is_uniform():
    assert sorted(answer_lengths(4, 50, 100)) == pytest.approx([12.5, 37.5, 62.5, 87.5], abs=1e-3)


def test_the_broadest_distribution_is_exponential():
    """Compare the median of a maximum far above the mean with that of an exponential distribution."""
    lengths = np.sort(answer_lengths(100_001, 1000, 1_000_000))
    assert lengths[50_000] == pytest.approx(1000 * np.log(2), rel=2e-3)


def test_a_mean_above_the_longest_is_refused():
    with pytest.raises(UserError, match="answers of 10 tokens on the mean cannot all have at most 5"):
        answer_lengths(3, 10, 5)


def test_equal_answers_run_in_full_rounds():
    schedule = schedule_answers(12, 1, 4, 100, 100)
    (level,) = schedule.levels
    assert (level.steps, level.running, level.answered) == (300, 4, 50)
    assert schedule.steps == 300 and schedule.peak_tokens == 400


def test_answers_that_do_not_fill_a_round_drain():
    schedule = schedule_answers(6, 1, 4, 100, 100)
    assert [(level.steps, level.running) for level in schedule.levels] == [(100, 4), (100, 2)]


@pytest.mark.parametrize(("count", "seats"), [(8, 8), (100, 7), (512, 64), (512, 512), (300, 299)])
def test_every_token_is_answered_once(count: int, seats: int):
    schedule = schedule_answers(count, 1, seats, 200, 1000)
    tokens = sum(level.steps * level.running for level in schedule.levels)
    assert tokens == pytest.approx(answer_lengths(count, 200, 1000).sum())
    assert max(level.running for level in schedule.levels) <= seats
    assert sum(level.steps for level in schedule.levels) == pytest.approx(schedule.steps)


def simulated(lengths: list[int], seats: int) -> tuple[int, float, int]:
    """Return steps, steps with less than half of the seats busy, and the peak of answered tokens of a queue.

    Each step gives one token to every running answer, and an ended answer's seat to the next one.
    """
    waiting, running, steps, drained, peak = lengths[::-1], list[list[int]](), 0, 0, 0
    while waiting or running:
        while waiting and len(running) < seats:
            running.append([0, waiting.pop()])
        for answer in running:
            answer[0] += 1
        steps += 1
        drained += len(running) < seats / 2
        peak = max(peak, sum(done for done, _ in running))
        running = [answer for answer in running if answer[0] < answer[1]]
    return steps, drained, peak


@pytest.mark.parametrize(("count", "seats"), [(256, 256), (1024, 128), (300, 200)])
def test_random_queues_take_as_many_steps(count: int, seats: int):
    """Simulate queues of random answers, drawn from an exponential distribution that is cut off at the maximum."""
    schedule, chance, runs = schedule_answers(count, 1, seats, 100, 400), random.Random(7), []
    pool = answer_lengths(100_000, 100, 400)
    for _ in range(20):
        runs.append(simulated([max(1, round(chance.choice(pool))) for _ in range(count)], seats))
    steps, drained, peak = (sum(run[place] for run in runs) / len(runs) for place in range(3))
    assert schedule.steps == pytest.approx(steps, rel=0.06)
    ours = sum(level.steps for level in schedule.levels if level.running < seats / 2)
    assert ours == pytest.approx(drained, rel=0.17)  # a late long answer counts much
    assert schedule.peak_tokens == pytest.approx(peak, rel=0.1)


def test_the_part_with_the_longest_answer_is_scheduled():
    lengths = answer_lengths(64, 100, 1000)
    schedule = schedule_answers(64, 16, 4, 100, 1000)
    assert schedule.steps == pytest.approx(lengths.max())
    part = int(lengths.argmax()) % 16
    assert sum(level.steps * level.running for level in schedule.levels) == pytest.approx(lengths[part::16].sum())


def test_a_queue_that_never_ends_has_answers_half_way_by_tokens():
    """Check the mean progress of running answers: half of the mean square over the mean (a renewal process)."""
    assert steady_level(8, 100, 100).answered == pytest.approx(50)
    # Uniform lengths from 0 to 200 have a mean square of 200**2 / 3.
    assert steady_level(8, 100, 200).answered == pytest.approx(200**2 / 3 / 200, rel=1e-3)
