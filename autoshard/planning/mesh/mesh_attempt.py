"""One mesh of a search: priced, bounded, and solved where it may be the best."""

import contextlib
import dataclasses
import math
import threading

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_count, format_seconds
from autoshard.cost import Mesh
from autoshard.errors import UserError
from autoshard.planning.price.analysed_program import Reading, Task
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.solve.problem_builder import Weights, kept_of, least_bytes, least_seconds
from autoshard.planning.solve.repeats import find_repeats
from autoshard.planning.solve.time_weights import Weighing, carried_weights, even_weights, normalise
from autoshard.planning.solve.weight_search import Climb
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN, stage_axis
from autoshard.planning.space.op_strategies import heavy_strategies
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.spec_constraints import check_regions
from autoshard.planning.space.user_constraints import Required
from autoshard.planning.xla.axis_assignments import enumerate_states
from autoshard.solver import Solution


MOST_PAIRS = 30_000_000
"""Pairs of alternatives up to which a mesh is solved."""
SMALL_PAIRS = 3_000_000
"""Pairs of alternatives up to which a mesh is priced in a second or less."""
MOST_AHEAD = 6
"""Meshes whose prices a process keeps until they are needed, with no more than so many pairs in all."""
BOUNDS = 8
"""Weights with which a mesh is bounded that most likely is not better."""
GOOD_ENOUGH = 3e-3
"""Plan gap at which a mesh is solved well enough to be compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshBest:
    """The best choice found on a mesh, without the mesh's prices."""

    mesh: Mesh
    choices: NDArray[np.int64]
    outcome: Outcome
    tight_s: float
    """What nearly full memory is expected to add to its step."""
    solution: Solution
    """The answer for the weighting whose bound is `bound_s`."""
    bound_s: float
    weightings: int
    """Rounds of the search on it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rival:
    """The best mesh so far, as far as others are held against it."""

    step_s: float
    axes: int
    weights: Weights
    """The best on it, and a good start on others."""

    def beaten_by_s(self, axes: int) -> float:
        """What a mesh of so many axes must take less than."""
        return self.step_s * (1 - LEAST_GAIN if axes > self.axes else 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What looking at one mesh came to."""

    mesh: Mesh
    excluded: str = ""
    """Why it was not looked at."""
    refusal: UserError | None = None
    """Why what is asked for cannot hold on it."""
    bound_s: float | None = None
    best: MeshBest | None = None
    """The best plan found that fits."""
    excess: float = math.inf
    """Bytes above the limit of the nearest choices, where none fit; of what no choice can go below, where none were
    looked for."""
    weights: Weights | None = None
    """The weights whose bound is the highest so far."""
    free_s: float = 0.0
    """No plan on it takes less, whatever fits into memory."""
    model: Model | None = None
    """It priced, and below what is required: of a mesh that beats its rival or has none."""
    required: Required | None = None

    @property
    def outcome(self) -> Outcome | None:
        return None if self.best is None else self.best.outcome

    @property
    def tight_s(self) -> float:
        """What nearly full memory is expected to add to the step of the best plan."""
        return 0.0 if self.best is None else self.best.tight_s

    @property
    def step_s(self) -> float:
        """Of the best plan, with what nearly full memory is expected to add."""
        return math.inf if self.best is None else self.best.outcome.step_time_s + self.best.tight_s

    def beats(self, rival: Rival | None) -> bool:
        if self.best is None:
            return False
        return rival is None or self.step_s < rival.beaten_by_s(len(self.mesh.sizes))

    def rival(self) -> Rival:
        """It, to hold others against."""
        assert self.weights is not None
        return Rival(self.step_s, len(self.mesh.sizes), self.weights)


