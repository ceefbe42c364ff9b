"""A plan as code or configuration for other frameworks.

The first lines of every form list the parts of the plan that it cannot express.
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
    expressible_specs,
    form_named,
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
    """A plan in one form, with the prediction for that form."""

    form: str
    text: str
    prediction: Prediction | None
    """The prediction of a step with the form's shardings; None if the form cannot be priced."""
    sentence: str
    """The form's prediction in words, compared with that of the plan."""


def export_plan(plan: Plan, form: str, program: Program | None = None, *, force: bool = False) -> str:
    """Return the plan as text in one of `EXPORT_FORMS`.

    The first lines list the parts of the plan that the form cannot represent, and predict step time and memory of the
    rest. The prediction needs the plan's program, which is opened again at its source unless it is given.

    Raises: UserError for another form, and for a form that would split nothing of a plan that splits, unless `force` is
    set.
    """
    return make_export(plan, form, program, force=force).text


def make_export(plan: Plan, form: str, program: Program | None = None, *, force: bool = False) -> Export:
    """Return the plan in one of `EXPORT_FORMS`, with the prediction for that form.

    Raises: UserError as `export_plan` does, and for a form that is a file of bytes.
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
    # Hints and names need the program itself; other forms need it for the price only.
    if form in OF_PROGRAM:
        text = OF_PROGRAM[form](plan, sentence, program)
    else:
        text = EXPORT_FORMS[form](plan, sentence)
    return Export(form, text, prediction, sentence)


def _refuse_nothing(plan: Plan, form: Form, program: Program | None) -> None:
    """Refuse a form that would split nothing of a plan that splits."""
    if form.rest in (Rest.MAXTEXT, Rest.STAGES) or math.prod(plan.mesh.values()) == 1:
        return
    specs: dict[str, Spec | None] = {}
    if form.rest is not Rest.NAMES:
        specs.update(expressible_specs(form, plan.arguments, plan.shapes, plan.roles, plan.mesh))
    elif program is not None:
        specs.update(by_name(plan, program)[1])
    if form.state:
        specs = {**specs, **{f"result {name}": spec for name, spec in plan.results.items()}}
    count = splits_in_plan(plan)
    if count and splits_nothing(specs, plan.mesh):
        raise UserError(
            f"the {form.name} form can express none of the plan's {count} splits, so every device would do all work; "
            f"plan with --for {form.name}, or write it all the same with --force."
        )


def _opened(plan: Plan, form: Form, program: Program | None) -> tuple[Program | None, str]:
    """Open the plan's program if a form or its price needs it; return the problem as text if it cannot be opened."""
    unpriced = plan.origin.form == form.name and form.name not in OF_PROGRAM
    if program is not None or unpriced or form.rest is Rest.STAGES:
        return program, ""
    try:
        return reopen(plan), ""
    except UserError as error:
        return None, str(error)


def _priced(plan: Plan, form: Form, program: Program | None, problem: str) -> tuple[Prediction | None, str]:
    """Return the prediction for a form's shardings, and the sentence that reports it."""
    if form.rest is Rest.STAGES:
        planned = plan.prediction
        step, peak = format_seconds(planned.step_time_s), format_bytes(planned.peak_bytes)
        return planned, f"Predicted: a step of {step}, {peak} of one device of the fullest stage."
    if problem and plan.origin.form != form.name:
        return None, f"This form's specs are not priced: {problem}"
    try:
        prediction = plan.prediction if program is None else price_form(plan, program, form)
    except UserError as error:
        return None, f"This form's specs are not priced: {error}"
    if prediction is None:
        return None, "This form's specs are not priced: it splits in ways that are not modelled."
    planned = plan.prediction
    both = f"the plan whole: {format_seconds(planned.step_time_s)}, {format_bytes(planned.peak_bytes)}"
    if (prediction.step_time_s, prediction.peak_bytes) == (planned.step_time_s, planned.peak_bytes):
        both = "as the plan whole"
    fits = "" if prediction.fits else ", which does not fit"
    step, peak = format_seconds(prediction.step_time_s), format_bytes(prediction.peak_bytes)
    return prediction, f"Predicted with what this form holds: a step of {step}, {peak} of one device{fits} ({both})."


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
    """Return the plan's code for `jax.jit`."""
    return head(plan, unpinned(plan), sentence) + _JAX.format(
        mesh=f"MESH = {plan.mesh!r}",
        order=f"DEVICE_ORDER = {order_text(plan)}",
        make_mesh=MAKE_MESH,
        arguments=table("ARGUMENTS", {name: partition(spec) for name, spec in plan.arguments.items()}),
        results=table("RESULTS", {name: partition(spec) for name, spec in plan.results.items()}),
    )


def _hlo(plan: Plan, sentence: str) -> str:
    """Return the plan's shardings in HLO's syntax, one line for each argument and result."""
    order = ",".join(map(str, plan.device_order))
    lines = [head(plan, unpinned(plan), sentence), f"# device assignment (numbers in the topology's order): {order}\n"]
    for kind, specs in (("argument", plan.arguments), ("result", plan.results)):
        lines += [f"{kind} {_word(name)} {hlo_sharding(spec, plan.mesh)}\n" for name, spec in specs.items()]
    return "".join(lines)


def _word(name: str) -> str:
    """Return a name as one word of a line; a name with spaces or quotes is written as JSON."""
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
    """Return the plan's logical axes for Flax, one for each way to split a dim, since a name may have only one rule."""
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
        inputs="# The same for the step's other inputs.\n" + table("INPUT_AXES", inputs),
    )


def _rule(rules: dict[tuple[str, ...], str], axes: tuple[str, ...]) -> str:
    """Return the name of the rule for these axes, which no other rule has."""
    name = f"over_{'_'.join(axis_words(axes))}"
    while axes not in rules and name in rules.values():
        name += "_"
    return rules.setdefault(axes, name)


def _maxtext(plan: Plan, sentence: str) -> str:
    """Return the parallelism settings of MaxText's base.yml that are nearest to the plan's uses of axes."""
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
    remat, missing = maxtext_remat(plan)
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
    body = "".join(f"{key}: {value}\n" for key, value in settings.items()) + piped + remat
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
