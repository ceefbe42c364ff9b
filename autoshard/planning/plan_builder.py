"""The main job: from a program and a topology to a `Plan`."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoshard.base.processes import collecting_seldom
from autoshard.base.workers import Crew
from autoshard.cost import (
    AUTO,
    MESH_VARIABLE,
    Calibration,
    Fit,
    Mesh,
    Topology,
    chosen_flags,
    learned_fit,
    load_calibration,
    make_mesh,
    parse_mesh,
    said_of_fit,
    with_flags,
)
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.explain.write_plan import WhenAsked, Writer
from autoshard.planning.forms.export_forms import Form, Rest, check_names, form_named
from autoshard.planning.forms.within_form import held_plan, plan_within
from autoshard.planning.mesh.mesh_attempt import MeshBest, Rival, Trials
from autoshard.planning.mesh.mesh_search import MeshSearch
from autoshard.planning.mesh.mesh_searcher import MeshOutcome, Phases, Searcher
from autoshard.planning.mesh.portfolio import PlanCandidate, contender, elsewhere, further, met, pick
from autoshard.planning.price.analysed_program import Task, read_program, share
from autoshard.planning.price.prediction import flag_gains, predict
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.record.plan_parts import MeshTried
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import original_mesh
from autoshard.planning.solve.infeasible import explain_infeasible
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.solve.weight_search import Found, Infeasible
from autoshard.planning.space.attention_exchange import check_exchange
from autoshard.planning.space.derived_axes import STAGE, find_axis_parts
from autoshard.planning.space.plan_options import Limits, Options
from autoshard.planning.space.spec_constraints import check_regions, program_mesh
from autoshard.planning.space.user_constraints import check_axes
from autoshard.planning.stages.stage_programs import StageSearch
from autoshard.program import Program, lift_constraints, lowered_for
from autoshard.solver import write_contest


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
    weights: Weights
    """The weights with the highest bound, a good start for another recipe of the program."""
    free_s: float = 0.0
    """No plan takes less on any mesh that was looked at, whatever fits into memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """What other recipes of a program have shown, planned with the same options."""

    rival: Rival | None
    """What a plan must beat to be of any use, if the mesh is to be searched for."""
    tables: PathTables
    stages: int = 0
    """How many stages a pipeline has whose meshes have an axis for them; 0 for any other program."""
    meshes: tuple[Mesh, ...] | None = None
    """Which meshes are searched; None for all."""


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
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    # Names stand in pins, reports and files beside signs that part them.
    for axis in original_mesh(mesh) if all(isinstance(axis, str) for axis in mesh) else ():
        if not re.fullmatch(r"[^\W\d][\w.-]*", axis) or axis.lower() == "none":
            raise UserError(
                f"the mesh has an axis called {axis!r}: call it by a letter or _, then letters, digits, _, - and dots, "
                "and not `none`, which says that a dim is whole."
            )
    return make_mesh(topology, mesh)


def check_request(options: Options) -> None:
    """Refuse what no program can be planned for, before one is traced.

    Raises `UserError` for a topology that does not exist, a mesh that cannot be laid on it, compiler flags that cannot
    be read or that its chips cannot run with, and something asked for with an axis that the mesh does not have, where
    the mesh is known without the program.
    """
    topology = Topology.parse(options.topology)
    given = given_mesh(topology, options.mesh)
    chosen_flags(options.xla_flags, topology.chip)
    if given is not None:
        check_axes(options.asked, given)


