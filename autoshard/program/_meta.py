"""Building a torch module without allocating its weights."""

import math
from collections.abc import Callable
from typing import Any


_LARGE = 1 << 20
"""Elements above which a constructor with known values is not worth keeping: only weights are that large."""

_ZEROS = 1 << 26
"""The same of zeros, which take no memory until they are written: tables of positions are filled from them."""


def build(make: Callable[[], Any]) -> Any:
    """Run `make()` with weights on the meta device.

    Uninitialised and random tensors have no values worth keeping and go to the meta device; small tensors with
    computed values (rotary frequencies, position ids) stay real, so that they can be constants of the program.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    shapeless = {torch.empty, torch.rand, torch.randn, torch.empty_strided, torch.normal}
    filled = {torch.ones: _LARGE, torch.zeros: _ZEROS, torch.full: _LARGE}

    class WeightsOnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in shapeless or (func in filled and _elements(args, kwargs) > filled[func]):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    with WeightsOnMeta():
        return make()


def _elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    size = kwargs.get("size", args[0] if args else ())
    if not isinstance(size, (tuple, list)):  # whole numbers one after the other, or a tensor of one
        size = tuple(int(a) for a in args) or (int(size),)
    return math.prod(int(each) for each in size)
