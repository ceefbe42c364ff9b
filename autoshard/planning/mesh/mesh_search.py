"""The search over meshes: every candidate is bounded, and candidates that may be the best are solved in order."""

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_seconds
from autoshard.base.worker import Job
from autoshard.base.workers import WorkerCrew
from autoshard.cost import Mesh, Topology, candidate_meshes
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.mesh.mesh_attempt import Incumbent, MeshAttempt, MeshAttempts, MeshBest
from autoshard.planning.record.plan_parts import MeshTried
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN
from autoshard.planning.space.spec_constraints import mesh_text
from autoshard.planning.space.user_constraints import Required


SCOUTED = 16
"""Least number of candidate meshes for which one mesh is solved ahead, as an incumbent for the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The best mesh with its prices and choices. `choices` is None if nothing fits on any mesh."""

    model: Model
    required: Required
    """User's constraints on the chosen mesh."""
    choices: NDArray[np.int64] | None
    """Chosen state of each node; None if nothing fits on any mesh."""
    weights: Weights | None
    """Time weights with the highest bound on the mesh; None if it was not bounded."""
    tried: tuple[MeshTried, ...]
    """Rows of all meshes, the chosen one first."""
    others: tuple[MeshBest, ...]
    """Best choices found on each other mesh."""
    unconstrained_bound_s: float
    """Lower bound in seconds of all plans on the other meshes, ignoring the memory limit."""


class PrunedByBound(Exception):
    """Exception that reports that no plan on any mesh beats the given incumbent."""

    def __init__(self, bound_s: float, unconstrained_bound_s: float = 0.0) -> None:
        super().__init__(f"no plan on any mesh takes less than {format_seconds(bound_s)}")
        self.bound_s = bound_s
        """Lower bound in seconds of a step on every mesh where a plan fits."""
        self.unconstrained_bound_s = unconstrained_bound_s
        """Lower bound in seconds of a step on every searched mesh, ignoring the memory limit."""


