"""The main job: from a program and a topology to a `Plan`."""

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, Topology, default_axis_names, load_calibration, make_mesh, parse_mesh
from autoshard.errors import InfeasibleError, UserError
from autoshard.graph import Liveness, OpGraph, Structure, analyse, build_structure, read_graph, replace_names
from autoshard.plan._asked import Asked, Required, require
from autoshard.plan._baselines import Baseline, baselines, left_out
from autoshard.plan._demands import broken_demands, check_regions, program_mesh, said_by_program
from autoshard.plan._groups import Groups, find_groups
from autoshard.plan._infeasible import explain_infeasible
from autoshard.plan._model import Model
from autoshard.plan._pins import make_calls, make_pins
from autoshard.plan._plan import Plan
from autoshard.plan._predict import Outcome, predict, tensor_spec
from autoshard.plan._price import price
from autoshard.plan._refine import LEAST_GAIN, Refinement, find_refinement, refinement_of
from autoshard.plan._regions import make_regions
from autoshard.plan._search import Candidate, Found, Infeasible, search
from autoshard.plan._spec import Spec
from autoshard.plan._states import States
from autoshard.plan._timeline import make_timeline
from autoshard.plan._unruled import call_lines, find_unruled, unruled_lines
from autoshard.plan._words import describe
from autoshard.program import Program, Role
from autoshard.solver import Solution, write_contest
from autoshard.units import format_bytes


MESH_VARIABLE = "XLA_AUTO_SPMD_MESH"


@dataclasses.dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, and how long each phase took (kept apart: the plan itself carries no wall times)."""

    plan: Plan
    wall_s: dict[str, float]
    baseline_plans: dict[str, Plan]
    """Every baseline as a plan of its own, completed by the solver, to apply, compile or measure beside ours."""


class _Phases:
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


def choose_mesh(
    topology: Topology, mesh: str | Mapping[str, int] | None, named: Mapping[str, int] | None = None
) -> Mesh:
    """The mesh the user gave, else the one in `XLA_AUTO_SPMD_MESH`, else `named`, else one axis `data`."""
    if mesh is None:
        mesh = os.environ.get(MESH_VARIABLE) or named
    if mesh is None:
        sizes: Mapping[str, int] = {default_axis_names(1)[0]: topology.num_devices}
    else:
        sizes = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    return make_mesh(topology, sizes)


def make_plan(
    program: Program,
    *,
    topology: str,
    mesh: str | Mapping[str, int] | None = None,
    memory_limit: int | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    save_problem: str | os.PathLike[str] | None = None,
    asked: Asked | None = None,
    refine_axes: bool = True,
) -> PlanResult:
    """Choose a sharding for every tensor; see `autoshard.plan` for the arguments, `read_asked` for `asked`.

    `save_problem` writes the Problem whose bound is certified, in the contest's format.
    """
    phases = _Phases(progress)
    parsed = Topology.parse(topology)
    if memory_limit is None:
        memory_limit = parsed.usable_bytes
    if memory_limit <= 0:
        raise UserError(f"the memory limit is {memory_limit} bytes; it must be more than 0.")
    phases.start("extract", "reading the program's ops and their sharding rules")
    reading = read_program(program)
    graph = reading.graph
    chosen = choose_mesh(parsed, mesh, program_mesh(graph, parsed.num_devices))
    check_regions(graph, chosen)
    _check_batch(program, chosen)
    search_on = _Searcher(program, reading, asked or Asked(), memory_limit, seed, phases)
    groups = reading.groups
    # A program that names axes itself keeps them whole.
    refinement = None
    if refine_axes and not graph.constraints and not graph.regions:
        refinement = find_refinement(graph, reading.structure, groups, chosen)
    share = 1.0 if refinement is None else 0.6
    original = search_on.mesh(chosen, share * time_limit)
    best = original
    if refinement is not None:
        refined = search_on.refined(refinement, original, (1 - share) * time_limit)
        best = refined if refined.is_better_than(original) else original
    if isinstance(best.found, Infeasible):
        said = explain_infeasible(best.model, best.found.solved, memory_limit, time_limit, seed, best.required)
        raise InfeasibleError(said) from best.found
    phases.start("write", "writing the plan")
    found, compared = best.found, original if isinstance(original.found, Found) else best
    assert isinstance(compared.found, Found)
    named = {name: predict(compared.model, c.outcome, memory_limit) for name, c in compared.found.baselines.items()}
    plan = _found_plan(program, best.model, groups, found, found.best, memory_limit, seed, list(named))
    plan = dataclasses.replace(plan, baselines=named)
    if asked:
        said = {"asked": asked.lines, "pinned": best.required.pinned}
        plan = dataclasses.replace(plan, provenance=plan.provenance | said)
    others = {
        name: _found_plan(program, compared.model, groups, compared.found, c, memory_limit, seed, list(named))
        for name, c in compared.found.baselines.items()
    }
    if save_problem is not None:
        write_contest(found.problem, Path(save_problem))
    phases.stop()
    return PlanResult(plan, phases.wall, others)


def _check_batch(program: Program, mesh: Mesh) -> None:
    """Refuse a batch that no mesh axis divides, when there is more than one device.

    What else a step takes and returns, such as a key-value cache, counts too: it is what serving one sequence splits.
    """
    batches = [a for a in program.arguments if a.role is Role.BATCH and a.shape]
    axes = [(name, size) for name, size in mesh.axes.items() if size > 1]
    if not batches or not axes:
        return
    state = [a for a in program.arguments if a.role is Role.OTHER and a.result is not None]
    if any(size % n == 0 and size > 1 for a in (*batches, *state) for size in a.shape for _, n in axes):
        return
    listed = ", ".join(f"{name}={size}" for name, size in axes)
    worst = batches[0]
    raise UserError(
        f"no mesh axis ({listed}) divides a dim of the batch argument {worst.name} of shape {list(worst.shape)}: "
        f"use a batch that is a multiple of {axes[0][1]}, or another mesh."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a program is, whatever the mesh."""

    graph: OpGraph
    structure: Structure
    liveness: Liveness
    groups: Groups


