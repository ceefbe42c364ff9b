"""Cut of a program's segments into pipeline stages with the least step time.

Segments follow one another. A stage computes one run of segments, or with several rounds as many runs as rounds. The
time of a complete cut is exactly that of its timetable. A best-first search over cuts, from the first segment on, finds
the fastest cut. A partial cut is bounded by its finished stages and, through dynamic programming, by the best
completion. If the search completes, no other cut is faster; if it is stopped, the least open bound tells how much
faster one could be.

Bounds of a stage s with segments [i, j) use these symbols: M microbatches; f and b, the stage's forward and backward
seconds; F and B, those of all segments before it. No work reaches the stage before F, and B is left when it is done.

- 1F1B and interleaved: F + M (f + b) + max(B, its update), and its idle time until its first microbatch returns. The
  stage begins at most n microbatches before that one returns.
- GPipe: all segments once, and (M - 1) (f + b), as neither pass is faster than this stage.
- Zero-bubble: F + M (f + b) + its update, as gradients of weights may be computed while others wait.
- Several rounds: the 1F1B bound without idle time, where f and b are the sums over the stage's chunks so far.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import ZERO_BUBBLE, Schedule, Timetable, timetable


LEAVES = 3000
"""Most cuts for which the search computes a timetable."""
NODES = 200_000
"""Most partial cuts that the search expands."""

Floats = NDArray[np.float64]
"""Array of seconds or bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentCosts:
    """Costs of K segments. Sizes are bytes of one device, times are seconds of one microbatch."""

    forward_s: Floats
    """Seconds of the forward pass [K]."""
    backward_s: Floats
    """Seconds of the backward pass [K]; zeros if there is none."""
    update_s: Floats
    """Seconds of the work done once a step [K]."""
    hand_over_s: Floats
    """Seconds from the end of segment k to the beginning of segment k + 1 on another stage [K - 1]."""
    fixed_bytes: Floats
    """Bytes of parameters, frozen ones apart, of gradients, optimizer state and batch [K]."""
    working_bytes: Floats
    """Bytes of the largest op's operands and results, in addition to all stored values [K]."""
    kept_bytes: Floats
    """Bytes that segments i to j - 1 save of one microbatch for the backward pass [K, K + 1]."""
    may_cut: NDArray[np.bool_]
    """True if a stage may begin with segment k [K]."""
    trains: bool = True
    """True if there is a backward pass."""
    weights_s: Floats | None = None
    """Part of `backward_s` that computes gradients of weights [K]; None for none."""
    forbidden: NDArray[np.bool_] | None = None
    """True for runs of segments i to j - 1 that may not be a chunk [K, K + 1]; None if every run may."""

    def may_be(self, first: int, last: int) -> bool:
        """Return True if segments [first, last) may be a chunk; `may_cut` is not looked at."""
        return self.forbidden is None or not self.forbidden[first, last]

    def memory(self, first: int, last: int, held: float) -> float:
        """Return the bytes of a stage of segments [first, last) that stores values of `held` microbatches.

        They are fixed bytes, the largest working bytes, and the saved values.
        """
        return (
            self.fixed_bytes[first:last].sum()
            + self.working_bytes[first:last].max(initial=0)
            + held * self.kept_bytes[first, last]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The best cut that the search found."""

    begins: tuple[int, ...]
    """First segment of every chunk, in the order of the segments."""
    step_time_s: float
    """Seconds of the step, as `cut_seconds` returns them."""
    bound_s: float
    """Lower bound in seconds of every cut between these segments; equal to `step_time_s` if the search completed."""
    memory_bytes: tuple[float, ...]
    """Bytes of one device for each stage."""
    tried: int
    """Number of cuts whose timetables were computed."""


def best_cut(costs: SegmentCosts, schedule: Schedule, memory_limit: float = math.inf, leaves: int = LEAVES) -> Cut:
    """Return the fastest cut for a schedule within `memory_limit` bytes of one device.

    `leaves` is the most timetables to compute. Raises `NoCutError` if no cut fits, if too few segments may begin a
    chunk, or if the search ended before it found one.
    """
    return _Search(costs, schedule, memory_limit, leaves).run()


class NoCutError(Exception):
    """Error that no cut into so many stages fits the memory limit, or that there are fewer places to cut."""


def cut_timetable(costs: SegmentCosts, schedule: Schedule, begins: Sequence[int]) -> Timetable:
    """Return the timetable of a cut: the work of each stage with its times, without updates.

    `begins` has the first segment of every chunk.
    """
    ends = [*begins[1:], len(costs.forward_s)]
    forward, backward = (
        [float(of[i:j].sum()) for i, j in zip(begins, ends, strict=True)] for of in (costs.forward_s, costs.backward_s)
    )
    between = [float(costs.hand_over_s[i - 1]) for i in begins[1:]]
    weights = chunk_weights(costs, begins)
    return timetable(schedule, forward, backward if costs.trains else None, between, weights_s=weights)


def chunk_weights(costs: SegmentCosts, begins: Sequence[int]) -> list[float]:
    """Return the seconds that each chunk of a cut spends on gradients of weights, for one microbatch."""
    ends = [*begins[1:], len(costs.forward_s)]
    own = np.zeros(len(costs.forward_s)) if costs.weights_s is None else costs.weights_s
    return [float(own[i:j].sum()) for i, j in zip(begins, ends, strict=True)]


def cut_seconds(costs: SegmentCosts, schedule: Schedule, begins: Sequence[int], made: Timetable | None = None) -> float:
    """Return the step time of a cut in seconds.

    A stage updates its parameters right after its last work, so the step ends with the latest update. `made` is the
    cut's timetable, built if None.
    """
    made = made or cut_timetable(costs, schedule, begins)
    ends, updates = [*begins[1:], len(costs.forward_s)], [0.0] * schedule.stages
    for chunk, (i, j) in enumerate(zip(begins, ends, strict=True)):
        updates[chunk % schedule.stages] += float(costs.update_s[i:j].sum())
    return max(row[-1].end_s + update_s for row, update_s in zip(made.rows, updates, strict=True))


def cut_memory(
    costs: SegmentCosts, schedule: Schedule, begins: Sequence[int], made: Timetable | None = None
) -> tuple[float, ...]:
    """Return the peak bytes of one device for each stage of a cut.

    They are the fixed bytes of its chunks, the largest working bytes, and the saved values of microbatches in flight.
    `made` is the cut's timetable, built if None.
    """
    made = made or cut_timetable(costs, schedule, begins)
    runs = list(zip(begins, [*begins[1:], len(costs.forward_s)], strict=True))
    saved_bytes = made.peak_bytes([float(costs.kept_bytes[i, j]) for i, j in runs])
    stage_bytes = []
    for stage in range(schedule.stages):
        own = runs[stage :: schedule.stages]
        fixed = sum(float(costs.fixed_bytes[i:j].sum()) for i, j in own)
        stage_bytes.append(
            fixed + max(float(costs.working_bytes[i:j].max(initial=0)) for i, j in own) + saved_bytes[stage]
        )
    return tuple(stage_bytes)


class _Search:
    """One best-first search over cuts, from the first segment on."""

    def __init__(self, costs: SegmentCosts, schedule: Schedule, limit: float, leaves: int) -> None:
        """Sum the costs from the first segment on, and bound all completions.

        `limit` is the bytes of one device, `leaves` the most timetables to compute.
        """
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
        self.rest = self._completion_bounds()

    def run(self) -> Cut:
        """Return the best cut; raise `NoCutError` if none was found.

        Partial cuts are expanded least bound first, the longest first on a tie. The search ends early after `leaves`
        timetables or `NODES` partial cuts; the bound is then the least open one.
        """
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
                child_bound = max(self._finished_chunk_bound(begins, end), float(self.rest[len(begins)][end]), least)
                if child_bound < self.best[0] and math.isfinite(child_bound):
                    heapq.heappush(heap, (child_bound, -len(begins), next(ticket), (*begins, end)))
        step, begins = self.best
        if not begins:
            raise NoCutError("no cut keeps within the memory limit, or none may be")
        return Cut(begins, step, min(bound, step), self.memory, self.tried)

    def _ends(self, begins: tuple[int, ...]) -> list[int]:
        """Return the places where the last begun chunk may end, such that every later chunk can have a segment."""
        later_chunks = self.schedule.chunks - len(begins)
        after = [k for k in self.places if k > begins[-1]]
        return after[: len(after) - later_chunks + 1]

    def _leaf(self, begins: tuple[int, ...]) -> None:
        """Evaluate a complete cut; if it is the best so far, move its boundaries one by one while that is faster."""
        if not self._try(begins):
            return
        improved = True
        while improved and self.tried < self.leaves:
            improved = False
            for boundary in range(1, len(begins)):
                for step in (-1, 1):
                    place = self.places.index(begins[boundary]) + step
                    if not 0 <= place < len(self.places):
                        continue
                    moved = (*begins[:boundary], self.places[place], *begins[boundary + 1 :])
                    if all(a < b for a, b in itertools.pairwise(moved)) and self._try(moved):
                        begins, improved = moved, True

    def _try(self, begins: tuple[int, ...]) -> bool:
        """Evaluate a cut; store it and return True if it is the fastest so far that fits.

        A cut that was tried before or that has a forbidden chunk gives False.
        """
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

    def _finished_chunk_bound(self, begins: tuple[int, ...], end: int) -> float:
        """Return a lower bound of the step in seconds from its last finished chunk, [begins[-1], end).

        With several rounds the chunk's stage counts with all of its chunks so far. The bound is infinite if the chunk
        is forbidden or the stage does not fit.
        """
        chunk = len(begins) - 1
        if self.schedule.rounds == 1:
            return float(self._stage_bound(chunk, begins[-1], np.array([end]))[0])
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

    def _stage_bound(self, stage: int, first: int, ends: NDArray[np.int64]) -> Floats:
        """Return a lower bound of the step in seconds from a stage of segments [first, end), for each end.

        The bound is infinite if the stage does not fit or may not be a chunk. It holds for schedules of one round only.

        - `stage`: number of the stage.
        - `first`: its first segment.
        - `ends`: candidates for the segment after its last, [ends].
        """
        schedule, count = self.schedule, self.schedule.microbatches
        f = self.forward[ends] - self.forward[first]
        b = self.backward[ends] - self.backward[first]
        update = self.update[ends] - self.update[first]
        if schedule.name == "gpipe":
            # The first microbatch passes through all stages; this stage then repeats its work for the others.
            hands = (schedule.stages - 1) * self.hand * (2 if self.costs.trains else 1)
            bound_s = self.forward[-1] + self.backward[-1] + hands + (count - 1) * (f + b)
        elif schedule.name == ZERO_BUBBLE:
            bound_s = self.forward[first] + stage * self.hand + count * (f + b) + update
        else:
            # The stage begins this many microbatches before the first one returns. It idles for the passes of the later
            # stages, less its own forward work on the other begun microbatches.
            begun = min(schedule.stages - stage, count)
            later = self.forward[-1] - self.forward[ends] + self.backward[-1] - self.backward[ends]
            later = later + 2 * (schedule.stages - 1 - stage) * self.hand
            idle = np.maximum(0.0, later - (begun - 1) * f) if self.costs.trains else 0.0
            before, after = self.forward[first] + stage * self.hand, self.backward[first] + stage * self.hand
            bound_s = before + count * (f + b) + idle + np.maximum(after if self.costs.trains else 0.0, update)
        if math.isfinite(self.limit):
            microbatches_stored = schedule.in_flight(stage) if self.costs.trains else 1
            bound_s[[self.costs.memory(first, int(end), microbatches_stored) > self.limit for end in ends]] = math.inf
        if self.costs.forbidden is not None:
            bound_s[self.costs.forbidden[first, ends]] = math.inf
        return bound_s

    def _completion_bounds(self) -> list[Floats]:
        """Return, for each chunk and each segment with which it may begin, a lower bound from it and all later chunks.

        The bounds are in seconds of a step, one array [K + 1] for each chunk and one for none. They are infinite for
        segments with which a chunk cannot begin. With several rounds all are the mean work of a stage.
        """
        chunks, count = self.schedule.chunks, self.count
        if self.schedule.rounds > 1:
            # All stages together do all work, so one of them does at least the mean.
            all_s = self.forward[-1] + self.backward[-1]
            least = self.schedule.microbatches * all_s / self.schedule.stages
            return [np.full(count + 1, least) for _ in range(chunks + 1)]
        rest = [np.full(count + 1, math.inf) for _ in range(chunks + 1)]
        rest[chunks][count] = 0.0
        begins = [0, *self.places]
        for chunk in range(chunks - 1, -1, -1):
            ends = np.array([count] if chunk == chunks - 1 else self.places, dtype=np.int64)
            for first in begins if chunk else [0]:
                after = ends[ends > first]
                if len(after):
                    both = np.maximum(self._stage_bound(chunk, first, after), rest[chunk + 1][after])
                    rest[chunk][first] = both.min()
        return rest
