"""Plans of reinforcement learning: every way to use the chips, its phases and its step."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from autoshard.cost import Compute, Topology
from autoshard.errors import UserError
from autoshard.planning import PlacedReshard
from autoshard.reinforcement.chip_shares import ChipPart, share_chips, whole_part
from autoshard.reinforcement.rl_workload import RlModel, RlWorkload, rl_model
from autoshard.reinforcement.sampler import Sampler, samplers
from autoshard.reinforcement.trainer import Trainer, best_trainer
from autoshard.reinforcement.weight_move import predict_move


MODES = {
    "in turn": "A step samples, scores, trains and moves weights, one after the other",
    "one off": "The samples of a step are made while the step before trains",
    "continuous": "Samples are made all the time, and answers continue under new weights",
}
"""Orders of the phases of a step -> their meaning."""


@dataclasses.dataclass(frozen=True, slots=True)
class RlWay:
    """One way to use the chips. Times are seconds of one step."""

    mode: str
    """A key of `MODES`."""
    trainer: Trainer
    sampler: Sampler
    colocated: bool
    """True if all chips do both, False if each part has its own chips."""
    offload_s: float
    """Seconds in which the trainer's state is copied to the hosts' memory and back, before and after samples."""
    move: PlacedReshard

    @property
    def sample_s(self) -> float:
        """Seconds of a step's samples, without waits for the longest answer if they are continuous."""
        return self.sampler.steady_s if self.mode == "continuous" else self.sampler.seconds

    @property
    def learn_s(self) -> float:
        """Seconds of scoring and training."""
        return self.trainer.score_s + self.trainer.train_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        both = max(self.sample_s, self.learn_s) if self.mode != "in turn" else self.sample_s + self.learn_s
        return both + self.move.seconds + self.offload_s

    @property
    def staleness(self) -> int:
        """Updates by which the weights of a sampled token may be older than those that it trains."""
        if self.mode != "continuous":
            return 0 if self.mode == "in turn" else 1
        return 1 + math.ceil(self.sampler.longest_s / self.step_s)

    @property
    def idle(self) -> tuple[float, float]:
        """Shares of a step in which the sampler's and the trainer's devices wait; with the same devices none does."""
        if self.colocated:
            return 0.0, 0.0
        return 1 - self.sample_s / self.step_s, 1 - self.learn_s / self.step_s


@dataclasses.dataclass(frozen=True, slots=True)
class RlPlan:
    """All ways to use the chips, the fastest first."""

    model: RlModel
    topology: Topology
    work: RlWorkload
    ways: tuple[RlWay, ...]
    """Ways whose samples are as fresh as asked for, by step time."""
    failed: tuple[str, ...]
    """Sentences on shares of the chips on which a part does not fit."""


def plan_rl(config: str, topology: str, work: RlWorkload, progress: Callable[[str], None] | None = None) -> RlPlan:
    """Return all ways to sample from and train `hf:CONFIG` on a topology, the fastest first.

    `progress` is called with a text for each share of the chips.

    Raises `UserError` for a model that is no decoder of known form, numbers that contradict one another, CPUs, and if
    no way fits.
    """
    work.check()
    model, place = rl_model(config, work), Topology.parse(topology)
    if place.traits.shares_machine:
        raise UserError(f"{place.name} has no accelerators; reinforcement learning is planned for TPUs and GPUs.")
    ways: list[RlWay] = []
    failed: list[str] = []
    for sampling, training in ((whole_part(place), whole_part(place)), *share_chips(place)):
        if progress is not None:
            progress(f"Pricing {sampling.topology.name} to sample and {training.topology.name} to train")
        try:
            ways += _ways(model, place, work, sampling, training)
        except UserError as error:
            failed.append(str(error))
    if not ways:
        raise UserError(failed[0])
    return RlPlan(model, place, work, tuple(sorted(ways, key=lambda each: each.step_s)), tuple(failed))


def _ways(model: RlModel, place: Topology, work: RlWorkload, sampling: ChipPart, training: ChipPart) -> Iterator[RlWay]:
    """Yield the ways with these parts, each with its fastest sampler.

    Raises `UserError` if the trainer or every sampler does not fit.
    """
    trainer = best_trainer(model, training.topology, work)
    colocated = sampling.topology.num_devices == place.num_devices
    found = _samplers(model, work, sampling, trainer, colocated)
    if not any(own for own, _ in found):
        raise UserError(
            f"no sampler fits {sampling.topology.name}: its devices cannot store the weights of {model.config} and the "
            f"keys and values of {work.prompt + work.longest} tokens; use more devices, or a shorter --longest."
        )
    for mode in _modes(work, colocated):
        options = []
        for own, offload_s in found:
            if own:
                sampler = min(own, key=lambda each: each.steady_s if mode == "continuous" else each.seconds)
                move = predict_move(model, place, (trainer, sampler), (training, sampling), work.weights)
                options.append(RlWay(mode, trainer, sampler, colocated, offload_s, move))
        fresh = [way for way in options if way.staleness <= work.staleness]
        if fresh:
            yield min(fresh, key=lambda way: way.step_s)


def _samplers(
    model: RlModel, work: RlWorkload, sampling: ChipPart, trainer: Trainer, colocated: bool
) -> list[tuple[list[Sampler], float]]:
    """Return the samplers that fit, and the seconds in which the trainer's state leaves their memory and returns.

    The same chips have two lists. Samplers of the first one fit next to the trainer's state, those of the second one
    while it is in the hosts' memory.
    """
    if not colocated:
        return [(list(samplers(model, sampling.topology, work)), 0.0)]
    state = trainer.resident_bytes
    copied = 2 * float(Compute(trainer.topology).host_seconds(state))
    return [
        (list(samplers(model, sampling.topology, work, spent)), seconds)
        for spent, seconds in ((state, 0.0), (0.0, copied))
    ]


def _modes(work: RlWorkload, colocated: bool) -> tuple[str, ...]:
    """Return the orders of phases that the allowed staleness may reach; the same devices work in turn."""
    return tuple(MODES) if work.staleness and not colocated else ("in turn",)
