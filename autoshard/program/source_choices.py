"""Options that a source leaves to the planner, and shardings that the program itself states."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.program.program_record import Lifted, Program, serialise


Choices = Mapping[str, tuple[Any, ...]]
"""Values that the planner may choose from, by option."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ATTRIBUTE = "autoshard_choices"
"""Attribute of a function with the choices that a decorator declares."""


def choices(**values: Sequence[Any]) -> Callable[[_Function], _Function]:
    """Return a decorator that declares the values from which the planner may choose for a function's arguments.

    The function returns a program, and is itself unchanged.

    ::

        @autoshard.choices(remat=["none", "full"], microbatches=[1, 2, 4])
        def program(remat="full", microbatches=1):
            ...

    A recipe is one value of each argument. `autoshard.plan(program, ...)` and `autoshard plan model.py` plan the
    program for every recipe that may be faster than the best one so far. They return the plan that is fastest for each
    element of the batch. Values are texts, numbers, booleans and None. Raises `UserError` for a name that the function
    does not take, and for values of other types. An empty list, or one that repeats a value, raises it too.
    """

    def decorate(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, checked_choices(values, function, f"`{function.__name__}`"))
        return function

    return decorate


def choices_of(function: Any) -> Choices:
    """Return the values that `choices` declared for a function; empty for any other object."""
    return getattr(function, _ATTRIBUTE, {})


def checked_choices(values: Mapping[str, Any], function: Any, where: str) -> Choices:
    """Return the values by name as tuples.

    Raises `UserError`, as `choices` does, about the function that `where` names. It also does for a `function` that is
    not callable.
    """
    if not callable(function):
        raise UserError(f"{where} has choices, but is no function that could take them; define it with `def`.")
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        for name in values:
            if name not in known:
                raise UserError(
                    f"{where} is to be planned with choices of `{name}`, which it does not take; it takes "
                    f"{', '.join(known) or 'nothing'}."
                )
    for name, given in values.items():
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise UserError(f"the choices of `{name}` for {where} are {given!r}; write a list such as [1, 2, 4].")
        for value in given:
            if value is not None and not isinstance(value, (str, int, float, bool)):
                raise UserError(
                    f"a choice of `{name}` for {where} is a {type(value).__name__}; use texts, numbers or booleans."
                )
        if len(set(given)) < len(given):
            raise UserError(f"the choices of `{name}` for {where} name a value twice: {given!r}.")
    return {name: tuple(given) for name, given in values.items()}


EXCHANGES = ("auto", "gather", "heads", "ring")
"""Exchanges of attention over a split sequence.

- `auto`: the fastest of the others.
- `gather`: every device has its own queries and gathers keys and values.
- `heads`: a split of the sequence becomes a split of the heads, and back.
- `ring`: keys and values are sent around a ring.
"""


def check_exchange_name(exchange: str) -> str:
    """Return the name, one of `EXCHANGES`, unchanged. Raises `UserError` for an unknown one."""
    if exchange not in EXCHANGES:
        raise UserError(f"exchange `{exchange}` is not known; use {', '.join(EXCHANGES[:-1])} or {EXCHANGES[-1]}.")
    return exchange


def weak_type_notes(
    names: Sequence[str], leaves: Sequence[Any], ties: Mapping[int, int], results: Sequence[Any]
) -> tuple[str, ...]:
    """Return a note if results with a dtype of their own replace weakly typed arguments, else nothing.

    JAX traces such a step again for its own results, so that a plan of the first step does not run the second. `ties`
    maps arguments to results, by number; leaves and results are JAX's abstract arrays.
    """
    weak = [names[i] for i, result in ties.items() if leaves[i].weak_type and not results[result].weak_type]
    if not weak:
        return ()
    which = f"`{weak[0]}` and {len(weak) - 1} more are" if len(weak) > 1 else f"`{weak[0]}` is"
    return (
        f"{which} weakly typed, as of `jnp.full(shape, 0.1)`, and the results that replace them are not: "
        "the second step is another program. Give a dtype.",
    )


def sharding_notes(counts: mlir.ConstraintCounts, lifted: bool = False) -> tuple[str, ...]:
    """Return notes on the shardings in the program that a plan respects or ignores, one for each kind that it has.

    With `lifted` they state that constraints and argument specs are removed.
    """
    notes: list[str] = []
    if counts.constraints:
        one = counts.constraints == 1
        noun = "1 sharding constraint; it is" if one else f"{counts.constraints} sharding constraints; they are"
        notes.append(f"The program itself holds {noun} {'lifted, as you asked' if lifted else 'respected'}.")
    if counts.regions:
        noun = "1 region" if counts.regions == 1 else f"{counts.regions} regions"
        verb = "it is" if counts.regions == 1 else "they are"
        notes.append(f"The program itself holds {noun} sharded by hand (shard_map); {verb} respected.")
    if counts.arguments:
        verb = "this is lifted, as you asked" if lifted else "this is respected"
        split = "1 argument is" if counts.arguments == 1 else f"{counts.arguments} arguments are"
        notes.append(f"The program itself says how {split} split; {verb}.")
    if counts.idle:
        one = counts.idle == 1
        noun, verb = ("1 sharding", "it is") if one else (f"{counts.idle} shardings", "they are")
        notes.append(
            f"The program holds {noun} on a mesh of one device, which says nothing of how to split: {verb} left out. "
            "Trace it under a mesh of the size that you plan for (an AbstractMesh will do) to keep what it says."
        )
    return tuple(notes)


def lift_constraints(program: Program) -> Program:
    """Return the program without its own sharding constraints and argument specs; manual regions stay.

    The program that runs has none either. Its fingerprint changes, and notes state the removal. Returns the same record
    if there is nothing to remove.
    """
    with mlir.new_context() as context:
        module = mlir.parse_module(program.module, context)
        counts = mlir.count_constraints(module)
        if not counts.constraints and not counts.arguments:
            return program
        old, new = sharding_notes(counts), sharding_notes(counts, lifted=True)
        mlir.drop_constraints(module)
        body, fingerprint = serialise(module, program.arguments)
    notes = (*(note for note in program.notes if note not in old), *new)
    return dataclasses.replace(program, module=body, fingerprint=fingerprint, notes=notes, lifted=Lifted.ALL)
