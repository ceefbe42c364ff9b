"""One mesh of a search: priced, bounded, and solved if it may be the best."""

import contextlib
import dataclasses
import math
import threading

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_count
from autoshard.cost import Mesh
from autoshard.errors import UserError
from autoshard.planning.price.analysed_program import AnalysedProgram, Task
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.record.plan_parts import UNSOLVED
from autoshard.planning.solve.problem_builder import Weights, kept_of, least_bytes, least_seconds
from autoshard.planning.solve.repeats import find_repeats
from autoshard.planning.solve.time_weights import Weighing, carried_weights, even_weights, normalise
from autoshard.planning.solve.weight_search import WeightSearch
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN, stage_axis
from autoshard.planning.space.op_strategies import heavy_strategies
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.spec_constraints import check_regions
from autoshard.planning.space.user_constraints import Required
from autoshard.planning.xla.axis_assignments import enumerate_states
from autoshard.solver import Solution


MOST_PAIRS = 30_000_000
"""Most pairs of alternatives of a mesh that is solved."""
SMALL_PAIRS = 3_000_000
"""Most pairs of alternatives of a mesh that is priced in a second or less."""
ALWAYS = 3
"""Most axes of a mesh that is solved without regard to what its axes save; prices of more axes take many seconds."""
PAYS = 3 * LEAST_GAIN
"""Share of the step that the last axis must have saved for one axis more to be tried.

Each further axis of a mesh saves less than the one before, and must save `LEAST_GAIN` itself.
"""
MOST_AHEAD = 6
"""Most meshes whose prices a process stores until they are used. Their pairs together are at most `MOST_PAIRS`."""
BOUNDS = 8
"""Rounds of weights that may raise the bound of a mesh which is most likely not better (`hopeless`)."""
GOOD_ENOUGH = 3e-3
"""Plan gap at which a mesh is solved well enough for comparison."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshBest:
    """The best choice found on a mesh, without the mesh's prices."""

    mesh: Mesh
    choices: NDArray[np.int64]
    """Chosen state of each node."""
    outcome: Outcome
    tight_s: float
    """Expected seconds that nearly full memory adds to its step."""
    solution: Solution
    """Answer for the weighting whose bound is `bound_s`."""
    bound_s: float
    """Lower bound in seconds of a step within the memory limit."""
    weightings: int
    """Number of rounds of the search on the mesh."""


