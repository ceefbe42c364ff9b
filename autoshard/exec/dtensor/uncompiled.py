"""Functions that `torch.compile` leaves as they are: it would trace the code that splits calls, and that has side
effects.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as written, with all that it calls, where `torch.compile` compiles its caller."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Call the function with compilation off."""
        # Nothing is compiled before this module is loaded, and loading it takes seconds.
        compiler = sys.modules.get("torch._dynamo")
        return (function if compiler is None else compiler.disable(function))(*args, **kwargs)

    return run


class UncompiledForward:
    """`forward` of a module, run as written (`uncompiled`)."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own = vars(module).get("forward")
        """The module's own `forward` if it is not its class's."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced function, whose signature is this one's."""
        return type(self._module).forward.__get__(self._module) if self._own is None else self._own

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replaced function."""
        return self.__wrapped__(*args, **kwargs)
