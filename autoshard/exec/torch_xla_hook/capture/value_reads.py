"""Detection of reads of a tensor's value, since such a read runs the pending graph inside C++."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.exec.torch_xla_hook.values.lazy_tensors import compute, on_xla, xlac


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
"""Methods of tensors that read a value."""


_WHOLE = ("cpu", "tolist")
"""Methods that copy a tensor of many elements to the host."""


Whole = Callable[[Sequence[Any]], list[Any]]
"""Function that returns tensors with their values whole, on the host or on the device, in place of split ones."""


def read_whole(whole: Whole) -> None:
    """Make reads and saves of whole tensors on the host read `whole(tensors)` instead, until the process ends."""
    import torch

    for name in _WHOLE:
        setattr(torch.Tensor, name, _of_whole(getattr(torch.Tensor, name), whole))
    extension = xlac()
    extension._xla_get_cpu_tensors = _of_all_whole(extension._xla_get_cpu_tensors, whole)


def from_shards(tensors: Sequence[Any]) -> list[Any]:
    """Return split tensors' values on the host, assembled from their shards without a compilation or a gather.

    All shards are read at once. Empty if devices of other processes own some shards. Waits for the device's pending
    work.
    """
    import torch_xla.runtime as xr

    if not tensors or xr.addressable_runtime_device_count() != xr.global_runtime_device_count():
        return []
    extension = xlac()
    extension._xla_wait_device_ops([])
    shards = extension._get_local_shards(list(tensors))
    places = extension._get_local_shard_replica_and_indices(list(tensors))
    return [_assembled(*each) for each in zip(tensors, shards, places, strict=True)]


def _assembled(tensor: Any, shards: Sequence[Any], places: Sequence[Any]) -> Any:
    """Return a tensor's values on the host, from its shards and their places."""
    import torch

    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    for (shard, _), (replica, place) in zip(shards, places, strict=True):
        if place is Ellipsis:
            return shard
        if not replica:  # the last shards may be padded
            values[tuple(place)] = shard[tuple(slice(part.stop - part.start) for part in place)]
    return values


def _of_whole(method: Callable[..., Any], whole: Whole) -> Callable[..., Any]:
    """Return a method of tensors that reads the whole tensor."""

    @functools.wraps(method)
    def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*whole([tensor]), *args, **kwargs)

    return read


def _of_all_whole(fetch: Callable[..., Any], whole: Whole) -> Callable[..., Any]:
    """Return the function by which PyTorch/XLA fetches tensors for the host, which then reads whole ones; order
    stays.
    """
    import torch

    @functools.wraps(fetch)
    def read(tensors: Any) -> list[Any]:
        with torch.no_grad():
            compute(tensors)
            wholes = whole(tensors)
        on_device = [each for each in wholes if on_xla(each)]
        rest = iter(fetch(on_device) if on_device else ())
        return [next(rest) if on_xla(each) else each for each in wholes]

    return read


class Reads:
    """Hook that calls `on_read(tensor)` before a tensor's value is read, between `start` and `stop`."""

    def __init__(self, on_read: Callable[[Any], None]) -> None:
        self._on_read = on_read
        self._replaced: dict[str, Any] = {}

    def start(self) -> None:
        """Replace the methods that read a tensor's value by methods that call `on_read` first."""
        import torch

        for name in _METHODS:
            own = torch.Tensor.__dict__.get(name)
            self._replaced[name] = own
            setattr(torch.Tensor, name, self._noticed(getattr(torch.Tensor, name)))

    def stop(self) -> None:
        """Restore the replaced methods; do nothing if none is replaced."""
        import torch

        for name, own in self._replaced.items():
            if own is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, own)
        self._replaced = {}

    def _noticed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls `on_read(tensor)` and then `method`."""

        @functools.wraps(method)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._on_read(tensor)
            return method(tensor, *args, **kwargs)

        return read
