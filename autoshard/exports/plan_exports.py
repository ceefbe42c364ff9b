"""A plan as code or configuration for the places where people already work.

Every form says in its first lines what of the plan it cannot express.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable

from autoshard.base.units import format_bytes, format_seconds
from autoshard.errors import UserError
from autoshard.exports.explicit_code import check_explicit, explicit_text
from autoshard.exports.export_text import (
    MAKE_MESH,
    comment,
    head,
    maxtext_remat,
    order_text,
    partition,
    table,
    unpinned,
)
from autoshard.exports.fsdp2_code import fsdp2_text
from autoshard.exports.haliax_mappings import haliax_text
from autoshard.exports.keras_layout_map import keras_text
from autoshard.exports.parallelize_code import torchtitan_text, transformers_text
from autoshard.exports.path_rules import rules_text
from autoshard.exports.pipelining_code import maxtext_pipeline, pipelining_text
from autoshard.exports.torch_code import dtensor_text, torch_xla_text
from autoshard.planning import (
    Form,
    Plan,
    Prediction,
    Rest,
    Spec,
    axis_words,
    by_name,
    check_names,
    form_named,
    held_specs,
    hlo_sharding,
    maxtext_uses,
    price_form,
    reopen,
    splits_in_plan,
    splits_nothing,
)
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Export:
    """A plan in one form, and what the form holds of it."""

    form: str
    text: str
    prediction: Prediction | None
    """The prediction of a step with what the form holds; None if that could not be told."""
    sentence: str
    """That prediction in words, beside the plan's own."""


def export_plan(plan: Plan, form: str, program: Program | None = None, *, force: bool = False) -> str:
    """The plan as text in one of `EXPORT_FORMS`.

    Its first lines say what of the plan the form cannot hold, and the predicted step time and memory of what it holds:
    for these the plan's program is opened again where it came from, unless it is given. Raises `UserError` for another
    form, and for one that would split nothing of a plan that splits, unless it is asked for with `force`.
    """
    return make_export(plan, form, program, force=force).text


def make_export(plan: Plan, form: str, program: Program | None = None, *, force: bool = False) -> Export:
    """The same with what the form holds of the plan.

    Raises `UserError` as `export_plan` does, and for a form that is a file of bytes.
    """
    known = form_named(form)
    if known.rest is not Rest.STAGES:
        plan.check_one_step()
    if form not in EXPORT_FORMS:
        raise UserError(
            f"{form} is a file of bytes, no text: write it with `autoshard.exec.jax_export(plan, program)`."
        )
    if form == "explicit":
        check_explicit(plan, program)
    program, problem = _opened(plan, known, program)
    if known.rest is Rest.NAMES:
        check_names(known, plan.program_name, program, problem)
    if not force:
        _refuse_nothing(plan, known, program)
    prediction, sentence = _priced(plan, known, program, problem)
    if plan.flags:
        sentence += f' The step is to run with LIBTPU_INIT_ARGS="{" ".join(plan.flags)}".'
    # Hints and names are read off the program itself; other forms have no more of it than its price.
    if form in OF_PROGRAM:
        text = OF_PROGRAM[form](plan, sentence, program)
    else:
        text = EXPORT_FORMS[form](plan, sentence)
    return Export(form, text, prediction, sentence)


def _refuse_nothing(plan: Plan, form: Form, program: Program | None) -> None:
    if form.rest in (Rest.MAXTEXT, Rest.STAGES) or math.prod(plan.mesh.values()) == 1:
        return
    held: dict[str, Spec | None] = {}
    if form.rest is not Rest.NAMES:
        held.update(held_specs(form, plan.arguments, plan.shapes, plan.roles, plan.mesh))
    elif program is not None:
        held.update(by_name(plan, program)[1])
    if form.state:
        held = {**held, **{f"result {name}": spec for name, spec in plan.results.items()}}
    count = splits_in_plan(plan)
    if count and splits_nothing(held, plan.mesh):
        raise UserError(
            f"in the {form.name} form every device would hold and do everything: all {count} splits of the plan are "
            f"of values that it cannot hold; plan for it with --for {form.name}, or write it all the same with --force."
        )


