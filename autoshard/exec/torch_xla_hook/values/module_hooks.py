"""Hooks on the user's modules that hold no module, and the guard that keeps our errors out of a script."""

import contextlib
import os
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.lazy_tensors import is_traced


STRICT_VARIABLE = "AUTOSHARD_STRICT"


def is_strict() -> bool:
    """Whether `AUTOSHARD_STRICT` asks for errors instead of warnings."""
    return os.environ.get(STRICT_VARIABLE, "0") not in ("", "0")


def said_of(error: Exception) -> str:
    """An error in a sentence."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


class Guard:
    """Around work of our own, never around the script's: a failure is warned of, and `give_up` is called, once.

    A `UserError` is the user's to see, and so is every error where `AUTOSHARD_STRICT` is set.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.failed = False
        self._give_up = give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception) or isinstance(error, UserError) or is_strict():
            return False
        if not self.failed:
            self.failed = True
            warnings.warn(
                f"autoshard: auto-sharding is off from here on, since watching this script failed: {said_of(error)}",
                stacklevel=3,
            )
            try:
                self._give_up()
            except Exception as another:  # what is half begun may not end well either
                warnings.warn(f"autoshard: {said_of(another)}", stacklevel=3)
        return True


class ModuleHook:
    """Runs `run` for the module that it is registered on, and not where this is only traced.

    A copy of the module has a hook that does nothing, and so has what is loaded from a file: that needs no autoshard.
    """

    def __init__(self, run: Callable[..., None], guard: Guard) -> None:
        self._run = run
        self._guard = guard

    def __call__(self, module: Any, *given: Any) -> None:
        if torch.compiler.is_compiling() or self._guard.failed or is_traced():
            return
        with self._guard:
            self._run(module, *given)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class CallHook(ModuleHook):
    """Is told of calls of a module of the script. A copy of that is told of alike: it is to be planned too."""

    def __deepcopy__(self, memo: Any) -> "CallHook":
        return self

    @staticmethod
    def to_front(module: Any) -> None:
        """Have it run before all other hooks of the module."""
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, CallHook)]:
            hooks.move_to_end(key, last=False)

    @staticmethod
    def on(module: Any) -> bool:
        """Whether the module has one."""
        return any(isinstance(hook, CallHook) for hook in module._forward_pre_hooks.values())
