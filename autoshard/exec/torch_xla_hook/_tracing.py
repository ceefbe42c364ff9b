"""Knowing when what runs is only traced, so that its tensors stand for others and hold nothing."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())
"""Of fake tensors, of functionalisation and of proxies: AOT autograd, `make_fx` and export trace in them."""


_is_transformed: Any = vars(torch._C)["_are_functorch_transforms_active"]
_modes: Any = vars(torch._C)["_len_torch_dispatch_stack"]


class _Traces(threading.local):
    depth = 0


_traces = _Traces()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """A context in which what runs on this thread is traced, by means of its own."""
    _traces.depth += 1
    try:
        yield
    finally:
        _traces.depth -= 1


def is_traced() -> bool:
    """Whether dynamo, AOT autograd, a functional transform or `traced` traces what runs now on this thread."""
    if torch.compiler.is_compiling():  # first: dynamo knows the answer, and reads no further
        return True
    if _traces.depth or _is_transformed():
        return True
    # Asked for each hook of each step, in most of which there is no mode at all.
    return bool(_modes()) and any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)
