"""Hooks on the user's modules that do not reference the module, and the guard that catches our errors."""

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
    """Return True if `AUTOSHARD_STRICT` asks for errors instead of warnings."""
    return os.environ.get(STRICT_VARIABLE, "0") not in ("", "0")


def error_text(error: Exception) -> str:
    """Describe an error in a sentence."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


class Guard:
    """Context around our own work, never around the script's: a first failure warns once and calls `give_up`.

    A `UserError` is raised to the user, and so is every error if `AUTOSHARD_STRICT` is set.
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
                f"autoshard: auto-sharding is off from here on, since watching this script failed: {error_text(error)}",
                stacklevel=3,
            )
            try:
                self._give_up()
            except Exception as another:  # ending a partly started step may fail too
                warnings.warn(f"autoshard: {error_text(another)}", stacklevel=3)
        return True


class ModuleHook:
    """Hook that calls `run` for the module that it is registered on, unless the call is only traced.

    A copy of the module, or a module that is loaded from a file, gets a hook that does nothing and needs no autoshard.
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
    """Hook on calls of a module of the script. A copy of the module shares this hook, since its steps are planned
    too.
    """

    def __deepcopy__(self, memo: Any) -> "CallHook":
        return self

    @staticmethod
    def to_front(module: Any) -> None:
        """Move this hook before all other pre-hooks of the module."""
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, CallHook)]:
            hooks.move_to_end(key, last=False)

    @staticmethod
    def on(module: Any) -> bool:
        """Return True if the module has such a hook."""
        return any(isinstance(hook, CallHook) for hook in module._forward_pre_hooks.values())
