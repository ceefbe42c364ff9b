"""Explanation of a tensor's spec: the cost of every other spec, and the change that would make another one win."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.base.providers import provides
from autoshard.cost import Topology, make_mesh
from autoshard.errors import UserError
from autoshard.planning.explain.alternatives_in_form import COMPLETED, WithinForm
from autoshard.planning.explain.plan_program import reopen
from autoshard.planning.forms.export_forms import FORMS
from autoshard.planning.price.analysed_program import analyse_program, as_planned, build_model, reprice
from autoshard.planning.price.evaluate import Outcome, evaluate, tensor_spec
from autoshard.planning.record.plan_parts import Collective
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec, patterns, without_slices
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import make_candidate
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.derived_axes import axis_parts_of
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.user_constraints import Required, near_names, require_lines
from autoshard.program import Program
from autoshard.solver import processor_seconds


SOLVED = 8
"""Most alternatives for which all other decisions are solved again on request. The rest are priced with all other
decisions fixed, as are those that begin after the time limit.
"""

FREED_S = 4.0
"""Processor seconds in which specs that the fixed decisions exclude are solved, where no solves are requested."""

SAME = 1e-9
"""Largest relative difference of two step times that counts as rounding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """One spec that the tensor could have, with the best step for it. Figures are None if it is impossible."""

    spec: Spec
    chosen: bool
    """True for the plan's own spec."""
    how: str
    """Method of its price. `solved`: all other decisions are solved again; `held`: all other decisions are fixed.
    `completed`: the other arguments are fixed, and the form's framework splits the rest.

    Without a price it is `impossible` if the solver found no other decisions. It is `unsolved` if the fixed ones
    exclude it and the solver was not asked. It is `inexpressible` if the plan's form cannot hold it,
    and `unpriced` if the time ended before.
    """
    step_time_s: float | None
    """Seconds of a step; nearly full memory adds nothing."""
    delta_s: float | None
    """Seconds of a step more than the plan's; below zero by at most the plan gap."""
    peak_bytes: int | None
    """Peak memory of one device."""
    fits: bool
    """True if the peak is within the plan's memory limit; always True for the chosen spec."""
    collectives: tuple[Collective, ...]
    """Collectives beyond the plan's, the slowest first: seconds, bytes and counts are differences."""
    wins_if: str
    """Change that would make this alternative win, in a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one tensor's spec."""

    name: str
    shape: tuple[int, ...]
    role: str
    """Role of the argument, such as `parameter`; `result` for a result."""
    spec: Spec
    fixed: str
    """Source of the constraint that fixes the spec; empty if there is none."""
    shares: tuple[str, ...]
    """Other arguments and results of the same cluster: they must have the same spec, since only elementwise ops connect
    them.
    """
    alternatives: tuple[Alternative, ...]
    """Alternatives, the chosen one first, then by step time, impossible ones last. Empty if the planner decides nothing
    for the tensor.
    """
    alike: tuple[str, ...] = ()
    """Other tensors that the given name matches, of the same shape and spec, for which this one stands."""
    form: str = ""
    """Form within which the plan was made, and within which its alternatives are priced; empty for none."""


@provides("explain")
def explain_plan(
    plan: Plan,
    name: str,
    program: Program | None = None,
    *,
    solve: bool = False,
    kept: bool = False,
    time_limit: float = 60.0,
    seed: int = 0,
) -> Explanation:
    """Explain why argument or result `name` has its spec in a plan.

    - `plan`, `name`: plan, and a full name, a last part of it or a pattern (see `named`).
    - `program`: the plan's program; None opens it again from its source in the plan.
    - `solve`: True solves all other decisions again for the `SOLVED` specs with the least step time.
    - `kept`: True to take the program and its ops from the disk cache if they are there.
    - `time_limit`: processor seconds for all solves together; each solve gets an equal share of the rest, at least one
      second.
    - `seed`: seed of the solver.

    The plan's own choices are priced again, and every other spec with all other decisions fixed. Specs that these
    exclude are solved within `FREED_S`, the simplest first.

    Raises `UserError` for a name that the plan does not have, and for a program that is not the plan's. Raises it also
    for a plan with a program for each stage, and for one without choices, as older or other versions write.
    """
    check_explainable(plan)
    name, *alike = named(plan, name)
    program = as_planned(program or reopen(plan, kept=kept), plan)
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(f"the program is not the one of the plan ({plan.program_name}): it has changed; plan it again.")
    model, choices, required, groups = _rebuild(plan, program, kept)
    form = FORMS.get(plan.origin.form)
    within = None
    if form is not None and form.rest in COMPLETED and name in plan.arguments:
        within = WithinForm(form, plan, model, groups, required, name, seed)
    limit = time_limit if solve else 0.0
    explanation = _Explainer(plan, model, choices, required, limit, seed, within).explain(name)
    return dataclasses.replace(explanation, alike=tuple(alike), form=within.form.name if within is not None else "")


