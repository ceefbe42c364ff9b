"""The search over meshes: every candidate is bounded, and those that may be the best are solved in order."""

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_seconds
from autoshard.base.worker_process import Job
from autoshard.base.workers import Crew
from autoshard.cost import Mesh, Topology, candidate_meshes
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.mesh.mesh_attempt import MeshBest, Rival, Trial, Trials
from autoshard.planning.record.plan_parts import MeshTried
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN
from autoshard.planning.space.spec_constraints import mesh_text
from autoshard.planning.space.user_constraints import Required


SCOUTED = 16
"""Meshes from which on one of them is looked at ahead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The best mesh, priced, with the choices found on it; without choices if nothing fits on any mesh."""

    model: Model
    required: Required
    choices: NDArray[np.int64] | None
    tried: tuple[MeshTried, ...]
    others: tuple[MeshBest, ...]
    """The best found on every other mesh."""
    free_s: float
    """On no other mesh does a plan take less, whatever fits into memory."""


class Beaten(Exception):
    """No plan on any mesh is faster than what had to be beaten."""

    def __init__(self, bound_s: float) -> None:
        super().__init__(f"no plan on any mesh takes less than {format_seconds(bound_s)}")
        self.bound_s = bound_s
        """A step takes no less on any mesh where something fits."""


class MeshSearch:
    """Looks for the best mesh of one topology for one program.

    Every mesh is held against the best before it. A crew tries several at once, each against what is the best by then;
    whatever turns out to have been held against another one is tried again, so that the answer is the same.
    """

    def __init__(self, trials: Trials, progress: Callable[[str], None], rival: Rival | None = None) -> None:
        """`rival`: what a plan must beat to be of any use."""
        self.trials, self.progress, self.rival = trials, progress, rival
        self.done: list[Trial] = []
        """Without prices."""
        self.refusals: list[UserError] = []
        self.best: Trial | None = None
        self.ceiling = rival
        """What meshes are held against as long as there is no best one."""
        self.nearest: Trial | None = None
        """To fitting, where nothing fits."""

    def run(self, topology: Topology, crew: Crew, meshes: Sequence[Mesh] | None = None) -> Chosen:
        """The best of all candidates, or of some `meshes`.

        Raises `UserError` if what is asked for can hold on none of them, `Beaten` if none beats the rival that was
        given, and `InfeasibleError` if there was one and nothing fits.
        """
        crew.share("trials", self.trials)
        meshes = candidate_meshes(topology) if meshes is None else meshes
        self.ceiling = self.rival or self.scouted(meshes)
        crew.run(InOrder(self.trials, meshes, self.take, ahead=not crew.alone, first=self.ceiling))
        if self.best is None and self.rival is None and self.ceiling is not None:
            self.done, self.ceiling = [], None  # what was found ahead was not found again
            crew.run(InOrder(self.trials, meshes, self.take, ahead=not crew.alone))
        crew.drop("trials")
        self.trials.forget()
        if self.best is None and self.rival is not None:
            raise self.beaten(topology)
        chosen = self.best or self.nearest
        if chosen is None or chosen.model is None or chosen.required is None:
            raise self.refused(topology)
        known = None if chosen.best is None else chosen.best.choices
        others = tuple(each.best for each in self.done if each.best is not None and each.mesh != chosen.mesh)
        free_s = min((each.free_s for each in self.done if each.mesh != chosen.mesh), default=math.inf)
        return Chosen(chosen.model, chosen.required, known, _records(self.done, chosen), others, free_s)

    def scouted(self, meshes: Sequence[Mesh]) -> Rival | None:
        """What one mesh shows that others can be held against from the beginning; None if it shows nothing.

        It is the one on which ops take least with nothing moved between them, of those that take little work to price.
        Others are held against what it comes to and a little more, so that a simpler mesh may still be preferred.
        """
        if len(meshes) < SCOUTED:
            return None
        floors = [(self.trials.floor(mesh), number) for number, mesh in enumerate(meshes) if self.trials.is_small(mesh)]
        if not floors:
            return None
        _, number = min(floors)
        trial = self.trials.trial(meshes[number], None, keep=True)
        if trial.best is None:
            return None
        self.progress(f"mesh {mesh_text(trial.mesh)}: {_so_far(trial, None)}, to hold others against")
        return dataclasses.replace(trial.rival(), step_s=(1 + 2 * LEAST_GAIN) * trial.step_s, axes=sys.maxsize)

    def take(self, trial: Trial) -> None:
        """The next one, held against the best before it."""
        if trial.refusal is not None:
            if any(str(trial.refusal) == str(other) for other in self.refusals):
                raise trial.refusal  # it is not the mesh
            self.refusals.append(trial.refusal)
        self.done.append(dataclasses.replace(trial, model=None, required=None))
        rival = self.ceiling if self.best is None else self.best.rival()
        self.progress(f"mesh {mesh_text(trial.mesh)}: {_so_far(trial, rival)}")
        if trial.beats(rival):
            self.best = trial
        elif self.best is None and trial.model is not None:
            if self.nearest is None or trial.excess < self.nearest.excess:
                self.nearest = trial

    def beaten(self, topology: Topology) -> Exception:
        """Why no mesh beats the rival that was given."""
        assert self.rival is not None
        held = [trial.bound_s for trial in self.done if trial.bound_s is not None and not _without_room(trial)]
        if held:
            return Beaten(min(held))
        if len(self.refusals) == len(self.done):
            return self.refused(topology)
        return InfeasibleError("no plan fits on any mesh")

    def refused(self, topology: Topology) -> UserError:
        """Why there is no mesh."""
        if self.refusals:
            return self.refusals[-1]
        sizes = sorted({size for size in self.trials.task.reading.groups.sizes.values() if size > 1})
        dims = f"dims of {', '.join(map(str, sizes[-6:]))}" if sizes else "no dim above 1"
        devices = topology.num_devices
        return UserError(
            f"no mesh of 1 to 4 axes over the {devices} devices of {topology.name} serves this program, which has "
            f"{dims}: {self.done[-1].excluded}; use a batch that is a multiple of {devices}, other devices, or a mesh "
            "of your own with --mesh."
        )


