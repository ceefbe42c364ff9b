"""A plan as code or configuration for other frameworks.

The first lines of every form list the parts of the plan that it cannot express.
"""

import dataclasses
import itertools
import math

from autoshard.base.units import format_bytes, format_seconds
from autoshard.errors import FormError, UserError
from autoshard.exports.export_text import other_code, partition
from autoshard.exports.form_writers import writer_of
from autoshard.planning import (
    Form,
    Plan,
    Prediction,
    Rest,
    Spec,
    by_name,
    check_names,
    eager_peak,
    examples_sentence,
    expressible_specs,
    form_named,
    held_remat,
    lost_values,
    planned_remat,
    price_form,
    reopen,
    splits_in_plan,
    splits_nothing,
    with_split_batch,
)
from autoshard.program import Program


SLOWEST = 1.1
"""Largest step of an export, as a multiple of the plan's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Export:
    """A plan in one form, with the prediction for that form."""

    form: str
    """Name of the form, as in `FORMS`."""
    text: str
    """The whole export, head included."""
    prediction: Prediction | None
    """The prediction of a step with the form's shardings; None if the form cannot be priced."""
    sentence: str
    """The form's prediction in words, compared with that of the plan; the reason if there is no prediction."""


def export_plan(plan: Plan, form: str, program: Program | None = None, *, force: bool = False) -> str:
    """Return the plan as text in one of the forms of `autoshard.planning.FORMS`.

    The first lines list the parts of the plan that the form cannot represent, and predict step time and memory of the
    rest. The prediction needs the plan's program, which is opened again at its source unless it is given.

    Raises: UserError for an unknown form, for one that does not fit the plan or its program, and for a file of bytes.
    Raises: FormError, unless `force` is True, for a form that cannot hold the plan. It would split nothing, its step
    takes more than `SLOWEST` of the plan's, or it does not fit where the plan does.
    """
    return make_export(plan, form, program, force=force).text


def make_export(plan: Plan, form: str, program: Program | None = None, *, force: bool = False) -> Export:
    """Return the plan in one of the forms of `autoshard.planning.FORMS`, with the prediction for that form.

    Compiler flags of the plan are added to the sentence. Raises: UserError as `export_plan` does.
    """
    known = form_named(form)
    if known.rest is not Rest.STAGES:
        plan.check_one_step()
    if not known.text:
        raise UserError(
            f"{form} is a file of bytes, no text: write it with `autoshard.exec.jax_export(plan, program)`."
        )
    writer = writer_of(known)
    if writer.check is not None:
        writer.check(plan, program)
    if not force:
        _refuse_other_code(plan, known)
    program, problem = _opened(plan, known, program)
    _check_program(plan, program)
    check_names(known, plan.program_name, program, problem)
    if program is not None and known.rest in (Rest.XLA, Rest.DTENSOR) and plan.origin.form != known.name:
        plan = with_split_batch(plan, program, known.gathers)
    examples = examples_sentence(plan, known, program, force)
    if not force:
        _refuse_nothing(plan, known, program)
    held = _held_remat(plan, known)
    prediction, sentence = _priced(plan, known, program, problem, held)
    if not force:
        _refuse_slow(plan, known, prediction, program, held)
    eager = eager_peak(plan, prediction) if known.gathers and prediction is not None else None
    if eager is not None:
        limit = plan.memory_limit_bytes
        over = f", more than the {format_bytes(limit)} it has" if eager > limit else ""
        sentence += (
            f" Eager torch needs {format_bytes(eager)} of one device{over}: it keeps logits in float32, and embedding "
            "and head gathered. The other figures are of a step compiled by XLA; `autoshard plan --for` and "
            "`autoshard degrees` state its time in eager torch."
        )
        if over and plan.prediction.fits and not force:
            within = plan.origin.form == known.name
            remedy = "Plan with more --microbatches or a smaller --batch"
            remedy = remedy if within else f"Repeat `autoshard plan` with --for {form}"
            raise FormError(
                f"eager torch does not hold this plan in the {form} form: it needs {format_bytes(eager)} of one "
                f"device{over}. It keeps logits in float32, and embedding and head gathered. {remedy}, "
                "or write it all the same with --force if the loss is computed in chunks or compiled."
            )
    elif known.gathers:
        sentence += " The figures are of a step compiled by XLA"
        configured = plan.source is not None and plan.source.is_configuration
        sentence += "; `autoshard degrees` has those of eager torch." if configured else ", not by eager torch."
    if known.of_torch and program is not None and not other_code(plan, program):
        sentence += (
            " The plan is of JAX code: the names below are those of its arguments, and no torch module has them."
        )
    sentence += f" {examples}" if examples else ""
    if plan.flags:
        sentence += f' The step is to run with LIBTPU_INIT_ARGS="{" ".join(plan.flags)}".'
    inputs = (plan, sentence, program) if known.reads_program else (plan, sentence)
    return Export(form, writer.write(*inputs), prediction, sentence)