class MeshSearch:
    """Search for the best mesh of one topology for one program.

    Every mesh is compared with the best mesh before it. A crew tries several meshes at once, each against the incumbent
    of that moment. A mesh that was compared with the wrong incumbent is tried again, so the result does not depend on
    the crew.
    """

    def __init__(
        self,
        trials: MeshAttempts,
        progress: Callable[[str], None],
        rival: Incumbent | None = None,
        kept: MeshAttempt | None = None,
    ) -> None:
        """Create a search.

        - `trials`: prices, bounds and solves single meshes.
        - `progress`: receives a line for each mesh.
        - `rival`: incumbent that a plan must beat; None if there is none.
        - `kept`: trial that is chosen if no mesh beats the rival; None if there is none.
        """
        self.trials, self.progress, self.rival, self.kept = trials, progress, rival, kept
        self.done: list[MeshAttempt] = []
        """Finished trials, without their prices."""
        self.refusals: list[UserError] = []
        self.best: MeshAttempt | None = None
        self.ceiling = rival
        """Incumbent that meshes must beat until one of them is the best."""
        self.nearest: MeshAttempt | None = None
        """Trial that exceeds the memory limit least, where nothing fits."""
        self.count = 0
        """Number of candidate meshes."""

    def run(self, topology: Topology, crew: WorkerCrew, meshes: Sequence[Mesh] | None = None) -> Chosen:
        """Return the best of all candidate meshes, or of the given `meshes`.

        If nothing fits, return the mesh that exceeds the memory limit least, without choices. Many meshes without a
        rival are first compared with a scouted one, which is solved once.

        Raises `UserError` if no mesh serves the program or can satisfy the user's constraints. With a given rival,
        and no `kept` trial, raises `PrunedByBound` if no mesh beats it and `InfeasibleError` if nothing fits.
        """
        crew.share("trials", self.trials)
        meshes = candidate_meshes(topology) if meshes is None else meshes
        self.count = len(meshes)
        self.ceiling = self.rival or self.scouted(meshes)
        crew.run(InOrder(self.trials, meshes, self.take, ahead=not crew.alone, first=self.ceiling))
        crew.drop("trials")
        self.trials.forget()
        if self.best is None and self.rival is not None and self.kept is None:
            raise self.beaten(topology)
        chosen = self.best or self.kept or self.nearest
        if chosen is None or chosen.model is None or chosen.required is None:
            raise self.refused(topology)
        choices = None if chosen.best is None else chosen.best.choices
        others = tuple(each.best for each in self.done if each.best is not None and each.mesh != chosen.mesh)
        unconstrained_bound_s = self.unconstrained_bound_s(chosen)
        rows = self.rows(chosen)
        return Chosen(chosen.model, chosen.required, choices, chosen.weights, rows, others, unconstrained_bound_s)

    def unconstrained_bound_s(self, chosen: MeshAttempt | None = None) -> float:
        """Return a lower bound in seconds of all plans on the meshes that are not excluded, ignoring the memory limit.

        - `chosen`: attempt whose mesh is left out; None for all meshes.
        """
        counted = (each for each in self.done if not each.excluded and (chosen is None or each.mesh != chosen.mesh))
        return min((each.unconstrained_bound_s for each in counted), default=math.inf)

    def scouted(self, meshes: Sequence[Mesh]) -> Incumbent | None:
        """Return an incumbent from one mesh for all others; None for fewer than `SCOUTED` meshes, or if that mesh gives
        no plan.

        The mesh is the one with the least floor among meshes that are cheap to price (`is_small`). The incumbent's time
        is raised by twice `LEAST_GAIN`, and it counts as having the most axes, so that a simpler mesh may still be
        preferred. The mesh beats it when its turn comes.
        """
        if len(meshes) < SCOUTED:
            return None
        floors = [(self.trials.floor(mesh), number) for number, mesh in enumerate(meshes) if self.trials.is_small(mesh)]
        if not floors:
            return None
        _, number = min(floors)
        trial = self.trials.attempt(meshes[number], None, keep=True)
        if trial.best is None or not trial.step_s:
            return None
        self.trials.remember(trial)
        self.progress(f"mesh {mesh_text(trial.mesh)}: {self.so_far(trial, None)}, to hold others against")
        return dataclasses.replace(trial.as_incumbent(), step_s=(1 + 2 * LEAST_GAIN) * trial.step_s, axes=sys.maxsize)

    def take(self, trial: MeshAttempt) -> None:
        """Accept the next trial, in order: record and report it, and make it the best one if it beats its rival.

        The rival is the best trial so far, else `ceiling`. Until a mesh is the best, the trial that exceeds memory
        least is stored as `nearest`. Raises `UserError` if two meshes refuse the program for the same reason.
        """
        if trial.refusal is not None:
            if any(str(trial.refusal) == str(other) for other in self.refusals):
                raise trial.refusal  # the cause is not the mesh
            self.refusals.append(trial.refusal)
        self.done.append(dataclasses.replace(trial, model=None, required=None))
        rival = self.ceiling if self.best is None else self.best.as_incumbent()
        place = f"{len(self.done)} of {self.count}"
        self.progress(f"mesh {mesh_text(trial.mesh)} ({place}): {self.so_far(trial, rival)}")
        if trial.beats(rival):
            self.best = trial
        elif self.best is None and trial.model is not None:
            if self.nearest is None or trial.excess < self.nearest.excess:
                self.nearest = trial

    def beaten(self, topology: Topology) -> Exception:
        """Return the exception that explains why no mesh beats the given rival: `PrunedByBound` with the least bound of
        meshes where plans may fit, else a refusal or `InfeasibleError`.
        """
        assert self.rival is not None
        bounds = [trial.bound_s for trial in self.done if trial.bound_s is not None and not _without_room(trial)]
        if bounds:
            return PrunedByBound(min(bounds), self.unconstrained_bound_s())
        if len(self.refusals) == len(self.done):
            return self.refused(topology)
        return InfeasibleError("no plan fits on any mesh")

    def rows(self, chosen: MeshAttempt) -> tuple[MeshTried, ...]:
        """Return the rows of all trials, the chosen one first and the others by step time, then by bound."""

        def verdict(trial: MeshAttempt) -> str:
            """Return the verdict of a trial: `chosen`, the reason that excludes it or leaves it without a plan, or why
            it is slower.
            """
            if trial.mesh == chosen.mesh:
                return "chosen"
            if trial.outcome is not None:
                return _slower(trial, chosen)
            reason = trial.excluded or self.without_plan(trial, chosen.step_s)
            return reason + (_least_excess(trial.bound_s, chosen.step_s) if _BOUNDED in reason else "")

        def place(trial: MeshAttempt) -> tuple[bool, float, float]:
            """Return the sort key of a trial; trials without a plan come last, by bound."""
            return trial.mesh != chosen.mesh, trial.step_s, trial.bound_s or math.inf

        return tuple(
            MeshTried(
                mesh_text(trial.mesh),
                trial.mesh.describe(),
                None if trial.outcome is None else trial.outcome.step_time_s,
                trial.bound_s,
                verdict(trial),
            )
            for trial in sorted(self.done, key=place)
        )

    def without_plan(self, trial: MeshAttempt, best_s: float) -> str:
        """Return the reason for which a mesh has no plan, from its bound and the incumbent's step `best_s` in
        seconds.
        """
        bound_s = trial.bound_s
        rival_s = None if self.kept is None or self.rival is None else self.rival.beaten_by_s(len(trial.mesh.sizes))
        if bound_s is not None and (bound_s >= best_s or (rival_s is not None and bound_s >= rival_s)):
            return f"{_BOUNDED} {format_seconds(bound_s)}"
        if bound_s is None or bound_s < best_s * (1 - LEAST_GAIN):
            return "no plan on it fits"
        return f"no plan on it saves the {LEAST_GAIN:.1%} that a further axis must"

    def so_far(self, trial: MeshAttempt, rival: Incumbent | None) -> str:
        """Return the progress text of a trial: the reason that excludes it, its step time, or the reason for no
        plan.
        """
        if trial.excluded:
            return trial.excluded
        if trial.outcome is not None:
            return format_seconds(trial.step_s)
        return self.without_plan(trial, math.inf if rival is None else rival.step_s)

    def refused(self, topology: Topology) -> UserError:
        """Return the error that explains why no mesh serves the program: the last refusal of the user's constraints,
        else the sizes that no mesh divides.
        """
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


