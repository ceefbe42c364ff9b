"""A program cut into the stages of a pipeline: between which of its segments, so that a step takes least time.

Segments follow one another; a stage holds a run of them (with several rounds, as many runs as there are rounds). What a
cut takes is its timetable, exactly. Which one takes least is found by a best-first search over cuts from the first
segment on. The bound of a cut that is begun is what its finished stages take at least and, by dynamic programming,
what the best rest takes at least; so where the search comes to its end no other cut is faster, and where it is cut off
the least bound that is left says by how much one could be.

What stage s of segments [i, j) takes at least, of M microbatches, f and b being its seconds of each, F and B those of
all segments before it: nothing reaches it before F, and B is left when it is done. 1F1B and interleaved: F + M (f + b)
+ max(B, its update), and what it idles until its first microbatch has come back, as it begins no more than n of them
before. GPipe: all segments once, and (M - 1) (f + b), as neither pass is faster than this stage. With several rounds
the same as 1F1B without the idling, f and b those of all chunks so far.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Schedule, Timetable, timetable


LEAVES = 3000
"""Cuts of which the timetable is made, at most."""
NODES = 200_000
"""Cuts that are begun, at most."""

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentCosts:
    """What runs of segments cost; of K segments. Sizes are bytes of one device, times those of one microbatch."""

    forward_s: Floats
    """Seconds of the forward pass [K]."""
    backward_s: Floats
    """Seconds of the backward pass [K]; zeros where there is none."""
    update_s: Floats
    """Seconds of what is done once a step [K]."""
    hand_over_s: Floats
    """Seconds from the end of segment k to the begin of segment k + 1 on another stage [K - 1]."""
    fixed_bytes: Floats
    """Bytes of parameters, gradients and optimizer state [K]."""
    working_bytes: Floats
    """Bytes that the largest op needs beside all that is kept [K]."""
    kept_bytes: Floats
    """Bytes that segments i to j - 1 keep of one microbatch for the backward pass [K, K + 1]."""
    may_cut: NDArray[np.bool_]
    """Whether a stage may begin with segment k [K]."""
    trains: bool = True
    """Whether there is a backward pass."""
    forbidden: NDArray[np.bool_] | None = None
    """Runs of segments i to j - 1 that may not be a chunk [K, K + 1], whatever they cost; None if all may be."""

    def may_be(self, first: int, last: int) -> bool:
        """Whether segments [first, last) may be a chunk."""
        return self.forbidden is None or not self.forbidden[first, last]

    def memory(self, first: int, last: int, held: float) -> float:
        """Bytes of a stage of segments [first, last) that holds so many microbatches."""
        return (
            self.fixed_bytes[first:last].sum()
            + self.working_bytes[first:last].max(initial=0)
            + held * self.kept_bytes[first, last]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The best cut that was found."""

    begins: tuple[int, ...]
    """The first segment of every chunk, in the order of the segments."""
    step_time_s: float
    bound_s: float
    """No cut between these segments takes less."""
    memory_bytes: tuple[float, ...]
    """Bytes of one device for each stage."""
    tried: int
    """Cuts whose timetables were made."""


def best_cut(costs: SegmentCosts, schedule: Schedule, memory_limit: float = math.inf, leaves: int = LEAVES) -> Cut:
    """The fastest cut for a schedule within `memory_limit` bytes of one device.

    Raises `NoCutError` if there is none.
    """
    return _Search(costs, schedule, memory_limit, leaves).run()


class NoCutError(Exception):
    """No cut into so many stages keeps within the memory limit, or there are fewer places to cut."""


def cut_timetable(costs: SegmentCosts, schedule: Schedule, begins: Sequence[int]) -> Timetable:
    """What each stage does when, in a cut."""
    ends = [*begins[1:], len(costs.forward_s)]
    forward, backward = (
        [float(of[i:j].sum()) for i, j in zip(begins, ends, strict=True)] for of in (costs.forward_s, costs.backward_s)
    )
    between = [float(costs.hand_over_s[i - 1]) for i in begins[1:]]
    return timetable(schedule, forward, backward if costs.trains else None, between)


