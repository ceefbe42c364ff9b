"""Modules compiled by `torch.compile(model, backend="openxla")`: planned like others, but compiled for inference only.

With auto-sharding such a module trains as a lazy one, since gradients of compiled regions are wrong in SPMD mode. XLA
compiles a lazy graph anyway. Evidence: docs/compiler_behaviour.md, "Gradients in compiled regions of PyTorch/XLA".
"""

import functools
from collections.abc import Callable
from typing import Any

from autoshard.exec.torch_xla_hook.values.lazy_tensors import on_xla


def uncompiled(module: Any) -> Any:
    """Return the module that an `OptimizedModule` of `torch.compile` wraps; None for any other module."""
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def lazily(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a module so that its ops are visible; `call` is `Module.__call__`.

    It is the original of a wrapped module, the uncompiled call of one that `Module.compile` compiled in place, else
    `call` itself.
    """
    original = uncompiled(module)
    if original is not None:
        return original
    return functools.partial(call, module) if module._compiled_call_impl is None else module._call_impl


def train_lazily(module: Any) -> None:
    """Make a compiled module run its original where it trains on the XLA device. No other module is changed.

    A second call changes nothing.
    """
    original, compiled = uncompiled(module), module._compiled_call_impl
    if original is not None and not isinstance(module.forward, _Lazily):
        module.forward = _Lazily(original, original, module.forward)
    elif compiled is not None and not isinstance(compiled, _Lazily):
        module._compiled_call_impl = _Lazily(module, module._call_impl, compiled)


class _Lazily:
    """Dispatcher between two functions of a module: `lazy` if it trains on the XLA device, else `compiled`.

    It trains if gradients are enabled and one of its parameters on the XLA device requires one.
    """

    def __init__(self, module: Any, lazy: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._module = module
        self._lazy = lazy
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `lazy` or `compiled`, as the module trains or not, and return its result."""
        import torch

        trains = torch.is_grad_enabled() and any(p.requires_grad and on_xla(p) for p in self._module.parameters())
        return (self._lazy if trains else self._compiled)(*args, **kwargs)


@functools.cache
def train_all_lazily() -> None:
    """Replace torch's compilation of modules so that `train_lazily` applies to every module compiled from here on.

    The replacement is made once and stays until the process ends; copies of such modules behave alike.
    """
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