def read_program(program: Program) -> Reading:
    """Its ops, decisions, lifetimes and dim groups."""
    graph = replace_names(read_graph(program.module), [a.name for a in program.arguments])
    parameters = [t for t, a in zip(graph.arguments, program.arguments, strict=True) if a.role is Role.PARAMETER]
    ties = [
        (graph.results[a.result], t)
        for t, a in zip(graph.arguments, program.arguments, strict=True)
        if a.result is not None
    ]
    structure = build_structure(graph, parameters, ties)
    named = list(zip(graph.arguments, program.arguments, strict=True))
    kept = [t for t, a in named if not a.donated]
    liveness = analyse(
        graph, kept, {t: graph.results[a.result] for t, a in named if a.donated and a.result is not None}
    )
    return Reading(graph, structure, liveness, find_groups(program, graph, structure))


def build_model(program: Program, reading: Reading, mesh: Mesh, memory_limit: int) -> Model:
    """Every decision of a program on a mesh, priced; axes that are parts of another go apart where they may."""
    refinement = refinement_of(reading.groups, mesh)
    return price(program, reading.graph, reading.structure, reading.liveness, mesh, memory_limit, refinement)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """What a search on one mesh came to."""

    model: Model
    required: Required
    found: Found | Infeasible

    def is_better_than(self, other: "_Outcome") -> bool:
        """True if it is worth an axis in two parts."""
        if isinstance(self.found, Infeasible) or isinstance(other.found, Infeasible):
            return isinstance(self.found, Found)
        return self.found.best.outcome.step_time_s < (1 - LEAST_GAIN) * other.found.best.outcome.step_time_s


class _Searcher:
    """Searches the plans of one program, mesh by mesh."""

    def __init__(
        self, program: Program, reading: Reading, asked: Asked, memory_limit: int, seed: int, phases: _Phases
    ) -> None:
        self.program, self.reading, self.asked = program, reading, asked
        self.memory_limit, self.seed, self.phases = memory_limit, seed, phases

    def mesh(self, mesh: Mesh, time_limit: float) -> _Outcome:
        """On a mesh as it was asked for, with baselines."""
        model = self._price(mesh)
        required = require(model, self.reading.groups, self.asked)
        return self._search(model, baselines(model, self.reading.groups), required, None, time_limit)

    def refined(self, refinement: Refinement, original: _Outcome, time_limit: float) -> _Outcome:
        """On its refinement, from the best that is known of it; what was asked for holds as it does there."""
        model = self._price(refinement.mesh)
        allowed = refinement.allowed(original.model, model, original.required.allowed)
        known = None
        if isinstance(original.found, Found):
            known = refinement.choices(original.model, model, original.found.best.choices)
        return self._search(model, [], Required(allowed, original.required.pinned), known, time_limit)

    def _price(self, mesh: Mesh) -> Model:
        self.phases.start("price", f"pricing {len(self.reading.graph.ops)} ops on {mesh.describe()}")
        return build_model(self.program, self.reading, mesh, self.memory_limit)

    def _search(
        self,
        model: Model,
        named: list[Baseline],
        required: Required,
        known: NDArray[np.int64] | None,
        time_limit: float,
    ) -> _Outcome:
        count = sum(len(node.states) for node in model.nodes)
        self.phases.start("solve", f"solving {len(model.nodes)} decisions with {count} alternatives")
        try:
            found = search(
                model, named, self.memory_limit, time_limit, self.seed, self.phases.progress, required, known
            )
        except Infeasible as error:
            return _Outcome(model, required, error)
        return _Outcome(model, required, found)