def cut_seconds(costs: SegmentCosts, schedule: Schedule, begins: Sequence[int], made: Timetable | None = None) -> float:
    """The step of a cut: a stage updates its parameters as soon as it has done its last work."""
    made = made or cut_timetable(costs, schedule, begins)
    ends, updates = [*begins[1:], len(costs.forward_s)], [0.0] * schedule.stages
    for chunk, (i, j) in enumerate(zip(begins, ends, strict=True)):
        updates[chunk % schedule.stages] += float(costs.update_s[i:j].sum())
    return max(row[-1].end_s + more for row, more in zip(made.rows, updates, strict=True))


def cut_memory(
    costs: SegmentCosts, schedule: Schedule, begins: Sequence[int], made: Timetable | None = None
) -> tuple[float, ...]:
    """Bytes of one device for each stage of a cut."""
    made = made or cut_timetable(costs, schedule, begins)
    runs = list(zip(begins, [*begins[1:], len(costs.forward_s)], strict=True))
    held = made.held([float(costs.kept_bytes[i, j]) for i, j in runs])
    found = []
    for stage in range(schedule.stages):
        own = runs[stage :: schedule.stages]
        fixed = sum(float(costs.fixed_bytes[i:j].sum()) for i, j in own)
        found.append(fixed + max(float(costs.working_bytes[i:j].max(initial=0)) for i, j in own) + held[stage])
    return tuple(found)