class Trials:
    """Tries meshes for one program. Pickled, it is the same without what it has priced."""

    def __init__(self, task: Task, time_limit: float, hopeless: bool = False) -> None:
        """`hopeless`: most likely no mesh is better than the first rival, so that bounds are worth more work."""
        self.task, self.time_limit, self.hopeless = task, time_limit, hopeless
        self._ahead: dict[Mesh, _Begun] = {}
        self._pairs: dict[Mesh, int] = {}
        self._floors: dict[Mesh, float] = {}

    def __reduce__(self) -> tuple[type["Trials"], tuple[object, ...]]:
        return Trials, (self.task, self.time_limit, self.hopeless)

    def price_ahead(self, mesh: Mesh) -> None:
        """What there is to be known of a mesh without others, if it is going to be tried here and can be kept."""
        if mesh in self._ahead or unusable(self.task.reading, mesh):
            return
        if self.pairs(mesh) > MOST_PAIRS:
            self.floor(mesh)
        elif self._has_room(self.pairs(mesh)):
            with contextlib.suppress(UserError):
                self._keep(self._priced(mesh))

    def forget(self) -> None:
        """Lets go of what is kept."""
        self._ahead.clear()

    def bound(self, mesh: Mesh, rival: Rival | None) -> Trial | None:
        """One mesh as `trial` has it, if that does not take solving it; None otherwise."""
        return self._looked_at(mesh, rival, keep=True)

    def bounded(self, mesh: Mesh) -> float:
        """Seconds that no plan takes less than, of a mesh that was bounded and must be solved to know more."""
        climb = self._ahead[mesh].climb
        return 0.0 if climb is None else climb.weighing.bound_s

    def trial(self, mesh: Mesh, rival: Rival | None, keep: bool, stop: threading.Event | None = None) -> Trial:
        """One mesh against the best so far, no further than needed to know that it is not better.

        With `keep` its prices are kept, as it may be held against another one soon. Raises `Stopped` after `stop` is
        set.
        """
        found = self._looked_at(mesh, rival, keep)
        if found is not None:
            return found
        begun = self._ahead.pop(mesh)
        climb, required = begun.climb, begun.required
        assert climb is not None
        if keep:
            self._keep(dataclasses.replace(begun, climb=None))
        beat_s = _beaten_by_s(rival, mesh)
        limits = Limits(self.task.memory_limit, self.time_limit, self.task.seed)
        climb.run(limits, _silent, required, beat_s, GOOD_ENOUGH, stop)
        return _tried(climb, required, rival)

    def _looked_at(self, mesh: Mesh, rival: Rival | None, keep: bool) -> Trial | None:
        """What is known of a mesh without solving it; None if it must be, and then it is kept for that."""
        excluded = unusable(self.task.reading, mesh)
        if excluded:
            return Trial(mesh, excluded, free_s=math.inf)
        begun = self._ahead.pop(mesh, None)
        if begun is None:
            if self.pairs(mesh) > MOST_PAIRS:
                return self._unsolved(mesh, _beaten_by_s(rival, mesh))
            try:
                begun = self._priced(mesh)
            except UserError as error:
                return Trial(mesh, f"excluded: {error}", error, free_s=math.inf)
        model, required = begun.model, begun.required
        climb = begun.climb if begun.climb is not None and begun.rival == rival else None
        if climb is None:
            least = least_bytes(model, kept_of(model, required.allowed))
            if least > self.task.memory_limit:
                return Trial(mesh, excess=least - self.task.memory_limit, model=model, required=required)
            climb = _bounded(model, required, rival, BOUNDS if self.hopeless else 1)
        solve = climb.weighing.bound_s < _beaten_by_s(rival, mesh)
        if solve or keep:
            self._keep(dataclasses.replace(begun, rival=rival, climb=climb if solve else None))
        return None if solve else _tried(climb, required, rival)

    def is_small(self, mesh: Mesh) -> bool:
        """Whether a mesh can be used, and takes little work to price."""
        return not unusable(self.task.reading, mesh) and self.pairs(mesh) <= SMALL_PAIRS

    def pairs(self, mesh: Mesh) -> int:
        """Pairs of alternatives at both ends of all values that move, before any is priced."""
        if mesh not in self._pairs:
            self._pairs[mesh] = _pairs(self.task.reading, mesh, bool(self.task.stages))
        return self._pairs[mesh]

    def floor(self, mesh: Mesh) -> float:
        """Seconds that no plan on the mesh can undercut, without prices."""
        if mesh not in self._floors:
            task = self.task
            self._floors[mesh] = least_seconds(
                task.program, task.reading, mesh, task.memory_limit, task.calibration, bool(task.stages)
            )
        return self._floors[mesh]

    def _priced(self, mesh: Mesh) -> "_Begun":
        check_regions(self.task.reading.graph, mesh)
        model = self.task.priced(mesh)
        return _Begun(model, self.task.required(model))

    def _keep(self, begun: "_Begun") -> None:
        mesh = begun.model.mesh
        self._ahead.pop(mesh, None)
        while not self._has_room(self.pairs(mesh)):
            del self._ahead[next(iter(self._ahead))]  # the oldest
        self._ahead[mesh] = begun

    def _has_room(self, pairs: int) -> bool:
        kept = sum(self.pairs(mesh) for mesh in self._ahead)
        return not kept or len(self._ahead) < MOST_AHEAD and kept + pairs <= MOST_PAIRS

    def _unsolved(self, mesh: Mesh, beat_s: float) -> Trial:
        """One mesh with more pairs than are solved here: what no plan on it can undercut may do to leave it out."""
        bound, pairs = self.floor(mesh), format_count(self.pairs(mesh))
        if bound >= beat_s:
            return Trial(mesh, bound_s=bound, free_s=bound)
        why = f"not solved: {pairs} pairs of alternatives, and all that is known is that no plan on it "
        why += f"takes less than {format_seconds(bound)}; give it with --mesh to solve it"
        return Trial(mesh, why, bound_s=bound, free_s=bound)