@collecting_seldom()
def make_plan(
    program: Program,
    options: Options,
    *,
    progress: Callable[[str], None] | None = None,
    save_problem: str | os.PathLike[str] | None = None,
    kept: bool = False,
    crew: Crew | None = None,
    before: Before | None = None,
) -> PlanResult:
    """Choose a sharding for every tensor, as the options say; see `autoshard.plan` for what they mean.

    `save_problem` writes the Problem whose bound is certified, in the contest's format. Of several candidates ours is
    the first; each further one must differ from the others in what it spends its time on. With `kept` the program's
    ops come from the cache on disk where they are there. With a `crew` its helpers take part; the plan is the same
    without. `before` is what other recipes have shown.

    Raises `UserError` for options that no plan can have, `InfeasibleError` if no plan keeps within the memory
    limit, and `Beaten` if none beats the rival there is.
    """
    wanted = None if options.form is None else _limiting(options.form, options.candidates, program)
    phases = Phases(progress)
    parsed = Topology.parse(options.topology)
    limits = _limits(options, parsed)
    if options.candidates < 1:
        raise UserError(f"{options.candidates} candidates are asked for; the plan itself is one.")
    figures = priced_with(options, parsed)
    phases.start("extract", "reading the program's ops and their sharding rules")
    program = lift_constraints(program) if options.ignore_constraints else program
    program = lowered_for(program, parsed.traits.platform)
    reading = read_program(program, parsed.backend, kept)
    crew = crew or Crew()
    crew.progress = phases.progress
    share(crew, program, reading)
    task = Task(program, reading, options.asked, limits.memory_bytes, limits.seed, figures.calibration)
    if before is not None:
        task = dataclasses.replace(task, tables=before.tables, stages=before.stages)
    search_on = Searcher(task, phases, crew, parsed)
    given = given_mesh(parsed, options.mesh, program_mesh(reading.graph, parsed.num_devices))
    searched = _search(search_on, given, limits.seconds, options.refine_axes, before)
    best, found = searched.best, searched.best.found
    if isinstance(found, Infeasible):
        said = explain_infeasible(best.model, found, limits, best.required)
        raise InfeasibleError(said) from found
    phases.start("write", "writing the plan")
    compared = searched.original if isinstance(searched.original.found, Found) else best
    assert isinstance(compared.found, Found)
    completed = compared.found.baselines
    plain = Writer(program, reading.groups, limits.memory_bytes, limits.seed, list(completed), figures.said)
    gains = flag_gains(best.model, found.best.choices, figures.plain)
    asked: dict[str, Any] = {}
    if options.asked:
        asked = {"asked": options.asked.lines, "pinned": best.required.pinned}
    if task.stages:
        asked["stage_axis"] = STAGE
    writer = dataclasses.replace(
        plain,
        said={**figures.said, **({"flag_sets": gains} if gains else {}), **asked},
        baselines={name: predict(compared.model, c.outcome, limits.memory_bytes) for name, c in completed.items()},
        notes=figures.notes,
    )
    if wanted is None:
        first = contender(best.model, found, found.best, "plan", "the least predicted time")
        plan = writer.write(first, searched.tried)
    else:
        phases.start("form", f"planning within what the {wanted.name} form can hold")
        within = plan_within(wanted, best.model, reading.groups, found, best.required, limits, phases.progress)
        first = contender(best.model, found, within.best, "plan", f"the least predicted time for {wanted.name}")
        writer = dataclasses.replace(writer, said={**writer.said, **within.said})
        plan = held_plan(writer.write(first, searched.tried), wanted, found.best.outcome.step_time_s)
    written = WhenAsked(
        {
            name: functools.partial(plain.write, contender(compared.model, compared.found, c, name, ""))
            for name, c in completed.items()
        }
    )
    if save_problem is not None:
        write_contest(found.problem, Path(save_problem))
    offered: tuple[PlanCandidate, ...] = (PlanCandidate(first.name, first.why, plan),)
    if options.candidates > 1:
        phases.start("candidates", "looking for other plans that differ")
        others = further(best.model, found, best.required, limits.share(0.5))
        for outcome in searched.outcomes:
            if isinstance(outcome.found, Found):
                others += met(outcome.model, outcome.found, outcome.required)
        others += [elsewhere(other, search_on.price) for other in searched.elsewhere]
        offered = pick(first, plan, others, options.candidates, writer.write)
    phases.stop()
    found_on = [outcome.found for outcome in searched.outcomes]
    free_s = min((each.free_s if isinstance(each, Found) else 0.0 for each in found_on), default=0.0)
    return PlanResult(plan, phases.wall, written, offered, found.weights, min(free_s, searched.free_s))


def plan_by_stage(
    make: Callable[..., Program],
    said: Mapping[str, Any],
    options: Options,
    *,
    progress: Callable[[str], None] | None = None,
    crew: Crew | None = None,
) -> PlanResult:
    """The fastest cut of a torch module into a program for each stage, see `StageSearch`.

    Raises `UserError` for what is no torch module or cannot be cut so, `InfeasibleError` if no cut keeps within the
    memory limit.
    """
    made: list[PlanResult] = []
    wall: dict[str, float] = {}

    def sharded(program: Program, inner: Options) -> Plan:
        made.append(make_plan(program, inner, progress=progress, crew=crew))
        for phase, seconds in made[-1].wall_s.items():
            wall[phase] = wall.get(phase, 0.0) + seconds
        return made[-1].plan

    plan = StageSearch(make, sharded, said, options, progress or (lambda _: None)).run()
    candidate = PlanCandidate("plan", "the fastest cut into stages", plan)
    return PlanResult(plan, wall, {}, (candidate,), made[-1].weights)


def _limits(options: Options, topology: Topology) -> Limits:
    """What the options allow a search to spend. Raises `UserError` for no memory at all."""
    memory = topology.usable_bytes if options.memory_limit is None else options.memory_limit
    if memory <= 0:
        raise UserError(f"the memory limit is {memory} bytes; it must be more than 0.")
    return Limits(memory, options.time_limit, options.seed)


