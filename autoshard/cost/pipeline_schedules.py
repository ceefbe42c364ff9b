"""Schedules of pipelines as data: the order and times of each stage's work, its idle time, and its live values.

Sources: GPipe: Huang et al., arXiv 1811.06965. 1F1B: Narayanan et al., arXiv 1806.03377 (its schedule without stale
weights, 2006.09503). Interleaved: Narayanan et al., arXiv 2104.04473, section 2.2. Zero-bubble: Qi et al., arXiv
2401.10241, the schedule ZB-H1. Circular: Xu et al., GSPMD, arXiv
2105.04663, section 3.3, the schedule of one SPMD program. In every tick all stages compute at once, needed or not.

A stage has `rounds` chunks of layers, and chunks are numbered in the order of the layers: chunk `c` is on stage `c %
stages`. A schedule is the order in which each stage does its work. A timetable is a schedule with times: each piece of
work begins as soon as its stage is free and its inputs have arrived.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from autoshard.errors import UserError


# Names of schedules that `make_schedule` reads.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "circular")
ZERO_BUBBLE = "zero-bubble"
"""The schedule that computes gradients of weights apart from those of activations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Order of the microbatches' work on the stages of a pipeline."""

    name: str
    """Name of the schedule:

    - `gpipe`: all forward, then all backward.
    - `1f1b`: one forward, one backward, as soon as the last stage has had the first microbatch.
    - `interleaved`: 1F1B with several chunks a stage.
    - `zero-bubble`: 1F1B whose gradients of weights wait until a stage would idle, within the memory of 1F1B's first
      stage.
    - `circular`: all forward, then all backward, with several chunks a stage.
    """
    stages: int
    microbatches: int
    rounds: int = 1
    """Chunks of layers in each stage, hence the rounds of a microbatch through the stages."""
    in_ticks: bool = False
    """True if all stages begin each piece of work at the same time, in ticks, as one SPMD program does. This always
    holds for `circular`, and for `gpipe` in one program.
    """

    @property
    def chunks(self) -> int:
        """Chunks of layers of all stages."""
        return self.stages * self.rounds

    @property
    def ticks(self) -> int:
        """Ticks of a stage's forward work for one batch, bubble included. The backward work has as many."""
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage idles, if all chunks take equally long and hand-overs take no time.

        With `zero-bubble` the gradients of weights are assumed to take a third of the time.
        """
        idle = (self.stages - 1) / (3 if self.name == ZERO_BUBBLE else 1)
        return idle / (self.microbatches * self.rounds + idle)

    def in_flight(self, stage: int) -> int:
        """Return the most microbatches whose values a stage stores at once for the backward pass.

        A microbatch counts once for each chunk. One SPMD program stores the values of every tick, also of ticks in the
        bubble.
        """
        work = self.microbatches * self.rounds
        if self.in_ticks:
            return self.ticks
        if self.name == "gpipe":
            return work
        if self.name == ZERO_BUBBLE:
            return min(self.stages, work)
        return min(_ahead(self, stage) + 1, work)

    def __str__(self) -> str:
        """Return the schedule as options write it: `1f1b`, `interleaved:2`."""
        return self.name if self.rounds == 1 else f"{self.name}:{self.rounds}"

    def words(self) -> str:
        """Return the schedule as a report describes it: stages, name, microbatches, and share of the bubble."""
        return f"{self.stages} stages, {self}, {self.microbatches} microbatches, {self.bubble:.1%} of the ticks bubble"


def make_schedule(text: str, stages: int, microbatches: int) -> Schedule:
    """Return the schedule with this name: `gpipe`, `1f1b`, `zero-bubble`, `interleaved:2` or `circular:2`.

    The number, at least 2, is that of chunks in a stage; `interleaved` alone has 2, and `circular` alone is refused.
    Schedules with chunks need a multiple of `stages` microbatches. Only `circular` works in ticks. Raises: UserError,
    one sentence, for an unknown name and for numbers that do not fit together.
    """
    name, _, number = text.partition(":")
    turns = int(number) if number.isdecimal() else 2 if text == "interleaved" else 0
    if text not in ("gpipe", "1f1b", ZERO_BUBBLE) and (name not in ("interleaved", "circular") or turns < 2):
        raise UserError(
            f"schedule `{text}` is not known; use gpipe, 1f1b, zero-bubble, interleaved:2 or circular:2 (two chunks of "
            "layers in a stage)."
        )
    if stages < 1:
        raise UserError(f"{stages} stages cannot be; 1 is no pipeline.")
    if microbatches < 1:
        raise UserError(f"{microbatches} microbatches cannot be; 1 is the whole batch at once.")
    rounds = max(turns, 1)
    if rounds > 1 and microbatches % stages:
        raise UserError(
            f"schedule `{text}` sends microbatches round in groups of as many as there are stages, so {stages} stages "
            f"need {stages} microbatches or a multiple of it, not {microbatches}; use "
            f"{'gpipe' if name == 'circular' else '1f1b'}, or {stages * max(1, round(microbatches / stages))} "
            "microbatches."
        )
    return Schedule(name, stages, microbatches, rounds, in_ticks=name == "circular")


@dataclasses.dataclass(frozen=True, slots=True)
class StageWork:
    """One piece of work of a stage: forward or backward of one microbatch through one of its chunks.

    With `zero-bubble`, the gradients of its weights are a piece of their own.
    """

    chunk: int
    """Number of the chunk over all stages, in the order of the layers."""
    microbatch: int
    """Number of the microbatch from 0."""
    backward: bool
    """True for the backward pass."""
    start_s: float
    """Seconds from the begin of the step."""
    end_s: float
    weights: bool = False
    """True for the gradients of weights alone; `backward` is True too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timetable:
    """Times of one step of a pipeline."""

    schedule: Schedule
    rows: tuple[tuple[StageWork, ...], ...]
    """Work of each stage, in the order in which the stage does it."""
    step_time_s: float
    """Seconds from the first forward work to the last backward work, or forward work without a backward pass."""

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each stage computes used values, [stages]."""
        return tuple(sum(work.end_s - work.start_s for work in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """Share of the time of all stages in which they compute nothing that is used; 0 for a step without time."""
        whole = self.schedule.stages * self.step_time_s
        return 1 - sum(self.busy_s) / whole if whole > 0 else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most microbatches whose values each stage stores at once, counted once for each chunk, [stages]."""
        return tuple(round(most) for most in self.peak_bytes([1.0] * self.schedule.chunks))

    def peak_bytes(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the most bytes that each stage stores for the backward pass; `sizes[c]` is a microbatch's in chunk c.

        The values are live from the begin of the forward work to the end of the backward work. Without a backward pass
        a stage stores the values of one microbatch at a time.
        """
        schedule = self.schedule
        if schedule.in_ticks and any(work.backward for work in self.rows[0]):
            # The buffers of a tick have the same size in every tick, for every chunk.
            return tuple(
                schedule.ticks * max(sizes[stage :: schedule.stages], default=0.0) for stage in range(schedule.stages)
            )
        return tuple(max(itertools.accumulate(_changes(row, sizes)), default=0.0) for row in self.rows)


def timetable(
    schedule: Schedule,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float] | None,
    hand_over_s: float | Sequence[float] = 0.0,
    pause_s: float = 0.0,
    weights_s: float | Sequence[float] = 0.0,
) -> Timetable:
    """Compute the time of every piece of work of a schedule.

    Hand-overs run while both stages compute other work, if they have any. Stages that work in ticks
    (`Schedule.in_ticks`) compute nothing during hand-overs. They may pause between the passes for work after all
    stages, such as a loss.

    - `forward_s`: seconds of one microbatch through a chunk, one figure or one for each of `stages * rounds` chunks in
      the order of the layers.
    - `backward_s`: the same for the backward pass; None for no backward pass.
    - `hand_over_s`: seconds between the end of a chunk and the begin of the next, one figure or one for each pair of
      successive chunks. The backward pass has the same hand-overs.
    - `pause_s`: seconds between the passes of stages that work in ticks; other stages ignore it.
    - `weights_s`: part of `backward_s` that computes gradients of weights; only `zero-bubble` computes it apart.

    A tick lasts as long as the longest chunk and the longest hand-over. Raises: ValueError for another number of times.
    """
    forward = _each(forward_s, schedule.chunks, "forward")
    backward = None if backward_s is None else _each(backward_s, schedule.chunks, "backward")
    hand_overs = _each(hand_over_s, schedule.chunks - 1, "hand-over")
    if not schedule.in_ticks:
        weights = _each(weights_s, schedule.chunks, "weights")
        rows = _as_it_comes(schedule, forward, backward, hand_overs, weights)
        return Timetable(schedule, rows, max(row[-1].end_s for row in rows))
    rows = _in_ticks(schedule, forward, backward, hand_overs, pause_s)
    length = schedule.ticks * sum(max(times) + max(hand_overs, default=0.0) for times in (forward, backward) if times)
    return Timetable(schedule, rows, length + (0.0 if backward is None else pause_s))


def _each(value: float | Sequence[float], count: int, what: str) -> Sequence[float]:
    """Return one time for each of `count` chunks or pairs, a single figure repeated.

    Raises: ValueError for another number of times; `what` names them.
    """
    if isinstance(value, int | float):
        return (float(value),) * count
    if len(value) != count:
        raise ValueError(f"{len(value)} {what} times for {count}")
    return value


_FORWARD, _BACKWARD, _WEIGHTS = range(3)
_Item = tuple[int, int, int]
"""One piece of work: its kind, its chunk, its microbatch."""


def _ahead(schedule: Schedule, stage: int) -> int:
    """Return the number of forward pieces of a stage (from 0) before its first pair of forward and backward work."""
    count, stages = schedule.microbatches, schedule.stages
    if schedule.name == "gpipe":
        return count
    if schedule.rounds == 1:
        return stages - stage - 1
    return 2 * (stages - stage - 1) + (schedule.rounds - 1) * stages


def _order(schedule: Schedule, stage: int, train: bool) -> Iterator[_Item]:
    """Yield the work of a stage in order; without `train` the forward work alone."""
    turns = _turns(schedule, stage)
    if not train:
        yield from ((_FORWARD, chunk, part) for chunk, part in turns)
        return
    last = schedule.rounds - 1
    mirrored = [(stage + (last - chunk // schedule.stages) * schedule.stages, part) for chunk, part in turns]
    warm = min(_ahead(schedule, stage), len(turns))
    apart = schedule.name == ZERO_BUBBLE
    yield from ((_FORWARD, *turn) for turn in turns[:warm])
    for number, turn in enumerate(mirrored):
        if warm + number < len(turns):
            yield _FORWARD, *turns[warm + number]
        yield _BACKWARD, *turn
        # A later stage holds fewer microbatches in flight, so it may leave as many more for later.
        if apart and number >= stage:
            yield _WEIGHTS, *mirrored[number - stage]
    if apart:
        yield from ((_WEIGHTS, *turn) for turn in mirrored[max(0, len(mirrored) - stage) :])


def _turns(schedule: Schedule, stage: int) -> list[tuple[int, int]]:
    """Return chunk and microbatch of a stage's forward work, in groups of as many microbatches as there are stages."""
    stages, rounds = schedule.stages, schedule.rounds
    if rounds == 1:
        return [(stage, part) for part in range(schedule.microbatches)]
    return [
        (stage + turn * stages, group * stages + part)
        for group in range(schedule.microbatches // stages)
        for turn in range(rounds)
        for part in range(stages)
    ]


def _as_it_comes(
    schedule: Schedule,
    ahead: Sequence[float],
    back: Sequence[float] | None,
    hand: Sequence[float],
    weights: Sequence[float],
) -> tuple[tuple[StageWork, ...], ...]:
    """Return the work of each stage, each piece started as soon as its stage is free and its inputs have arrived."""
    apart = schedule.name == ZERO_BUBBLE
    passed = [each - own if apart else each for each, own in zip(back or ahead, weights, strict=True)]
    seconds = {_FORWARD: ahead, _BACKWARD: passed, _WEIGHTS: weights}
    orders = [list(_order(schedule, stage, back is not None)) for stage in range(schedule.stages)]
    rows: list[list[StageWork]] = [[] for _ in orders]
    done: dict[_Item, float] = {}
    waiting = sum(map(len, orders))
    while waiting:
        before = waiting
        for order, row in zip(orders, rows, strict=True):
            while len(row) < len(order):
                kind, chunk, part = item = order[len(row)]
                ready = _ready(item, done, hand, schedule.chunks)
                if ready is None:
                    break
                start = max(ready, row[-1].end_s if row else 0.0)
                end = start + seconds[kind][chunk]
                done[item] = end
                row.append(StageWork(chunk, part, kind != _FORWARD, start, end, kind == _WEIGHTS))
                waiting -= 1
        if waiting == before:
            raise AssertionError(f"the stages of {schedule} wait for one another")
    return tuple(map(tuple, rows))


def _ready(item: _Item, done: dict[_Item, float], hand: Sequence[float], chunks: int) -> float | None:
    """Return the time at which the inputs of a piece of work have arrived; None if it is not known yet."""
    kind, chunk, part = item
    if kind == _WEIGHTS:
        return done.get((_BACKWARD, chunk, part))
    if kind == _FORWARD:
        if chunk == 0:
            return 0.0
        end = done.get((_FORWARD, chunk - 1, part))
        return None if end is None else end + hand[chunk - 1]
    own = done.get((_FORWARD, chunk, part))
    if chunk == chunks - 1 or own is None:
        return own
    end = done.get((_BACKWARD, chunk + 1, part))
    return None if end is None else max(own, end + hand[chunk])


def _in_ticks(
    schedule: Schedule, ahead: Sequence[float], back: Sequence[float] | None, hand: Sequence[float], pause_s: float
) -> tuple[tuple[StageWork, ...], ...]:
    """Return the work of each stage if all stages begin a tick together.

    The backward pass runs through the ticks from the last one to the first.
    """
    between = max(hand, default=0.0)
    tick_s, ticks = max(ahead) + between, schedule.ticks
    rows = []
    for stage in range(schedule.stages):
        # Stage s continues in tick t the work that stage 0 began in tick t - s.
        turns = [(tick + stage, *turn) for tick, turn in enumerate(_turns(schedule, stage))]
        row = [StageWork(c, m, False, tick * tick_s, tick * tick_s + ahead[c]) for tick, c, m in turns]
        if back is not None:
            back_s = max(back) + between
            starts = [(ticks * tick_s + pause_s + (ticks - 1 - tick) * back_s, c, m) for tick, c, m in reversed(turns)]
            row += [StageWork(c, m, True, start, start + back[c]) for start, c, m in starts]
        rows.append(tuple(row))
    return tuple(rows)


def _changes(row: Sequence[StageWork], sizes: Sequence[float]) -> Iterator[float]:
    """Yield the changes of a stage's live bytes in the order of time.

    In a forward pass alone, the bytes of each piece of work are added and removed at once. Gradients of weights that
    are computed apart need the values until then.
    """
    train = any(work.backward for work in row)
    apart = any(work.weights for work in row)
    for work in row:
        if not train:
            yield sizes[work.chunk]
        if not train or work.backward and work.weights == apart:
            yield -sizes[work.chunk]
        elif not work.backward:
            yield sizes[work.chunk]