@dataclasses.dataclass(frozen=True, slots=True)
class _Begun:
    """A mesh that is priced, and perhaps bounded."""

    model: Model
    required: Required
    rival: Rival | None = None
    """The contender that the mesh was held against."""
    climb: Climb | None = None
    """The rounds so far, with the bound that they give; None if that is still to be found."""


def _beaten_by_s(rival: Rival | None, mesh: Mesh) -> float:
    return math.inf if rival is None else rival.beaten_by_s(len(mesh.sizes))


def _bounded(model: Model, required: Required, rival: Rival | None, rounds: int) -> Climb:
    """The beginning of a search, with a bound where there is a rival to be held against."""
    weights = normalise(even_weights(model)) if rival is None else carried_weights(model, rival.weights)
    climb = Climb(model, Weighing(weights), repeats=find_repeats(model))
    if rival is not None:
        climb.bound_first(required, _beaten_by_s(rival, model.mesh), rounds)
    return climb


def _tried(climb: Climb, required: Required, rival: Rival | None) -> Trial:
    """What a search has come to; with the prices if they may be needed."""
    weighing, solved = climb.weighing, climb.certified
    best = None
    if climb.best is not None and solved is not None:
        found = climb.best
        best = MeshBest(
            climb.model.mesh,
            found.choices,
            found.outcome,
            found.tight_s,
            solved.solution,
            weighing.bound_s,
            climb.rounds,
        )
    trial = Trial(
        climb.model.mesh,
        bound_s=weighing.bound_s if weighing.bound_s > 0 else None,
        best=best,
        excess=math.inf if solved is None else solved.solution.stats.get("excess", math.inf),
        weights=weighing.weights,
        free_s=climb.free_s,
    )
    needed = rival is None or trial.beats(rival)
    return dataclasses.replace(trial, model=climb.model, required=required) if needed else trial


def unusable(reading: Reading, mesh: Mesh) -> str:
    """Why a mesh cannot serve the program at all; empty if it may, as any may that has nothing to split."""
    sizes = [size for size in reading.groups.sizes.values() if size > 1]
    for name, count in mesh.axes.items():
        if count > 1 and sizes and not any(size % count == 0 for size in sizes):
            return f"no dim of the program divides by {name}={count}"
    return ""


def _pairs(reading: Reading, mesh: Mesh, staged: bool = False) -> int:
    """Pairs of alternatives at both ends of all values that move, before any is priced."""
    graph, structure = reading.graph, reading.structure
    axes, backend = list(mesh.sizes), mesh.topology.backend
    stages = stage_axis(reading, mesh) if staged else None
    known: dict[object, int] = {}

    def cluster_states(number: int) -> int:
        cluster = structure.clusters[number]
        key = (cluster.sizes, tuple(sorted(cluster.blocked)), None if stages is None else number)
        if key not in known:
            states = enumerate_states(cluster.sizes, axes, cluster.blocked)
            known[key] = len(states) if stages is None else int(stages.of_cluster(number, states).sum())
        return known[key]

    def op_strategies(number: int) -> int:
        op = graph.ops[number]
        key = (op.kind, op.rule, op.opaque, op.halos, None if stages is None else number)
        if key not in known:
            states = heavy_strategies(graph, op, axes, backend)
            known[key] = len(states) if stages is None else int(stages.of_op(op, states).sum())
        return known[key]

    total = 0
    heavy = set(structure.heavy)
    for edge in structure.edges:
        here = cluster_states(structure.cluster_of[edge.tensor])
        if edge.op in heavy:
            total += here * op_strategies(edge.op)
        elif edge.op >= 0 and edge.result >= 0:
            total += here * cluster_states(structure.cluster_of[graph.ops[edge.op].results[edge.result]])
    return total


def _silent(line: str) -> None:
    """The rounds on each mesh are too many to tell."""
