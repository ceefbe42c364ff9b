"""Times at which the sequences of one engine start and end: a queue of answers of unequal lengths, and seats for them.

All running sequences get one token per step, so the schedule is in steps and needs no prices. At the end the queue is
empty and the batch drains: the last steps serve few sequences.

Only the mean and the maximum of lengths are known. Their distribution has the largest entropy that both allow: an
exponential one, cut off at the maximum.
"""

import dataclasses
import functools
import heapq
import math

import numpy as np

from autoshard.errors import UserError


_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio, modulo 1, spread evenly however many there are."""
_RATIO = 1.5
"""Ratio of the numbers of running sequences between two levels of a schedule."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleLevel:
    """Steps with about as many running sequences."""

    steps: float
    running: float
    """Mean number of running sequences."""
    answered: float
    """Mean number of answered tokens of a running sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerSchedule:
    """The steps of a queue of sequences on a number of seats."""

    levels: tuple[ScheduleLevel, ...]
    """Levels by number of running sequences, the fullest first."""
    peak_tokens: float
    """Most answered tokens that all running sequences have at a time, without prompts."""
    steps: float
    """Steps until the last sequence ends."""


@functools.lru_cache(maxsize=64)
def answer_lengths(count: int, mean: int, longest: int) -> np.ndarray:
    """Return the lengths of `count` answers, in the order in which they are asked; they have the given mean.

    They are quantiles of the distribution, in an order that is spread evenly. Raises `UserError` for a mean above the
    longest length.
    """
    if mean > longest:
        raise UserError(f"answers of {mean} tokens on the mean cannot all have at most {longest}.")
    if mean == longest:
        return np.full(count, float(mean))
    order = np.argsort(np.argsort((np.arange(1, count + 1) * _GOLDEN) % 1.0, kind="stable"), kind="stable")
    return _quantiles((order + 0.5) / count, mean / longest) * longest


def _quantiles(ranks: np.ndarray, mean: float) -> np.ndarray:
    """Return quantiles of the exponential distribution on 0 to 1 whose quantiles at `ranks` have that mean.

    The density is proportional to exp(-rate x), where the rate may be negative. The rate is found by bisection.
    """
    low, high = -1e4, 1e4

    def at(rate: float) -> np.ndarray:
        """Return the quantiles of one rate."""
        if abs(rate) < 1e-9:
            return ranks
        if rate < 0:  # mirrored, so that nothing overflows
            return 1.0 + np.log1p(-(1.0 - ranks) * -np.expm1(rate)) / -rate
        return -np.log1p(-ranks * -np.expm1(-rate)) / rate

    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).mean() > mean else (low, middle)
    return at((low + high) / 2)


@functools.lru_cache(maxsize=4096)
def schedule_answers(count: int, parts: int, seats: int, mean: int, longest: int) -> AnswerSchedule:
    """Return the schedule of one part of `count` answers, which are dealt to `parts` groups of devices in turn.

    It is the part with the longest answer, for which all others wait. A seat is filled again as soon as its answer
    ends.
    """
    lengths = answer_lengths(count, mean, longest)
    lengths = lengths[int(lengths.argmax()) % parts :: parts]
    starts = np.zeros(len(lengths))
    free = list(lengths[:seats])
    heapq.heapify(free)
    for number in range(seats, len(lengths)):
        starts[number] = free[0]
        heapq.heapreplace(free, free[0] + lengths[number])
    return _levels(starts, starts + lengths)


def steady_level(seats: int, mean: int, longest: int) -> ScheduleLevel:
    """Return the level of a queue that never ends, per answer of each seat: `mean` steps with all seats busy.

    A running sequence is found in the middle of a long answer more often than of a short one.
    """
    lengths = answer_lengths(1024, mean, longest)
    return ScheduleLevel(float(mean), float(seats), float((lengths**2).mean() / (2 * lengths.mean())))


def _levels(starts: np.ndarray, ends: np.ndarray) -> AnswerSchedule:
    """Return the schedule of sequences with these first and last steps."""
    times = np.concatenate([starts, ends])
    signs = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
    begun = np.concatenate([starts, -starts])
    order = np.argsort(times, kind="stable")
    times, running, begun = times[order], np.cumsum(signs[order]), np.cumsum(begun[order])
    steps = np.diff(times)
    running, begun = running[:-1], begun[:-1]
    inside = (steps > 0) & (running > 0)
    steps, running, begun, first = steps[inside], running[inside], begun[inside], times[:-1][inside]
    # Tokens grow by one per step and sequence, so the middle of an interval has its mean and the end its peak.
    tokens = running * (first + steps / 2) - begun
    peak = running * (first + steps) - begun
    level = np.floor(np.log(running) / math.log(_RATIO) + 1e-9).astype(int)
    levels = []
    for number in np.unique(level)[::-1]:
        mine = level == number
        spent = float(steps[mine].sum())
        seat_steps = float((running * steps)[mine].sum())
        levels.append(ScheduleLevel(spent, seat_steps / spent, float((tokens * steps)[mine].sum()) / seat_steps))
    return AnswerSchedule(tuple(levels), float(peak.max()), float(ends.max()))