class _Search:
    """One search, from the first segment on."""

    def __init__(self, costs: SegmentCosts, schedule: Schedule, limit: float, leaves: int) -> None:
        self.costs, self.schedule, self.limit, self.leaves = costs, schedule, limit, leaves
        self.count = len(costs.forward_s)
        self.forward = np.concatenate([[0.0], np.cumsum(costs.forward_s)])
        self.backward = np.concatenate([[0.0], np.cumsum(costs.backward_s)])
        self.update = np.concatenate([[0.0], np.cumsum(costs.update_s)])
        self.fixed = np.concatenate([[0.0], np.cumsum(costs.fixed_bytes)])
        places = np.flatnonzero(costs.may_cut[1:]) + 1
        self.places = [int(k) for k in places]
        least = costs.hand_over_s[places - 1].min() if len(places) else 0.0
        self.hand = float(least) if schedule.stages > 1 else 0.0
        self.best: tuple[float, tuple[int, ...]] = (math.inf, ())
        self.memory: tuple[float, ...] = ()
        self.tried = 0
        self.seen: set[tuple[int, ...]] = set()
        self.rest = self._rest()

    def run(self) -> Cut:
        chunks, ticket = self.schedule.chunks, itertools.count()
        if len(self.places) + 1 < chunks:
            raise NoCutError(f"there are {len(self.places) + 1} places where a chunk may begin")
        heap: list[tuple[float, int, int, tuple[int, ...]]] = [(float(self.rest[0][0]), 0, next(ticket), (0,))]
        bound, nodes = math.inf, 0
        while heap:
            least, _, _, begins = heapq.heappop(heap)
            if least >= self.best[0]:
                bound = min(bound, least)
                break
            if self.tried >= self.leaves or nodes >= NODES:
                bound = least
                break
            nodes += 1
            if len(begins) == chunks:
                self._leaf(begins)
                continue
            for end in self._ends(begins):
                more = max(self._taken(begins, end), float(self.rest[len(begins)][end]), least)
                if more < self.best[0] and math.isfinite(more):
                    heapq.heappush(heap, (more, -len(begins), next(ticket), (*begins, end)))
        step, begins = self.best
        if not begins:
            raise NoCutError("no cut keeps within the memory limit, or none may be")
        return Cut(begins, step, min(bound, step), self.memory, self.tried)

    def _ends(self, begins: tuple[int, ...]) -> list[int]:
        """Where the chunk that is last begun may end, so that every chunk after it may have a segment."""
        left = self.schedule.chunks - len(begins)
        after = [k for k in self.places if k > begins[-1]]
        return after[: len(after) - left + 1]

    def _leaf(self, begins: tuple[int, ...]) -> None:
        """A whole cut, and what it becomes if its bounds are moved one by one as long as that is faster."""
        if not self._try(begins):
            return
        better = True
        while better and self.tried < self.leaves:
            better = False
            for which in range(1, len(begins)):
                for way in (-1, 1):
                    place = self.places.index(begins[which]) + way
                    if not 0 <= place < len(self.places):
                        continue
                    moved = (*begins[:which], self.places[place], *begins[which + 1 :])
                    if all(a < b for a, b in itertools.pairwise(moved)) and self._try(moved):
                        begins, better = moved, True

    def _try(self, begins: tuple[int, ...]) -> bool:
        """Whether a cut is the best yet; it is then kept."""
        if begins in self.seen:
            return False
        self.seen.add(begins)
        if not all(self.costs.may_be(i, j) for i, j in itertools.pairwise((*begins, self.count))):
            return False
        self.tried += 1
        made = cut_timetable(self.costs, self.schedule, begins)
        step = cut_seconds(self.costs, self.schedule, begins, made)
        if step >= self.best[0]:
            return False
        memory = cut_memory(self.costs, self.schedule, begins, made)
        if max(memory) > self.limit:
            return False
        self.best, self.memory = (step, begins), memory
        return True

    def _taken(self, begins: tuple[int, ...], end: int) -> float:
        """What the step takes at least for its last finished chunk, [begins[-1], end)."""
        chunk = len(begins) - 1
        if self.schedule.rounds == 1:
            return float(self._stage(chunk, begins[-1], np.array([end]))[0])
        if not self.costs.may_be(begins[-1], end):
            return math.inf
        stage, stages = chunk % self.schedule.stages, self.schedule.stages
        runs = list(zip(begins, [*begins[1:], end], strict=True))[stage::stages]
        if sum(self.fixed[j] - self.fixed[i] for i, j in runs) > self.limit:
            return math.inf
        work = sum(self.forward[j] - self.forward[i] + self.backward[j] - self.backward[i] for i, j in runs)
        update = sum(self.update[j] - self.update[i] for i, j in runs)
        after = self.backward[begins[stage]] + stage * self.hand
        return float(
            self.forward[begins[stage]] + stage * self.hand + self.schedule.microbatches * work + max(after, update)
        )

    def _stage(self, stage: int, first: int, ends: NDArray[np.int64]) -> Floats:
        """What a step takes at least for a stage of segments [first, end), for each end; infinite if it does not fit.

        With several rounds a chunk says nothing alone but this: as one stage of that many chunks it could be."""
        schedule, count = self.schedule, self.schedule.microbatches
        f = self.forward[ends] - self.forward[first]
        b = self.backward[ends] - self.backward[first]
        update = self.update[ends] - self.update[first]
        if schedule.name == "gpipe":
            hands = (schedule.stages - 1) * self.hand * (2 if self.costs.trains else 1)
            taken = self.forward[-1] + self.backward[-1] + hands + (count - 1) * (f + b)
        else:
            begun = min(schedule.stages - stage, count)
            later = self.forward[-1] - self.forward[ends] + self.backward[-1] - self.backward[ends]
            later = later + 2 * (schedule.stages - 1 - stage) * self.hand
            idle = np.maximum(0.0, later - (begun - 1) * f) if self.costs.trains else 0.0
            before, after = self.forward[first] + stage * self.hand, self.backward[first] + stage * self.hand
            taken = before + count * (f + b) + idle + np.maximum(after if self.costs.trains else 0.0, update)
        if math.isfinite(self.limit):
            held = schedule.in_flight(stage) if self.costs.trains else 1
            taken[[self.costs.memory(first, int(end), held) > self.limit for end in ends]] = math.inf
        if self.costs.forbidden is not None:
            taken[self.costs.forbidden[first, ends]] = math.inf
        return taken

    def _rest(self) -> list[Floats]:
        """For each chunk and each segment it may begin with: what a step takes at least for it and all after it."""
        chunks, count = self.schedule.chunks, self.count
        if self.schedule.rounds > 1:
            # All stages together have all work to do, and one of them has a part that is no smaller than the mean.
            whole = self.forward[-1] + self.backward[-1]
            least = self.schedule.microbatches * whole / self.schedule.stages
            return [np.full(count + 1, least) for _ in range(chunks + 1)]
        rest = [np.full(count + 1, math.inf) for _ in range(chunks + 1)]
        rest[chunks][count] = 0.0
        begins = [0, *self.places]
        for chunk in range(chunks - 1, -1, -1):
            ends = np.array([count] if chunk == chunks - 1 else self.places, dtype=np.int64)
            for first in begins if chunk else [0]:
                after = ends[ends > first]
                if len(after):
                    both = np.maximum(self._stage(chunk, first, after), rest[chunk + 1][after])
                    rest[chunk][first] = both.min()
        return rest
