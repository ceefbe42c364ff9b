"""Modules that `torch.compile(model, backend="openxla")` made: planned like others, compiled for inference only.

In SPMD mode on several devices PyTorch/XLA 2.9 computes wrong gradients in compiled regions, with or without a plan. A
lazy graph is compiled by XLA anyway, so while auto-sharding is on such a module trains as a lazy one.
"""

import functools
from collections.abc import Callable
from typing import Any


def uncompiled(module: Any) -> Any:
    """The module that a compiled one was made of; None for any other."""
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def lazily(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """How to call a module so that its ops are seen: `call` is `Module.__call__`."""
    return uncompiled(module) or functools.partial(call, module)


def train_lazily(module: Any) -> None:
    """Have a compiled module run what it was made of where gradients are kept. No other module is changed."""
    import torch

    original = uncompiled(module)
    if original is None:
        return
    compiled = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in original.parameters())
        return (original if trains else compiled)(*args, **kwargs)

    module.forward = forward
