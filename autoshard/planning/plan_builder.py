"""Construction of a `Plan` from a program and a topology."""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoshard.base.processes import collecting_seldom
from autoshard.base.workers import WorkerCrew
from autoshard.cost import (
    AUTO,
    MESH_VARIABLE,
    Calibration,
    Fit,
    Mesh,
    Topology,
    chosen_flags,
    fit_record,
    learned_fit,
    load_calibration,
    make_mesh,
    parse_mesh,
    with_flags,
)
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.explain.write_plan import WhenAsked, Writer
from autoshard.planning.forms.eager_figures import faster_baseline, with_eager_figures
from autoshard.planning.forms.export_forms import Form, Rest, check_names, form_named
from autoshard.planning.forms.independent_examples import check_planned, shares_examples, with_own_examples
from autoshard.planning.forms.lost_values import as_held
from autoshard.planning.forms.spec_search import SpecSearch
from autoshard.planning.forms.within_form import BestWithin, plan_within
from autoshard.planning.mesh.mesh_searcher import MeshOutcome, Phases, Searcher
from autoshard.planning.mesh.portfolio import (
    PlanCandidate,
    alternative_choices,
    contender,
    on_other_mesh,
    pick,
    visited_choices,
)
from autoshard.planning.mesh_choice import (
    EarlierRecipes,
    better_within,
    faster_in_eager_torch,
    on_one_axis,
    search_meshes,
)
from autoshard.planning.price.analysed_program import Task, analyse_program, share
from autoshard.planning.price.prediction import flag_gains, predict
from autoshard.planning.price.remat_forecast import spared_seconds
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import original_mesh
from autoshard.planning.solve.infeasible import explain_infeasible
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.solve.weight_search import Candidate, Infeasible, SearchResult
from autoshard.planning.space.derived_axes import STAGE
from autoshard.planning.space.plan_options import Limits, Options
from autoshard.planning.space.spec_constraints import check_searched_axes, program_mesh
from autoshard.planning.space.user_constraints import check_axes
from autoshard.program import Program, lift_constraints, lowered_for
from autoshard.solver import write_contest


@dataclasses.dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with the wall time of each phase, which the plan itself does not contain."""

    plan: Plan
    wall_s: dict[str, float]
    """Wall time in seconds by name of the phase."""
    baseline_plans: Mapping[str, Plan]
    """Baselines as plans of their own, completed by the solver, to apply, compile or measure. Each is written on first
    access.
    """
    candidates: tuple[PlanCandidate, ...]
    """The plan, and up to the requested number of others that really differ, by predicted time."""
    weights: Weights
    """Time weights with the highest bound, used as a start for another recipe of the program."""
    unconstrained_bound_s: float = 0.0
    """Lower bound in seconds of all plans on every searched mesh, ignoring the memory limit."""
    spared_s: float = 0.0
    """Seconds of the step that the best recomputation would spare, as `spared_seconds` forecasts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Circumstances of planning that change no plan."""

    progress: Callable[[str], None] | None = None
    """Callback that receives a line for each phase."""
    crew: WorkerCrew | None = None
    """Helper processes that take part; None plans in this process alone."""
    kept: bool = False
    """True if the program's ops may come from the cache on disk."""
    save_problem: str | os.PathLike[str] | None = None
    """File for the Problem whose bound is certified, in the contest's format."""