def check_explainable(plan: Plan) -> None:
    """Raise `UserError` for a plan with a program for each stage, whose choices are those of no single step."""
    if plan.by_stage:
        raise UserError(
            f"the plan of {plan.program_name} is a program for each stage, and `explain` compares specs of one: plan "
            "the step without --stages and --schedule, and explain that plan."
        )


def named(plan: Plan, name: str) -> list[str]:
    """Return the arguments and results that a name matches: the one with this full name, or all with this last part.

    A last part begins after a dot, and may have the wildcard `*`, or `…` as in names that a table cuts. Several matches
    are those of repeated layers; of layers that differ in shape or spec, the largest are returned. Optimizer state is
    found by its full name only. Raises `UserError` if nothing matches, or if the matches are not of one kind of layer.
    """
    known = {**plan.results, **plan.arguments}
    if name in known:
        return [name]
    of_weights = [k for k in known if plan.roles.get(k) != "optimizer_state"]
    pattern = name.replace("…", "*")
    found = [k for k in of_weights if fnmatchcase(k, pattern) or fnmatchcase(k, f"*.{pattern}")]
    if not found:
        raise UserError(f"the plan has no argument or result {name}; {near_names(name, known)}")

    def same(one: str, other: str) -> bool:
        """Return True for two tensors of one shape and spec."""
        return (plan.shapes.get(one), known[one]) == (plan.shapes.get(other), known[other])

    largest = max(found, key=lambda k: math.prod(plan.shapes.get(k, ())))
    kinds = list(dict.fromkeys(patterns(map(without_slices, found)).values()))
    if len(kinds) > 1 and not all(same(k, largest) for k in found):
        listed = f"{', '.join(kinds[:3])}{f' and {len(kinds) - 3} more' if len(kinds) > 3 else ''}"
        raise UserError(f"{name} names tensors of several kinds: {listed}; give one of them.")
    return [k for k in found if same(k, largest)]


def _rebuild(plan: Plan, program: Program, kept: bool) -> tuple[Model, NDArray[np.int64], Required, Groups]:
    """Return the priced model of a plan, its choice of each node, the user's constraints on the model, and dim groups.

    If the plan cut an axis in two, the constraints are read on the uncut mesh and mapped to the states of the cut one.
    """
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    reading = analyse_program(program, mesh.topology, kept)
    model, choices = reprice(plan, program, reading)
    lines, axis_parts = plan.origin.asked, axis_parts_of(reading.groups, mesh)
    if axis_parts is None or not lines:
        return model, choices, require_lines(model, reading.groups, lines), reading.groups
    limit, staged = plan.memory_limit_bytes, plan.origin.staged
    original = build_model(program, reading, axis_parts.original, limit, model.compute.calibration, staged=staged)
    asked = require_lines(original, reading.groups, lines)
    allowed = axis_parts.allowed(original, model, asked.allowed)
    return model, choices, Required(allowed, asked.pinned), reading.groups