def _found_plan(
    program: Program,
    model: Model,
    groups: Groups,
    found: Found,
    chosen: Candidate,
    memory_limit: int,
    seed: int,
    compared: Sequence[str],
) -> Plan:
    warnings = _warnings(program, model, compared, chosen.choices, chosen.outcome, memory_limit)
    more = {"weightings": found.rounds, "bound_s": found.bound_s}
    true = chosen.outcome.step_time_s
    plan = plan_of_choices(program, model, groups, chosen.choices, chosen.outcome, found.solution, memory_limit)
    return dataclasses.replace(
        plan,
        plan_gap=max(0.0, 1.0 - found.bound_s / true) if true > 0 else 0.0,
        warnings=warnings,
        provenance=_provenance(model, seed, more),
    )


def plan_of_choices(
    program: Program,
    model: Model,
    groups: Groups,
    choices: NDArray[np.int64],
    outcome: Outcome,
    solution: Solution,
    memory_limit: int,
) -> Plan:
    """Choices as a plan. `solution` is of the Problem that they solve; nothing is said of what bounds them."""
    graph = model.graph
    prediction = predict(model, outcome, memory_limit)
    arguments = {
        a.name: tensor_spec(model, choices, t) for a, t in zip(program.arguments, graph.arguments, strict=True)
    }
    results: dict[str, Spec] = {}
    for r, tensor in zip(program.results, graph.results, strict=True):
        tied = program.arguments[r.argument] if r.argument is not None else None
        results[r.name] = arguments[tied.name] if tied else tensor_spec(model, choices, tensor)
    return Plan(
        program_name=program.name,
        program_fingerprint=program.fingerprint,
        topology=model.mesh.topology.name,
        mesh=dict(model.mesh.axes),
        device_order=model.mesh.device_order,
        memory_limit_bytes=memory_limit,
        arguments=arguments,
        results=results,
        pins=make_pins(model, choices),
        regions=make_regions(model, choices),
        prediction=prediction,
        baselines={},
        objective=int(solution.cost),
        lower_bound=int(solution.lower_bound),
        solver_gap=float(solution.gap),
        plan_gap=1.0,
        words=describe(model, groups, choices),
        warnings=tuple(program.notes),
        provenance=_provenance(model, 0, {}),
        shapes={a.name: tuple(a.shape) for a in program.arguments},
        dtypes={a.name: a.dtype for a in program.arguments},
        roles={a.name: str(a.role) for a in program.arguments},
        module_hash=graph.module_hash,
        timeline=make_timeline(model, choices),
        calls=make_calls(model, choices),
        unruled=find_unruled(model, choices, outcome.step_time_s),
        choices=" ".join(str(int(c)) for c in choices),
    )


def _warnings(
    program: Program,
    model: Model,
    compared: Sequence[str],
    choices: NDArray[np.int64],
    outcome: Outcome,
    memory_limit: int,
) -> tuple[str, ...]:
    lines = list(program.notes)
    graph = model.graph
    lines.extend(unruled_lines(find_unruled(model, choices, outcome.step_time_s)))
    lines.extend(call_lines(model))
    for loop in graph.loops:
        if not loop.known:
            lines.append("a loop's number of trips cannot be read from the program: it is counted once.")
    for demand in broken_demands(graph, model.structure, model.mesh, lambda t: cluster_state(model, choices, t)):
        lines.append(
            f"{demand.why} excludes what the program asks for elsewhere of the same carried value: the compiler keeps "
            "both, but the way between them is not in the prediction."
        )
    lines.extend(left_out(model, compared))
    peak = outcome.peak_bytes
    if peak > 0.92 * memory_limit:
        lines.append(
            f"memory is tight: {format_bytes(peak)} of {format_bytes(memory_limit)}; "
            "the compiler may need to rematerialise."
        )
    return tuple(dict.fromkeys(lines))


def cluster_state(model: Model, choices: NDArray[np.int64], tensor: int) -> States:
    """The chosen state of a tensor's cluster, as one row."""
    node = model.cluster_node[model.structure.cluster_of[tensor]]
    return model.nodes[node].states[int(choices[node])][None, :]


def _provenance(model: Model, seed: int, more: Mapping[str, Any]) -> dict[str, Any]:
    calibration = load_calibration(model.mesh.topology.chip)
    versions = {}
    for package in ("autoshard", "jax", "jaxlib", "highspy", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return (
        ({"source": source} if (source := model.program.source) else {})
        | {
            "versions": versions,
            "topology": model.mesh.topology.name,
            "layout": model.mesh.describe(),
            "seed": seed,
            "calibration": calibration.hash(),
            "nodes": len(model.nodes),
            "alternatives": int(np.sum([len(n.states) for n in model.nodes])),
            "edges": len(model.moves),
        }
        | dict(more)
        | ({"said_by_program": said} if (said := said_by_program(model.graph)) else {})
    )