def given_mesh(
    topology: Topology, mesh: str | Mapping[str, int] | None, named: Mapping[str, int] | None = None
) -> Mesh | None:
    """Return the mesh of a request; None if it has to be searched.

    - `mesh`: the user's mesh, as text or sizes; None reads `XLA_AUTO_SPMD_MESH`, then uses `named`. `auto` ignores the
      variable.
    - `named`: the mesh that the program names; None if there is none.

    Raises `UserError` for names of axes that specs cannot contain, and for a mesh that cannot be laid out on the
    topology.
    """
    if mesh is None:
        mesh = os.environ.get(MESH_VARIABLE, "").strip() or named
    if mesh == AUTO:
        mesh = named
    if mesh is None:
        return None
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    # Pins, reports and files separate axis names by other characters, which names may not contain.
    for axis in original_mesh(mesh) if all(isinstance(axis, str) for axis in mesh) else ():
        if not re.fullmatch(r"[^\W\d][\w.-]*", axis) or axis.lower() == "none":
            raise UserError(
                f"the mesh has an axis called {axis!r}: call it by a letter or _, then letters, digits, _, - and dots, "
                "and not `none`, which says that a dim is whole."
            )
    return make_mesh(topology, mesh)


def check_request(options: Options) -> None:
    """Refuse options for which no program can be planned, before one is traced.

    Raises `UserError` for an unknown topology and for a mesh that cannot be laid out on it. Raises it also for compiler
    flags that are unreadable or unsuitable for the chips. If the mesh is given, by option or environment, raises it for
    constraints with an axis that the mesh does not have.
    """
    topology = Topology.parse(options.topology)
    given = given_mesh(topology, options.mesh)
    chosen_flags(options.xla_flags, topology.chip)
    if given is not None:
        check_axes(options.asked, given)


