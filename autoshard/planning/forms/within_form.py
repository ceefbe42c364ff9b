"""Planning within what a form of an export can hold, and pricing what one holds of a plan."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_bytes
from autoshard.cost import Topology
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.forms.dim_name_rules import Mappings, NamedDims, said_mappings
from autoshard.planning.forms.export_forms import Form, Rest, held_specs, maxtext_uses
from autoshard.planning.forms.propagated_specs import Propagation, needs_pins
from autoshard.planning.price.analysed_program import price_again, read_program
from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.price.prediction import predict
from autoshard.planning.record.plan_parts import Prediction
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import Candidate, Found, judged
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.space.named_layouts import Uses, stated
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Program, Role
from autoshard.solver import processor_seconds


TRIES = 200
"""Sets of specs that are priced for one plan as ops go forward: work, not time, so that plans can be made again."""
HEARD = 60
"""The same of sets that XLA's propagation, which takes longer, is asked about."""
AHEAD = 12
"""Of these, the best that went forward."""
NAMED = 400
"""The same of mappings of names."""
MAXTEXT_USES = ("data", "fsdp", "tensor")
"""What MaxText's settings can make of an axis and is priced here."""
SOLVE_S = 20.0
"""Limit for completing one of MaxText's shardings."""


def price_form(plan: Plan, program: Program, form: Form) -> Prediction | None:
    """What a step takes where only what the form holds of a plan is applied; None if that cannot be told.

    Raises `UserError` for a program that is not the plan's, and for a plan that cannot be priced again.
    """
    if form.rest is Rest.PLAN or plan.origin.form == form.name:
        return plan.prediction
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(f"the program is not the one of the plan ({plan.program_name}): it has changed; plan it again.")
    reading = read_program(program, Topology.parse(plan.topology).backend)
    model, choices = price_again(plan, program, reading)
    if form.rest is Rest.MAXTEXT:
        found = _maxtext(model, reading.groups, maxtext_uses(plan), plan.memory_limit_bytes, None, 0)
        return None if found is None else predict(model, found.outcome, plan.memory_limit_bytes)
    if form.rest is Rest.NAMES:
        named = NamedDims(model, reading.groups)
        return predict(model, evaluate(model, named.choices(named.mappings(choices))), plan.memory_limit_bytes)
    given = held_specs(form, plan.arguments, plan.shapes, plan.roles, plan.mesh)
    made = Propagation(model, form.rest, plan.results if form.state else {}).choices(given)
    return predict(model, evaluate(model, made), plan.memory_limit_bytes)


def by_name(plan: Plan, program: Program) -> tuple[Mappings, dict[str, Spec]]:
    """What a plan comes to by the names of dims, and the specs of arguments that have them under that.

    Raises `UserError` as `price_form` does.
    """
    reading = read_program(program, Topology.parse(plan.topology).backend)
    model, choices = price_again(plan, program, reading)
    named = NamedDims(model, reading.groups)
    mappings = said_mappings(plan) or named.mappings(choices)
    return mappings, named.specs(mappings)


@dataclasses.dataclass(frozen=True, slots=True)
class BestWithin:
    """The best choice that a form can hold."""

    best: Candidate
    said: Mapping[str, Any]
    """What the plan's provenance says of it."""


def plan_within(
    form: Form,
    model: Model,
    groups: Groups,
    found: Found,
    required: Required,
    limits: Limits,
    progress: Callable[[str], None],
) -> BestWithin:
    """The best choice within the memory limit, of those that the form can hold, that keeps what is `required`.

    It is looked for from what an unlimited search has `found`. Raises `InfeasibleError` if none fits.
    """
    if form.rest is Rest.MAXTEXT:
        best, said = _best_maxtext(model, groups, required, limits.memory_bytes, limits.seed)
    elif form.rest is Rest.NAMES:
        best, said = _best_names(model, groups, found, required, limits)
    else:
        search = _FormSearch(form, model, groups, required, limits, progress)
        best, said = search.run(found), {}
    if best is None or not best.fits:
        least = "" if best is None else f": the least found is {format_bytes(best.outcome.peak_bytes)}"
        limit = format_bytes(limits.memory_bytes)
        raise InfeasibleError(
            f"no plan that the {form.name} form can hold fits into {limit} per device{least}; "
            "more devices or a smaller batch would help, or a plan without `--for` (in Python `form`)."
        )
    return BestWithin(best, {"for": form.name, **said})


def held_plan(plan: Plan, form: Form, free_s: float) -> Plan:
    """A plan within a form: nothing in it that the form cannot hold. `free_s` is the step time of one without limit."""
    from autoshard.base.units import format_seconds

    line = f"planned within what the {form.name} form can hold: nothing inside the step is pinned"
    if plan.prediction.step_time_s > free_s * (1 + 1e-3):
        line += f"; a plan with pins takes {format_seconds(free_s)} a step"
    return dataclasses.replace(plan, pins=(), regions=(), calls=(), warnings=(*plan.warnings, f"{line}."))


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    peak = candidate.outcome.peak_bytes
    return not candidate.fits, round(candidate.expected_s, 12) if candidate.fits else float(peak), peak


