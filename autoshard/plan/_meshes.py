"""Choosing the mesh: every candidate is bounded, those that may be the best are solved.

One program is read once and priced once for each mesh. Candidates come with fewer axes first; a further axis makes the
plan harder to read, so it must save `LEAST_GAIN`. What no plan on a mesh can undercut is known before it is solved: its
weighted problem without the memory limit, relaxed to messages between decisions, with the weights that were best on
the best mesh so far.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Calibration, Mesh, Topology, candidate_meshes
from autoshard.errors import UserError
from autoshard.plan._asked import Asked, Required, require
from autoshard.plan._build import kept_of
from autoshard.plan._demands import check_regions
from autoshard.plan._floors import least_bytes, least_seconds
from autoshard.plan._heavy import heavy_states
from autoshard.plan._model import Model
from autoshard.plan._plan import MeshTried
from autoshard.plan._predict import Outcome
from autoshard.plan._reading import Reading, build_model
from autoshard.plan._refine import LEAST_GAIN
from autoshard.plan._repeats import find_repeats
from autoshard.plan._search import Climb
from autoshard.plan._states import enumerate_states
from autoshard.plan._weights import Weighing, carried_weights, even_weights, normalise
from autoshard.program import Program, Role
from autoshard.solver import Solution
from autoshard.units import format_count, format_seconds


MOST_PAIRS = 30_000_000
"""Pairs of alternatives up to which a mesh is solved."""
GOOD_ENOUGH = 3e-3
"""Plan gap at which a mesh is solved well enough to be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The best mesh, priced, with the choices found on it; without choices if nothing fits on any mesh."""

    model: Model
    required: Required
    choices: NDArray[np.int64] | None
    tried: tuple[MeshTried, ...]
    others: tuple["MeshBest", ...]
    """The best found on every other mesh."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshBest:
    """The best choice found on a mesh, without the mesh's prices."""

    mesh: Mesh
    choices: NDArray[np.int64]
    outcome: Outcome
    tight_s: float
    """What nearly full memory is expected to add to its step."""
    solution: Solution
    """Of the weighting whose bound is `bound_s`."""
    bound_s: float
    weightings: int
    """Rounds of the search on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    mesh: Mesh
    excluded: str = ""
    """Why it was not looked at."""
    bound_s: float | None = None
    outcome: Outcome | None = None
    """Of the best plan found that fits."""
    tight_s: float = 0.0
    """What nearly full memory is expected to add to its step."""
    excess: float = math.inf
    """Bytes above the limit of the nearest choices, where none fit; of what no choice can go below, where none were
    looked for."""
    climb: Climb | None = None
    model: Model | None = None
    required: Required | None = None

    @property
    def step_s(self) -> float:
        """Of the best plan, with what nearly full memory is expected to add."""
        return math.inf if self.outcome is None else self.outcome.step_time_s + self.tight_s

    def beaten_by_s(self, axes: int) -> float:
        """What a mesh of so many axes must take less than."""
        return self.step_s * (1 - LEAST_GAIN if axes > len(self.mesh.sizes) else 1.0)


class MeshSearch:
    """Looks for the best mesh of one topology for one program."""

    def __init__(
        self,
        program: Program,
        reading: Reading,
        asked: Asked,
        memory_limit: int,
        time_limit: float,
        seed: int,
        progress: Callable[[str], None],
        calibration: Calibration,
    ) -> None:
        self.program, self.reading, self.asked, self.calibration = program, reading, asked, calibration
        self.memory_limit, self.time_limit, self.seed = memory_limit, time_limit, seed
        self.progress = progress
        self.refusals: list[UserError] = []

    def run(self, topology: Topology) -> Chosen:
        """The best of all candidates. Raises `UserError` if what is asked for can hold on none of them."""
        trials: list[_Trial] = []
        found: list[MeshBest] = []
        best: _Trial | None = None
        nearest: _Trial | None = None
        for mesh in candidate_meshes(topology):
            trial = self.trial(mesh, best)
            trials.append(dataclasses.replace(trial, climb=None, model=None, required=None))
            found.extend(_best_on(trial))
            self.progress(f"mesh {mesh_text(mesh)}: {_so_far(trial, best)}")
            if trial.outcome is not None and (best is None or trial.step_s < best.beaten_by_s(len(mesh.sizes))):
                best = trial
            elif best is None and trial.model is not None and (nearest is None or trial.excess < nearest.excess):
                nearest = trial
        chosen = best or nearest
        if chosen is None or chosen.model is None or chosen.required is None:
            raise self.refused(topology, trials)
        known = None if chosen.climb is None or chosen.climb.best is None else chosen.climb.best.choices
        others = tuple(each for each in found if each.mesh != chosen.mesh)
        return Chosen(chosen.model, chosen.required, known, _records(trials, chosen), others)

    def trial(self, mesh: Mesh, rival: _Trial | None) -> _Trial:
        """One mesh against the best so far, no further than needed to know that it is not better."""
        excluded = _unusable(self.program, self.reading, mesh)
        if excluded:
            return _Trial(mesh, excluded)
        beat_s = math.inf if rival is None else rival.beaten_by_s(len(mesh.sizes))
        pairs = _pairs(self.reading, mesh)
        if pairs > MOST_PAIRS:
            return self.unsolved(mesh, pairs, beat_s)
        try:
            check_regions(self.reading.graph, mesh)
            model = build_model(self.program, self.reading, mesh, self.memory_limit, self.calibration)
            required = require(model, self.reading.groups, self.asked)
        except UserError as error:
            if any(str(error) == str(other) for other in self.refusals):
                raise  # it is not the mesh
            self.refusals.append(error)
            return _Trial(mesh, f"excluded: {error}")
        kept = kept_of(model, required.allowed)
        least = least_bytes(model, kept)
        if least > self.memory_limit:
            return _Trial(mesh, excess=least - self.memory_limit, model=model, required=required)
        weights = normalise(even_weights(model))
        if rival is not None and rival.climb is not None:
            weights = carried_weights(model, rival.climb.weighing.weights)
        climb = Climb(model, Weighing(weights), repeats=find_repeats(model))
        if rival is not None:
            climb.bound_without_limit(required, beat_s)
        if climb.weighing.bound_s < beat_s:
            climb.run(self.memory_limit, self.time_limit, self.seed, _silent, required, beat_s, GOOD_ENOUGH)
        bound = climb.weighing.bound_s if climb.weighing.bound_s > 0 else None
        outcome, tight = (None, 0.0) if climb.best is None else (climb.best.outcome, climb.best.tight_s)
        solved = climb.certified
        excess = math.inf if solved is None else solved.solution.stats.get("excess", math.inf)
        return _Trial(mesh, "", bound, outcome, tight, excess, climb, model, required)

    def unsolved(self, mesh: Mesh, pairs: int, beat_s: float) -> _Trial:
        """One mesh with more pairs than are solved here: what no plan on it can undercut may do to leave it out."""
        bound = least_seconds(self.program, self.reading, mesh, self.memory_limit, self.calibration)
        if bound >= beat_s:
            return _Trial(mesh, bound_s=bound)
        why = f"not solved: {format_count(pairs)} pairs of alternatives, and all that is known is that no plan on it "
        return _Trial(mesh, f"{why}takes less than {format_seconds(bound)}; give it with --mesh to solve it", bound)

    def refused(self, topology: Topology, trials: Sequence[_Trial]) -> UserError:
        """Why there is no mesh."""
        if self.refusals:
            return self.refusals[-1]
        sizes = sorted({size for size in self.reading.groups.sizes.values() if size > 1})
        dims = f"dims of {', '.join(map(str, sizes[-6:]))}" if sizes else "no dim above 1"
        devices = topology.num_devices
        return UserError(
            f"no mesh of 1 to 4 axes over the {devices} devices of {topology.name} serves this program, which has "
            f"{dims}: {trials[-1].excluded}; use a batch that is a multiple of {devices}, other devices, or a mesh of "
            "your own with --mesh."
        )


def _best_on(trial: _Trial) -> list[MeshBest]:
    """What the trial found, if it found anything."""
    climb = trial.climb
    if climb is None or climb.best is None or climb.certified is None:
        return []
    best, solution = climb.best, climb.certified.solution
    return [
        MeshBest(trial.mesh, best.choices, best.outcome, best.tight_s, solution, climb.weighing.bound_s, climb.rounds)
    ]


def mesh_text(mesh: Mesh) -> str:
    """As `--mesh` takes it."""
    return ",".join(f"{name}={size}" for name, size in mesh.axes.items())


def _unusable(program: Program, reading: Reading, mesh: Mesh) -> str:
    """Why a mesh cannot serve the program at all; empty if it may."""
    sizes = [size for size in reading.groups.sizes.values() if size > 1]
    for name, count in mesh.axes.items():
        if count > 1 and not any(size % count == 0 for size in sizes):
            return f"no dim of the program divides by {name}={count}"
    return "" if splits_batch(program, mesh) else "none of its axes divides a dim of the batch"


def splits_batch(program: Program, mesh: Mesh) -> bool:
    """Whether some axis divides a dim of the batch, or of state (such as a key-value cache) that a step replaces.

    True for a program without either and for one device.
    """
    batches = [a for a in program.arguments if a.role is Role.BATCH and a.shape]
    axes = [size for size in mesh.axes.values() if size > 1]
    if not batches or not axes:
        return True
    state = [a for a in program.arguments if a.role is Role.OTHER and a.result is not None]
    return any(size % n == 0 and size > 1 for a in (*batches, *state) for size in a.shape for n in axes)


def _pairs(reading: Reading, mesh: Mesh) -> int:
    """Pairs of alternatives at both ends of all values that move, before any is priced."""
    graph, structure = reading.graph, reading.structure
    axes, backend = list(mesh.sizes), mesh.topology.backend
    known: dict[object, int] = {}

    def cluster_states(number: int) -> int:
        cluster = structure.clusters[number]
        key = (cluster.sizes, tuple(sorted(cluster.blocked)))
        if key not in known:
            known[key] = len(enumerate_states(cluster.sizes, axes, cluster.blocked))
        return known[key]

    def op_states(number: int) -> int:
        op = graph.ops[number]
        key = (op.kind, op.rule, op.opaque, op.halos)
        if key not in known:
            known[key] = len(heavy_states(graph, op, axes, backend))
        return known[key]

    total = 0
    heavy = set(structure.heavy)
    for edge in structure.edges:
        here = cluster_states(structure.cluster_of[edge.tensor])
        if edge.op in heavy:
            total += here * op_states(edge.op)
        elif edge.op >= 0 and edge.result >= 0:
            total += here * cluster_states(structure.cluster_of[graph.ops[edge.op].results[edge.result]])
    return total


def _silent(line: str) -> None:
    """The rounds on each mesh are too many to tell."""


def _so_far(trial: _Trial, best: _Trial | None) -> str:
    """A line of progress."""
    if trial.excluded:
        return trial.excluded
    if trial.outcome is not None:
        return format_seconds(trial.step_s)
    return _without_plan(trial, math.inf if best is None else best.step_s)


def _without_plan(trial: _Trial, best_s: float) -> str:
    """Why a mesh has no plan."""
    if trial.bound_s is None or trial.bound_s < best_s * (1 - LEAST_GAIN):
        return "no plan on it fits"
    if trial.bound_s < best_s:
        return f"no plan on it saves the {LEAST_GAIN:.1%} that a further axis must"
    return f"no plan on it takes less than {format_seconds(trial.bound_s)}"


def _records(trials: Sequence[_Trial], chosen: _Trial) -> tuple[MeshTried, ...]:
    """All of them, the chosen one first, then by time."""

    def verdict(trial: _Trial) -> str:
        if trial.mesh == chosen.mesh:
            return "chosen"
        if trial.excluded:
            return trial.excluded
        return _without_plan(trial, chosen.step_s) if trial.outcome is None else _slower(trial, chosen)

    def place(trial: _Trial) -> tuple[bool, float, float]:
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


def _slower(trial: _Trial, chosen: _Trial) -> str:
    """In which part of the step a solved mesh loses."""
    mine, theirs = trial.outcome, chosen.outcome
    assert mine is not None and theirs is not None
    more = trial.step_s / chosen.step_s - 1
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
    return f"{more:.1%} slower" + (f": {', '.join(parts)}" if parts else "")
