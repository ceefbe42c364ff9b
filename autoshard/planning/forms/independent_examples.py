"""Check that a step is a mean over independent examples, which forms that gather parameters rely on."""

from autoshard.errors import FormError, UserError
from autoshard.planning.forms.export_forms import Form
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.record.plan_record import Plan
from autoshard.program import Program, Reduced, Reduction, Role


_NORMS = (
    "Batch norms have the statistics of each process's part of the batch, as always in FSDP; those of the planned step "
    "are of the whole batch, as `torch.nn.SyncBatchNorm` computes them on GPUs."
)


def examples_reduction(program: Program) -> Reduced | None:
    """Return the `Reduced` of the examples in a step, each input cut along its dim of examples, if it has one.

    None for a program that is no torch module of the user's.
    """
    if program.reduction is None:
        return None
    examples = analyse_program(program, "cpu").groups.examples
    return program.reduction(
        {
            argument.name.removeprefix("batch."): examples.get(position, -1)
            for position, argument in enumerate(program.arguments)
            if argument.role is Role.BATCH
        }
    )


def shares_examples(plan: Plan) -> bool:
    """Return True if devices of a plan have different examples."""
    batch = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "batch"]
    axes = {*plan.batch_axes, *(axis for spec in batch for axis in (spec.dims or ((),))[0])}
    return any(plan.mesh[axis] > 1 for axis in axes)


def check_planned(form: Form, program: Program) -> None:
    """Raise `UserError` if examples meet in a step that is to be planned for a form that gathers parameters."""
    if meeting := _meeting(form, examples_reduction(program) if form.gathers else None):
        raise UserError(
            f"{meeting}; plan with --for dtensor or --for torch-xla, or without --for and run "
            "`plan.distribute(module, mesh)`."
        )


def examples_sentence(plan: Plan, form: Form, program: Program | None, force: bool) -> str:
    """Return sentences on the loss and the batch norms of a plan's step in a form that gathers parameters; may be
    empty.

    Raises `FormError`, unless `force` is True, if examples meet in the step.
    """
    if not form.gathers or program is None or not shares_examples(plan):
        return ""
    reduction = examples_reduction(program)
    if reduction is None:
        return ""
    meeting = _meeting(form, reduction)
    if meeting and not force:
        raise FormError(
            f"{meeting}; choose --to dtensor, --to torch-xla or `plan.distribute(module, mesh)`, or write it all the "
            "same with --force."
        )
    sentences = [f"{meeting[0].upper()}{meeting[1:]}."] if meeting else []
    if reduction.kind is Reduction.SUM:
        sentences.append(
            "The loss is a sum over examples, and gradients are averaged over the processes that share the batch: "
            "multiply the loss by their number."
        )
    elif reduction.kind is Reduction.QUOTIENT:
        sentences.append(
            "The loss divides by a count, such as that of targets that are not ignored. Each process divides by the "
            "count of its own rows, which is the planned step if all counts are equal."
        )
    elif reduction.kind is Reduction.COMBINED:
        sentences.append(
            f"The loss has {reduction.why}: each process computes it of its own rows, and gradients are averaged."
        )
    elif reduction.why:
        sentences.append(f"The step was not checked for examples that meet, as {reduction.why}.")
    if reduction.norms:
        sentences.append(_NORMS)
    return " ".join(sentences)


def _meeting(form: Form, reduction: Reduced | None) -> str:
    """Return a clause on the operation where examples meet, or on outputs that FSDP does not see; empty without any."""
    if reduction is not None and reduction.closed:
        return (
            f"the {form.name} form finds no tensors in the `{reduction.closed}` that the module returns, and would sum "
            "no gradients (it finds those of a dict, and of a class that "
            f"`torch.utils._pytree.register_dataclass({reduction.closed})` opens)"
        )
    if reduction is None or reduction.kind is not Reduction.OTHER:
        return ""
    place = f", at {reduction.line}" if reduction.line else ""
    return (
        f"the {form.name} form runs the step on each process's own rows of the batch and averages gradients, which "
        f"gives other values for this step: it has {reduction.why}{place}"
    )