class _Explainer:
    """Explanations of the tensors of one priced plan."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        choices: NDArray[np.int64],
        required: Required,
        time_limit: float,
        seed: int,
        within: WithinForm | None = None,
    ) -> None:
        """Evaluate the plan's choices, and index the tensors of results and arguments by name; arguments win."""
        self.plan, self.model, self.choices, self.required = plan, model, choices, required
        self.time_limit, self.seed, self.within = time_limit, seed, within
        self.base = evaluate(model, choices)
        program, graph = model.program, model.graph
        self.tensors = {r.name: t for r, t in zip(program.results, graph.results, strict=True)}
        self.tensors |= {a.name: t for a, t in zip(program.arguments, graph.arguments, strict=True)}
        self.ranks = {value.name: len(value.shape) for value in (*program.results, *program.arguments)}

    def explain(self, name: str) -> Explanation:
        """Explain the spec of an argument or a result with this full name; there are no alternatives for a tensor
        outside of all clusters.
        """
        model, plan = self.model, self.plan
        tensor = self.tensors[name]
        cluster = model.structure.cluster_of[tensor]
        rank = self.ranks[name]
        shape = model.graph.tensors[tensor].shape[:rank]
        spec = tensor_spec(model, self.choices, tensor).of_rank(rank)
        fixed = plan.origin.pinned.get(name, "")
        constraints = [c.where for c in model.graph.constraints if model.structure.cluster_of[c.tensor] == cluster >= 0]
        fixed = "; ".join([*([fixed] if fixed else []), *dict.fromkeys(constraints)])
        role = plan.roles.get(name, "result")
        if cluster < 0:
            return Explanation(name, shape, role, spec, fixed, (), ())
        shares = tuple(
            other
            for other, t in self.tensors.items()
            if other != name and t != tensor and model.structure.cluster_of[t] == cluster
        )
        return Explanation(name, shape, role, spec, fixed, shares, self.alternatives(cluster, tensor, spec))

    def alternatives(self, cluster: int, tensor: int, chosen: Spec) -> tuple[Alternative, ...]:
        """Return the alternatives of a tensor, the chosen one first and then by step time, impossible ones last.

        - `cluster`: cluster of the tensor; its states that give the tensor one spec make one alternative.
        - `chosen`: the plan's spec.

        Specs are solved again in order of their step time under fixed decisions, at most `SOLVED`, until the time
        limit. A limit of 0 solves those alone that the fixed decisions exclude, in order of their axes, for `FREED_S`.
        A spec without a solution has its price under fixed decisions.
        """
        node = self.model.cluster_node[cluster]
        rows: dict[Spec, list[int]] = {}
        for row in range(len(self.model.nodes[node].states)):
            trial = self.choices.copy()
            trial[node] = row
            rows.setdefault(tensor_spec(self.model, trial, tensor).of_rank(len(chosen.dims)), []).append(row)
        rows.pop(chosen)
        own = Alternative(
            chosen, True, "solved", self.base.step_time_s, 0.0, self.base.peak_bytes, True, (), "it is the choice"
        )
        if self.within is not None:
            return (own, *self.alternatives_within(self.within, node, rows))
        held = {spec: self.held(node, members) for spec, members in rows.items()}
        ranked = sorted(rows, key=lambda s: (held[s] is None, held[s].step_time_s if held[s] else len(s.axes), str(s)))  # type: ignore[union-attr]
        wanted = ranked if self.time_limit > 0 else [spec for spec in ranked if held[spec] is None]
        solved = self.all_solved(node, {spec: rows[spec] for spec in wanted[:SOLVED]}, self.time_limit or FREED_S)
        others = []
        for spec in ranked:
            outcome = solved.get(spec)
            how = "solved" if outcome is not None else "held" if held[spec] else "unsolved"
            how = "impossible" if how == "unsolved" and spec in solved else how
            others.append(self.alternative(spec, how, outcome or held[spec]))
        others.sort(key=lambda a: (a.step_time_s is None, a.step_time_s or 0.0, str(a.spec)))
        return (own, *others)

    def alternatives_within(self, within: WithinForm, node: int, rows: Mapping[Spec, list[int]]) -> list[Alternative]:
        """Return alternatives by step time, each with the best step that the plan's form can hold.

        Without a time limit, the other arguments stay as they are; with one, their specs are searched too. Specs that
        begin after the limit, those with the most axes, have no price.
        """
        found, began = [], processor_seconds()
        limit = self.time_limit or FREED_S
        for number, spec in enumerate(sorted(rows, key=lambda s: (len(s.axes), str(s)))):
            left = limit - (processor_seconds() - began)
            if left <= 0:
                found.append(self.alternative(spec, "unpriced", None))
                continue
            states = np.zeros(len(self.model.nodes[node].states), dtype=bool)
            states[rows[spec]] = True
            share = max(1.0, left / (len(rows) - number))
            outcome = within.price(spec, node, states, share, search=self.time_limit > 0)
            priced = "solved" if self.time_limit > 0 else "completed"
            found.append(self.alternative(spec, priced if outcome is not None else "inexpressible", outcome))
        return sorted(found, key=lambda a: (a.step_time_s is None, a.step_time_s or 0.0, str(a.spec)))

    def all_solved(self, node: int, rows: Mapping[Spec, list[int]], limit: float) -> dict[Spec, Outcome | None]:
        """Return the outcome of each spec of `rows`, as of `solved`, in order until `limit` processor seconds end."""
        outcomes: dict[Spec, Outcome | None] = {}
        began = processor_seconds()
        for number, spec in enumerate(rows):
            seconds_left = limit - (processor_seconds() - began)
            if seconds_left <= 0:
                break
            outcomes[spec] = self.solved(node, rows[spec], max(1.0, seconds_left / (len(rows) - number)))
        return outcomes

    def held(self, node: int, rows: list[int]) -> Outcome | None:
        """Return the fastest outcome with all other decisions fixed, regardless of memory.

        None if the neighbours exclude all of `rows`, the states of `node` that give the spec.
        """
        best = None
        for row in rows:
            trial = self.choices.copy()
            trial[node] = row
            try:
                outcome = evaluate(self.model, trial)
            except ValueError:  # a neighbour excludes it
                continue
            if best is None or outcome.step_time_s < best.step_time_s:
                best = outcome
        return best

    def solved(self, node: int, rows: list[int], time_limit: float) -> Outcome | None:
        """Return the outcome with all other decisions solved again, within the memory limit and the user's constraints.

        If the fixed decisions give a faster outcome that fits, return that. Return None if the solver finds no solution
        with the spec. `rows` are the states of `node` that give the spec, and `time_limit` is in processor seconds.
        """
        mask = np.zeros(len(self.model.nodes[node].states), dtype=bool)
        mask[rows] = True
        allowed = {**self.required.allowed, node: mask}
        weights = normalise(even_weights(self.model))
        hint = self.choices.copy()
        hint[node] = rows[0]
        limit = self.plan.memory_limit_bytes
        solved = solve_within(self.model, weights, Terms(limit, time_limit, self.seed, hint, allowed))
        candidate = make_candidate(self.model, "alternative", solved, limit)
        if candidate is None or not mask[int(candidate.choices[node])]:
            return None
        fixed = self.held(node, rows)
        if fixed is not None and fixed.peak_bytes <= limit and fixed.step_time_s < candidate.outcome.step_time_s:
            return fixed
        return candidate.outcome

    def alternative(self, spec: Spec, how: str, outcome: Outcome | None) -> Alternative:
        """Return the row of a spec that is not chosen, from its outcome and `how` it was priced; None has no price."""
        if outcome is None:
            return Alternative(spec, False, how, None, None, None, False, (), "its neighbours exclude it")
        delta = outcome.step_time_s - self.base.step_time_s
        added = _added(self.base.collectives, outcome.collectives)
        fits = outcome.peak_bytes <= self.plan.memory_limit_bytes
        wins = self.wins_if(outcome, delta, added, fits)
        return Alternative(spec, False, how, outcome.step_time_s, delta, outcome.peak_bytes, fits, tuple(added), wins)

    def wins_if(self, outcome: Outcome, delta: float, added: list[Collective], fits: bool) -> str:
        """Return the change that would make an alternative win, in a sentence.

        - `delta`: seconds of a step more than the plan's.
        - `added`: collectives beyond the plan's.
        - `fits`: True if the alternative fits the memory limit.

        The first that applies of: missing memory, a tie, a better alternative, a faster slowest collective, less
        compute, seconds saved elsewhere.
        """
        from autoshard.base.units import format_bytes, format_seconds

        if not fits:
            over = outcome.peak_bytes - self.plan.memory_limit_bytes
            return f"{format_bytes(over)} more memory on every device are needed for it"
        if abs(delta) <= SAME * self.base.step_time_s:
            less = outcome.peak_bytes - self.base.peak_bytes
            return "it ties" + (f", and needs {format_bytes(less)} more memory" if less > 0 else "")
        if delta < 0:
            return f"it is better by {format_seconds(-delta)}, which the plan gap allows for"
        slowest = max(added, key=lambda c: c.seconds, default=None)
        if slowest is not None and slowest.seconds > delta:
            # Speed at which the collective would take `delta` seconds less; beyond 100 times it is no realistic change.
            factor = slowest.seconds / (slowest.seconds - delta)
            if factor < 100:
                speed = f"{factor:.2g} times as fast" if factor >= 1.1 else f"{factor - 1:.1%} faster"
                return f"wins if its {slowest.kind} over {', '.join(slowest.axes)} were {speed}"
        compute = outcome.compute_s - self.base.compute_s
        if compute > 0.5 * delta:  # compute explains most of the difference
            return f"wins if the {format_seconds(compute)} of compute it adds went away"
        return f"wins if it saved {format_seconds(delta)} elsewhere"