def _check_program(plan: Plan, program: Program | None) -> None:
    """Raise UserError if a program has other arguments than the plan, by name or shape; None passes."""
    if program is None:
        return
    theirs = {each.name: tuple(each.shape) for each in program.arguments}
    mine = {name: tuple(plan.shapes[name]) for name in plan.arguments}
    if theirs == mine:
        return
    name = next((name for name in (*mine, *theirs) if mine.get(name) != theirs.get(name)), "")
    shapes = [f"of shape {list(each[name])} in" if name in each else "not in" for each in (mine, theirs)]
    raise UserError(
        f"the program is not the one of the plan ({plan.program_name}): argument `{name}` is {shapes[0]} the plan and "
        f"{shapes[1]} the program; plan it again."
    )


def _refuse_other_code(plan: Plan, form: Form) -> None:
    """Raise FormError for a plan of a padded or quantised model; the user's code has the model's sizes and matmuls."""
    options = plan.source.options if plan.source is not None else {}
    for name, own in (("pad", "sizes"), ("quantize", "matmuls")):
        if options.get(name) not in (None, "none"):
            raise FormError(
                f"the {form.name} form cannot say --{name} {options[name]}: its code has the model's own {own}. "
                f"`plan.jit(step)` and --to jax-export hold the plan; plan without --{name}, or write it all the same "
                "with --force."
            )


def _refuse_nothing(plan: Plan, form: Form, program: Program | None) -> None:
    """Raise FormError if the form would split nothing of a plan that splits.

    Return for one device, for the MaxText form, for pipeline stages and for a form with hints. Results count as
    splits if the form has them (`form.state`).
    """
    if form.hints or form.rest in (Rest.MAXTEXT, Rest.STAGES) or math.prod(plan.mesh.values()) == 1:
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
        raise FormError(
            f"the {form.name} form can express none of the plan's {count} splits, so every device would do all work; "
            f"plan with --for {form.name}, or write it all the same with --force."
        )


def _held_remat(plan: Plan, form: Form) -> str:
    """Return the recomputation that layers have in a form if it is not the plan's, else an empty text."""
    try:
        planned = planned_remat(plan)
    except UserError:  # a choice of the program's own, which the step keeps
        return ""
    held = None if planned is None else str(held_remat(form, planned))
    return "" if held is None or held == str(planned) else held


def _refuse_slow(plan: Plan, form: Form, prediction: Prediction | None, program: Program | None, held: str) -> None:
    """Raise FormError if a form's step takes more than `SLOWEST` of the plan's, or does not fit where the plan does.

    The error names the first values that lack splits, and ends with the command that plans within the form. It proposes
    no constraint on these values: XLA splits their neighbours in its own way, and the step may become slower. Return
    for a form without a price, and for a plan that was made within the form. `held` is as of `_held_remat`.
    """
    planned = plan.prediction
    if prediction is None or (plan.origin.form == form.name and not held):
        return
    slow = prediction.step_time_s > SLOWEST * planned.step_time_s
    if slow or (planned.fits and not prediction.fits):
        both = [
            f"{format_seconds(each.step_time_s)} and {format_bytes(each.peak_bytes)}" for each in (prediction, planned)
        ]
        raise FormError(
            f"the {form.name} form cannot hold this plan{_why(plan, held)}: its step would take {both[0]} of one "
            f"device, the plan's takes {both[1]}. {_lost(plan, form, program)}{_whole(form)}--force writes it all the "
            "same. For the best plan that the form can hold, which may be much slower or not fit, repeat "
            f"`autoshard plan` with --for {form.name}."
        )


