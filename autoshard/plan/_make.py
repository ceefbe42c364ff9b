"""The main job: from a program and a topology to a `Plan`."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from autoshard.base.crew import Crew
from autoshard.cost import (
    Fit,
    Mesh,
    Topology,
    learned_fit,
    load_calibration,
    make_mesh,
    parse_mesh,
    read_flags,
    said_of_fit,
    with_flags,
)
from autoshard.errors import InfeasibleError, UserError
from autoshard.plan.forms._forms import Form, Rest, form_named
from autoshard.plan.forms._within import held_plan, plan_within
from autoshard.plan.mesh._meshes import MeshSearch
from autoshard.plan.mesh._portfolio import Contender, PlanCandidate, contender, elsewhere, further, met, pick
from autoshard.plan.mesh._searcher import Outcome, Phases, Searcher
from autoshard.plan.mesh._trial import MeshBest, Trials, splits_batch
from autoshard.plan.model._asked import Asked, check_axes
from autoshard.plan.model._demands import check_regions, program_mesh
from autoshard.plan.model._refine import find_refinement
from autoshard.plan.price._predict import predict
from autoshard.plan.price._reading import Reading, read_program
from autoshard.plan.price._task import Task
from autoshard.plan.record._parts import MeshTried
from autoshard.plan.record._plan import Plan
from autoshard.plan.solve._infeasible import explain_infeasible
from autoshard.plan.solve._search import Found, Infeasible
from autoshard.plan.write._write import WhenAsked, Writer
from autoshard.program import Program, Role
from autoshard.solver import write_contest


MESH_VARIABLE = "XLA_AUTO_SPMD_MESH"
AUTO = "auto"
"""Written where a mesh may be given: search for one."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, and how long each phase took (kept apart: the plan itself carries no wall times)."""

    plan: Plan
    wall_s: dict[str, float]
    baseline_plans: Mapping[str, Plan]
    """Every baseline as a plan of its own, completed by the solver, to apply, compile or measure beside ours; written
    when it is asked for."""
    candidates: tuple[PlanCandidate, ...]
    """The plan, and as many others that really differ as were asked for and found, by predicted time."""


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


def check_request(topology: str, mesh: str | Mapping[str, int] | None, asked: Asked | None = None) -> None:
    """Refuse what no program can be planned for, before one is traced.

    Raises `UserError` for a topology that does not exist, a mesh that cannot be laid on it, and something asked for
    with an axis that the mesh does not have, where the mesh is known without the program.
    """
    given = given_mesh(Topology.parse(topology), mesh)
    if given is not None and asked is not None:
        check_axes(asked, given)


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
    candidates: int = 1,
    calibration: bool | Fit = True,
    xla_flags: str | Iterable[str] | None = None,
    kept: bool = False,
    crew: Crew | None = None,
    form: str | None = None,
) -> PlanResult:
    """Choose a sharding for every tensor; see `autoshard.plan` for the arguments, `read_asked` for `asked`.

    `save_problem` writes the Problem whose bound is certified, in the contest's format. `candidates` is how many plans
    to offer at most, ours the first; each further one must differ from the others in what it spends its time on. With
    `kept` the program's ops come from the cache on disk where they are there. `calibration` may be a fit made before.
    With a `crew` its helpers take part; the plan is the same without. With a `form` only what that form of an export
    can hold is planned.
    """
    wanted = None if form is None else _limiting(form, candidates)
    phases = Phases(progress)
    parsed = Topology.parse(topology)
    if memory_limit is None:
        memory_limit = parsed.usable_bytes
    if memory_limit <= 0:
        raise UserError(f"the memory limit is {memory_limit} bytes; it must be more than 0.")
    if candidates < 1:
        raise UserError(f"{candidates} candidates are asked for; the plan itself is one.")
    learned = calibration if isinstance(calibration, Fit) else learned_fit(parsed) if calibration else None
    flags = read_flags(xla_flags)
    flagged = with_flags(learned.calibration if learned else load_calibration(parsed.chip), flags)
    phases.start("extract", "reading the program's ops and their sharding rules")
    reading = read_program(program, parsed.backend, kept)
    asked, crew = asked or Asked(), crew or Crew()
    crew.progress = phases.progress
    _share(crew, program, reading)
    search_on = Searcher(Task(program, reading, asked, memory_limit, seed, flagged.calibration), phases, crew)
    given = given_mesh(parsed, mesh, program_mesh(reading.graph, parsed.num_devices))
    searched = _search(search_on, parsed, given, time_limit, refine_axes)
    best, found = searched.best, searched.best.found
    if isinstance(found, Infeasible):
        said = explain_infeasible(best.model, found.solved, memory_limit, time_limit, seed, best.required)
        raise InfeasibleError(said) from found
    phases.start("write", "writing the plan")
    compared = searched.original if isinstance(searched.original.found, Found) else best
    assert isinstance(compared.found, Found)
    named = {name: predict(compared.model, c.outcome, memory_limit) for name, c in compared.found.baselines.items()}
    learnt = {"learned": said_of_fit(learned)} if learned is not None and learned.observations else {}
    if flags:
        learnt["xla_flags"] = {"flags": list(flags), "figures": dict(flagged.figures), "priced": list(flagged.priced)}
    writer = Writer(program, reading.groups, memory_limit, seed, list(named), learnt)
    more = {"asked": asked.lines, "pinned": best.required.pinned} if asked else {}

    def write(each: Contender) -> Plan:
        plan = writer.write(each)
        warnings = (*plan.warnings, *flagged.notes)
        return dataclasses.replace(plan, baselines=named, warnings=warnings, provenance=plan.provenance | more)

    first = contender(best.model, found, found.best, "plan", "the least predicted time")
    if wanted is None:
        plan = dataclasses.replace(write(first), meshes=searched.tried)
    else:
        phases.start("form", f"planning within what the {wanted.name} form can hold")
        within = plan_within(
            wanted, best.model, reading.groups, found, best.required, memory_limit, time_limit, seed, phases.progress
        )
        first = contender(best.model, found, within.best, "plan", f"the least predicted time for {wanted.name}")
        more = {**more, **within.said}
        plan = held_plan(write(first), wanted, found.best.outcome.step_time_s)
        plan = dataclasses.replace(plan, meshes=searched.tried)
    completed = WhenAsked(
        {
            name: functools.partial(writer.write, contender(compared.model, compared.found, c, name, ""))
            for name, c in compared.found.baselines.items()
        }
    )
    if save_problem is not None:
        write_contest(found.problem, Path(save_problem))
    offered: tuple[PlanCandidate, ...] = (PlanCandidate(first.name, first.why, plan),)
    if candidates > 1:
        phases.start("candidates", "looking for other plans that differ")
        others = further(best.model, found, best.required, memory_limit, time_limit / 2, seed)
        for outcome in searched.outcomes:
            if isinstance(outcome.found, Found):
                others += met(outcome.model, outcome.found, outcome.required)
        others += [elsewhere(other, search_on.price) for other in searched.elsewhere]
        offered = pick(first, plan, others, candidates, write)
    phases.stop()
    return PlanResult(plan, phases.wall, completed, offered)


