"""Tensors of the lazy backend: live, pending and traced tensors, and the device data that a graph reads."""

import collections
import contextlib
import functools
import gc
import importlib
import os
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch


def pending(tensors: Sequence[Any]) -> list[bool]:
    """Return for each tensor True if its value is still to be computed, False if it has device data.

    All tensors must lie on the XLA device.
    """

    return list(xlac()._check_tensor_need_materialization(list(tensors))) if tensors else []


def compute(tensors: Sequence[Any]) -> None:
    """Start one program that computes the pending ones of these tensors, without waiting for the device; none does
    nothing.
    """
    waiting = [tensor for tensor, waits in zip(tensors, pending(tensors), strict=True) if waits]
    if waiting:
        xlac()._xla_sync_multi(waiting, [], wait=False, sync_xla_data=False)


def handles(tensors: Sequence[Any]) -> list[int]:
    """Return an identity of the device data of each tensor in order, equal for tensors that share the data.

    Data that is still on the host is uploaded. Do not pass pending tensors: they would be computed. The function waits
    for the running step, since its results have no handle yet. Evidence: docs/compiler_behaviour.md, "Handles of
    running results in torch_xla 2.9".
    """
    if not tensors:
        return []
    xlac()._xla_wait_device_ops([])
    return list(xlac()._get_tensors_handle(list(tensors)))


def plain(tensor: Any) -> Any:
    """Return the tensor inside of an `XLAShardedTensor`, which `xs.mark_sharding` and `distribute_tensor` return; any
    other tensor unchanged.
    """
    return getattr(tensor, "global_tensor", tensor)


def is_functional(tensor: Any) -> bool:
    """Return True if functionalisation wraps this tensor, as every tensor that a script sees."""
    import torch

    return vars(torch)["_is_functional_tensor"](tensor)


def become(tensor: Any, value: Any, shared: Container[int]) -> None:
    """Replace the value of a tensor and of all its aliases by `value`, of the same shape and dtype.

    - `tensor`: tensor to change in place.
    - `value`: new value, with or without the wrapper of functionalisation.
    - `shared`: storages of `shared_storages`.

    A tensor in a shared storage receives the node of `value` below functionalisation, in the lazy tensor that the
    aliases share. Any other tensor receives a new storage, which frees the old one. The gradient among such tensors may
    be a view of a tensor that only C++ knows.
    """
    import torch

    if storage_of(tensor) not in shared:
        tensor.data = value if is_functional(tensor) else vars(torch)["_from_functional_tensor"](value)
        return
    with torch.no_grad():
        _unwrapped(tensor).copy_(_unwrapped(value))


def hold(tensor: Any, value: Any, shared: Container[int]) -> None:
    """Replace the device data of a tensor and its aliases by `value`, which has the same elements in another sharding.

    - `shared`: storages of `shared_storages`; a tensor outside of them receives a new storage, as in `become`.

    In a shared storage nothing changes if the tensor is only a part of it, or if functionalisation does not wrap the
    tensor.
    """
    import torch

    if storage_of(tensor) not in shared:
        become(tensor, value, shared)
    elif is_functional(tensor) and is_whole(tensor):
        vars(torch)["_functionalize_replace"](tensor, _unwrapped(value))
        vars(torch)["_functionalize_commit_update"](tensor)


def is_whole(tensor: Any) -> bool:
    """Return True if a tensor has as many bytes as its storage; a view of a part has fewer."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def storage_of(tensor: Any) -> int:
    """Return an identity of a tensor's storage, equal for all aliases and views."""
    return tensor.untyped_storage()._cdata


def shared_storages() -> set[int]:
    """Return identities (`storage_of`) of the storages that several tensors on the XLA device use, among tensors that
    Python can see.
    """
    return _shared({id(plain(tensor)): plain(tensor) for tensor in live_on_xla()}.values())


def _shared(tensors: Iterable[Any]) -> set[int]:
    """Return the storages that at least two of these tensors use."""
    users = collections.Counter(storage_of(tensor) for tensor in tensors)
    return {storage for storage, count in users.items() if count > 1}


def _base_of(tensor: Any) -> Any:
    """Return a new tensor over the whole storage of a wrapped tensor: the base of its views, which Python may
    not know.
    """
    import torch

    torch_vars = vars(torch)
    base = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    own = base.detach()
    while True:
        # A wrapper reads the base of its storage if the two generations differ.
        torch_vars["_functionalize_commit_update"](base)
        torch_vars["_functionalize_sync"](base)
        before = xlac()._xla_get_tensor_id(base)
        torch_vars["_functionalize_unsafe_set"](base, tensor)
        torch_vars["_functionalize_sync"](base)
        if xlac()._xla_get_tensor_id(base) != before:
            return base
        torch_vars["_functionalize_unsafe_set"](base, own)


def _unwrapped(tensor: Any) -> Any:
    """Return the lazy tensor inside of the wrapper of functionalisation; the tensor unchanged if it has no wrapper."""
    import torch

    return vars(torch)["_from_functional_tensor"](tensor) if is_functional(tensor) else tensor


def on_xla(tensor: Any) -> bool:
    """Return True if the tensor lies on the XLA device."""
    return tensor.device.type == "xla"