def _without_room(trial: Trial) -> bool:
    """Whether it was solved, or bounded, and nothing fits."""
    return trial.best is None and trial.excess < math.inf


def _so_far(trial: Trial, rival: Rival | None) -> str:
    """A line of progress."""
    if trial.excluded:
        return trial.excluded
    if trial.outcome is not None:
        return format_seconds(trial.step_s)
    return _without_plan(trial, math.inf if rival is None else rival.step_s)


def _without_plan(trial: Trial, best_s: float) -> str:
    """Why a mesh has no plan."""
    if trial.bound_s is None or trial.bound_s < best_s * (1 - LEAST_GAIN):
        return "no plan on it fits"
    if trial.bound_s < best_s:
        return f"no plan on it saves the {LEAST_GAIN:.1%} that a further axis must"
    return f"no plan on it takes less than {format_seconds(trial.bound_s)}"


def _records(trials: Sequence[Trial], chosen: Trial) -> tuple[MeshTried, ...]:
    """All of them, the chosen one first, then by time."""

    def verdict(trial: Trial) -> str:
        if trial.mesh == chosen.mesh:
            return "chosen"
        if trial.excluded:
            return trial.excluded
        return _without_plan(trial, chosen.step_s) if trial.outcome is None else _slower(trial, chosen)

    def place(trial: Trial) -> tuple[bool, float, float]:
        return trial.mesh != chosen.mesh, trial.step_s, trial.bound_s or math.inf

    return tuple(
        MeshTried(
            mesh_text(trial.mesh),
            trial.mesh.describe(),
            None if trial.outcome is None else trial.outcome.step_time_s,
            trial.bound_s,
            verdict(trial),
        )
        for trial in sorted(trials, key=place)
    )


def _slower(trial: Trial, chosen: Trial) -> str:
    """In which part of the step a solved mesh loses."""
    mine, theirs = trial.outcome, chosen.outcome
    assert mine is not None and theirs is not None
    # The chosen one may take no time at all, in a program without ops.
    more = trial.step_s / chosen.step_s - 1 if chosen.step_s else math.inf if trial.step_s else 0.0
    if more < 0:
        return f"saves {-more:.2%}, and a further axis must save {LEAST_GAIN:.1%}"
    if more < 5e-4:
        return "as fast; the simpler, earlier one is taken"
    exposed = (mine.step_time_s - mine.compute_s, theirs.step_time_s - theirs.compute_s)
    parts = []
    for name, own, other in (
        ("compute", mine.compute_s, theirs.compute_s), ("exposed communication", *exposed),
        ("nearly full memory", trial.tight_s, chosen.tight_s),
    ):  # fmt: skip
        if own > other + 1e-3 * chosen.step_s:
            parts.append(f"{name} {format_seconds(own)} against {format_seconds(other)}")
    return (f"{more:.1%} slower" if more < math.inf else "slower") + (f": {', '.join(parts)}" if parts else "")


