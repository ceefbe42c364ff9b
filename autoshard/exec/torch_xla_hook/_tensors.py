"""Finding tensors of the lazy backend: which are live, which are pending, which data a graph reads."""

import functools
import gc
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from autoshard.exec.torch_xla_hook._xlac import xlac


def pending(tensors: Sequence[Any]) -> list[bool]:
    """For each tensor on the XLA device: whether its value is still to be computed."""

    return list(xlac()._check_tensor_need_materialization(list(tensors))) if tensors else []


def compute(tensors: Sequence[Any]) -> None:
    """Compute those of these tensors that are pending, in one program."""
    waiting = [tensor for tensor, waits in zip(tensors, pending(tensors), strict=True) if waits]
    if waiting:
        xlac()._xla_sync_multi(waiting, [], wait=False, sync_xla_data=False)


def handles(tensors: Sequence[Any]) -> list[int]:
    """An identity of the device data of each tensor, equal for tensors that share it.

    Data that is on the host still is uploaded. Not for pending tensors: these would be computed. Waits for the step
    that runs: what a running step makes has no handle yet, and torch_xla 2.9 ends the process when it is asked for one.
    """
    if not tensors:
        return []
    xlac()._xla_wait_device_ops([])
    return list(xlac()._get_tensors_handle(list(tensors)))


def plain(tensor: Any) -> Any:
    """The tensor inside of an `XLAShardedTensor`, which is what `xs.mark_sharding` and `distribute_tensor` return."""
    return getattr(tensor, "global_tensor", tensor)


def is_functional(tensor: Any) -> bool:
    """Whether functionalisation wraps this tensor, as it does all that a script sees by itself."""
    import torch

    return vars(torch)["_is_functional_tensor"](tensor)


def become(tensor: Any, value: Any) -> None:
    """Make a tensor compute what `value`, of the same shape and dtype, computes, and with it all its aliases.

    The copy is below functionalisation: it puts the node of `value` into the lazy tensor that the aliases share. New
    data for the wrapper (`tensor.data = value`) would leave them with the storage of before.
    """
    import torch

    with torch.no_grad():
        _unwrapped(tensor).copy_(_unwrapped(value))


def own_again(tensors: Iterable[Any]) -> None:
    """Give these tensors, with their aliases, the right to donate their device data, which reading a graph has taken.

    PyTorch/XLA gives that right to the lazy tensor that it made last for the data. So each becomes another one, in the
    order of those before: PyTorch/XLA compiles a step again that finds its tensors in another order. A part of a
    larger storage stays as it is.
    """
    import torch

    for tensor in sorted(tensors, key=xlac()._xla_get_tensor_id):
        if is_functional(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes():
            (own,) = xlac()._get_tensors_xla_device_data_node([tensor])[1]
            vars(torch)["_functionalize_replace"](tensor, _unwrapped(own))
            vars(torch)["_functionalize_commit_update"](tensor)


def _unwrapped(tensor: Any) -> Any:
    """The lazy tensor inside of the wrapper of functionalisation."""
    import torch

    return vars(torch)["_from_functional_tensor"](tensor) if is_functional(tensor) else tensor


def on_xla(tensor: Any) -> bool:
    return tensor.device.type == "xla"


def live_pending(first: Iterable[Any]) -> list[Any]:
    """All live pending tensors that Python can see: those in `first` in its order, then the others.

    Of aliases that share one lazy tensor the first stands for all. A parameter's gradient may have no Python object
    until it is asked for. What only C++ holds (tensors saved for a backward pass that has not run) is not found.
    """
    found: dict[int, Any] = {}
    wrapped = is_wrapped()

    def take(tensor: Any) -> None:
        inner = plain(tensor)
        if id(inner) not in found and on_xla(inner) and (inner is not tensor or is_functional(inner) == wrapped):
            found[id(inner)] = inner

    everything = [*first, *_tensors_of_process()]
    for tensor in everything:
        take(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            take(tensor.grad)
    tensors = list(found.values())
    waiting = [tensor for tensor, is_pending in zip(tensors, pending(tensors), strict=True) if is_pending]
    first: dict[int, Any] = {}
    for tensor in waiting:
        first.setdefault(xlac()._xla_get_tensor_id(tensor), tensor)
    return list(first.values())


def live_data(but: Container[Any] = ()) -> list[tuple[int, Any]]:
    """Device data handle and tensor of all tensors of one dim and more that Python can see and that are not pending.

    Those in `but` are left out.
    """
    wrapped = is_wrapped()
    seen = (plain(tensor) for tensor in _tensors_of_process() if on_xla(tensor) and tensor.dim())
    seen = (tensor for tensor in seen if tensor not in but)
    tensors = list({id(tensor): tensor for tensor in seen if is_functional(tensor) == wrapped}.values())
    held = [tensor for tensor, waits in zip(tensors, pending(tensors), strict=True) if not waits]
    return list(zip(handles(held), held, strict=True))


@functools.cache
def is_wrapped() -> bool:
    """Whether a script's tensors are wrapped: kernels in Python see those below functionalisation, no one else's."""
    return not _flag("XLA_DISABLE_FUNCTIONALIZATION")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true")


def live_on_xla() -> list[Any]:
    """All tensors on the XLA device that Python can see."""
    return [tensor for tensor in _tensors_of_process() if on_xla(tensor)]


def _tensors_of_process() -> Iterator[Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    kinds = _subclasses(torch.Tensor) - _subclasses(FakeTensor) - _subclasses(FunctionalTensor)
    wanted = set(map(id, kinds))  # to ask each of a million objects for its class is slow, and not all can be hashed
    for thing in gc.get_objects():
        if id(type(thing)) in wanted:
            thing._fix_weakref()  # a tensor that only C++ held is Python's too from here on
            yield thing


def _subclasses(kind: type) -> set[type]:
    """A class and all that are made from it."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors in nested tuples, lists, mappings and model outputs, with dotted names."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, plain(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}" if name else str(index))
