"""Recomputation that export forms can hold, where this differs from a plan's."""

import dataclasses
import re

from autoshard.errors import UserError
from autoshard.planning.forms.export_forms import Form, HeldRemat, layer_spec, module_pattern
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec, is_stacked, stack_names
from autoshard.program import Program, Remat, parse_remat


_MATMULS = "dots,keep=context"
"""The policy that recomputes least in MaxText: `minimal_with_context`. Its `none` recomputes everything.

Source: `get_remat_policy` of MaxText's decoders.
"""


def held_remat(form: Form, remat: Remat) -> Remat:
    """Return the recomputation that layers have in a form for that of a plan; `form.remat` decides.

    Forms with `WHOLE` recompute every layer if the plan recomputes any. Forms with `FIRST` recompute at least what is
    elementwise.
    """
    if form.remat is HeldRemat.ALL:
        return remat
    bases = tuple((policy.split(",")[0], count) for policy, count in remat.parts)
    if form.remat is HeldRemat.BASES:
        return Remat(bases)
    if form.remat is HeldRemat.FIRST:
        first = str(remat.of(0))
        return Remat(((_MATMULS if first == "none" else first, 0),))
    return Remat((("full" if any(base != "none" for base, _ in bases) else "none", 0),))


def holds_remat(form: Form | None, text: object) -> bool:
    """Return True if layers recompute in a form exactly as the policy `text` says.

    This holds without a form, and for a text that is no policy: a program's own choice, which its module applies.
    """
    if form is None or not isinstance(text, str):
        return True
    try:
        remat = parse_remat(text)
    except UserError:
        return True
    return str(held_remat(form, remat)) == str(remat)


def check_remat(form: Form | None, text: object) -> None:
    """Raise `UserError` if a form cannot hold the policy that a user gave as `--remat`."""
    if form is not None and not holds_remat(form, text):
        held = held_remat(form, parse_remat(str(text)))
        raise UserError(
            f"the {form.name} form cannot hold --remat {text}: its layers would recompute by {held}; give --remat "
            f"{held} or --remat auto with --for {form.name}."
        )


def plan_of_held(plan: Plan, program: Program) -> Plan:
    """Return the plan with the arguments of its program under another recomputation, which may stack other layers.

    A stack has the spec of its first layer in the plan. Raises `UserError` for an argument that the plan lacks.
    """
    arguments: dict[str, Spec] = {}
    for argument in program.arguments:
        single = stack_names(argument.name, 1)[0].replace("*", "0")
        own = next((name for name in plan.arguments if re.match(module_pattern(plan, name), single)), None)
        if own is None:
            raise UserError(f"the plan of {plan.program_name} has no argument {argument.name}; plan it again.")
        spec = layer_spec(plan, own)
        arguments[argument.name] = Spec(((), *spec.dims)) if is_stacked(argument.name) else spec
    shapes = {argument.name: tuple(argument.shape) for argument in program.arguments}
    roles = {argument.name: str(argument.role) for argument in program.arguments}
    return dataclasses.replace(plan, arguments=arguments, shapes=shapes, roles=roles)