class _Step(enum.IntEnum):
    """How far a job goes with a mesh, by what is done first."""

    WHOLE = 0
    """A trial whose rival is known."""
    BOUND = 1
    """Prices and a bound, which may be all that a trial takes."""
    PRICES = 2
    """What does not depend on a rival, while none is known."""
    GUESSED = 3
    """A trial that takes solving, against a rival that is only guessed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    """The mesh of that number against what another one came to."""

    number: int
    rival: "_Key | None"


class InOrder:
    """The work of trying every mesh against the best before it.

    Which mesh is the best before another is only known once all before it are done. Until then it is guessed that
    those not done are not better; what was held against a wrong guess is done again.
    """

    def __init__(
        self,
        trials: Trials,
        meshes: Sequence[Mesh],
        accept: Callable[[Trial], None],
        ahead: bool = True,
        first: Rival | None = None,
    ) -> None:
        """`first` is what the first mesh is held against, if there is anything."""
        self.first = first
        self.trials, self.meshes, self.accept, self.ahead = trials, meshes, accept, ahead
        self.next = 0
        """Number of the mesh to be taken next."""
        self.rival: _Key | None = None
        """The best before it."""
        self.rivals: dict[_Key, Rival] = {}
        self.done: dict[_Key, Trial] = {}
        self.undecided: set[_Key] = set()
        """Bounded, and to be solved."""
        self.begun: set[tuple[_Key, _Step]] = set()
        self.priced_at: dict[int, int] = {}
        """Mesh -> the seat that has prices of it."""

    @property
    def finished(self) -> bool:
        return self.next == len(self.meshes)

    def take(self, seat: int) -> Job | None:
        if seat == 0:
            self._accept()
        chosen = min(self._open(), key=lambda one: self._turn(*one, seat), default=None)
        if chosen is None:
            return None
        key, step = chosen
        self.begun.add((key, step))
        self.priced_at[key.number] = seat
        mesh, against = self.meshes[key.number], self._against(key)
        if step is _Step.PRICES:
            return Job((key, step), self.trials.price_ahead, (mesh,))
        if step is _Step.BOUND:
            return Job((key, step), self.trials.bound, (mesh, against))
        return Job((key, step), self.trials.trial, (mesh, against, step is _Step.GUESSED), stoppable=True)

    def _turn(self, key: _Key, step: _Step, seat: int) -> tuple[bool, _Step, int]:
        """What comes first in a seat is least."""
        # Where prices of a mesh are already, its trial is half done. Prices are made from the end, where meshes have
        # most axes and take longest; trials come from the beginning.
        elsewhere = self.priced_at.get(key.number, seat) != seat
        return elsewhere, step, -key.number if step is _Step.PRICES else key.number

    def put(self, job: Job, seat: int, value: Trial | None) -> None:
        key, step = _of(job)
        if value is not None:
            self.done[key] = value
            if value.best is not None:
                self.rivals[key] = value.rival()
        elif step is _Step.BOUND:
            self.undecided.add(key)

    def lose(self, job: Job) -> None:
        self.begun.discard(_of(job))
        self.priced_at.pop(_of(job)[0].number, None)

    def outdated(self, job: Job) -> bool:
        key, _ = _of(job)
        return all(key != other for other, _ in self._chain())

    def _accept(self) -> None:
        """Takes what is done and next, as far as that goes."""
        while not self.finished and (trial := self.done.pop(key := _Key(self.next, self.rival), None)) is not None:
            if trial.beats(self._against(key)):
                self.rival = key
            self.next += 1
            self.accept(trial)

    def _against(self, key: _Key) -> Rival | None:
        return self.first if key.rival is None else self.rivals[key.rival]

    def _chain(self) -> Iterator[tuple[_Key, bool]]:
        """What is left to be done and how it is guessed to be, in order, and whether it is sure."""
        rival, sure = self.rival, True
        for number in range(self.next, len(self.meshes)):
            key = _Key(number, rival)
            trial = self.done.get(key)
            if trial is None:
                yield key, sure
                sure = False
            elif trial.beats(self._against(key)):
                rival = key

    def _open(self) -> Iterator[tuple[_Key, _Step]]:
        """What may be begun now, in order."""
        for key, sure in self._chain():
            if not sure and not self.ahead:
                return
            for step in self._steps(key, sure):
                if (key, step) not in self.begun:
                    yield key, step

    def _steps(self, key: _Key, sure: bool) -> Iterator[_Step]:
        """What can be done for a mesh now."""
        bounding = (key, _Step.BOUND) in self.begun and key not in self.undecided
        guessing = (key, _Step.GUESSED) in self.begun
        if sure:
            if not bounding and not guessing:
                yield _Step.WHOLE
        elif key.rival is None and self.first is None:
            yield _Step.PRICES  # no bound without a rival, and the first one found changes all
        elif key in self.undecided:
            yield _Step.GUESSED
        else:
            yield _Step.BOUND


def _of(job: Job) -> tuple[_Key, _Step]:
    key, step = job.key  # type: ignore[misc]
    return key, step
