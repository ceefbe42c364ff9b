"""Hooks of ours on the user's modules. They hold no module, and are nothing in what is saved."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from autoshard.exec.torch_xla_hook._guard import Guard
from autoshard.exec.torch_xla_hook._tracing import is_traced


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
