"""Timetables of pipelines against the formulas of the papers, and against a simulation minute by minute."""

import itertools
import random
import re
from collections.abc import Sequence

import pytest

from autoshard import UserError
from autoshard.cost import Schedule, StageWork, Timetable, make_schedule, timetable


SHAPES = [(stages, count) for stages in (1, 2, 3, 4) for count in (1, 2, 3, 4, 8)]


def schedules() -> list[Schedule]:
    """List all schedules of few stages and microbatches."""
    rows = [Schedule(name, *shape) for name in ("gpipe", "1f1b") for shape in SHAPES]
    rows += [Schedule("gpipe", *shape, in_ticks=True) for shape in SHAPES]
    shapes = [(stages, count, rounds) for stages, count in SHAPES if count % stages == 0 for rounds in (2, 3)]
    rows += [Schedule("interleaved", *shape) for shape in shapes]
    return rows + [Schedule("circular", *shape, in_ticks=True) for shape in shapes]


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 1)])
def test_equal_chunks_take_what_the_papers_say(forward: int, backward: int) -> None:
    for schedule in schedules():
        made = timetable(schedule, forward, backward)
        stages, count, rounds = schedule.stages, schedule.microbatches, schedule.rounds
        # In all, a stage has M + S - 1 turns. With R chunks, the bubble is (S - 1) / R turns.
        turn = rounds * (forward + backward)
        assert made.step_time_s == count * turn + (stages - 1) * turn / rounds, schedule
        assert made.bubble == pytest.approx(schedule.bubble), schedule
        assert made.bubble == pytest.approx((stages - 1) / (count * rounds + stages - 1)), schedule
        assert made.in_flight == tuple(schedule.in_flight(stage) for stage in range(stages)), schedule
        if schedule.name == "1f1b":
            assert made.in_flight == tuple(min(stages - stage, count) for stage in range(stages))
        if schedule.name == "gpipe" and not schedule.in_ticks:
            assert made.in_flight == (count,) * stages


def test_interleaving_holds_what_its_warm_up_begins() -> None:
    made = timetable(make_schedule("interleaved:2", 4, 8), 1, 2)
    assert made.in_flight == (11, 9, 7, 5)  # 2 (S - 1 - s) + (R - 1) S + 1


def by_the_minute(made: Timetable, forward: Sequence[int], backward: Sequence[int], hand: Sequence[int]) -> list[str]:
    """Simulate stages that check every minute if their next task can begin. Return deviations from the timetable."""
    schedule = made.schedule
    lists = [list(row) for row in made.rows]
    free, arrived, odd = [0] * schedule.stages, {}, []
    for minute in itertools.count():
        if not any(lists):
            return odd
        for stage, todo in enumerate(lists):
            while todo and free[stage] <= minute:
                work = todo[0]
                needs = _needs(work, schedule.chunks)
                if any(arrived.get(need, minute + 1) > minute for need in needs):
                    break
                if work.start_s != minute:
                    odd.append(f"{schedule}: {work} could begin at {minute}")
                length = (backward if work.backward else forward)[work.chunk]
                free[stage] = minute + length
                key = (work.backward, work.chunk, work.microbatch)
                arrived[key, "here"] = minute + length
                neighbour = work.chunk - 1 if work.backward else work.chunk
                if 0 <= neighbour < schedule.chunks - 1:
                    arrived[key, "there"] = minute + length + hand[neighbour]
                todo.pop(0)
        assert minute < 10000
    raise AssertionError


def _needs(work: StageWork, chunks: int) -> list[tuple[tuple[bool, int, int], str]]:
    if not work.backward:
        return [((False, work.chunk - 1, work.microbatch), "there")] if work.chunk else []
    own = [((False, work.chunk, work.microbatch), "here")]
    after = [((True, work.chunk + 1, work.microbatch), "there")] if work.chunk < chunks - 1 else []
    return own + after


def test_unequal_chunks_begin_as_soon_as_they_can() -> None:
    dice = random.Random(0)
    for schedule in schedules():
        if schedule.in_ticks:
            continue
        forward, backward = ([dice.randint(1, 5) for _ in range(schedule.chunks)] for _ in range(2))
        hand = [dice.randint(0, 3) for _ in range(schedule.chunks - 1)]
        made = timetable(schedule, forward, backward, hand)
        assert not by_the_minute(made, forward, backward, hand)
        assert made.step_time_s == max(work.end_s for row in made.rows for work in row)


def test_every_stage_does_everything_once() -> None:
    for schedule in schedules():
        made = timetable(schedule, 1, 2, 0.5)
        for stage, row in enumerate(made.rows):
            done = [(work.backward, work.chunk, work.microbatch) for work in row]
            own = range(stage, schedule.chunks, schedule.stages)
            assert sorted(done) == sorted(itertools.product((False, True), own, range(schedule.microbatches)))
            assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(row))


