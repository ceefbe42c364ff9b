"""Modules that `torch.compile(model, backend="openxla")` made: planned like others, compiled for inference only.

In SPMD mode on several devices PyTorch/XLA 2.9 computes wrong gradients in compiled regions, with or without a plan. A
lazy graph is compiled by XLA anyway, so while auto-sharding is on such a module trains as a lazy one.
"""

import functools
from collections.abc import Callable
from typing import Any

from autoshard.exec.torch_xla_hook.values.lazy_tensors import on_xla


def uncompiled(module: Any) -> Any:
    """The module that a compiled one was made of; None for any other."""
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def lazily(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """How to call a module so that its ops are seen: `call` is `Module.__call__`."""
    original = uncompiled(module)
    if original is not None:
        return original
    return functools.partial(call, module) if module._compiled_call_impl is None else module._call_impl


def train_lazily(module: Any) -> None:
    """Have a compiled module run what it was made of where gradients are kept. No other module is changed."""
    original, compiled = uncompiled(module), module._compiled_call_impl
    if original is not None and not isinstance(module.forward, _Lazily):
        module.forward = _Lazily(original, original, module.forward)
    elif compiled is not None and not isinstance(compiled, _Lazily):
        module._compiled_call_impl = _Lazily(module, module._call_impl, compiled)


class _Lazily:
    """Runs one of two functions of a module on the XLA device: the second where no gradients are kept."""

    def __init__(self, module: Any, lazy: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._module = module
        self._lazy = lazy
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        trains = torch.is_grad_enabled() and any(p.requires_grad and on_xla(p) for p in self._module.parameters())
        return (self._lazy if trains else self._compiled)(*args, **kwargs)


@functools.cache
def train_all_lazily() -> None:
    """Have every module that is compiled from here on trained so, and every copy of one."""
    import torch
    from torch._dynamo import OptimizedModule

    optimised: Any = OptimizedModule
    modules: Any = torch.nn.Module
    initialise, compile_it = optimised._initialize, modules.compile

    @functools.wraps(initialise)
    def _initialize(module: Any) -> None:
        initialise(module)
        train_lazily(module)

    @functools.wraps(compile_it)
    def compile(module: Any, *args: Any, **kwargs: Any) -> None:
        compile_it(module, *args, **kwargs)
        train_lazily(module)

    optimised._initialize = _initialize
    modules.compile = compile
