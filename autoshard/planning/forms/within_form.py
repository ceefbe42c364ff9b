"""Planning within the specs that an export form can express, and prices of a plan's part that the form expresses."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoshard.base.units import format_bytes, format_seconds
from autoshard.cost import Topology
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.forms.dim_name_rules import Mappings, NamedDims
from autoshard.planning.forms.export_forms import (
    FORMS,
    Form,
    Rest,
    expressible_specs,
    gathered_specs,
)
from autoshard.planning.forms.gathered_parameters import SOLVE_S, gathered_candidate
from autoshard.planning.forms.held_recipes import plan_of_held
from autoshard.planning.forms.lost_values import NOTICED
from autoshard.planning.forms.maxtext_axes import maxtext_candidate, maxtext_candidates, maxtext_uses
from autoshard.planning.forms.propagated_specs import Propagation, needs_pins, typed_choices
from autoshard.planning.forms.spec_search import SpecSearch, is_near, rank
from autoshard.planning.price.analysed_program import analyse_program, as_planned, model_of, reprice
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.prediction import predict
from autoshard.planning.record.plan_parts import Prediction
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.weight_search import Candidate, SearchResult, evaluated_candidate
from autoshard.planning.space.baselines import wide_axes
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Program, lift_constraints
from autoshard.solver import processor_seconds


NAMED = 400
"""Most mappings of names that are priced for one plan."""


def price_form(plan: Plan, program: Program, form: Form, held: Program | None = None) -> Prediction | None:
    """Price the step if only the form's part of a plan is applied; None if MaxText's sharding cannot be priced.

    A form that expresses the whole plan, or within which the plan was made, has the plan's own prediction. Otherwise
    the form's specs are completed by the system of `form.rest`. `held` is the program with the recomputation that the
    form holds, if that is not the plan's; the specs are then priced on it.

    Raises `UserError` for a program that is not the plan's, and for a plan that cannot be priced again.
    """
    if form.rest is Rest.PLAN or (plan.origin.form == form.name and held is None):
        return plan.prediction
    program = as_planned(program, plan)
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(f"the program is not the one of the plan ({plan.program_name}): it has changed; plan it again.")
    topology = Topology.parse(plan.topology)
    if held is None:
        reading = analyse_program(program, topology)
        model, choices = reprice(plan, program, reading)
    else:
        program = as_planned(held, plan)
        reading = analyse_program(program, topology)
        model, choices = None, np.zeros(0, dtype=np.int64)
        plan = plan_of_held(plan, program)
    if model is None or model.eager != form.eager:
        model = model_of(plan, program, dataclasses.replace(reading, eager=form.eager))
    if form.rest is Rest.MAXTEXT:
        free = lift_constraints(program)  # MaxText's own code has no constraint of this program
        if free is not program:
            reading = analyse_program(free, topology)
            model = model_of(plan, free, reading)
        candidate = maxtext_candidate(model, reading.groups, maxtext_uses(plan), plan.memory_limit_bytes)
        return None if candidate is None else predict(model, candidate.outcome, plan.memory_limit_bytes)
    if form.rest is Rest.NAMES:
        named = NamedDims(model, reading.groups)
        return predict(model, evaluate(model, named.choices(named.mappings(choices))), plan.memory_limit_bytes)
    given = expressible_specs(form, plan.arguments, plan.shapes, plan.roles, plan.mesh)
    if form.gathers and plan.batch_axes:
        split = gathered_specs(form, given, plan.shapes, plan.roles, plan.mesh, plan.batch_axes)
        limits = Limits(plan.memory_limit_bytes, SOLVE_S, 0)
        axes = tuple(list(plan.mesh).index(axis) for axis in plan.batch_axes)
        gathered = gathered_candidate(form.name, model, reading.groups, split, limits, Required({}, {}), axes)
        if gathered is not None:
            return predict(model, gathered.outcome, plan.memory_limit_bytes)
    typed = typed_choices(model, choices) if form.hints else None
    propagation = Propagation(model, form.rest, plan.results if form.state else {})
    first = propagation.complete(given, fixed=typed)
    completed = [first, *([propagation.complete(given, matmuls=True)] if first.disputed else [])]
    outcomes = [evaluate(model, each.choices) for each in completed]
    return predict(model, max(outcomes, key=lambda each: each.step_time_s), plan.memory_limit_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class BestWithin:
    """The best choice that a form can express."""

    best: Candidate
    provenance: Mapping[str, Any]
    """Entries for the provenance of the plan."""
    other: Candidate | None = None
    """Faster plan in another form of the same framework, named after that form; None without one."""


def plan_within(
    form: Form,
    model: Model,
    groups: Groups,
    found: SearchResult,
    required: Required,
    limits: Limits,
    progress: Callable[[str], None],
) -> BestWithin:
    """Return the best choice that fits, satisfies the constraints and that the form can express.

    - `form`: form with `Rest` other than `PLAN`.
    - `model`, `groups`: the priced program and its dim groups.
    - `found`: result of the search without the form, from which this search starts.
    - `required`: the user's constraints.
    - `limits`: limits of memory and time (processor seconds).
    - `progress`: receives lines of progress.

    Raises `InfeasibleError`, with the least peak found, if no choice fits.
    """
    if form.rest is Rest.MAXTEXT:
        best, origin = _best_maxtext(model, groups, required, limits)
    elif form.rest is Rest.NAMES:
        best, origin = _best_names(form, model, groups, found, required, limits)
    else:
        search = SpecSearch(form, model, groups, required, limits, progress)
        gathered = search.gathered(found) if form.gathers else None
        several = len(wide_axes(model, range(len(model.axis_sizes)))) > 1
        near = gathered is not None and is_near(gathered, found)
        best = search.run(found) if form.tensor and not near and (several or gathered is None) else None
        best, origin = min((each for each in (gathered, best) if each is not None), key=rank, default=None), {}
    if best is None and form.gathers:
        raise InfeasibleError(
            f"the {form.name} form can hold no plan on this mesh: every axis must split the batch or parameters; give "
            "another --mesh, or plan without `--for` (in Python `form`)."
        )
    if best is None or not best.fits:
        least = "" if best is None else f": the least found is {format_bytes(best.outcome.peak_bytes)}"
        limit = format_bytes(limits.memory_bytes)
        remedy = "more devices or a smaller batch would help, or a plan without `--for` (in Python `form`)"
        if form.rest is Rest.XLA and found.best.fits:
            step = format_seconds(found.best.outcome.step_time_s)
            remedy = (
                f"plan without `--for` (in Python `form`), which takes {step} a step, and `autoshard export` names the "
                "first values that lose a split, which a constraint in the step may keep"
            )
        raise InfeasibleError(
            f"no plan that the {form.name} form can hold fits into {limit} per device{least}; {remedy}."
        )
    faster = {
        name: each
        for name, each in found.baselines.items()
        if each.fits and required.holds(each.choices) and each.expected_s < best.expected_s * (1 - NOTICED)
    }
    if faster:  # the search started from their specs, which take longer as the form completes them
        origin["not_held"] = list(faster)
    other = _best_other(form, best, dataclasses.replace(found, baselines=faster), model, groups, required, limits)
    return BestWithin(best, {"for": form.name, **origin}, other)


def _best_other(
    form: Form, best: Candidate, found: SearchResult, model: Model, groups: Groups, required: Required, limits: Limits
) -> Candidate | None:
    """Return the best plan that gathers parameters, named after its form, if `found` has baselines that beat `best`.

    The forms are those that complete specs as `form` does, for any program. None if no such plan is faster than `best`.
    """
    others = [] if form.gathers else [o for o in FORMS.values() if o.gathers and not o.reads_program]
    searches = [SpecSearch(o, model, groups, required, limits, lambda _: None) for o in others if o.rest is form.rest]
    made = [search.gathered(found) for search in searches if found.baselines]
    faster = [each for each in made if each is not None and each.expected_s < best.expected_s * (1 - NOTICED)]
    return min(faster, key=rank, default=None)


def _best_maxtext(
    model: Model, groups: Groups, required: Required, limits: Limits
) -> tuple[Candidate | None, dict[str, Any]]:
    """Return the best of all uses of the axes that satisfies the constraints, with its entry for the provenance; (None,
    {}) without one. The result may exceed the memory limit.
    """
    found = [each for each in maxtext_candidates(model, groups, limits) if required.holds(each[0].choices)]
    return min(found, key=lambda each: rank(each[0]), default=(None, {}))


def _best_names(
    form: Form, model: Model, groups: Groups, found: SearchResult, required: Required, limits: Limits
) -> tuple[Candidate | None, dict[str, Any]]:
    """Return the best mappings of names as a candidate, with their entry for the provenance; (None, {}) without one.

    The search starts from the mappings closest to known choices and from empty ones. It changes one name of one mapping
    at a time until nothing improves, `NAMED` mappings are priced, or the processor time of `limits` is spent. The
    result may exceed the memory limit.
    """
    named, until = NamedDims(model, groups), processor_seconds() + limits.seconds
    tried: dict[Any, Candidate | None] = {}
    best: tuple[Candidate, Mappings] | None = None

    def take(mappings: Mappings) -> None:
        """Price mappings, unless they were tried or the search is spent; store them if they are the best so far.
        Mappings that need pins or break a constraint are no candidates.
        """
        nonlocal best
        if mappings.key in tried or len(tried) >= NAMED or processor_seconds() > until:
            return
        choices = named.choices(mappings)
        made = None
        if not needs_pins(model, choices, form.rest) and required.holds(choices):
            try:
                made = evaluated_candidate(model, form.name, choices, evaluate(model, choices), limits.memory_bytes)
            except ValueError:  # two alternatives exclude each other
                made = None
        tried[mappings.key] = made
        if made is not None and (best is None or rank(made) < rank(best[0])):
            best = made, mappings

    for start in (found.best, *found.baselines.values(), *found.fitting):
        take(named.mappings(start.choices))
    take(Mappings({}, {}))
    before = None
    while best is not None and before is not best:
        before = best
        for mappings in named.changes(best[1]):
            take(mappings)
    return (None, {}) if best is None else (best[0], {form.name: best[1].to_json()})
