"""Any torch code on DTensors: functions that DTensor cannot run are run on whole tensors, by every device alike.

DTensor can split most of torch's operators, but not all. For some operators it lacks the gradient, and it refuses to
mix its tensors with plain ones. A mode that intercepts every call of a torch function handles these cases. The mode
works above autograd: a function on whole tensors also has its gradient computed on whole tensors.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _python_dispatch, _pytree

from autoshard.exec.dtensor.shared_memory import SharedMemory
from autoshard.exec.dtensor.split_functions import ON_SHARDS
from autoshard.exec.dtensor.split_trial import PlacedGradient, is_sound, running_statistics, settle, trial


class SplitOps(TorchFunctionMode):
    """Mode in which torch functions accept DTensors of `mesh` together with plain tensors, and do not fail on DTensors.

    A plain tensor is assumed to be equal on every process. The first call of a function with such shapes and placements
    is a trial. The function fails the trial if DTensor fails on it or on its gradient, or returns other values than one
    device does. From then on it is tried with splits of the first dim only. If that fails too, its arguments are
    gathered and every device runs it whole. Open sums are completed before the next function, and tensors that cannot
    be split evenly are replicated. A write to a tensor reaches all that share its memory (`SharedMemory`).

    `pins` are placements of results by function's name and result's shape.
    """

    def __init__(self, mesh: Any, pins: Mapping[tuple[str, tuple[int, ...]], Sequence[Any]] | None = None) -> None:
        super().__init__()
        register_missing()
        self._pins = dict(pins or {})
        """(Name of a function, shape of its result) -> placements of the result."""
        self.inside = 0
        """Number of running layers whose results are placed at their end; no value within them is pinned."""
        self.mesh = mesh
        self.memory = SharedMemory(mesh)
        self.whole: dict[str, str] = {}
        """Name of a function that every device ran whole -> its failure on DTensors."""
        self._runs: dict[Any, bool] = {}
        """Key of a trial (`_key`) -> True if it succeeded."""
        self._replicated = [Replicate()] * mesh.ndim

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on DTensors if its trial succeeds; else split by batch if that trial succeeds; else whole.

        Reads of metadata, and calls without DTensors, run unchanged. A write of DTensors to a plain tensor runs whole.
        Results are placed as pinned and settled; those of a whole run are replicated DTensors.
        """
        kwargs = kwargs or {}
        leaves = _pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, DTensor) for leaf in leaves):
            result = func(*args, **kwargs)
            if _changes(func):
                self.memory.spread(leaves[0])
            return result
        if func in _READS:
            return self.memory.record(func, args, kwargs, func(*args, **kwargs), func)
        if func is torch.Tensor.__iter__:  # its result hides the views from `record`
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if kwargs.get("out") is not None:
            return self._into(kwargs["out"], func, args, {key: each for key, each in kwargs.items() if key != "out"})
        if (position := _inplace(func, args, kwargs)) is not None:
            return self._in_place(func, args, kwargs, position)
        if not _changes(func):
            return self._run(func, args, kwargs)
        if not isinstance(leaves[0], DTensor):
            result = self._on_whole(func, args, kwargs)
            self.memory.spread(leaves[0])
            return result
        if not args:  # the tensor is named
            first, *others = kwargs
            args, kwargs = (kwargs[first],), {key: kwargs[key] for key in others}
        if not isinstance(args[0], DTensor):
            raise NotImplementedError(f"{_named(func)} on several distributed tensors: write to each of them.")
        # A write to the memory itself could change what autograd or another DTensor has of it.
        changed = args[0].clone()
        result = self._run(func, (changed, *args[1:]), kwargs)
        self.memory.assign(args[0], changed)
        return args[0] if result is changed else result

    def _into(self, out: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function, write its results to the tensors of `out`, and return these."""
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(f"{_named(func)}: torch has no gradient of functions with `out`.")
        distributed = any(isinstance(tensor, DTensor) for tensor in tensors)
        result = self._run(func, args, kwargs) if distributed else func(*args, **kwargs)
        for target, value in zip(_pytree.tree_leaves(out), _pytree.tree_leaves(result), strict=True):
            self.memory.assign(target, self._distributed(value))
        return out

    def _in_place(self, func: Callable[..., Any], args: Any, kwargs: Any, position: int) -> Any:
        """Run a function with its argument `inplace`, at a position, as False, and write its result to its input."""
        args, kwargs = list(args), {key: each for key, each in kwargs.items() if key != "inplace"}
        target = args[0] if args else kwargs["input"]
        if isinstance(target, DTensor):
            # Autograd may save the argument, which must not be the tensor that changes.
            own = settle(target)
            own = own.redistribute(placements=own.placements)
            args, kwargs = ([own, *args[1:]], kwargs) if args else (args, kwargs | {"input": own})
        if len(args) > position:
            args[position] = False
        else:
            kwargs["inplace"] = False
        self.memory.assign(target, self._run(func, tuple(args), kwargs))
        return target

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function, by its trials, which writes to no DTensor but its first argument."""
        given, keywords = _pytree.tree_map_only(torch.Tensor, self._distributed, (args, kwargs))
        key = _key(func, (given, keywords))
        if key not in self._runs:
            # A checkpoint counts the ops of a module, and trials are missing as it runs again.
            with _python_dispatch._disable_current_modes():
                self._try(func, given, keywords, key)
        if not self._runs[key]:
            by_batch, by_key = self._by_batch(func, given, keywords)
            if by_batch and self._runs.get(by_key):
                (given, keywords), key = by_batch, by_key
        if self._runs[key]:
            result = run_split(func, given, keywords)
            if all(is_sound(each, _divides) for each in _pytree.tree_leaves(result)):
                if _changes(func):
                    return result
                result = _pytree.tree_map_only(DTensor, self._pinned(func, args), result)
                return self.memory.record(func, args, kwargs, result, key)
            self._note(func, self._agreed("its result is of another shape"))
            self._runs[key] = False
        return self.memory.record(func, args, kwargs, self._on_whole(func, args, kwargs), key)

    def _try(self, func: Callable[..., Any], given: Any, keywords: Any, key: Any) -> None:
        """Record if a function runs on its arguments as they are split, else if it runs on them split by batch."""
        wrong = self._agreed(trial(func, run_split, given, keywords, _changes(func)))
        self._runs[key] = not wrong
        by_batch, by_key = self._by_batch(func, given, keywords) if wrong else (None, None)
        if by_batch and by_key not in self._runs:
            split, named = by_batch
            self._runs[by_key] = not self._agreed(trial(func, run_split, split, named, _changes(func)))
        if wrong and not (by_batch and self._runs[by_key]):
            self._note(func, wrong)

    def _pinned(self, func: Callable[..., Any], args: Sequence[Any]) -> Callable[[Any], Any]:
        """Return a function that places a DTensor result of `func` as planned, if it has a pin and no layer runs, and
        settles it.
        """
        name = plain_name(func)
        # No plan pins a view that does not change the shape.
        same = args[0].shape if name in _VIEWS and args and isinstance(args[0], torch.Tensor) else None

        def place(tensor: Any) -> Any:
            """Return the tensor in its pinned placements, else in its own, without uneven splits (`settled`)."""
            pinned = not self.inside and tensor.shape != same
            places = self._pins.get((name, tuple(tensor.shape))) if pinned else None
            return settled(tensor if places is None else tensor.redistribute(placements=list(places)))

        return place

    def _distributed(self, tensor: Any) -> Any:
        """Return a tensor as a DTensor without open sums; a plain tensor becomes a replicated one."""
        return settle(tensor) if isinstance(tensor, DTensor) else self._wrapped(tensor)

    def _by_batch(self, func: Callable[..., Any], given: Any, keywords: Any) -> tuple[Any, Any]:
        """Return the arguments split in their first dim only, and the key of their trial.

        An argument with another first dim than the first argument, such as a weight, is whole. Both are None if no
        argument is split so, if all are split only so already, or if the function writes to its first argument.
        """
        if _changes(func):
            return None, None
        changed = False
        tensors = [leaf for leaf in _pytree.tree_leaves((given, keywords)) if _is(leaf)]
        if not any(Shard(0) in tensor.placements for tensor in tensors):
            return None, None
        rows = next(tensor.shape[0] for tensor in tensors if tensor.ndim)

        def kept(tensor: Any) -> Any:
            """Return the tensor with `Replicate` in place of all but splits of a first dim of `rows` elements."""
            nonlocal changed
            batch = tensor.ndim > 0 and tensor.shape[0] == rows
            places = [place if batch and place == Shard(0) else Replicate() for place in tensor.placements]
            if places == list(tensor.placements):
                return tensor
            changed = True
            return tensor.redistribute(placements=places)

        resplit = _pytree.tree_map_only(DTensor, kept, (given, keywords))
        return (resplit, _key(func, resplit)) if changed else (None, None)

    def _agreed(self, wrong: str) -> str:
        """Return the failure of a trial, also if only another process failed; "" if no process failed.

        All processes must call it, since it communicates over the mesh.
        """
        failed = DTensor.from_local(
            torch.tensor(float(bool(wrong)), device=self.mesh.device_type), self.mesh, [Partial("max")] * self.mesh.ndim
        )
        return (wrong or "it went wrong on another process") if failed.full_tensor().item() else ""

    def _note(self, func: Callable[..., Any], wrong: str) -> None:
        """Record that every device runs a function whole, with the reason; the first reason of a function stays."""
        self.whole.setdefault(_named(func), wrong)

    def _on_whole(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function on gathered arguments, on every device, and copy its writes back to the shards.

        Returns results as replicated DTensors; a function that writes to its first argument returns that argument.
        """
        target = _pytree.tree_leaves((args, kwargs))[0]
        writable: list[tuple[Any, Any, int]] = []

        def gather(tensor: Any) -> Any:
            """Return the whole of a DTensor, and record it, since the function may write to it."""
            result = gathered(tensor)
            writable.append((tensor, result, result._version))
            return result

        whole, keywords = _pytree.tree_map_only(DTensor, gather, (args, kwargs))
        if not _changes(func):
            result = func(*whole, **keywords)
            uncounted = {id(each) for each in running_statistics(func, whole, keywords)}
            for tensor, each, before in writable:
                if each._version != before or id(each) in uncounted:  # as rows of a table with `max_norm`
                    with torch.set_grad_enabled(torch.is_grad_enabled() and not tensor.requires_grad):
                        self.memory.assign(tensor, self._wrapped(each))
            return _pytree.tree_map_only(torch.Tensor, self._wrapped, result)
        if not isinstance(target, DTensor):
            return func(*whole, **keywords)
        changed = whole[0].clone()
        func(changed, *whole[1:], **keywords)
        target.copy_(self._wrapped(changed).redistribute(placements=target.placements))
        return target

    def _wrapped(self, tensor: Any) -> Any:
        """Wrap a plain tensor as a replicated DTensor."""
        return DTensor.from_local(tensor, self.mesh, self._replicated, run_check=False)


@functools.cache
def register_missing() -> None:
    """Register with DTensor how `alias` and `select` are split, once: as their inputs are.

    A selected dim must be whole.
    """

    @register_sharding(torch.ops.aten.alias.default)
    def _(tensor: Any) -> Any:
        return [([place], [place]) for place in (Replicate(), *map(Shard, range(len(tensor.shape))))]

    # The rule of torch 2.9 for `select` writes the selected shape into DTensor's cached metadata of the op before.
    @register_sharding(torch.ops.aten.select.int)
    def _(tensor: Any, dim: int, index: int) -> Any:
        rank = len(tensor.shape)
        strategies: list[Any] = [([Replicate()], [Replicate(), None, None])]
        for own in range(rank):
            if own != dim % rank:
                strategies.append(([Shard(own - (own > dim % rank))], [Shard(own), None, None]))
        return strategies


def run_split(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function on DTensors, by an implementation of `ON_SHARDS` if there is one that accepts the arguments.

    A concatenation leaves out empty tensors of one dim.
    """
    if func in ON_SHARDS:
        result = ON_SHARDS[func](func, args, kwargs)
        if result is not None:
            return result
    if func in (torch.cat, torch.concat) and args and isinstance(args[0], (list, tuple)):
        # Torch skips an empty tensor of one dim, such as an empty cache; DTensor fails on it.
        nonempty = [each for each in args[0] if tuple(each.shape) != (0,)]
        args = (nonempty or args[0], *args[1:])
    return func(*args, **kwargs)


def settled(tensor: Any) -> Any:
    """Return a DTensor result with even splits, uneven ones replicated, and with its gradient placed alike.

    Plain partial sums stay open, and their gradients are replicated. A gradient may arrive in any placement, which the
    trial does not cover.
    """
    if any(place.is_partial() and type(place) is not Partial for place in tensor.placements):
        tensor = settle(tensor)  # a lookup in a part of a table can be summed only once
    places = [p if _divides(tensor, p) else Replicate() for p in tensor.placements]
    result = tensor if places == list(tensor.placements) else tensor.redistribute(placements=places)
    if result.requires_grad and not result.is_leaf:
        gradient_places = [Replicate() if p.is_partial() else p for p in places]
        result.register_hook(PlacedGradient(gradient_places))
    return result


def gathered(tensor: Any) -> Any:
    """Return the whole of a DTensor as a plain tensor, equal on every process.

    Gradients flow back in the placements in which they arrive.
    """
    return settle(tensor).redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def _divides(tensor: Any, placement: Any) -> bool:
    """Return True if a placement splits its dim evenly, together with all axes that split that dim; True for no
    split.
    """
    if not isinstance(placement, Shard):
        return True
    parts = 1
    for axis, other in enumerate(tensor.placements):
        if isinstance(other, Shard) and other.dim == placement.dim:
            parts *= tensor.device_mesh.size(axis)
    return tensor.shape[placement.dim] % parts == 0


def plain_name(func: Callable[..., Any]) -> str:
    """Return a function's name in plans: `add` for `Tensor.__radd__`, `__iadd__`, `add_` and `torch.add`; empty if it
    has none.
    """
    name = getattr(func, "__name__", "")
    plain = name.strip("_")
    return plain[1:] if name.startswith("__") and plain[1:] in _REFLECTED else plain


_VIEWS = {"view", "reshape", "expand", "contiguous", "squeeze", "unsqueeze"}
"""Names of functions that may return their input in the same shape."""
_REFLECTED = set("add sub mul truediv".split())
"""Names of operators with reflected (`__radd__`) and in-place (`__iadd__`) methods."""


def _is(leaf: Any) -> bool:
    """Return True for a DTensor."""
    return isinstance(leaf, DTensor)


def _named(func: Callable[..., Any]) -> str:
    """Return the name of a function in sentences."""
    return resolve_name(func) or getattr(func, "__name__", str(func))


@functools.cache
def _position(func: Callable[..., Any]) -> int | None:
    """Return the position of a function's parameter `inplace`; None if it has none."""
    try:
        return list(inspect.signature(func).parameters).index("inplace")
    except (TypeError, ValueError):
        return None


def _inplace(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the position of a function's parameter `inplace` if it is given as True; else None."""
    position = _position(func)
    if position is None:
        return None
    return position if kwargs.get("inplace") or (len(args) > position and args[position]) else None


def _changes(func: Callable[..., Any]) -> bool:
    """Return True if a function writes to its first argument, by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
"""Names of the in-place operators' methods."""


_READS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_contiguous,
    torch.Tensor.stride,
    torch.Tensor.requires_grad_,
    torch.Tensor.detach_,
    torch.Tensor.register_hook,
    torch.Tensor.__len__,
    torch.Tensor.data_ptr,
    torch.Tensor.detach,
    torch.Tensor.__hash__,
    *(
        getattr(torch.Tensor, name).__get__
        for name in "shape dtype device layout ndim requires_grad is_leaf is_cuda is_meta data grad grad_fn".split()
    ),
}
"""Functions that only read metadata of a tensor, or return the same tensor."""


def _key(func: Callable[..., Any], given: Any) -> Any:
    """Return the key of a function's trial: the function and all properties of its arguments but tensors' values.

    Plain numbers count with their values.
    """
    grad = torch.is_grad_enabled()

    def told(leaf: Any) -> Any:
        """Return a leaf's shape, dtype, placements and need of a gradient, or its plain value."""
        if isinstance(leaf, DTensor):
            return tuple(leaf.shape), leaf.dtype, tuple(leaf.placements), leaf.requires_grad and grad
        return leaf if isinstance(leaf, (int, bool, str, type(None), torch.dtype)) else repr(leaf)[:80]

    leaves, spec = _pytree.tree_flatten(given)
    return func, spec, tuple(map(told, leaves))