def live_pending(first: Iterable[Any]) -> list[Any]:
    """Return all live pending tensors on the XLA device that Python can see: those in `first` in its order, then the
    others.

    Each lazy tensor is listed once, by its first alias; the pending bases of views come last. Gradients of leaves are
    included, although they may have no Python object until they are read. Tensors that only C++ owns (saved for a
    backward pass that has not run) are missing.
    """
    seen: dict[int, Any] = {}
    wrapped = is_wrapped()

    def take(tensor: Any) -> None:
        """Add a tensor to `seen` if it lies on the XLA device and is one that a script sees."""
        inner = plain(tensor)
        if id(inner) not in seen and on_xla(inner) and (inner is not tensor or is_functional(inner) == wrapped):
            seen[id(inner)] = inner

    everything = [*first, *_tensors_of_process()]
    for tensor in everything:
        take(tensor)
        gradient = _gradient(tensor)
        if gradient is not None:
            take(gradient)
    tensors = list(seen.values())
    waiting = [tensor for tensor, is_pending in zip(tensors, pending(tensors), strict=True) if is_pending]
    shared = _shared(tensors) if wrapped else ()
    viewed = {storage_of(tensor): tensor for tensor in waiting if storage_of(tensor) in shared}
    bases = [_base_of(tensor) for tensor in viewed.values()]
    bases = [base for base, is_pending in zip(bases, pending(bases), strict=True) if is_pending]
    distinct: dict[int, Any] = {}
    for tensor in (*waiting, *bases):
        distinct.setdefault(xlac()._xla_get_tensor_id(tensor), tensor)
    return list(distinct.values())


def _gradient(tensor: Any) -> Any:
    """Return the gradient of a leaf tensor; None if it has none, and for any other tensor."""
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # autograd rejects a view that was made without gradients and whose base has changed
        return None


def live_data(but: Container[Any] = ()) -> list[tuple[int, Any]]:
    """Return (device data handle, tensor) for all computed tensors of at least one dim that Python can see.

    Tensors in `but` are omitted; it must compare by identity. The function waits for the running step, as `handles`
    does.
    """
    wrapped = is_wrapped()
    seen = (plain(tensor) for tensor in _tensors_of_process() if on_xla(tensor) and tensor.dim())
    seen = (tensor for tensor in seen if tensor not in but)
    tensors = list({id(tensor): tensor for tensor in seen if is_functional(tensor) == wrapped}.values())
    computed = [tensor for tensor, waits in zip(tensors, pending(tensors), strict=True) if not waits]
    return list(zip(handles(computed), computed, strict=True))


@functools.cache
def is_wrapped() -> bool:
    """Return True if functionalisation wraps a script's tensors: `XLA_DISABLE_FUNCTIONALIZATION` is not 1 or true.

    The answer is that of the first call. Only kernels in Python see the tensors below the wrapper.
    """
    return not _flag("XLA_DISABLE_FUNCTIONALIZATION")


def _flag(name: str) -> bool:
    """Return True if an environment variable is `1` or `true`."""
    return os.environ.get(name, "").strip().lower() in ("1", "true")


def live_on_xla() -> list[Any]:
    """Return all tensors on the XLA device that Python can see."""
    return [tensor for tensor in _tensors_of_process() if on_xla(tensor)]


_UNINTERRUPTED_S = 60.0
"""Seconds for which no other thread interrupts the search for tensors; the search takes about a tenth of a second."""


def _tensors_of_process() -> list[Any]:
    """Return all tensors, on any device, that Python's garbage collector knows, without fake tensors and those of
    transforms.

    Threads of the autograd engine release tensors that only C++ owns. Such a tensor has no users in C++ any more, waits
    for Python's lock, and must not be touched. The search is therefore done before anything releases the lock.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    kinds = _subclasses(torch.Tensor) - _subclasses(FakeTensor) - _subclasses(FunctionalTensor)
    wanted = set(map(id, kinds))  # isinstance on a million objects is slow, and some cannot be hashed
    found = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_UNINTERRUPTED_S)
    try:
        for thing in gc.get_objects():
            if id(type(thing)) in wanted and thing._use_count() and not _is_of_transform(thing):
                thing._fix_weakref()  # Python now owns a tensor that only C++ owned
                found.append(thing)
    finally:
        sys.setswitchinterval(interval)
    return found


def _is_of_transform(tensor: Any) -> bool:
    """Return True if a functional transform made this tensor for internal use: a wrapper, or a tensor without a
    device.
    """
    import torch

    if vars(torch._C)["_functorch"].is_functorch_wrapped_tensor(tensor):
        return True
    try:
        return tensor.device is None
    except RuntimeError:
        return True


def _subclasses(kind: type) -> set[type]:
    """Return a class and all its subclasses, direct and indirect."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, tensor) for each tensor in nested tuples, lists and dicts, such as model outputs.

    Keys and indices are joined to `name` by dots; an empty `name` adds nothing. The tensor inside of an
    `XLAShardedTensor` is yielded (`plain`). All other objects are skipped.
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield name, plain(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}" if name else str(index))


@functools.cache  # called for each tensor of every step
def xlac() -> Any:
    """Return the extension module `torch_xla._XLAC`."""
    return importlib.import_module("torch_xla")._XLAC


_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())
"""Modes of fake tensors, functionalisation and proxies: AOT autograd, `make_fx` and export trace in them."""


_is_transformed: Any = vars(torch._C)["_are_functorch_transforms_active"]
"""Function that returns True inside functional transforms, such as `vmap`."""
_modes: Any = vars(torch._C)["_len_torch_dispatch_stack"]
"""Function that returns the number of modes entered on this thread."""


class _Traces(threading.local):
    """Depth of `traced` contexts on each thread."""

    depth = 0


_traces = _Traces()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Declare that the ops on this thread are only traced while the context is entered; contexts may be nested."""
    _traces.depth += 1
    try:
        yield
    finally:
        _traces.depth -= 1


def is_traced() -> bool:
    """Return True if dynamo, AOT autograd, a functional transform or `traced` traces the current ops of this thread."""
    if torch.compiler.is_compiling():  # first: dynamo evaluates this and traces no further
        return True
    if _traces.depth or _is_transformed():
        return True
    # Every hook of every step calls this, mostly without any mode: the length is the cheap test.
    return bool(_modes()) and any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)