# MaxText


def _maxtext(
    model: Model,
    groups: Groups,
    uses: Mapping[str, str],
    memory_limit: int,
    limit: int | None,
    seed: int,
) -> Candidate | None:
    """MaxText's sharding with these uses of the axes; None for uses or sizes that cannot be told."""
    if not set(uses.values()) <= set(MAXTEXT_USES):
        return None
    axes = {use: [k for k, axis in enumerate(model.axis_names) if uses[axis] == use] for use in MAXTEXT_USES}
    wanted = stated(model, groups, "maxtext", Uses(axes["data"], axes["fsdp"], axes["tensor"]))
    if wanted is None:
        return None
    solved = solve_within(
        model, normalise(even_weights(model)), Terms(limit, SOLVE_S, seed, allowed=wanted.allowed)
    )  # fmt: skip
    choices = solved.choices
    if len(choices) != len(model.nodes):
        return None
    try:
        outcome = evaluate(model, choices)
    except ValueError:
        return None
    return judged(model, "maxtext", choices, outcome, memory_limit)


def _best_maxtext(
    model: Model, groups: Groups, required: Required, memory_limit: int, seed: int
) -> tuple[Candidate | None, dict[str, Any]]:
    """Of all uses of the axes."""
    best: Candidate | None = None
    said: dict[str, Any] = {}
    for uses in itertools.product(MAXTEXT_USES, repeat=len(model.axis_names)):
        named = dict(zip(model.axis_names, uses, strict=True))
        made = _maxtext(model, groups, named, memory_limit, memory_limit, seed)
        if made is not None and required.holds(made.choices) and (best is None or _rank(made) < _rank(best)):
            best, said = made, {"maxtext": named}
    return best, said


# Haliax


def _best_names(
    model: Model, groups: Groups, found: Found, required: Required, limits: Limits
) -> tuple[Candidate | None, dict[str, Any]]:
    """From the mappings that known choices agree with to the next better ones, one name of one mapping at a time."""
    named, until = NamedDims(model, groups), processor_seconds() + limits.seconds
    tried: dict[Any, Candidate | None] = {}
    best: tuple[Candidate, Mappings] | None = None

    def take(mappings: Mappings) -> None:
        nonlocal best
        if mappings.key in tried or len(tried) >= NAMED or processor_seconds() > until:
            return
        choices = named.choices(mappings)
        made = None
        if not needs_pins(model, choices) and required.holds(choices):
            try:
                made = judged(model, "haliax", choices, evaluate(model, choices), limits.memory_bytes)
            except ValueError:  # two alternatives that exclude one another
                made = None
        tried[mappings.key] = made
        if made is not None and (best is None or _rank(made) < _rank(best[0])):
            best = made, mappings

    for start in (found.best, *found.seen, *found.baselines.values()):
        take(named.mappings(start.choices))
    take(Mappings({}, {}))
    before = None
    while best is not None and before is not best:
        before = best
        for mappings in named.changes(best[1]):
            take(mappings)
    return (None, {}) if best is None else (best[0], {"haliax": best[1].to_json()})


# Specs of arguments


