"""Choosing the mesh: every candidate is bounded, those that may be the best are solved.

One program is read once and priced once for each mesh. Candidates come with fewer axes first; a further axis makes the
plan harder to read, so it must save `LEAST_GAIN`. What no plan on a mesh can undercut is known before it is solved: its
weighted problem without the memory limit, relaxed to messages between decisions, with the weights that were best on
the best mesh so far.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.crew import Crew
from autoshard.cost import Mesh, Topology, candidate_meshes
from autoshard.errors import InfeasibleError, UserError
from autoshard.plan.mesh._in_order import InOrder
from autoshard.plan.mesh._trial import MeshBest, Rival, Trial, Trials
from autoshard.plan.model._asked import Required
from autoshard.plan.model._axis_parts import LEAST_GAIN
from autoshard.plan.model._demands import mesh_text
from autoshard.plan.model._model import Model
from autoshard.plan.record._parts import MeshTried
from autoshard.units import format_seconds


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