def _limiting(name: str, candidates: int) -> Form:
    """The form to plan within; refuses one that limits nothing, and candidates, which are for plans without one."""
    form = form_named(name)
    if form.rest is Rest.PLAN:
        raise UserError(f"the form {name!r} holds a plan whole: leave it out when planning, and export to it.")
    if candidates > 1:
        raise UserError(f"{candidates} candidates are asked for, but only one plan is made for the form {name!r}.")
    return form


def _share(crew: Crew, program: Program, reading: Reading) -> None:
    """What all prices refer to. What runs the program cannot be sent, and is not needed to plan it."""
    sent = dataclasses.replace(program, fn=_stays_here, args=(), make_args=None, source=None)
    crew.share("program", program, sent)
    for name in ("graph", "structure", "liveness"):
        crew.share(name, getattr(reading, name))
    crew.share("reading", reading)


def _stays_here(*args: object) -> None:
    raise RuntimeError("a helper cannot run the program")


@dataclasses.dataclass(frozen=True, slots=True)
class _Searched:
    """What the searches came to."""

    best: Outcome
    original: Outcome
    """On the mesh as it was asked for or chosen, with baselines; the best one too, unless its refinement is."""
    outcomes: tuple[Outcome, ...]
    """Both."""
    tried: tuple[MeshTried, ...]
    elsewhere: tuple[MeshBest, ...]
    """The best on other meshes, if the mesh was searched for."""


def _search(
    search_on: Searcher, topology: Topology, given: Mesh | None, time_limit: float, refine_axes: bool
) -> _Searched:
    """On the mesh that is given, else on the best one, and on its refinement where dims ask for one."""
    task, phases = search_on.task, search_on.phases
    reading = task.reading
    graph = reading.graph
    if given is None:
        phases.start("meshes", f"looking for the mesh of {topology.num_devices} devices")
        looked = MeshSearch(Trials(task, time_limit), phases.progress).run(topology, search_on.crew)
        chosen = looked.model.mesh
    else:
        looked, chosen = None, given
        check_regions(graph, chosen)
        _check_batch(task.program, chosen)
    # A program that names axes itself keeps them whole.
    refinement = None
    if refine_axes and not graph.constraints and not graph.regions:
        refinement = find_refinement(graph, reading.structure, reading.groups, chosen)
    share = 1.0 if refinement is None else 0.6
    if looked is None:
        original = search_on.mesh(chosen, share * time_limit)
    else:
        original = search_on.priced(looked.model, looked.required, looked.choices, share * time_limit)
    best, outcomes = original, (original,)
    if refinement is not None:
        refined = search_on.refined(refinement, original, (1 - share) * time_limit)
        best = refined if refined.is_better_than(original) else original
        outcomes = (original, refined)
    tried, others = (looked.tried, looked.others) if looked is not None else ((), ())
    return _Searched(best, original, outcomes, tried, others)


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