_BOUNDED = "no plan on it takes less than"
"""Words before the bound of a mesh without a solved plan."""


def _without_room(trial: MeshAttempt) -> bool:
    """Return True if a mesh was solved or bounded and nothing fits in memory on it."""
    return trial.best is None and trial.excess < math.inf


def _least_excess(bound_s: float | None, chosen_s: float) -> str:
    """Return in words, after a comma, how a mesh's bound compares with the chosen step; empty without either."""
    if not bound_s or not chosen_s:
        return ""
    excess = bound_s / chosen_s - 1
    if excess < 5e-4:
        return f", {-excess:.1%} less than the chosen mesh" if excess < -5e-4 else ", as the chosen mesh"
    return f": at least {_ratio(excess)}"


def _slower(trial: MeshAttempt, chosen: MeshAttempt) -> str:
    """Return in words how much slower a solved mesh is than the chosen one, and in which parts of the step.

    A mesh that is faster by less than `LEAST_GAIN` and has more axes is reported as a saving that is too small. Parts
    that differ by less than 0.1 % of the step are left out. The search on a mesh ends once none of its plans can win.
    If a much faster plan than the one found may exist, the range of possible excess is given, and no parts but memory.
    """
    mine, theirs = trial.outcome, chosen.outcome
    assert mine is not None and theirs is not None
    # The chosen step takes zero seconds in a program without ops.
    excess = trial.step_s / chosen.step_s - 1 if chosen.step_s else math.inf if trial.step_s else 0.0
    if excess < 0:
        return f"saves {-excess:.2%}, and a further axis must save {LEAST_GAIN:.1%}"
    # Smaller differences print as 0.0%.
    if excess < 5e-4:
        return "as fast; the simpler, earlier one is chosen"
    least = max(0.0, (trial.bound_s or 0.0) / chosen.step_s - 1) if chosen.step_s else math.inf
    compared = [("nearly full memory", trial.tight_s, chosen.tight_s)]
    words = f"{least:.1%} to {excess:.1%} slower" if excess < 1 else f"at least {_ratio(least)}"
    if excess - least <= LEAST_GAIN:
        exposed = (mine.step_time_s - mine.compute_s, theirs.step_time_s - theirs.compute_s)
        compared = [("compute", mine.compute_s, theirs.compute_s), ("exposed communication", *exposed), *compared]
        words = _ratio(excess)
    parts = [
        f"{name} {format_seconds(own)} against {format_seconds(other)}"
        for name, own, other in compared
        if own > other + 1e-3 * chosen.step_s
    ]
    return words + (f": {', '.join(parts)}" if parts else "")


