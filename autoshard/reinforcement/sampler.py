"""The sampler of a step: engines that answer all prompts, with as many sequences at a time as their caches allow."""

import dataclasses
import math
from collections.abc import Iterator

from autoshard.cost import Compute, Topology
from autoshard.reinforcement.answer_schedule import AnswerSchedule, ScheduleLevel, schedule_answers, steady_level
from autoshard.reinforcement.rl_workload import RlModel, RlWorkload
from autoshard.serving import LEAST_CHUNK, MEMORY_SHARE, Engines, ServingEngine, ServingRequests, engine_kinds


MOST_CHUNK = 8192
"""Most tokens of prompts that a step of one group computes, as vLLM's default on large GPUs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """The engines of a sampler, and the seconds of a step's samples."""

    topology: Topology
    engine: ServingEngine
    engines: int
    seats: int
    """Sequences of one group of an engine at a time."""
    chunk: int
    """Tokens of prompts that a step of one group computes."""
    seconds: float
    """Seconds until the last answer of a step's batch ends."""
    drained_s: float
    """Seconds of these in which less than half of the seats are busy."""
    steady_s: float
    """Seconds of as many tokens where answers never wait for others: seats are always busy."""
    longest_s: float
    """Seconds in which the longest answer is written while all seats are busy."""
    weight_bytes: float
    """Bytes of one device's part of the weights."""
    peak_bytes: float
    """Bytes of one device when caches are fullest."""
    limit_bytes: float
    """Bytes of one device that the sampler may occupy."""


def samplers(model: RlModel, topology: Topology, work: RlWorkload, spent_bytes: float = 0.0) -> Iterator[Sampler]:
    """Yield a sampler for every kind of engine whose weights and longest answers fit in a topology's memory.

    - `spent_bytes`: bytes of each device that the trainer occupies while the sampler runs.
    """
    compute = Compute(topology)
    asked = ServingRequests(work.prompt, work.longest, work.weights, work.cache)
    limit = MEMORY_SHARE * topology.usable_bytes - spent_bytes
    for engine in engine_kinds(model.decoder, topology):
        engines = Engines(model.decoder, compute, asked, engine)
        own = _EngineSampler(engines, work, limit)
        if own.fits(1):
            yield own.sampler()


class _EngineSampler:
    """The batch of one kind of engine."""

    def __init__(self, engines: Engines, work: RlWorkload, limit_bytes: float) -> None:
        self.engines, self.work, self.limit_bytes = engines, work, limit_bytes
        self.groups = engines.count * engines.engine.attention
        self.most = -(-work.sequences // self.groups)
        prompts = -(-self.most // work.answers) * work.prompt
        self.chunk = min(MOST_CHUNK, max(LEAST_CHUNK, 1 << math.ceil(math.log2(prompts))))
        self.chunks = prompts / self.chunk
        """Steps of a group that also compute prompts; a prompt is computed once for its answers."""

    def schedule(self, seats: int) -> AnswerSchedule:
        """Return the schedule of the group with the longest answer."""
        return schedule_answers(self.work.sequences, self.groups, seats, self.work.answer, self.work.longest)

    def bytes(self, seats: int) -> float:
        """Return the bytes of one device when the cache of `seats` sequences is fullest."""
        attention = self.engines.engine.attention
        length = self.work.prompt + math.ceil(self.schedule(seats).peak_tokens / seats)
        return sum(self.engines.memory_bytes(seats * attention, self.chunk, length).values())

    def fits(self, seats: int) -> bool:
        """Return True if so many sequences fit in memory, at least with one of the longest answers."""
        return self.bytes(seats) <= self.limit_bytes

    def sampler(self) -> Sampler:
        """Return the sampler with the most seats that fit, by bisection."""
        seats, beyond = 1, self.most + 1
        while beyond - seats > 1:
            middle = (seats + beyond) // 2
            seats, beyond = (middle, beyond) if self.fits(middle) else (seats, middle)
        engines, schedule = self.engines, self.schedule(seats)
        prompts_s = self._prompts_s(seats)
        times = [(level, level.steps * self._step_s(level)) for level in schedule.levels]
        steady = steady_level(seats, self.work.answer, self.work.longest)
        each = self._step_s(steady)
        rounds = self.work.sequences / self.groups / seats
        weights = engines.memory_bytes(engines.engine.attention)["parameters"]
        return Sampler(
            topology=engines.compute.topology,
            engine=engines.engine,
            engines=engines.count,
            seats=seats,
            chunk=self.chunk,
            seconds=sum(spent for _, spent in times) + prompts_s,
            drained_s=sum(spent for level, spent in times if level.running < seats / 2),
            steady_s=rounds * self.work.answer * each + prompts_s,
            longest_s=self.work.longest * each,
            weight_bytes=weights,
            peak_bytes=self.bytes(seats),
            limit_bytes=self.limit_bytes,
        )

    def _step_s(self, level: ScheduleLevel) -> float:
        """Return the seconds of a decoding step with as many sequences as a level has."""
        running = max(1, round(level.running)) * self.engines.engine.attention
        return self.engines.step("decode", running, round(self.work.prompt + level.answered)).step_time_s

    def _prompts_s(self, seats: int) -> float:
        """Return the seconds by which the prompts of one group's sequences make its steps longer."""
        running, length = seats * self.engines.engine.attention, self.work.prompt + self.work.answer // 2
        plain, mixed = (self.engines.step("decode", running, length, chunk) for chunk in (0, self.chunk))
        return self.chunks * (mixed.step_time_s - plain.step_time_s)