def _added(base: Sequence[Collective], other: Sequence[Collective]) -> list[Collective]:
    """Return the collectives of `other` beyond those of `base`, the slowest first, one for each kind and axes.

    Count, bytes and seconds are differences of sums; those with no more seconds than in `base` are dropped. Causes do
    not match: a loop's collectives are listed under the name of the largest, which may be another one in `base`.
    """

    def joined(collectives: Sequence[Collective]) -> dict[tuple[str, tuple[str, ...]], Collective]:
        """Return the sum of the collectives of each kind and axes, with the cause and line of the slowest."""
        sums: dict[tuple[str, tuple[str, ...]], Collective] = {}
        for c in sorted(collectives, key=lambda c: (-c.seconds, c.cause)):
            sums[c.kind, c.axes] = c if (old := sums.get((c.kind, c.axes))) is None else _plus(old, c, 1)
        return sums

    before, added = joined(base), []
    for key, c in joined(other).items():
        more = _plus(c, before[key], -1) if key in before else c
        if more.seconds > 0:
            added.append(more)
    return sorted(added, key=lambda c: (-c.seconds, c.kind, c.axes))


def _plus(one: Collective, other: Collective, sign: int) -> Collective:
    """Return `one` with the count, bytes and seconds of `other` added, or subtracted for a `sign` of -1."""
    return dataclasses.replace(
        one,
        count=one.count + sign * other.count,
        wire_bytes=one.wire_bytes + sign * other.wire_bytes,
        seconds=one.seconds + sign * other.seconds,
        exposed_s=one.waited_s + sign * other.waited_s,
    )


def explanation_figures(found: Explanation) -> dict[str, Any]:
    """Return the JSON object of `autoshard explain --json`; `fixed` is None if nothing fixes the spec."""

    def row(one: Alternative) -> Mapping[str, Any]:
        """Return the JSON object of an alternative."""
        values = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        added = [
            {"kind": c.kind, "axes": list(c.axes), "count": c.count, "wire_bytes": c.wire_bytes, "seconds": c.seconds,
             "hidden": c.hidden, "cause": c.cause}
            for c in one.collectives
        ]  # fmt: skip
        return values | {"spec": one.spec.to_json(), "collectives": added}

    return {
        "name": found.name,
        "shape": list(found.shape),
        "role": found.role,
        "spec": found.spec.to_json(),
        "fixed": found.fixed or None,
        "shares": list(found.shares),
        "alike": list(found.alike),
        "alternatives": [row(one) for one in found.alternatives],
    }