def _opened(plan: Plan, form: Form, program: Program | None) -> tuple[Program | None, str]:
    """The plan's program where a form or its price needs it, and what is wrong if it cannot be opened."""
    unpriced = plan.origin.form == form.name and form.name not in OF_PROGRAM
    if program is not None or unpriced or form.rest is Rest.STAGES:
        return program, ""
    try:
        return reopen(plan), ""
    except UserError as error:
        return None, str(error)


def _priced(plan: Plan, form: Form, program: Program | None, problem: str) -> tuple[Prediction | None, str]:
    """The prediction of what a form holds, and what is said of it."""
    if form.rest is Rest.STAGES:
        whole = plan.prediction
        step, peak = format_seconds(whole.step_time_s), format_bytes(whole.peak_bytes)
        return whole, f"Predicted: a step of {step}, {peak} of one device of the fullest stage."
    if problem and plan.origin.form != form.name:
        return None, f"What this form holds is not priced: {problem}"
    try:
        found = plan.prediction if program is None else price_form(plan, program, form)
    except UserError as error:
        return None, f"What this form holds is not priced: {error}"
    if found is None:
        return None, "What this form holds is not priced: it splits in ways that are not modelled."
    whole = plan.prediction
    both = f"the plan whole: {format_seconds(whole.step_time_s)}, {format_bytes(whole.peak_bytes)}"
    if (found.step_time_s, found.peak_bytes) == (whole.step_time_s, whole.peak_bytes):
        both = "as the plan whole"
    fits = "" if found.fits else ", which does not fit"
    step, peak = format_seconds(found.step_time_s), format_bytes(found.peak_bytes)
    return found, f"Predicted with what this form holds: a step of {step}, {peak} of one device{fits} ({both})."


_JAX = '''
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

{mesh}
{order}

{make_mesh}

def shardings(specs, mesh):
    """One NamedSharding for each name, in the order of the step's flat arguments (or results)."""
    return {{name: NamedSharding(mesh, spec) for name, spec in specs.items()}}


def jit(fn, args, mesh=None, **options):
    """`jax.jit(fn)` with the plan's shardings; `args` are its arguments, or their shapes, as they were planned."""
    mesh = make_mesh() if mesh is None else mesh
    ins, outs = jax.tree.structure(tuple(args)), jax.tree.structure(jax.eval_shape(fn, *args))
    return jax.jit(
        fn,
        in_shardings=ins.unflatten(shardings(ARGUMENTS, mesh).values()),
        out_shardings=outs.unflatten(shardings(RESULTS, mesh).values()),
        **options,
    )


{arguments}

{results}'''


def _jax(plan: Plan, sentence: str) -> str:
    return head(plan, unpinned(plan), sentence) + _JAX.format(
        mesh=f"MESH = {plan.mesh!r}",
        order=f"DEVICE_ORDER = {order_text(plan)}",
        make_mesh=MAKE_MESH,
        arguments=table("ARGUMENTS", {name: partition(spec) for name, spec in plan.arguments.items()}),
        results=table("RESULTS", {name: partition(spec) for name, spec in plan.results.items()}),
    )


def _hlo(plan: Plan, sentence: str) -> str:
    order = ",".join(map(str, plan.device_order))
    lines = [head(plan, unpinned(plan), sentence), f"# device assignment (numbers in the topology's order): {order}\n"]
    for kind, specs in (("argument", plan.arguments), ("result", plan.results)):
        lines += [f"{kind} {_word(name)} {hlo_sharding(spec, plan.mesh)}\n" for name, spec in specs.items()]
    return "".join(lines)


def _word(name: str) -> str:
    """A name as one word of a line; one that is none, or looks like text in quotes, is written as JSON."""
    return name if name.isprintable() and not re.search(r'[\s"{}\\]', name) and name else json.dumps(name)


