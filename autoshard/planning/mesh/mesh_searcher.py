"""The search on single meshes of one program, with the wall time of each phase."""

import dataclasses
import time
from collections.abc import Callable

from autoshard.base.workers import WorkerCrew
from autoshard.cost import Mesh, Topology
from autoshard.planning.price.analysed_program import Task
from autoshard.planning.solve.weight_search import Infeasible, SearchResult, Start, search
from autoshard.planning.space.baselines import Baseline, baselines
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN, AxisParts
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required


class Phases:
    """Wall time of each phase of planning, in seconds; a phase that starts again adds to its time."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        """Start without a phase; `progress` receives the line of each, None reports nothing."""
        self.wall: dict[str, float] = {}
        self.progress = progress or (lambda line: None)
        self.began = time.monotonic()
        self.current = ""

    def start(self, name: str, line: str) -> None:
        """End the current phase, start another one called `name`, and report `line` as progress."""
        self.stop()
        self.current, self.began = name, time.monotonic()
        self.progress(line)

    def stop(self) -> None:
        """End the current phase and add its time to `wall`; without a phase, do nothing."""
        if self.current:
            self.wall[self.current] = self.wall.get(self.current, 0.0) + time.monotonic() - self.began
        self.current = ""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshOutcome:
    """The result of a search on one mesh."""

    model: Model
    required: Required
    """User's constraints on the mesh."""
    found: SearchResult | Infeasible
    """Result of the search, or the error with which nothing fits."""

    def is_better_than(self, other: "MeshOutcome") -> bool:
        """Return True if this outcome is faster by at least `LEAST_GAIN`, so that an axis in two parts pays.

        Seconds include the expected cost of nearly full memory. If either is infeasible, return True if this one is
        not.
        """
        if isinstance(self.found, Infeasible) or isinstance(other.found, Infeasible):
            return isinstance(self.found, SearchResult)
        return self.found.best.expected_s < (1 - LEAST_GAIN) * other.found.best.expected_s


class Searcher:
    """Search on single meshes for the plans of one program."""

    def __init__(self, task: Task, phases: Phases, crew: WorkerCrew, topology: Topology) -> None:
        self.task, self.phases, self.crew, self.topology = task, phases, crew, topology

    def mesh(self, mesh: Mesh, time_limit: float, start: Start | None = None) -> MeshOutcome:
        """Price a mesh and search its plans, with baselines and the user's constraints; `time_limit` is in processor
        seconds. Raises `UserError` if the constraints cannot hold.

        - `start`: results of another search; None if there are none.
        """
        model = self.price(mesh)
        return self.priced(model, self.task.required(model), start, time_limit)

    def priced(self, model: Model, required: Required, start: Start | None, time_limit: float) -> MeshOutcome:
        """Search the plans on a priced mesh, with baselines; an infeasible search gives an outcome too.

        - `required`: the user's constraints.
        - `start`: results of another search; None if there are none.
        - `time_limit`: processor seconds.
        """
        return self._search(model, baselines(model, self.task.reading.groups), required, start, time_limit)

    def with_parts(self, axis_parts: AxisParts, original: MeshOutcome, time_limit: float) -> MeshOutcome:
        """Search the plans on the mesh with an axis cut in two, without baselines, from the best plan without the cut.

        The constraints of the uncut mesh apply to the cut one. `time_limit` is in processor seconds.
        """
        model = self.price(axis_parts.mesh)
        allowed = axis_parts.allowed(original.model, model, original.required.allowed)
        start = None
        if isinstance(original.found, SearchResult):
            choices = axis_parts.choices(original.model, model, original.found.best.choices)
            start = Start(choices, original.found.weights)
        return self._search(model, [], Required(allowed, original.required.pinned), start, time_limit)

    def price(self, mesh: Mesh) -> Model:
        """Start the phase `price` and price the program on a mesh."""
        self.phases.start("price", f"pricing {len(self.task.reading.graph.ops)} ops on {mesh.describe()}")
        return self.task.priced(mesh)

    def _search(
        self,
        model: Model,
        named: list[Baseline],
        required: Required,
        start: Start | None,
        time_limit: float,
    ) -> MeshOutcome:
        """Search the plans of a priced model; return an outcome even if nothing fits.

        - `named`: baselines to complete.
        - `required`: the user's constraints.
        - `start`: results of another search; None if there are none.
        - `time_limit`: processor seconds.
        """
        count = sum(len(node.states) for node in model.nodes)
        task, progress = self.task, self.phases.progress
        self.phases.start("solve", f"solving {len(model.nodes)} decisions with {count} alternatives")
        try:
            limits = Limits(task.memory_limit, time_limit, task.seed)
            result = search(model, named, limits, progress, required, start, self.crew)
        except Infeasible as error:
            return MeshOutcome(model, required, error)
        return MeshOutcome(model, required, result)
