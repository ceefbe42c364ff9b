"""Check that a step is a mean over independent examples, which forms that gather parameters rely on."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from autoshard.base.shared_results import shared
from autoshard.errors import FormError, UserError
from autoshard.planning.forms.export_forms import Form
from autoshard.planning.price.analysed_program import AnalysedProgram, analyse_program
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import is_stacked
from autoshard.planning.space.dim_groups import tensor_groups
from autoshard.program import Program, Reduced, Reduction, Role


_NORMS = (
    "Batch norms have the statistics of each process's part of the batch, as always in FSDP; those of the planned step "
    "are of the whole batch, as `torch.nn.SyncBatchNorm` computes them on GPUs."
)
_UNTIED = 3
"""Most inputs untied to the batch that are tried as shared by all examples."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnExamples:
    """The examples of a step in a form whose processes compute the step on their own examples."""

    dims: Mapping[int, int]
    """Position of each batch argument with examples -> the dim that counts them. Others are whole in each process."""
    reduction: Reduced | None
    """The reduction of the examples; None for a program that is no torch module of the user's."""


def own_examples(program: Program) -> OwnExamples:
    """Return the dims of examples with which the step can be computed in parts, and their reduction.

    Dim groups count the first dim of an input as examples even if no op ties it to the batch. All examples share such
    an input, for instance a grid or a table of prototypes, if they would meet in the step otherwise.
    """
    # The program is part of the result, since its id is unique only as long as it exists.
    return shared("own examples", id(program), lambda: (program, _own_examples(program)), 2)[1]


def with_own_examples(program: Program, reading: AnalysedProgram) -> AnalysedProgram:
    """Return an analysis of a program whose dim groups have the examples of `own_examples`."""
    if not _untied(reading):
        return reading
    groups = dataclasses.replace(reading.groups, examples=own_examples(program).dims)
    return dataclasses.replace(reading, groups=groups)


def _own_examples(program: Program) -> OwnExamples:
    """Return `own_examples` of a program; of equally good readings that with the fewest shared inputs."""
    reading = analyse_program(program, "cpu")
    examples, reduction = dict(reading.groups.examples), program.reduction
    if reduction is None:
        return OwnExamples(examples, None)

    def read(dims: Mapping[int, int]) -> OwnExamples:
        """Return the examples with the reduction of these dims."""
        named = {
            argument.name.removeprefix("batch."): dims.get(position, -1)
            for position, argument in enumerate(program.arguments)
            if argument.role is Role.BATCH
        }
        return OwnExamples(dims, reduction(named))

    found = read(examples)
    untied = _untied(reading)
    for number in range(1, 1 + len(untied) if len(untied) <= _UNTIED else 1):
        for whole in itertools.combinations(untied, number):
            if _doubts(found.reduction) == 0:
                return found
            other = read({position: dim for position, dim in examples.items() if position not in whole})
            # A loss that cannot be read so says nothing of the examples.
            found = other if _doubts(other.reduction) < min(2, _doubts(found.reduction)) else found
    return found


def _untied(reading: AnalysedProgram) -> list[int]:
    """Return the positions of arguments with examples that no op ties to the batch."""
    groups, tensors = reading.groups, reading.graph.arguments
    of = {p: tensor_groups(reading.structure, groups.of_factor, tensors[p]) for p in groups.examples}
    return [position for position, own in of.items() if groups.batch not in own]


def _doubts(reduction: Reduced | None) -> int:
    """Return 0 if parts of the batch give the step, 1 if nearly, and 2 if examples meet or the loss cannot be read."""
    if reduction is None or reduction.closed:
        return 0
    known = reduction.kind not in (Reduction.OTHER, Reduction.COMBINED) and not reduction.why
    return 0 if known else 1 if reduction.kind is Reduction.COMBINED else 2


def shares_examples(plan: Plan) -> bool:
    """Return True if devices of a plan have different examples."""
    batch = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "batch"]
    axes = {*plan.batch_axes, *(axis for spec in batch for axis in (spec.dims or ((),))[0])}
    return any(plan.mesh[axis] > 1 for axis in axes)


def check_planned(form: Form, program: Program) -> None:
    """Raise `UserError` if a form that gathers parameters cannot run a step: if examples meet in it, or if a parameter
    has no dim.
    """
    if refusal := _scalars(form, {a.name: a.shape for a in program.arguments if a.role is Role.PARAMETER}):
        raise UserError(f"{refusal}.")
    if meeting := _meeting(form, own_examples(program).reduction if form.gathers else None):
        raise UserError(
            f"{meeting}; plan with --for dtensor or --for torch-xla, or without --for and run "
            "`plan.distribute(module, mesh)`."
        )


def examples_sentence(plan: Plan, form: Form, program: Program | None, force: bool) -> str:
    """Return sentences on the loss and the batch norms of a plan's step in a form that gathers parameters; may be
    empty.

    Raises `FormError`, unless `force` is True, if examples meet in the step, or if a parameter has no dim.
    """
    refusal = _scalars(form, {n: shape for n, shape in plan.shapes.items() if plan.roles[n] == Role.PARAMETER})
    if refusal and not force:
        raise FormError(f"{refusal}; or write it all the same with --force.")
    if not form.gathers or not shares_examples(plan):
        return ""
    if plan.source is not None and plan.source.is_configuration and "batch.labels" in plan.arguments:
        return (
            "The loss of transformers divides by the count of labels that are not -100. Each process divides by the "
            "count of its own rows, which is the planned step if all counts are equal."
        )
    reduction = None if program is None else own_examples(program).reduction
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


def _scalars(form: Form, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return a clause on the first parameter without dims, which torch's `fully_shard` refuses; empty without any."""
    of_layers = {name: shape[1:] if is_stacked(name) else shape for name, shape in shapes.items()}
    name = next((name for name, shape in of_layers.items() if not shape), "") if form.gathers else ""
    return name and (
        f"torch's `fully_shard` takes no parameter without dims, as `{name}` is: make its shape [1], or choose the "
        "form dtensor or `plan.distribute(module, mesh)`"
    )


def _meeting(form: Form, reduction: Reduced | None) -> str:
    """Return a clause on the operation where examples meet, or on outputs that FSDP does not see; empty without any."""
    if reduction is not None and reduction.closed:
        return (
            f"the {form.name} form finds no tensors in the `{reduction.closed}` that the module returns, and would sum "
            "no gradients (it finds those of a dict, and of a class that "
            f"`torch.utils._pytree.register_dataclass({reduction.closed})` opens)"
        )
    if reduction is not None and reduction.written and reduction.kind is not Reduction.OTHER:
        return (
            f"the {form.name} form runs the step on each process's own rows of the batch, from which this step "
            f"computes its buffer `{reduction.written[0]}`: each process would have another one"
        )
    if reduction is None or reduction.kind is not Reduction.OTHER:
        return ""
    place = f", at {reduction.line}" if reduction.line else ""
    return (
        f"the {form.name} form runs the step on each process's own rows of the batch and averages gradients, which "
        f"gives other values for this step: it has {reduction.why}{place}"
    )