_FLAX = '''
from flax.linen import logical_to_mesh_axes

{mesh}
{rules}
{parameters}
{inputs}

def partition_specs(axes=LOGICAL_AXES):
    """The `PartitionSpec` of each parameter (or of `INPUT_AXES`), as Flax makes it of names and rules."""
    return {{name: logical_to_mesh_axes(names, RULES) for name, names in axes.items()}}
'''


def _flax(plan: Plan, sentence: str) -> str:
    """A logical axis for each way in which a dim is split, since one name may have one rule only."""
    rules: dict[tuple[str, ...], str] = {}
    rows, inputs = {}, {}
    for name, spec in plan.arguments.items():
        if plan.roles[name] != "optimizer_state":
            into = rows if plan.is_weight(name) else inputs
            into[name] = repr(tuple(_rule(rules, axes) if axes else None for axes in spec.dims))
    listed = "".join(f"    ({name!r}, {(axes[0] if len(axes) == 1 else axes)!r}),\n" for axes, name in rules.items())
    lacks = (*unpinned(plan), "optimizer state; state made like its parameter is split like it.", "the device order.")
    return head(plan, lacks, sentence) + _FLAX.format(
        mesh=f"MESH = {plan.mesh!r}\n",
        rules=f"# For flax.linen.logical_axis_rules, or nnx.logical_axis_rules.\nRULES = (\n{listed})\n",
        parameters="# Names for nn.with_logical_partitioning, or nnx.with_partitioning, of each parameter.\n"
        + table("LOGICAL_AXES", rows),
        inputs="# The same of what the step takes beside them.\n" + table("INPUT_AXES", inputs),
    )


def _rule(rules: dict[tuple[str, ...], str], axes: tuple[str, ...]) -> str:
    """The name of the rule for these axes, which no other rule has."""
    name = f"over_{'_'.join(axis_words(axes))}"
    while axes not in rules and name in rules.values():
        name += "_"
    return rules.setdefault(axes, name)


def _maxtext(plan: Plan, sentence: str) -> str:
    """The parallelism settings of MaxText's base.yml that come nearest; an axis's use is read off the plan."""
    from autoshard.cost import Topology

    slices = Topology.parse(plan.topology).slices
    settings: dict[str, int] = {}
    notes = []
    uses = maxtext_uses(plan)
    dcn = slices
    for axis, size in plan.mesh.items():
        use = uses[axis]
        notes.append(f"{axis}={size} is used as {use} parallelism.")
        outer = size if dcn % size == 0 and dcn >= size else dcn if size % dcn == 0 else 1
        dcn //= outer
        for prefix, part in (("dcn", outer), ("ici", size // outer)):
            if part > 1:
                key = f"{prefix}_{use}_parallelism"
                settings[key] = settings.get(key, 1) * part
    again, missing = maxtext_remat(plan)
    piped, unpiped = maxtext_pipeline(
        plan, math.prod(plan.mesh[axis] for axis, use in uses.items() if use == "pipeline")
    )
    lacks = (
        *unpinned(plan),
        "single tensors that are split in another way than the rest; MaxText's own rules split by kind of dim.",
        "the device order.",
        *missing,
        *unpiped,
    )
    body = "".join(f"{key}: {value}\n" for key, value in settings.items()) + piped + again
    return head(plan, lacks, sentence) + "".join(map(comment, notes)) + body


EXPORT_FORMS: dict[str, Callable[[Plan, str], str]] = {
    "jax": _jax,
    "explicit": explicit_text,
    "flax": _flax,
    "maxtext": _maxtext,
    "keras": keras_text,
    "rules": rules_text,
    "haliax": haliax_text,
    "torch-xla": torch_xla_text,
    "dtensor": dtensor_text,
    "fsdp2": fsdp2_text,
    "transformers": transformers_text,
    "torchtitan": torchtitan_text,
    "hlo": _hlo,
    "torch-pipelining": pipelining_text,
}
OF_PROGRAM: dict[str, Callable[[Plan, str, Program | None], str]] = {"explicit": explicit_text, "haliax": haliax_text}
"""The forms that need the plan's program."""