@collecting_seldom()
def make_plan(
    program: Program, options: Options, running: Running | None = None, *, before: EarlierRecipes | None = None
) -> PlanResult:
    """Choose a sharding for every tensor under the options; see `autoshard.plan` for their meaning.

    - `running`: circumstances that change no plan; None for the defaults.
    - `before`: results of other recipes of the program; None if there are none.

    Among several candidates the plan is the first. Each further candidate must differ from the others in how its step
    spends time.

    Raises `UserError` for options that no plan can satisfy, `InfeasibleError` if no plan fits the memory limit, and
    `PrunedByBound` if none beats the given rival.
    """
    running = running or Running()
    form = None if options.form is None else _limiting(options.form, options.candidates, program)
    phases = Phases(running.progress)
    parsed = Topology.parse(options.topology)
    first_recipe = before is None or before.rival is None
    if form is not None and form.shares_batch and first_recipe and parsed.num_devices > 1:
        check_planned(form, program)
    limits = _limits(options, parsed)
    if options.candidates < 1:
        raise UserError(f"{options.candidates} candidates are asked for; the plan itself is one.")
    figures = priced_with(options, parsed)
    phases.start("extract", "reading the program's ops and their sharding rules")
    unlowered = program
    program = lift_constraints(program) if options.ignore_constraints else program
    program = lowered_for(program, parsed.traits.platform)
    reading = analyse_program(program, parsed, running.kept)
    if form is not None and form.gathers:
        reading = with_own_examples(unlowered, reading)
    if form is not None and form.eager:
        reading = dataclasses.replace(reading, eager=True)
    crew = running.crew or WorkerCrew()
    crew.progress = phases.progress
    share(crew, program, reading)
    task = Task(program, reading, options.asked, limits.memory_bytes, limits.seed, figures.calibration)
    if before is not None:
        task = dataclasses.replace(task, tables=before.tables, stages=before.stages)
    search_on = Searcher(task, phases, crew, parsed)
    given = given_mesh(parsed, options.mesh, program_mesh(reading.graph, parsed.num_devices))
    if given is None:
        check_searched_axes(reading.graph, parsed.num_devices)
    first = None
    if form is not None and form.gathers and given is None and parsed.num_devices > 1:
        first = on_one_axis(form, search_on, limits, before, phases.progress)
    known = {**figures.provenance, **({"eager": True} if reading.eager else {})}
    searched = search_meshes(search_on, given, limits.seconds, options.refine_axes, before, first)
    within = None
    if form is not None and isinstance(searched.best.found, SearchResult):

        def within_form(form: Form = form, on: MeshOutcome = searched.best) -> BestWithin:
            """Return the form's plan on the chosen mesh."""
            assert isinstance(on.found, SearchResult)
            phases.start("form", f"planning within what the {form.name} form can hold")
            return plan_within(form, on.model, reading.groups, on.found, on.required, limits, phases.progress)

        def written(on: MeshOutcome, choice: BestWithin, form: Form = form) -> Plan:
            """Return the form's plan on a mesh, without its baselines."""
            assert isinstance(on.found, SearchResult)
            origin = {**known, "for": form.name}
            writer = Writer(program, reading.groups, limits.memory_bytes, limits.seed, [], origin)
            return writer.write(contender(on.model, on.found, choice.best, "plan", ""))

        searched, within = better_within(first, searched, within_form, written)
        if form.gathers and given is None and parsed.num_devices > 1 and not task.stages:
            rival_s = math.inf if before is None or before.rival is None else before.rival.step_s
            searched, within = faster_in_eager_torch(form, search_on, limits, (searched, within), written, rival_s)
        on = searched.best
        if form.gathers and isinstance(on.found, SearchResult):
            search = SpecSearch(form, on.model, reading.groups, on.required, limits, phases.progress)
            rewritten = functools.partial(_written_choice, written, on)
            faster = faster_baseline(written(on, within), search, on.found.baselines, rewritten)
            within = within if faster is None else BestWithin(faster, {"for": form.name})
    best, found = searched.best, searched.best.found
    if isinstance(found, Infeasible):
        explain = functools.partial(explain_infeasible, best.model, found, limits, best.required)
        # A search of recipes asks the last one alone for its reason, which takes seconds to find. Pins that exclude
        # each other do so in every recipe.
        raise InfeasibleError(explain() if before is None or best.required.allowed else explain) from found
    phases.start("write", "writing the plan")
    compared = searched.compared if isinstance(searched.compared.found, SearchResult) else best
    assert isinstance(compared.found, SearchResult)
    completed = compared.found.baselines
    baseline_writer = Writer(program, reading.groups, limits.memory_bytes, limits.seed, list(completed), known)
    asked: dict[str, Any] = {}
    if options.asked:
        asked = {"asked": options.asked.lines, "pinned": best.required.pinned}
    if task.stages:
        asked["stage_axis"] = STAGE
    chosen, of_form, other, why = found.best, {}, None, "the least predicted time"
    if form is not None and within is not None:
        chosen, of_form, other, why = within.best, within.provenance, within.other, f"{why} for {form.name}"
    gains = flag_gains(best.model, chosen.choices, figures.plain)
    writer = dataclasses.replace(
        baseline_writer,
        provenance={**known, **({"flag_sets": gains} if gains else {}), **asked, **of_form},
        baselines={name: predict(compared.model, c.outcome, limits.memory_bytes) for name, c in completed.items()},
        notes=(*figures.notes, *searched.notes),
    )
    first = contender(best.model, found, chosen, "plan", why)
    if form is None:
        plan = writer.write(first, searched.tried)
    else:
        plan = as_held(writer.write(first, searched.tried), form, found.best.outcome.step_time_s, other)
        if form.gathers:
            search = SpecSearch(form, compared.model, reading.groups, compared.required, limits, phases.progress)
            plan = with_eager_figures(plan, search, completed)
        if not form.shares_batch and first_recipe and shares_examples(plan):
            check_planned(form, program)
    baseline_plans = WhenAsked(
        {
            name: functools.partial(baseline_writer.write, contender(compared.model, compared.found, c, name, ""))
            for name, c in completed.items()
        }
    )
    if running.save_problem is not None:
        write_contest(found.problem, Path(running.save_problem))
    candidates: tuple[PlanCandidate, ...] = (PlanCandidate(first.name, first.why, plan),)
    if options.candidates > 1:
        phases.start("candidates", "looking for other plans that differ")
        others = alternative_choices(best.model, found, best.required, limits.share(0.5))
        for outcome in searched.outcomes:
            if isinstance(outcome.found, SearchResult):
                others += visited_choices(outcome.model, outcome.found, outcome.required)
        others += [on_other_mesh(other, search_on.price) for other in searched.elsewhere]
        candidates = pick(first, plan, others, options.candidates, writer.write)
    phases.stop()
    results = [outcome.found for outcome in searched.outcomes]
    unconstrained_bound_s = min(
        (each.unconstrained_bound_s if isinstance(each, SearchResult) else 0.0 for each in results), default=0.0
    )
    return PlanResult(
        plan,
        phases.wall,
        baseline_plans,
        candidates,
        found.weights,
        min(unconstrained_bound_s, searched.unconstrained_bound_s),
        spared_seconds(best.model, chosen.choices),
    )