_LOST = 3
"""Most values that a refusal names."""


def _lost(plan: Plan, form: Form, program: Program | None) -> str:
    """Return a sentence on the first values that lack splits of the plan in a form.

    Empty if there are none, and without a program that is the user's JAX code.
    """
    if program is None or plan.uses or (plan.source is not None and not plan.source.program.endswith(".py")):
        return ""
    lost = list(itertools.islice(lost_values(plan, program, form), _LOST))
    if not lost:
        return ""
    places = ", ".join(
        f"{each.line} ({each.kind}, {'x'.join(map(str, each.shape)) or 'a scalar'}, {partition(each.spec)})"
        for each in lost
    )
    return f"The first values that lose a split are at {places}, or inside of what is called there. "


def _why(plan: Plan, held: str) -> str:
    """Return a phrase on the recomputation `held` by a form; empty for the plan's own."""
    return f", whose layers recompute by {planned_remat(plan)} and there by {held}" if held else ""


def _whole(form: Form) -> str:
    """Return a sentence on the ways to run the whole plan where `form` cannot hold it; empty if none is known."""
    if form.rest is Rest.XLA and form.layers:
        return "`plan.jit(step)` and --to jax-export hold it whole. "
    if form.rest is Rest.DTENSOR:
        return "`plan.distribute(module)` holds more of it. " if form.name != "dtensor" else ""
    return ""


def _opened(plan: Plan, form: Form, program: Program | None) -> tuple[Program | None, str]:
    """Return the plan's program and an empty text, or None and the problem if the program cannot be opened.

    A given program is returned. None and an empty text are returned if neither the form, its price nor the check of
    its examples needs the program.
    """
    checked = form.gathers and plan.source is not None and not plan.source.is_configuration
    unpriced = plan.origin.form == form.name and not (form.reads_program or checked or _held_remat(plan, form))
    if program is not None or unpriced or form.rest is Rest.STAGES:
        return program, ""
    try:
        return reopen(plan), ""
    except UserError as error:
        return None, str(error)


def _priced(plan: Plan, form: Form, program: Program | None, problem: str, held: str) -> tuple[Prediction | None, str]:
    """Return the prediction for a form's shardings, and the sentence that reports it.

    The prediction is None if the form cannot be priced; the sentence then names the reason (`problem` if the program
    could not be opened). It is the plan's own for stages, and for a plan that was made for this form and is without
    program. `held` is as of `_held_remat`: another recomputation than the plan's is priced.
    """
    if form.rest is Rest.STAGES:
        planned = plan.prediction
        step, peak = format_seconds(planned.step_time_s), format_bytes(planned.peak_bytes)
        return planned, f"Predicted: a step of {step}, {peak} of one device of the fullest stage."
    if problem and (held or plan.origin.form != form.name):
        return None, f"This form's specs are not priced: {problem}"
    try:
        recomputed = reopen(plan, remat=held) if held and program is not None else None
        prediction = plan.prediction if program is None else price_form(plan, program, form, recomputed)
    except UserError as error:
        return None, f"This form's specs are not priced: {error}"
    if prediction is None:
        return None, "This form's specs are not priced: it splits in ways that are not modelled."
    planned = plan.prediction
    both = f"the plan itself: {format_seconds(planned.step_time_s)}, {format_bytes(planned.peak_bytes)}"
    if (prediction.step_time_s, prediction.peak_bytes) == (planned.step_time_s, planned.peak_bytes):
        both = "the same as the plan itself"
    fits = "" if prediction.fits else ", which does not fit"
    step, peak = format_seconds(prediction.step_time_s), format_bytes(prediction.peak_bytes)
    sentence = f"Predicted with what this form holds: a step of {step}, {peak} of one device{fits} ({both})."
    if form.hints and program is not None:
        without = price_form(plan, program, dataclasses.replace(form, hints=False))
        assert without is not None
        figures = f"{format_seconds(without.step_time_s)}, {format_bytes(without.peak_bytes)}"
        sentence += f" `jit_unchanged`, without the hints: {figures}."
    return prediction, sentence