@dataclasses.dataclass(frozen=True, slots=True)
class Incumbent:
    """The incumbent: figures of the best mesh so far that another mesh must beat."""

    step_s: float
    """Seconds of the step, with the expected cost of nearly full memory."""
    axes: int
    """Number of axes of the incumbent mesh."""
    weights: Weights
    """Best time weights on the incumbent mesh, used as a start on other meshes."""
    needed_axes: int = 1
    """Number of axes of the incumbent mesh that save time, or that nothing is known of."""
    saved: float = math.inf
    """Share of the step that the last of these axes saves; infinite if it is not known."""

    def saved_by(self, step_s: float, axes: int) -> float:
        """Return the share of the step that the last of a mesh's axes saves, if the mesh beats this incumbent."""
        if not self.step_s or axes < self.needed_axes:
            return math.inf
        kept = step_s / self.step_s
        return 1 - kept * (1 - self.saved if axes == self.needed_axes else 1)

    def admits(self, axes: int) -> bool:
        """Return True if a mesh of this many axes, more than `ALWAYS`, may save enough to be priced."""
        return axes <= self.needed_axes or (axes == self.needed_axes + 1 and self.saved >= PAYS)

    def beaten_by_s(self, axes: int) -> float:
        """Return the seconds below which a mesh of this many axes beats the incumbent; a mesh with more axes must save
        the share `LEAST_GAIN`.
        """
        return self.step_s * (1 - LEAST_GAIN if axes > self.axes else 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAttempt:
    """The result of trying one mesh."""

    mesh: Mesh
    excluded: str = ""
    """Reason for which the mesh was not solved; empty if it was, or if a bound decided."""
    refusal: UserError | None = None
    """Error that explains why the user's constraints cannot hold on the mesh."""
    bound_s: float | None = None
    """Lower bound in seconds of plans that fit on the mesh; None if there is none above 0."""
    best: MeshBest | None = None
    """Best plan found that fits."""
    excess: float = math.inf
    """Bytes above the memory limit of the nearest choices, where none fit. If no choices were searched, the figure is
    that of a lower bound.
    """
    weights: Weights | None = None
    """Time weights whose bound is the highest so far."""
    saved: float = math.inf
    """Share of the step that the last of the mesh's axes saves, if it beats its rival; infinite if it is not known."""
    unconstrained_bound_s: float = 0.0
    """Lower bound in seconds of all plans on the mesh, ignoring the memory limit."""
    model: Model | None = None
    """Priced mesh. This field and `required` are set if the mesh beats its rival or has none."""
    required: Required | None = None
    """Constraints of the user, as masks of the states of `model`."""

    @property
    def outcome(self) -> Outcome | None:
        """The step and the memory of the best plan that fits; None without one."""
        return None if self.best is None else self.best.outcome

    @property
    def tight_s(self) -> float:
        """The expected seconds that nearly full memory adds to the best plan's step; 0 without a plan."""
        return 0.0 if self.best is None else self.best.tight_s

    @property
    def step_s(self) -> float:
        """The seconds of the best plan's step, with the expected cost of nearly full memory; infinite without a
        plan.
        """
        return math.inf if self.best is None else self.best.outcome.step_time_s + self.best.tight_s

    def beats(self, rival: Incumbent | None) -> bool:
        """Return True if the mesh has a plan that beats the rival; any plan beats None."""
        if self.best is None:
            return False
        return rival is None or self.step_s < rival.beaten_by_s(len(self.mesh.sizes))

    def as_incumbent(self) -> Incumbent:
        """Return this trial as the incumbent for other meshes; it must have been searched."""
        assert self.weights is not None
        axes = len(self.mesh.sizes)
        return Incumbent(self.step_s, axes, self.weights, axes, self.saved)


class MeshAttempts:
    """Attempts at meshes for one program, with a store of prices. A pickled copy carries none of the prices."""

    def __init__(
        self, task: Task, time_limit: float, hopeless: bool = False, solved: MeshAttempt | None = None
    ) -> None:
        """Create attempts.

        - `task`: the program and how to price it.
        - `time_limit`: processor seconds of the solves on one mesh.
        - `hopeless`: True to spend more work on bounds, since likely no mesh beats the first rival.
        - `solved`: trial without a rival, whose mesh is not tried again.
        """
        self.task, self.time_limit, self.hopeless, self.solved = task, time_limit, hopeless, solved
        self._ahead: dict[Mesh, _PricedMesh] = {}
        self._pairs: dict[Mesh, int] = {}
        self._floors: dict[Mesh, float] = {}

    def __reduce__(self) -> tuple[type["MeshAttempts"], tuple[object, ...]]:
        return MeshAttempts, (self.task, self.time_limit, self.hopeless, self.solved)

    def price_ahead(self, mesh: Mesh) -> None:
        """Price a mesh before its rival is known, if the prices can be stored until the trial.

        A mesh with more than `MOST_PAIRS` pairs, or one that needs a rival that admits it, gets only its floor. An
        unusable mesh, a full store or a `UserError` does nothing.
        """
        if mesh in self._ahead or unusable(self.task.reading, mesh):
            return
        if self.pairs(mesh) > MOST_PAIRS or self._needs_admission(mesh):
            self.floor(mesh)
        elif self._has_room(self.pairs(mesh)):
            with contextlib.suppress(UserError):
                self._keep(self._priced(mesh))

    def remember(self, trial: MeshAttempt) -> None:
        """Store a trial without a rival, but not its prices, so that its mesh is not tried again."""
        self.solved = dataclasses.replace(trial, model=None, required=None)

    def forget(self) -> None:
        """Discard the stored prices."""
        self._ahead.clear()

    def bound(self, mesh: Mesh, rival: Incumbent | None) -> MeshAttempt | None:
        """Return the trial of a mesh if bounds decide it; None if the mesh must be solved. A mesh that was priced and
        bounded stays stored.
        """
        return self._decide_by_bounds(mesh, rival, keep=True)

    def bounded(self, mesh: Mesh) -> float:
        """Return the lower bound in seconds of a mesh that was bounded and must still be solved; 0 without a bound.
        Raises `KeyError` if its prices are not stored.
        """
        search = self._ahead[mesh].search
        return 0.0 if search is None else search.weighing.bound_s

    def attempt(
        self, mesh: Mesh, rival: Incumbent | None, keep: bool, stop: threading.Event | None = None
    ) -> MeshAttempt:
        """Try one mesh against the best so far, only until it is known not to be better.

        - `mesh`, `rival`: mesh to try, and incumbent that it must beat; None if there is none.
        - `keep`: True to store the prices after the trial, since another rival may follow.
        - `stop`: event that ends the search.

        Ends at a plan gap of `GOOD_ENOUGH` or at the time limit. Raises `Stopped` after `stop` is set.
        """
        decided = self._decide_by_bounds(mesh, rival, keep)
        if decided is not None:
            return decided
        begun = self._ahead.pop(mesh)
        search, required = begun.search, begun.required
        assert search is not None
        if keep:
            self._keep(dataclasses.replace(begun, search=None))
        beat_s = _beaten_by_s(rival, mesh)
        limits = Limits(self.task.memory_limit, self.time_limit, self.task.seed)
        search.run(limits, _silent, required, beat_s, GOOD_ENOUGH, stop)
        return _against(_tried(search), search.model, required, rival)

    def _decide_by_bounds(self, mesh: Mesh, rival: Incumbent | None, keep: bool) -> MeshAttempt | None:
        """Return the trial of a mesh as far as no solving is needed; None if the mesh must be solved.

        An unusable mesh, too many pairs, a rival that does not admit so many axes, and constraints that cannot hold
        decide it. So do least bytes above the limit and a bound that does not beat the rival. A mesh that must be
        solved is stored with its bound; `keep` stores prices of others too.
        """
        excluded = unusable(self.task.reading, mesh)
        if excluded:
            return MeshAttempt(mesh, excluded, unconstrained_bound_s=math.inf)
        if self.solved is not None and mesh == self.solved.mesh:
            return self._compared(self.solved, rival, keep)
        begun = self._ahead.pop(mesh, None)
        if begun is None:
            if self.pairs(mesh) > MOST_PAIRS:
                pairs = f"{format_count(self.pairs(mesh))} pairs of alternatives"
                return self._unsolved(mesh, _beaten_by_s(rival, mesh), pairs)
            if rival is not None and self._needs_admission(mesh) and not rival.admits(len(mesh.sizes)):
                fewer = len(mesh.sizes) - 1
                why = f"{fewer} axes save too little over {fewer - 1}"
                return self._unsolved(mesh, _beaten_by_s(rival, mesh), why)
            try:
                begun = self._priced(mesh)
            except UserError as error:
                return MeshAttempt(mesh, f"excluded: {error}", error, unconstrained_bound_s=math.inf)
        model, required = begun.model, begun.required
        search = begun.search if begun.search is not None and begun.rival == rival else None
        if search is None:
            least = least_bytes(model, kept_of(model, required.allowed))
            if least > self.task.memory_limit:
                # Other recipes need less memory: how fast they could be here is known from this one without a limit.
                unconstrained_s = _bounded(model, required, rival, 2).unconstrained_bound_s
                excess = least - self.task.memory_limit
                return MeshAttempt(
                    mesh, excess=excess, model=model, required=required, unconstrained_bound_s=unconstrained_s
                )
            search = _bounded(model, required, rival, BOUNDS if self.hopeless else 1)
        solve = search.weighing.bound_s < _beaten_by_s(rival, mesh)
        if solve or keep:
            self._keep(dataclasses.replace(begun, rival=rival, search=search if solve else None))
        return None if solve else _against(_tried(search), search.model, required, rival)

    def _compared(self, solved: MeshAttempt, rival: Incumbent | None, keep: bool) -> MeshAttempt:
        """Return a remembered trial as one against a rival, with prices if it beats the rival or has none."""
        if rival is not None and not solved.beats(rival):
            return solved
        begun = self._ahead.pop(solved.mesh, None) or self._priced(solved.mesh)
        if keep:
            self._keep(begun)
        return _against(solved, begun.model, begun.required, rival)

    def is_small(self, mesh: Mesh) -> bool:
        """Return True if a mesh is usable and cheap to price, with at most `SMALL_PAIRS` pairs."""
        return not unusable(self.task.reading, mesh) and self.pairs(mesh) <= SMALL_PAIRS

    def pairs(self, mesh: Mesh) -> int:
        """Return the number of pairs of alternatives at both ends of all reshards, counted without prices; cached."""
        if mesh not in self._pairs:
            self._pairs[mesh] = _pairs(self.task.reading, mesh, bool(self.task.stages))
        return self._pairs[mesh]

    def floor(self, mesh: Mesh) -> float:
        """Return a lower bound in seconds of all plans on the mesh, computed without prices and cached."""
        if mesh not in self._floors:
            task = self.task
            self._floors[mesh] = least_seconds(
                task.program, task.reading, mesh, task.memory_limit, task.calibration, bool(task.stages)
            )
        return self._floors[mesh]

    def _priced(self, mesh: Mesh) -> "_PricedMesh":
        """Price a mesh and apply the user's constraints; raise `UserError` if they cannot hold."""
        check_regions(self.task.reading.graph, mesh)
        model = self.task.priced(mesh)
        return _PricedMesh(model, self.task.required(model))

    def _keep(self, begun: "_PricedMesh") -> None:
        """Store the prices of a mesh as the newest; discard the oldest ones until there is room."""
        mesh = begun.model.mesh
        self._ahead.pop(mesh, None)
        while not self._has_room(self.pairs(mesh)):
            del self._ahead[next(iter(self._ahead))]  # the oldest mesh
        self._ahead[mesh] = begun

    def _has_room(self, pairs: int) -> bool:
        """Return True if prices with this many pairs may be stored too, by `MOST_AHEAD` and `MOST_PAIRS`; an empty
        store accepts any.
        """
        stored_pairs = sum(self.pairs(mesh) for mesh in self._ahead)
        return not stored_pairs or len(self._ahead) < MOST_AHEAD and stored_pairs + pairs <= MOST_PAIRS

    def _needs_admission(self, mesh: Mesh) -> bool:
        """Return True if a mesh is priced only against a rival that admits so many axes: it is neither small nor has
        stages.
        """
        return len(mesh.sizes) > ALWAYS and self.pairs(mesh) > SMALL_PAIRS and not self.task.stages

    def _unsolved(self, mesh: Mesh, beat_s: float, why: str) -> MeshAttempt:
        """Return the trial of a mesh that is not solved, `why` in words.

        A lower bound of at least `beat_s` seconds prunes the mesh. Otherwise it is excluded, and its bound is all that
        is known.
        """
        bound = self.floor(mesh)
        if bound >= beat_s:
            return MeshAttempt(mesh, bound_s=bound, unconstrained_bound_s=bound)
        reason = f"{UNSOLVED}: {why}"
        return MeshAttempt(mesh, reason, bound_s=bound, unconstrained_bound_s=bound)


@dataclasses.dataclass(frozen=True, slots=True)
class _PricedMesh:
    """A mesh that is priced, and bounded if `search` is set."""

    model: Model
    required: Required
    rival: Incumbent | None = None
    """Incumbent against which the mesh was bounded."""
    search: WeightSearch | None = None
    """Search so far with its bound; None if the mesh is not bounded."""


def _beaten_by_s(rival: Incumbent | None, mesh: Mesh) -> float:
    """Return the seconds below which a mesh beats the rival, by its number of axes; infinite without a rival."""
    return math.inf if rival is None else rival.beaten_by_s(len(mesh.sizes))


def _bounded(model: Model, required: Required, rival: Incumbent | None, rounds: int) -> WeightSearch:
    """Return the beginning of a search, with a bound if there is a rival.

    Weights start from the rival's, or even without one. `rounds` is the number of weightings that may raise the bound.
    """
    weights = normalise(even_weights(model)) if rival is None else carried_weights(model, rival.weights)
    search = WeightSearch(model, Weighing(weights), repeats=find_repeats(model))
    if rival is not None:
        search.bound_first(required, _beaten_by_s(rival, model.mesh), rounds)
    return search


def _tried(search: WeightSearch) -> MeshAttempt:
    """Return the trial of a search, without prices: its bound, its weights, and its best plan if any fits."""
    weighing, solved = search.weighing, search.certified
    best = None
    if search.best is not None and solved is not None:
        candidate = search.best
        best = MeshBest(
            search.model.mesh,
            candidate.choices,
            candidate.outcome,
            candidate.tight_s,
            solved.solution,
            weighing.bound_s,
            search.rounds,
        )
    return MeshAttempt(
        search.model.mesh,
        bound_s=weighing.bound_s if weighing.bound_s > 0 else None,
        best=best,
        excess=math.inf if solved is None else solved.solution.stats.get("excess", math.inf),
        weights=weighing.weights,
        unconstrained_bound_s=search.unconstrained_bound_s,
    )


def _against(trial: MeshAttempt, model: Model, required: Required, rival: Incumbent | None) -> MeshAttempt:
    """Return a trial with the prices of its mesh if it beats the rival or has none, else the trial itself."""
    if rival is not None and not trial.beats(rival):
        return trial
    saved = math.inf if rival is None else rival.saved_by(trial.step_s, len(trial.mesh.sizes))
    return dataclasses.replace(trial, saved=saved, model=model, required=required)


def unusable(reading: AnalysedProgram, mesh: Mesh) -> str:
    """Return the reason for which no plan on a mesh can serve the program; empty if one may.

    The reason is a mesh axis larger than 1 whose size divides the size of no dim group. Every mesh may serve a program
    whose dims are all of size 1.
    """
    sizes = [size for size in reading.groups.sizes.values() if size > 1]
    for name, count in mesh.axes.items():
        if count > 1 and sizes and not any(size % count == 0 for size in sizes):
            return f"no dim of the program divides by {name}={count}"
    return ""


def _pairs(reading: AnalysedProgram, mesh: Mesh, staged: bool = False) -> int:
    """Return the number of pairs of alternatives at both ends of all reshards, before any is priced.

    An edge counts the states of its tensor times the strategies of its heavy op, or the states of the result of another
    op. With `staged`, only states that the stage axis allows count.
    """
    graph, structure = reading.graph, reading.structure
    axes, backend = list(mesh.sizes), mesh.topology.backend
    stages = stage_axis(reading, mesh) if staged else None
    counts: dict[object, int] = {}

    def cluster_states(number: int) -> int:
        """Return the number of states of a cluster, by its number."""
        cluster = structure.clusters[number]
        key = (cluster.sizes, tuple(sorted(cluster.blocked)), None if stages is None else number)
        if key not in counts:
            states = enumerate_states(cluster.sizes, axes, cluster.blocked)
            counts[key] = len(states) if stages is None else int(stages.of_cluster(number, states).sum())
        return counts[key]

    def op_strategies(number: int) -> int:
        """Return the number of strategies of a heavy op, by its number."""
        op = graph.ops[number]
        key = (op.kind, op.rule, op.opaque, op.halos, None if stages is None else number)
        if key not in counts:
            states = heavy_strategies(graph, op, axes, backend)
            counts[key] = len(states) if stages is None else int(stages.of_op(op, states).sum())
        return counts[key]

    total = 0
    heavy = set(structure.heavy)
    for edge in structure.edges:
        producer_states = cluster_states(structure.cluster_of[edge.tensor])
        if edge.op in heavy:
            total += producer_states * op_strategies(edge.op)
        elif edge.op >= 0 and edge.result >= 0:
            total += producer_states * cluster_states(structure.cluster_of[graph.ops[edge.op].results[edge.result]])
    return total


def _silent(line: str) -> None:
    """Ignore a progress line, since each mesh has too many rounds to report."""
