"""Values that a form splits otherwise than the plan, and plans as a form holds them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from autoshard.base.units import format_seconds
from autoshard.cost import FRACTION, Topology
from autoshard.planning.forms.export_forms import Form, Rest, expressible_specs
from autoshard.planning.forms.propagated_specs import Propagation
from autoshard.planning.price.analysed_program import analyse_program, as_planned, reprice
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.solve.weight_search import Candidate
from autoshard.program import Program


NOTICED = 1e-3
"""Share of a step time by which another plan must be faster to be named."""


@dataclasses.dataclass(frozen=True, slots=True)
class LostValue:
    """A value that lacks splits of the plan in a form."""

    line: str
    """Source line of the op that computes it, such as `model.py:12`."""
    kind: str
    """Kind of that op."""
    shape: tuple[int, ...]
    """Shape of the whole value."""
    spec: Spec
    """The plan's spec."""


def as_held(plan: Plan, form: Form, free_s: float, other: Candidate | None = None) -> Plan:
    """Return a plan made within a form, with a warning about what the form lacks.

    Pins, regions and calls stay if the form's own framework splits values inside of the step: they make XLA follow that
    framework. Other forms leave such values to XLA, so the plan has none.

    `free_s` is the step time in seconds without the form; the warning names it if the plan is slower by `NOTICED`. It
    also names baselines that are faster, and `other`, a faster plan in another form.
    """
    line = f"planned within what the {form.name} form can hold"
    parts: dict[str, Any] = {}
    if not form.splits_inside:
        line += ": nothing inside the step is pinned"
        parts = {"pins": (), "regions": (), "calls": ()}
    if plan.prediction.step_time_s > free_s * (1 + NOTICED):
        line += f"; a plan without the form takes {format_seconds(free_s)} a step"
    lines = [f"{line}.", *_whole_kernels(plan, form)]
    if plan.origin.not_held:
        line = not_held_words(plan)
        if other is not None:
            line += f"; on this mesh, --for {other.name} takes {format_seconds(other.outcome.step_time_s)} a step"
        lines.append(f"{line}.")
    # A step of torch has no memory of JAX's allocator.
    kept = (each for each in plan.warnings if form.rest is not Rest.DTENSOR or FRACTION not in each)
    return dataclasses.replace(plan, **parts, warnings=(*kept, *lines))


def _whole_kernels(plan: Plan, form: Form) -> list[str]:
    """Return a sentence if kernels of attention take more than `NOTICED` of a step in a form that leaves them to XLA.

    XLA's partitioner cannot split such a kernel, and a form without calls splits none in its place.
    """
    kernels = [op for op in plan.ops if op.scores and op.scores[3]]
    share = sum(op.compute_s for op in kernels) / (plan.prediction.step_time_s or 1.0)
    if form.rest is not Rest.XLA or max(plan.mesh.values(), default=1) == 1 or share <= NOTICED:
        return []
    plain = "plan with `--attention plain`" if plan.source is not None and plan.source.is_configuration else ""
    plain = plain or "call them in `jax.shard_map`"
    return [
        f"XLA cannot split kernels of attention ({', '.join(sorted({op.kind for op in kernels}))}), so every device "
        f"computes them whole, {share:.0%} of the step: {plain}, or plan without the form and run `plan.jit`."
    ]


def not_held_words(plan: Plan) -> str:
    """Return a clause on the faster baselines, at least one, that the plan's form cannot hold as they are priced."""
    names = plan.origin.not_held
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{', '.join(names)} {verb} priced with splits of single tensors and values that the {plan.origin.form} form "
        "cannot state"
    )


def lost_values(plan: Plan, program: Program, form: Form) -> Iterator[LostValue]:
    """Yield the values of forward passes that lack splits of the plan in a form of `Rest.XLA`, in program order.

    Each source line is named once, with its first value. Values without a line, and those of other forms, are left out.
    Raises `UserError` for a plan that cannot be priced again.
    """
    if form.rest is not Rest.XLA:
        return
    program = as_planned(program, plan)
    model, choices = reprice(plan, program, reading := analyse_program(program, Topology.parse(plan.topology)))
    given = expressible_specs(form, plan.arguments, plan.shapes, plan.roles, plan.mesh)
    completed = Propagation(model, form.rest, plan.results if form.state else {}).choices(given)
    named = set[str]()
    for op in reading.graph.ops:
        # A gradient has no line of its own on which a constraint could stand.
        if not op.line or op.line in named or "transpose(" in op.name:
            continue
        for tensor in op.results:
            if model.structure.cluster_of[tensor] < 0:
                continue
            spec, held = (tensor_spec(model, each, tensor) for each in (choices, completed))
            if any(set(own) - set(kept) for own, kept in zip(spec.dims, held.dims, strict=True)):
                named.add(op.line)
                yield LostValue(op.line, op.kind, tuple(reading.graph.tensors[tensor].shape), spec)
                break