def greedy(stages: int, count: int, backward: int) -> int:
    """Return the end of 1F1B as a rule: backward tasks first, and at most S - s microbatches live in stage s."""
    forward_at, backward_at, free = {}, {}, [0] * stages
    held, begun, ended = [0] * stages, [0] * stages, [0] * stages
    for minute in itertools.count():
        if min(ended) == count:
            return max(free)
        for stage in range(stages):
            if free[stage] > minute:
                continue
            part, own = ended[stage], forward_at.get((stage, ended[stage]), minute + 1)
            came = own if stage == stages - 1 else backward_at.get((stage + 1, part), minute + 1)
            if part < count and own <= minute and came <= minute:
                free[stage] = backward_at[stage, part] = minute + backward
                ended[stage] += 1
                held[stage] -= 1
            elif begun[stage] < count and held[stage] < stages - stage:
                if stage and forward_at.get((stage - 1, begun[stage]), minute + 1) > minute:
                    continue
                free[stage] = forward_at[stage, begun[stage]] = minute + 1
                begun[stage] += 1
                held[stage] += 1
    raise AssertionError


def test_1f1b_is_what_its_rule_gives() -> None:
    for (stages, count), backward in itertools.product(SHAPES, (1, 2)):
        assert timetable(Schedule("1f1b", stages, count), 1, backward).step_time_s == greedy(stages, count, backward)


def test_ticks_of_one_program_last_as_long_as_the_longest_stage() -> None:
    made = timetable(make_schedule("circular:2", 2, 4), [1, 2, 3, 4], [2, 3, 4, 5], 0.5)
    assert made.step_time_s == 9 * (4.5 + 5.5)
    assert made.rows[1][0] == StageWork(1, 0, False, 4.5, 6.5)
    assert made.rows[0][-1] == StageWork(0, 0, True, 9 * 4.5 + 8 * 5.5, 9 * 4.5 + 8 * 5.5 + 2)
    busy = 4 * (1 + 3 + 2 + 4), 4 * (2 + 4 + 3 + 5)
    assert made.busy_s == pytest.approx(busy)
    assert made.bubble == pytest.approx(1 - sum(busy) / (2 * made.step_time_s))
    assert made.peak_bytes([1, 2, 3, 4]) == (9 * 3, 9 * 4)


def test_a_forward_pass_alone_holds_one_microbatch() -> None:
    made = timetable(Schedule("1f1b", 4, 8), 1, None, 0.25)
    assert made.step_time_s == 11 + 3 * 0.25
    assert made.in_flight == (1, 1, 1, 1)


def test_values_of_different_sizes_are_stored() -> None:
    made = timetable(Schedule("1f1b", 3, 6), 1, 2)
    assert made.peak_bytes([10.0, 20.0, 30.0]) == (30.0, 40.0, 30.0)


@pytest.mark.parametrize(
    ("text", "stages", "microbatches", "sentence"),
    [
        ("zigzag", 2, 4, "schedule `zigzag` is not known; use gpipe, 1f1b, zero-bubble, interleaved:2 or circular:2"),
        ("1f1b:2", 2, 4, "schedule `1f1b:2` is not known"),
        ("interleaved:0", 2, 4, "schedule `interleaved:0` is not known"),
        ("1f1b", 0, 4, "0 stages cannot be"),
        ("gpipe", 2, 0, "0 microbatches cannot be"),
        (
            "interleaved:2",
            4,
            6,
            "4 stages need 4 microbatches or a multiple of it, not 6; use 1f1b, or 8 microbatches.",
        ),
        ("circular:2", 4, 2, "not 2; use gpipe, or 4 microbatches."),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(text: str, stages: int, microbatches: int, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        make_schedule(text, stages, microbatches)
    assert str(make_schedule("interleaved", 2, 4)) == "interleaved:2"


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_zero_bubble_idles_a_third_and_holds_what_the_first_stage_of_1f1b_holds(stages: int, count: int):
    """Compare with arXiv 2401.10241: ZB-H1 idles (p - 1) (F + B - W) where 1F1B idles (p - 1) (F + B + W)."""
    made = timetable(make_schedule("zero-bubble", stages, count), 1, 2, weights_s=1)
    one = timetable(make_schedule("1f1b", stages, count), 1, 2)
    assert made.step_time_s == pytest.approx(3 * count + stages - 1) and made.step_time_s < one.step_time_s
    assert made.bubble == pytest.approx(made.schedule.bubble)
    assert max(made.in_flight) <= max(one.in_flight) == stages == made.schedule.in_flight(0)
    for row in made.rows:
        done = {(work.chunk, work.microbatch): work.end_s for work in row if work.backward and not work.weights}
        late = [work for work in row if work.weights]
        assert len(late) == count and all(work.start_s >= done[work.chunk, work.microbatch] for work in late)