def _written_choice(written: Callable[[MeshOutcome, BestWithin], Plan], on: MeshOutcome, choice: Candidate) -> Plan:
    """Return a choice within a form on a mesh as `written` writes it."""
    return written(on, BestWithin(choice, {}))


def _limits(options: Options, topology: Topology) -> Limits:
    """Return the limits of memory (default: the topology's usable bytes) and time for a search. Raises `UserError` for
    a memory limit of 0 or less.
    """
    memory = topology.usable_bytes if options.memory_limit is None else options.memory_limit
    if memory <= 0:
        raise UserError(f"the memory limit is {memory} bytes; it must be more than 0.")
    return Limits(memory, options.time_limit, options.seed)


@dataclasses.dataclass(frozen=True, slots=True)
class PricedWith:
    """Figures from which prices are computed, with their words for the plan."""

    plain: Calibration
    """Figures for steps without compiler flags."""
    calibration: Calibration
    """Figures for the step with its compiler flags."""
    provenance: Mapping[str, Any]
    """Entries of the provenance: learned figures, and compiler flags."""
    notes: tuple[str, ...]
    """Warnings about flags that are not in the price."""


def priced_with(options: Options, topology: Topology) -> PricedWith:
    """Return the figures for prices: the shipped or learned ones, changed by the compiler flags of the step.

    `options.calibration` may be a fit to use, True for the one learned for the topology with these flags, or False for
    the shipped figures. Figures that were fitted with these very flags override the flags' own effect. Raises
    `UserError` for unreadable flags.
    """
    given = options.calibration
    flags, origin = chosen_flags(options.xla_flags, topology.chip)
    learned = given if isinstance(given, Fit) else learned_fit(topology, flags) if given else None
    learned_with_flags = learned is not None and bool(flags) and learned.flags == flags
    unflagged = learned.calibration if learned and not learned_with_flags else load_calibration(topology.chip)
    flagged = with_flags(unflagged, flags)
    if learned is not None and learned_with_flags:  # figures fitted with these flags override the flags' own
        fitted = {each.figure for each in learned.figures}
        figures = {figure: value for figure, value in flagged.figures.items() if figure not in fitted}
        priced = tuple(line for line in flagged.priced if line.split()[0] not in fitted)
        flagged = dataclasses.replace(flagged, calibration=learned.calibration, figures=figures, priced=priced)
    origins: dict[str, Any] = {}
    if learned is not None and learned.observations:
        origins["learned"] = fit_record(learned)
    if flags:
        origins["xla_flags"] = flagged.record(flags) | ({"from": origin} if origin else {})
    return PricedWith(unflagged, flagged.calibration, origins, tuple(flagged.notes))


def _limiting(name: str, candidates: int, program: Program) -> Form:
    """Return the form to plan within. Raises `UserError` for an unknown form, one that limits nothing, several
    candidates, and missing names of dims.
    """
    form = form_named(name)
    if form.rest is Rest.PLAN:
        raise UserError(f"the form {name!r} holds a plan whole: leave it out when planning, and export to it.")
    if candidates > 1:
        raise UserError(f"{candidates} candidates are asked for, but only one plan is made for the form {name!r}.")
    check_names(form, program.name, program)
    return form
