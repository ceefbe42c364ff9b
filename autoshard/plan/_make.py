"""The main job: from a program and a topology to a `Plan`."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, Topology, load_calibration, make_mesh, parse_mesh
from autoshard.errors import InfeasibleError, UserError
from autoshard.plan._asked import Asked
from autoshard.plan._baselines import left_out
from autoshard.plan._demands import broken_demands, check_regions, program_mesh, said_by_program
from autoshard.plan._groups import Groups
from autoshard.plan._infeasible import explain_infeasible
from autoshard.plan._meshes import MeshSearch, splits_batch
from autoshard.plan._model import Model
from autoshard.plan._pins import make_calls, make_pins
from autoshard.plan._plan import MeshTried, Plan
from autoshard.plan._predict import Outcome, predict, tensor_spec
from autoshard.plan._reading import read_program
from autoshard.plan._refine import find_refinement
from autoshard.plan._regions import make_regions
from autoshard.plan._search import Candidate, Found, Infeasible
from autoshard.plan._searcher import Phases, Searcher
from autoshard.plan._spec import Spec
from autoshard.plan._states import States
from autoshard.plan._timeline import make_timeline
from autoshard.plan._unruled import call_lines, find_unruled, unruled_lines
from autoshard.plan._words import describe
from autoshard.program import Program, Role
from autoshard.solver import Solution, write_contest
from autoshard.units import format_bytes


MESH_VARIABLE = "XLA_AUTO_SPMD_MESH"
AUTO = "auto"
"""Written where a mesh may be given: search for one."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, and how long each phase took (kept apart: the plan itself carries no wall times)."""

    plan: Plan
    wall_s: dict[str, float]
    baseline_plans: dict[str, Plan]
    """Every baseline as a plan of its own, completed by the solver, to apply, compile or measure beside ours."""


def given_mesh(
    topology: Topology, mesh: str | Mapping[str, int] | None, named: Mapping[str, int] | None = None
) -> Mesh | None:
    """The mesh the user gave, else the one in `XLA_AUTO_SPMD_MESH`, else `named`; None if it is to be searched for."""
    if mesh is None:
        mesh = os.environ.get(MESH_VARIABLE, "").strip() or named
    if mesh == AUTO:
        mesh = named
    if mesh is None:
        return None
    return make_mesh(topology, parse_mesh(mesh) if isinstance(mesh, str) else mesh)


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
    phases = Phases(progress)
    parsed = Topology.parse(topology)
    if memory_limit is None:
        memory_limit = parsed.usable_bytes
    if memory_limit <= 0:
        raise UserError(f"the memory limit is {memory_limit} bytes; it must be more than 0.")
    phases.start("extract", "reading the program's ops and their sharding rules")
    reading = read_program(program, parsed.backend)
    graph = reading.graph
    given = given_mesh(parsed, mesh, program_mesh(graph, parsed.num_devices))
    asked = asked or Asked()
    search_on = Searcher(program, reading, asked, memory_limit, seed, phases)
    tried: tuple[MeshTried, ...] = ()
    groups = reading.groups
    if given is None:
        phases.start("meshes", f"looking for the mesh of {parsed.num_devices} devices")
        looked = MeshSearch(program, reading, asked, memory_limit, time_limit, seed, phases.progress).run(parsed)
        chosen, tried = looked.model.mesh, looked.tried
    else:
        looked, chosen = None, given
        check_regions(graph, chosen)
        _check_batch(program, chosen)
    # A program that names axes itself keeps them whole.
    refinement = None
    if refine_axes and not graph.constraints and not graph.regions:
        refinement = find_refinement(graph, reading.structure, groups, chosen)
    share = 1.0 if refinement is None else 0.6
    if looked is None:
        original = search_on.mesh(chosen, share * time_limit)
    else:
        original = search_on.priced(looked.model, looked.required, looked.choices, share * time_limit)
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
    plan = dataclasses.replace(plan, baselines=named, meshes=tried)
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
    if splits_batch(program, mesh):
        return
    axes = [(name, size) for name, size in mesh.axes.items() if size > 1]
    batches = [a for a in program.arguments if a.role is Role.BATCH and a.shape]
    listed = ", ".join(f"{name}={size}" for name, size in axes)
    worst = batches[0]
    raise UserError(
        f"no mesh axis ({listed}) divides a dim of the batch argument {worst.name} of shape {list(worst.shape)}: "
        f"use a batch that is a multiple of {axes[0][1]}, or another mesh."
    )


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
