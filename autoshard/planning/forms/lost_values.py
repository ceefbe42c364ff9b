"""Values of a step that a form splits otherwise than the plan, since the form leaves them to XLA's propagation."""

import dataclasses
from collections.abc import Iterator

from autoshard.cost import Topology
from autoshard.planning.forms.export_forms import Form, Rest, expressible_specs
from autoshard.planning.forms.propagated_specs import Propagation
from autoshard.planning.price.analysed_program import analyse_program, as_planned, reprice
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.program import Program


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


def lost_values(plan: Plan, program: Program, form: Form) -> Iterator[LostValue]:
    """Yield the values of forward passes that lack splits of the plan in a form of `Rest.XLA`, in program order.

    Each source line is named once, with its first value. Values without a line, and those of other forms, are left out.
    Raises `UserError` for a plan that cannot be priced again.
    """
    if form.rest is not Rest.XLA:
        return
    program = as_planned(program, plan)
    model, choices = reprice(plan, program, reading := analyse_program(program, Topology.parse(plan.topology).backend))
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