@dataclasses.dataclass(frozen=True, slots=True)
class PricedWith:
    """The figures that prices are made of, and what is said of them."""

    plain: Calibration
    """The figures that hold for steps without compiler flags."""
    calibration: Calibration
    said: Mapping[str, Any]
    """What the provenance says: what was learned, and the compiler flags."""
    notes: tuple[str, ...]
    """Warnings about flags that are not in the price."""


def priced_with(options: Options, topology: Topology) -> PricedWith:
    """The shipped figures, or those learned of the topology, with the compiler flags that the step will run with."""
    given = options.calibration
    flags, origin = chosen_flags(options.xla_flags, topology.chip)
    learned = given if isinstance(given, Fit) else learned_fit(topology, flags) if given else None
    seen_so = learned is not None and bool(flags) and learned.flags == flags
    plain = learned.calibration if learned and not seen_so else load_calibration(topology.chip)
    flagged = with_flags(plain, flags)
    if learned is not None and seen_so:  # what was seen of steps with these flags stands above what they are said to do
        fitted = {each.figure for each in learned.figures}
        figures = {figure: value for figure, value in flagged.figures.items() if figure not in fitted}
        priced = tuple(line for line in flagged.priced if line.split()[0] not in fitted)
        flagged = dataclasses.replace(flagged, calibration=learned.calibration, figures=figures, priced=priced)
    said: dict[str, Any] = {}
    if learned is not None and learned.observations:
        said["learned"] = said_of_fit(learned)
    if flags:
        said["xla_flags"] = flagged.said(flags) | ({"from": origin} if origin else {})
    return PricedWith(plain, flagged.calibration, said, tuple(flagged.notes))


def _limiting(name: str, candidates: int, program: Program) -> Form:
    """The form to plan within; refuses one that limits nothing, and candidates, which are for plans without one."""
    form = form_named(name)
    if form.rest is Rest.PLAN:
        raise UserError(f"the form {name!r} holds a plan whole: leave it out when planning, and export to it.")
    if candidates > 1:
        raise UserError(f"{candidates} candidates are asked for, but only one plan is made for the form {name!r}.")
    check_names(form, program.name, program)
    return form


@dataclasses.dataclass(frozen=True, slots=True)
class _Searched:
    """What the searches came to."""

    best: MeshOutcome
    original: MeshOutcome
    """On the mesh as it was asked for or chosen, with baselines; the best one too, unless one with an axis cut is."""
    outcomes: tuple[MeshOutcome, ...]
    """What was planned on each of the two meshes, or on the one."""
    tried: tuple[MeshTried, ...]
    elsewhere: tuple[MeshBest, ...]
    """The best on other meshes, if the mesh was searched for."""
    free_s: float
    """None on other meshes takes less, whatever fits into memory."""


def _search(
    search_on: Searcher, given: Mesh | None, time_limit: float, refine_axes: bool, before: Before | None
) -> _Searched:
    """On the mesh that is given, else on the best one, and on the same with an axis cut where dims ask for that.

    Raises `Beaten` if a mesh is looked for and none beats the rival that is known `before`.
    """
    task, phases, topology = search_on.task, search_on.phases, search_on.topology
    rival, meshes = (None, None) if before is None else (before.rival, before.meshes)
    reading = task.reading
    graph = reading.graph
    check_exchange(task.program, graph, given)
    if given is None:
        phases.start("meshes", f"looking for the mesh of {topology.num_devices} devices")
        looked = MeshSearch(Trials(task, time_limit, rival is not None), phases.progress, rival).run(
            topology, search_on.crew, meshes
        )
        chosen = looked.model.mesh
    else:
        looked, chosen = None, given
        check_regions(graph, chosen)
    # A program that names axes itself keeps them whole.
    axis_parts = None
    if refine_axes and not graph.constraints and not graph.regions:
        axis_parts = find_axis_parts(graph, reading.structure, reading.groups, chosen)
    if axis_parts is not None and task.stages and chosen.names[axis_parts.axis] == STAGE:
        axis_parts = None
    share = 1.0 if axis_parts is None else 0.6
    if looked is None:
        original = search_on.mesh(chosen, share * time_limit)
    else:
        original = search_on.priced(looked.model, looked.required, looked.choices, share * time_limit)
    best, outcomes = original, (original,)
    if axis_parts is not None:
        refined = search_on.with_parts(axis_parts, original, (1 - share) * time_limit)
        best = refined if refined.is_better_than(original) else original
        outcomes = (original, refined)
    if looked is None:
        return _Searched(best, original, outcomes, (), (), math.inf)
    return _Searched(best, original, outcomes, looked.tried, looked.others, looked.free_s)
