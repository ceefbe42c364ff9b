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
    """Return True if `AUTOSHARD_STRICT` is set to anything but `0` or nothing: errors are raised instead of warned
    about.
    """
    return os.environ.get(STRICT_VARIABLE, "0") not in ("", "0")


def error_text(error: Exception) -> str:
    """Describe an error: the message of a `UserError`, else `Type: message`."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


_STEPS_THAT_FAIL = 3
"""Number of steps with an error of ours after which auto-sharding is off."""


class Guard:
    """Context around our own work, never around the script's, that suppresses an unexpected error of ours.

    The first such error of a step calls `give_up`, and the rest of the step runs without us; `recover` begins the next
    step. After `_STEPS_THAT_FAIL` such steps nothing is done any more. The first and the last of these steps warn. A
    `UserError` passes to the user, and so do all errors if `AUTOSHARD_STRICT` is set, and exceptions such as
    KeyboardInterrupt.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.failed = False
        """True for the rest of a step with an error of ours."""
        self._failures = 0
        self._give_up = give_up

    def recover(self) -> bool:
        """End a step; return True if it had an error, and the next one is to be watched again."""
        again = self.failed and self._failures < _STEPS_THAT_FAIL
        self.failed = self.failed and not again
        return again

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        """Return True to suppress the error; an error of `give_up` becomes a second warning."""
        if error is None:
            return False
        if not isinstance(error, Exception) or isinstance(error, UserError) or is_strict():
            return False
        if not self.failed:
            self.failed = True
            self._failures += 1
            ends = (
                "auto-sharding is off from here on" if self._failures >= _STEPS_THAT_FAIL else "this step runs as it is"
            )
            if self._failures in (1, _STEPS_THAT_FAIL):
                warnings.warn(
                    f"autoshard: {ends}, since watching this script failed: {error_text(error)}", stacklevel=3
                )
            try:
                self._give_up()
            except Exception as another:  # ending a partly started step may fail too
                warnings.warn(f"autoshard: {error_text(another)}", stacklevel=3)
        return True


class ModuleHook:
    """Hook that calls `run` under `guard` with the module it is registered on and the hook's other arguments.

    It does nothing if the call is only traced, or once the guard has failed. A copy of the module, or a module that is
    loaded from a file, gets a hook that does nothing and needs no autoshard.
    """

    def __init__(self, run: Callable[..., None], guard: Guard) -> None:
        self._run = run
        self._guard = guard

    def __call__(self, module: Any, *given: Any) -> None:
        """Call `run` with the module and the other arguments of the hook, within the guard."""
        if torch.compiler.is_compiling() or self._guard.failed or is_traced():
            return
        with self._guard:
            self._run(module, *given)

    def __reduce__(self) -> Any:
        """Return a function that does nothing, as the copy or the saved form of this hook."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class CallHook(ModuleHook):
    """Pre-hook on calls of a module of the script. A deep copy of the module shares this hook, since its steps are
    planned too.
    """

    def __deepcopy__(self, memo: Any) -> "CallHook":
        """Return this hook, which a copy of the module shares."""
        return self

    @staticmethod
    def to_front(module: Any) -> None:
        """Move the module's `CallHook`s before all its other pre-hooks."""
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, CallHook)]:
            hooks.move_to_end(key, last=False)

    @staticmethod
    def on(module: Any) -> bool:
        """Return True if the module has a `CallHook` as a pre-hook."""
        return any(isinstance(hook, CallHook) for hook in module._forward_pre_hooks.values())