class _FormSearch:
    """From specs that are known to the next better ones: one argument and its like, or one dim group, at a time."""

    def __init__(
        self,
        form: Form,
        model: Model,
        groups: Groups,
        required: Required,
        limits: Limits,
        progress: Callable[[str], None],
    ) -> None:
        self.form, self.model, self.groups, self.required = form, model, groups, required
        self.limits, self.progress = limits, progress
        self.until = processor_seconds() + limits.seconds
        self.propagation = Propagation(model, form.rest)
        program = model.program
        self.roles = {a.name: str(a.role) for a in program.arguments}
        self.shapes = {a.name: tuple(a.shape) for a in program.arguments}
        self.tensors = {
            a.name: t
            for a, t in zip(program.arguments, model.graph.arguments, strict=True)
            if model.structure.cluster_of[t] >= 0
        }
        self.own = [n for n in self.tensors if form.state or self.roles[n] != Role.OPTIMIZER_STATE]
        self.tries = HEARD if form.rest is Rest.XLA else TRIES
        self.tried: dict[tuple[tuple[str, Spec | None], ...], Candidate | None] = {}
        self.best: Candidate | None = None

    def run(self, found: Found) -> Candidate | None:
        starts = [self.specs(start.choices) for start in (found.best, *found.seen, *found.baselines.values())]
        starts.append({name: Spec.replicated(len(self.shapes[name])) for name in self.tensors})
        for specs in starts:
            self.take(specs)
        if self.form.rest is Rest.XLA:
            for specs in self.ahead(starts):
                self.take(specs)
        self.climb()
        return self.best

    def ahead(self, starts: Iterable[Mapping[str, Spec]]) -> list[dict[str, Spec]]:
        """The best specs if ops went forward one by one, which is told sooner than what XLA makes of them."""
        quick = dataclasses.replace(self.form, rest=Rest.DTENSOR)
        half = dataclasses.replace(self.limits, seconds=(self.until - processor_seconds()) / 2)
        other = _FormSearch(quick, self.model, self.groups, self.required, half, self.progress)
        for specs in starts:
            other.take(specs)
        other.climb()
        made = sorted((each for each in other.tried.values() if each is not None), key=_rank)
        return [self.specs(each.choices) for each in made[:AHEAD]]

    def climb(self) -> None:
        """From the best so far, until no change is better."""
        while self.best is not None and not self.spent:
            before = _rank(self.best)
            for change in (*self.by_group(), *self.by_slot()):
                self.take(change(self.specs(self.best.choices)))
            self.progress(f"{len(self.tried)} sets of specs: step {self.best.outcome.step_time_s:.6g} s")
            if _rank(self.best) == before:
                break

    @property
    def spent(self) -> bool:
        return len(self.tried) >= self.tries or processor_seconds() > self.until

    def specs(self, choices: NDArray[np.int64]) -> dict[str, Spec]:
        return {name: tensor_spec(self.model, choices, tensor) for name, tensor in self.tensors.items()}

    def take(self, specs: Mapping[str, Spec] | None) -> None:
        """Keeps what comes of these specs if it is the best so far."""
        if specs is None or self.spent:
            return
        given = held_specs(self.form, specs, self.shapes, self.roles, self.model.mesh.axes)
        key = tuple(given.items())
        if key not in self.tried:
            self.tried[key] = made = self.made(given)
            if made is not None and (self.best is None or _rank(made) < _rank(self.best)):
                self.best = made

    def made(self, given: Mapping[str, Spec | None]) -> Candidate | None:
        choices = self.propagation.choices(given)
        if needs_pins(self.model, choices) or not self.required.holds(choices):
            return None
        try:
            outcome = evaluate(self.model, choices)
        except ValueError:  # two alternatives that exclude one another
            return None
        return judged(self.model, self.form.name, choices, outcome, self.limits.memory_bytes)

    # What may be changed

    def by_group(self) -> Iterator[Callable[[dict[str, Spec]], dict[str, Spec] | None]]:
        """An axis over one dim group, or over nothing: wherever arguments have the group's dims."""
        dims = {
            name: tensor_groups(self.model.structure, self.groups.of_factor, self.tensors[name]) for name in self.own
        }
        present = sorted({g for own in dims.values() for g in own if g is not None})
        for axis, group in itertools.product(self.model.axis_names, [None, *present]):

            def change(specs: dict[str, Spec], axis: str = axis, group: int | None = group) -> dict[str, Spec] | None:
                changed = dict(specs)
                for name, own in dims.items():
                    if group is None or group in own:
                        at = None if group is None else own.index(group)
                        changed[name] = self.moved(specs[name], name, axis, at)
                return changed

            yield change

    def moved(self, spec: Spec, name: str, axis: str, at: int | None) -> Spec:
        """With an axis over dim `at` and no other, if its size allows it."""
        order = self.model.axis_names
        dims = [tuple(a for a in axes if a != axis) for axes in spec.dims]
        if at is not None:
            dims[at] = tuple(sorted((*dims[at], axis), key=order.index))
            if self.shapes[name][at] % Spec((dims[at],)).shards(self.model.mesh.axes):
                return spec
        return Spec(tuple(dims))

    def by_slot(self) -> Iterator[Callable[[dict[str, Spec]], dict[str, Spec] | None]]:
        """Any other spec for an argument and those that are called alike, the largest first."""
        slots: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name in self.own:
            slots.setdefault((re.sub(r"\d+", "*", name), self.shapes[name]), []).append(name)
        for names in sorted(slots.values(), key=lambda names: -self.size(names)):
            for spec in self.alternatives(names[0]):
                yield lambda specs, names=names, spec=spec: {**specs, **dict.fromkeys(names, spec)}

    def size(self, names: Iterable[str]) -> int:
        return sum(self.model.graph.tensors[self.tensors[name]].bytes for name in names)

    def alternatives(self, name: str) -> list[Spec]:
        model, tensor = self.model, self.tensors[name]
        node = model.cluster_node[model.structure.cluster_of[tensor]]
        trial = np.zeros(len(model.nodes), dtype=np.int64)
        allowed = self.required.allowed.get(node, np.ones(len(model.nodes[node].states), dtype=bool))
        found = {}
        for row in np.flatnonzero(allowed):
            trial[node] = row
            found[tensor_spec(model, trial, tensor)] = None
        return list(found)
