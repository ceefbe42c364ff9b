"""`forward` of modules that `torch.compile` leaves as they are: it would trace the code that splits calls, and that has
side effects.
"""

from collections.abc import Callable
from typing import Any

import torch


class UncompiledForward:
    """`forward` of a module, run as written, with all that it calls, where `torch.compile` compiles its caller."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own = vars(module).get("forward")
        """The module's own `forward` if it is not its class's."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced function, whose signature is this one's."""
        return type(self._module).forward.__get__(self._module) if self._own is None else self._own

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replaced function."""
        return self.__wrapped__(*args, **kwargs)
