"""Options that a source leaves to the planner, and shardings that the program itself states."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.program.program_record import Lifted, Program, serialise


Choices = Mapping[str, tuple[Any, ...]]
"""The values that each choice may have."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ATTRIBUTE = "autoshard_choices"


def choices(**values: Sequence[Any]) -> Callable[[_Function], _Function]:
    """Say of a function that makes a program which values of its arguments the planner may choose from.

    ::

        @autoshard.choices(remat=["none", "full"], microbatches=[1, 2, 4])
        def program(remat="full", microbatches=1):
            ...

    `autoshard.plan(program, ...)` and `autoshard plan model.py` then plan the program for every recipe, which is one
    value of each, but for those that cannot be faster than one already found, and take the fastest for each element of
    the batch. Values are texts, numbers and booleans. Raises `UserError` for a name that the function does not take,
    and for values that are none of these.
    """

    def said(function: _Function) -> _Function:
        setattr(function, _ATTRIBUTE, checked_choices(values, function, f"`{function.__name__}`"))
        return function

    return said


def choices_of(function: Any) -> Choices:
    """What `choices` says of a function; nothing of any other."""
    return getattr(function, _ATTRIBUTE, {})


def checked_choices(values: Mapping[str, Any], function: Any, where: str) -> Choices:
    """The values by name. Raises `UserError`, as `choices` does, of the function that `where` names."""
    if not callable(function):
        raise UserError(f"{where} has choices, but is no function that could take them; define it with `def`.")
    taken = inspect.signature(function).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in taken):
        known = [each.name for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
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
"""As is fastest; every device keeps its queries and gathers keys and values; from a split of the sequence to one of the
heads and back; keys and values go around a ring."""


def check_exchange_name(exchange: str) -> str:
    """The name. Raises `UserError` for one that there is not."""
    if exchange not in EXCHANGES:
        raise UserError(f"exchange `{exchange}` is not known; use {', '.join(EXCHANGES[:-1])} or {EXCHANGES[-1]}.")
    return exchange


def sharding_notes(said: mlir.SaidCounts, lifted: bool = False) -> tuple[str, ...]:
    """What a plan has to respect, and what it does not; with `lifted`, what is taken out on the user's word."""
    notes: list[str] = []
    if said.constraints:
        one = said.constraints == 1
        held = "1 sharding constraint; it is" if one else f"{said.constraints} sharding constraints; they are"
        notes.append(f"The program itself holds {held} {'lifted, as you asked' if lifted else 'respected'}.")
    if said.regions:
        held = "1 region" if said.regions == 1 else f"{said.regions} regions"
        kept = "it is" if said.regions == 1 else "they are"
        notes.append(f"The program itself holds {held} sharded by hand (shard_map); {kept} respected.")
    if said.arguments:
        kept = "this is lifted, as you asked" if lifted else "this is respected"
        split = "1 argument is" if said.arguments == 1 else f"{said.arguments} arguments are"
        notes.append(f"The program itself says how {split} split; {kept}.")
    if said.idle:
        one = said.idle == 1
        held, kept = ("1 sharding", "it is") if one else (f"{said.idle} shardings", "they are")
        notes.append(
            f"The program holds {held} on a mesh of one device, which says nothing of how to split: {kept} left out. "
            "Trace it under a mesh of the size that you plan for (an AbstractMesh will do) to keep what it says."
        )
    return tuple(notes)


def lift_constraints(program: Program) -> Program:
    """The same program without its own sharding constraints and specs of arguments; regions by hand stay.

    What such a program is run as has none either. The same record if there is nothing to lift.
    """
    with mlir.new_context() as context:
        module = mlir.parse_module(program.module, context)
        said = mlir.count_said(module)
        if not said.constraints and not said.arguments:
            return program
        old, new = sharding_notes(said), sharding_notes(said, lifted=True)
        mlir.drop_constraints(module)
        body, fingerprint = serialise(module, program.arguments)
    notes = (*(note for note in program.notes if note not in old), *new)
    return dataclasses.replace(program, module=body, fingerprint=fingerprint, notes=notes, lifted=Lifted.ALL)
