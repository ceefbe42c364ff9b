"""Noticing that a value of a tensor is read: such a read runs what is pending inside C++."""

import functools
from collections.abc import Callable
from typing import Any


_METHODS = (
    "item",
    "cpu",
    "tolist",
    "numpy",
    "__array__",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__repr__",
    "__format__",
)


_WHOLE = ("cpu", "tolist")
"""Those by which the values of a tensor of many come to the host."""


def read_whole(whole: Callable[[Any], Any]) -> None:
    """Have `whole(tensor)` read in the place of each tensor that is read whole, until the process ends."""
    import torch

    for name in _WHOLE:
        setattr(torch.Tensor, name, _of_whole(getattr(torch.Tensor, name), whole))


def _of_whole(method: Callable[..., Any], whole: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return method(whole(tensor), *args, **kwargs)

    return read


class Reads:
    """Calls `on_read(tensor)` before a tensor's value is read, between `start` and `stop`."""

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        self._on_read = on_read
        self._replaced: dict[str, Any] = {}

    def start(self) -> None:
        import torch

        for name in _METHODS:
            own = torch.Tensor.__dict__.get(name)
            self._replaced[name] = own
            setattr(torch.Tensor, name, self._noticed(getattr(torch.Tensor, name)))

    def stop(self) -> None:
        import torch

        for name, own in self._replaced.items():
            if own is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, own)
        self._replaced = {}

    def _noticed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._on_read(tensor)
            return method(tensor, *args, **kwargs)

        return read
