"""The error for a torch module that does not lower: which op, which module, which line, what to change."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from autoshard.errors import UserError, reason_of
from autoshard.program.lowering import asks_for_values, check_backend
from autoshard.program.torch_ops.torch_gradients import TorchGradientError
from autoshard.program.torch_ops.torch_imports import untested_torch
from autoshard.program.torch_ops.views import SharedWriteError


_TRANSFORMS = ("torch._functorch.apis", "torch._functorch.eager_transforms")
"""Modules that implement the transforms of torch.func."""


_MACHINERY = {"_call_impl", "_wrapped_call_impl", "__call__"}
"""Methods of every module that only call its `forward`."""


def lowering_error(error: BaseException, label: str, module: Any) -> UserError:
    """Return the `UserError` for an error that was raised while `module` ran through torchax.

    `label` is the module's name in the message. Raises `UserError` itself if JAX cannot start its platform.
    """
    check_backend(error)
    text = reason_of(error) or "no message"
    kind = type(error).__name__
    place = _place(error.__traceback__, module)
    if isinstance(error, TorchGradientError):
        return UserError(
            f"`{label}` could not be lowered: its code asks torch for gradients{place} (`torch.autograd.grad`, "
            "`backward`, `jacobian`), which lowered operations do not record; "
            "write the derivative out, or give a JAX function with `jax.grad`."
        )
    if not asks_for_values(error) and _passes(error.__traceback__, _TRANSFORMS):
        return UserError(
            f"`{label}` could not be lowered: its code calls a transform of torch.func"
            f"{_place(error.__traceback__, module, _TRANSFORMS)} (`vmap`, `grad`, "
            "`jacrev`, `jvp`) around an operation without lowering there; write it for the whole batch, or give "
            "a JAX function with `jax.vmap` or `jax.grad`."
        )
    if unlowerable := re.search(r"returned a value of type <class '([^']*)'>.*not a valid JAX type", text):
        returned, how = unlowerable[1].rpartition(".")[2], "return tensors, in tuples, lists or dicts"
        if returned.endswith("Cache"):
            how = "give the keyword input `use_cache=False`, or set `use_cache` of its configuration to False"
        return UserError(f"`{label}` returns a `{returned}`, which is no tensor: {how}.")
    if kind == "OperatorNotFound":
        return UserError(
            f"`{label}` uses a torch operation that has no lowering ({text}){place}{untested_torch()}; "
            "replace it, or give the program as a JAX function."
        )
    if isinstance(error, SharedWriteError):
        return UserError(
            f"`{label}` could not be lowered: its code writes in place{place} to a tensor that may share elements with "
            "another (`reshape` of a tensor in another order, `expand`, `unfold`, `as_strided` or `t_`), which is read "
            "afterwards: write to a `clone()`."
        )
    if asks_for_values(error):
        return UserError(
            f"`{label}` could not be lowered: its code asks for the values of a tensor{place}, but plans are made from "
            "shapes alone; replace the `if`, `.item()`, `nonzero`, mask index or numpy call by torch.where or a "
            "fixed mask."
        )
    if _passes(error.__traceback__, ("triton",)):
        return UserError(
            f"`{label}` could not be lowered: it calls a Triton kernel{place}, which runs on a GPU alone; "
            "call the equal torch code instead."
        )
    if missing := re.search(r"(\w*loss\w*|cross_entropy|<lambda>)\(\) missing 1 .*'targets?'", text):
        return UserError(
            f"the loss of `{label}`, `{missing[1]}`, takes targets: define `targets` in the Python file, as `loss` is."
        )
    inputs = "; if the module takes other inputs than these, give it with such inputs through a Python file"
    missing_name = any(f"'{type(child).__name__}' object has no attribute" in text for child in module.modules())
    advice = "" if isinstance(error, NameError | ImportError) or missing_name else inputs
    return UserError(f"`{label}` could not be lowered: {kind}: {text}{place}{untested_torch()}{advice}.")


def place_of(error: Exception, module: Any) -> str:
    """Return a clause that names the line of the module's code where an error was raised, or an empty text."""
    return _place(error.__traceback__, module)


def _passes(trace: TracebackType | None, packages: Sequence[str]) -> bool:
    """Return True if an error was raised in one of the packages, or in code that they called."""
    while trace is not None:
        if _is_of(trace.tb_frame, packages):
            return True
        trace = trace.tb_next
    return False


def _is_of(frame: FrameType, packages: Sequence[str]) -> bool:
    """Return True if a frame runs code of one of the packages."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith(tuple(f"{package}." for package in packages))


def _place(trace: TracebackType | None, module: Any, before: Sequence[str] = ()) -> str:
    """Return a clause like ` in layers.1 (Block.forward at model.py:12)`, or an empty text.

    The path is that of the innermost module with a running method. The line is that of the innermost method of the
    user's, or of torch's own without any. Frames of the packages in `before`, and frames that they call,
    are ignored.
    """
    paths = {id(child): name for name, child in module.named_modules()}
    running: list[tuple[FrameType, int]] = []
    while trace is not None and not _is_of(trace.tb_frame, before):
        if id(_owner(trace.tb_frame)) in paths and trace.tb_frame.f_code.co_name not in _MACHINERY:
            running.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    if not running:
        return ""
    written = [(frame, line) for frame, line in running if not _is_of(frame, ("torch", "autoshard"))]
    frame, line = (written or running)[-1]
    where = f"{type(_owner(frame)).__name__}.{frame.f_code.co_name} at {Path(frame.f_code.co_filename).name}:{line}"
    path = paths[id(_owner(running[-1][0]))]
    return f" in `{path}` ({where})" if path else f" in {where}"


def _owner(frame: FrameType) -> Any:
    """Return the first argument of the function that a frame runs, which is `self` in a method."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
