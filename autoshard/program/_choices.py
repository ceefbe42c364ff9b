"""What a program leaves to the planner: names, each with the values that it may have."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autoshard.errors import UserError


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
