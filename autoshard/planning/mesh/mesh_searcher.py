"""Searching the plans of one program, mesh by mesh, and how long each phase takes."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autoshard.base.workers import Crew
from autoshard.cost import Mesh, Topology
from autoshard.planning.price.analysed_program import Task
from autoshard.planning.solve.weight_search import Found, Infeasible, search
from autoshard.planning.space.baselines import Baseline, baselines
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import LEAST_GAIN, AxisParts
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required


class Phases:
    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.wall: dict[str, float] = {}
        self.progress = progress or (lambda line: None)
        self.began = time.monotonic()
        self.current = ""

    def start(self, name: str, line: str) -> None:
        self.stop()
        self.current, self.began = name, time.monotonic()
        self.progress(line)

    def stop(self) -> None:
        if self.current:
            self.wall[self.current] = self.wall.get(self.current, 0.0) + time.monotonic() - self.began
        self.current = ""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshOutcome:
    """What a search on one mesh came to."""

    model: Model
    required: Required
    found: Found | Infeasible

    def is_better_than(self, other: "MeshOutcome") -> bool:
        """True if it is worth an axis in two parts."""
        if isinstance(self.found, Infeasible) or isinstance(other.found, Infeasible):
            return isinstance(self.found, Found)
        return self.found.best.expected_s < (1 - LEAST_GAIN) * other.found.best.expected_s


class Searcher:
    """Searches the plans of one program, mesh by mesh."""

    def __init__(self, task: Task, phases: Phases, crew: Crew, topology: Topology) -> None:
        self.task, self.phases, self.crew, self.topology = task, phases, crew, topology

    def mesh(self, mesh: Mesh, time_limit: float) -> MeshOutcome:
        """On a mesh as it was asked for, with baselines."""
        model = self.price(mesh)
        return self.priced(model, self.task.required(model), None, time_limit)

    def priced(
        self, model: Model, required: Required, known: NDArray[np.int64] | None, time_limit: float
    ) -> MeshOutcome:
        """The same on a mesh that is priced already, from choices that are `known` to fit, if there are any."""
        return self._search(model, baselines(model, self.task.reading.groups), required, known, time_limit)

    def with_parts(self, axis_parts: AxisParts, original: MeshOutcome, time_limit: float) -> MeshOutcome:
        """On the mesh with an axis cut, from the best known without; what was asked for holds as it does there."""
        model = self.price(axis_parts.mesh)
        allowed = axis_parts.allowed(original.model, model, original.required.allowed)
        known = None
        if isinstance(original.found, Found):
            known = axis_parts.choices(original.model, model, original.found.best.choices)
        return self._search(model, [], Required(allowed, original.required.pinned), known, time_limit)

    def price(self, mesh: Mesh) -> Model:
        self.phases.start("price", f"pricing {len(self.task.reading.graph.ops)} ops on {mesh.describe()}")
        return self.task.priced(mesh)

    def _search(
        self,
        model: Model,
        named: list[Baseline],
        required: Required,
        known: NDArray[np.int64] | None,
        time_limit: float,
    ) -> MeshOutcome:
        count = sum(len(node.states) for node in model.nodes)
        task, progress = self.task, self.phases.progress
        self.phases.start("solve", f"solving {len(model.nodes)} decisions with {count} alternatives")
        try:
            limits = Limits(task.memory_limit, time_limit, task.seed)
            found = search(model, named, limits, progress, required, known, self.crew)
        except Infeasible as error:
            return MeshOutcome(model, required, error)
        return MeshOutcome(model, required, found)