def _ratio(excess: float) -> str:
    """Return in words how much slower a step is, from its excess as a share of the other step, above 0."""
    if excess == math.inf:
        return "slower"
    # A percentage above 100 is hard to read.
    return f"{excess:.1%} slower" if excess < 1 else f"{1 + excess:.1f} times as long"


class _Step(enum.IntEnum):
    """Extent of a job on a mesh, in order of priority."""

    WHOLE = 0
    """Whole trial against a known rival."""
    BOUND = 1
    """Prices and a bound, which may complete the trial."""
    PRICES = 2
    """Prices only, which depend on no rival, while no rival is known."""
    GUESSED = 3
    """Trial that needs solving, against a guessed rival."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    """The number of a mesh and the key of the rival that it must beat."""

    number: int
    """Position of the mesh among the candidates."""
    rival: "_Key | None"
    """Key of the trial that gives the rival; None for the first rival."""


class InOrder:
    """Jobs that try every mesh against the best mesh before it.

    The best mesh before another one is known only once all earlier meshes are done. Until then unfinished meshes are
    guessed not to be better. A trial against a wrong guess is run again.
    """

    def __init__(
        self,
        trials: MeshAttempts,
        meshes: Sequence[Mesh],
        accept: Callable[[MeshAttempt], None],
        ahead: bool = True,
        first: Incumbent | None = None,
    ) -> None:
        """Create the jobs.

        - `trials`: prices, bounds and solves a mesh.
        - `meshes`: candidates in order.
        - `accept`: receives every trial in order.
        - `ahead`: True if meshes may be tried against guessed rivals.
        - `first`: rival of the first mesh; None if there is none.
        """
        self.first = first
        self.trials, self.meshes, self.accept, self.ahead = trials, meshes, accept, ahead
        self.next = 0
        """Number of the mesh to accept next."""
        self.rival: _Key | None = None
        """Key of the best mesh before `next`."""
        self.rivals: dict[_Key, Incumbent] = {}
        """Incumbents of trials with a plan, by key of the trial."""
        self.done: dict[_Key, MeshAttempt] = {}
        """Finished trials that are not accepted yet."""
        self.undecided: set[_Key] = set()
        """Keys that are bounded and still have to be solved."""
        self.begun: set[tuple[_Key, _Step]] = set()
        """Jobs that run or ended, and were not lost."""
        self.priced_at: dict[int, int] = {}
        """Slot that has the prices of each mesh."""

    @property
    def finished(self) -> bool:
        """True once all meshes are accepted."""
        return self.next == len(self.meshes)

    def take(self, slot: int) -> Job | None:
        """Return the next job for a slot of the crew; None if none is open.

        Slot 0 first accepts finished trials. The job is recorded as begun.
        """
        if slot == 0:
            self._accept()
        chosen = min(self._open(), key=lambda one: self._turn(*one, slot), default=None)
        if chosen is None:
            return None
        key, step = chosen
        self.begun.add((key, step))
        self.priced_at[key.number] = slot
        mesh, against = self.meshes[key.number], self._against(key)
        if step is _Step.PRICES:
            return Job((key, step), self.trials.price_ahead, (mesh,))
        if step is _Step.BOUND:
            return Job((key, step), self.trials.bound, (mesh, against))
        return Job((key, step), self.trials.attempt, (mesh, against, step is _Step.GUESSED), stoppable=True)

    def _turn(self, key: _Key, step: _Step, slot: int) -> tuple[bool, _Step, int]:
        """Return the priority of a job in a slot; the least one is first. Meshes that have prices in another slot come
        last, then jobs go by step, then by mesh.
        """
        # A slot that has the prices of a mesh has half of its trial done. Prices start from the last mesh, since late
        # meshes have most axes and take longest. Trials start from the first mesh.
        elsewhere = self.priced_at.get(key.number, slot) != slot
        return elsewhere, step, -key.number if step is _Step.PRICES else key.number

    def put(self, job: Job, slot: int, value: MeshAttempt | None) -> None:
        """Record the result of a finished job; `value` is None if the trial is not complete, and after a bound the mesh
        must be solved.
        """
        key, step = _of(job)
        if value is not None:
            self.done[key] = value
            if value.best is not None:
                self.rivals[key] = value.as_incumbent()
        elif step is _Step.BOUND:
            self.undecided.add(key)

    def lose(self, job: Job) -> None:
        """Release a job that was stopped or failed, so that it may begin again in any slot."""
        self.begun.discard(_of(job))
        self.priced_at.pop(_of(job)[0].number, None)

    def outdated(self, job: Job) -> bool:
        """Return True if a running job's mesh is done or its rival is no longer the guessed one."""
        key, _ = _of(job)
        return all(key != other for other, _ in self._chain())

    def _accept(self) -> None:
        """Accept finished trials in order, up to the first unfinished one, and advance `rival` to each that beats its
        rival.
        """
        while not self.finished and (trial := self.done.pop(key := _Key(self.next, self.rival), None)) is not None:
            if trial.beats(self._against(key)):
                self.rival = key
            self.next += 1
            self.accept(trial)

    def _against(self, key: _Key) -> Incumbent | None:
        """Return the incumbent that a key's mesh must beat; None if there is none."""
        return self.first if key.rival is None else self.rivals[key.rival]

    def _chain(self) -> Iterator[tuple[_Key, bool]]:
        """Yield the unfinished trials in order, each with its guessed rival and True if that rival is certain.

        Only the first is certain; later ones are guessed as if unfinished meshes were not better.
        """
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
        """Yield the jobs that may begin now and have not begun, in order of meshes. Without `ahead` they are those of
        the first unfinished mesh.
        """
        for key, sure in self._chain():
            if not sure and not self.ahead:
                return
            for step in self._steps(key, sure):
                if (key, step) not in self.begun:
                    yield key, step

    def _steps(self, key: _Key, sure: bool) -> Iterator[_Step]:
        """Yield the steps that may be done for a mesh now; `sure` is True if its rival is certain.

        A certain one is tried whole, unless its bound or its guessed trial is running. An uncertain one is only priced
        without a rival, bounded with one, and tried once its bound leaves it undecided.
        """
        bounding = (key, _Step.BOUND) in self.begun and key not in self.undecided
        guessing = (key, _Step.GUESSED) in self.begun
        if sure:
            if not bounding and not guessing:
                yield _Step.WHOLE
        elif key.rival is None and self.first is None:
            yield _Step.PRICES  # no bound without a rival; the first rival changes all
        elif key in self.undecided:
            yield _Step.GUESSED
        else:
            yield _Step.BOUND


def _of(job: Job) -> tuple[_Key, _Step]:
    """Return the key and the step of a job."""
    key, step = job.key  # type: ignore[misc]
    return key, step
