"""Any torch code on DTensors: what DTensor cannot run is run on whole tensors, by every device alike.

DTensor knows how to split most of torch's operators, but not all; of some it knows the operator and not its gradient;
and it refuses to mix its tensors with plain ones. A mode that sees every call of a torch function stands in between.
It works above autograd: what runs on whole tensors also has its gradient computed on whole tensors.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree

from autoshard.exec.dtensor.split_functions import ON_SHARDS
from autoshard.exec.dtensor.split_trial import is_sound, settle, trial


class SplitOps(TorchFunctionMode):
    """While it is entered, torch functions that take DTensors of `mesh` take plain tensors too and do not fail on them.

    A plain tensor is taken to be the same on every process. A function is tried when it is first met with arguments of
    such shapes and placements: if DTensor fails on it or on its gradient, or comes to other values than one device
    does, its arguments are gathered and every device runs it whole, from then on. Sums that are left over are done
    before the next function sees them, and what cannot be split evenly is whole.
    """

    def __init__(self, mesh: Any, pins: Mapping[tuple[str, tuple[int, ...]], Sequence[Any]] | None = None) -> None:
        super().__init__()
        register_missing()
        self._pins = dict(pins or {})
        """Name of a function and shape of what it gives -> how that is placed."""
        self.inside = 0
        """Layers that are being run whose results are placed at their end: nothing within them is pinned."""
        self.mesh = mesh
        self.whole: dict[str, str] = {}
        """Functions that every device ran whole, by name, with what was wrong on DTensors."""
        self._runs: dict[Any, bool] = {}
        """Function and all that decides whether DTensor runs it -> whether it does."""
        self._replicated = [Replicate()] * mesh.ndim

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = _pytree.tree_leaves((args, kwargs))
        if func in _READS or not any(isinstance(leaf, DTensor) for leaf in leaves):
            return func(*args, **kwargs)
        if _changes(func) and not isinstance(leaves[0], DTensor):
            return self._on_whole(func, args, kwargs)
        given, keywords = _pytree.tree_map_only(torch.Tensor, self._distributed, (args, kwargs))
        key = _key(func, (given, keywords))
        if key not in self._runs:
            wrong = self._agreed(trial(func, run_split, given, keywords, _changes(func)))
            self._runs[key] = not wrong
            by_batch, by_key = self._by_batch(func, given, keywords) if wrong else (None, None)
            if by_batch and by_key not in self._runs:
                split, named = by_batch
                self._runs[by_key] = not self._agreed(trial(func, run_split, split, named, _changes(func)))
            if wrong and not (by_batch and self._runs[by_key]):
                self._note(func, wrong)
        if not self._runs[key]:
            by_batch, by_key = self._by_batch(func, given, keywords)
            if by_batch and self._runs.get(by_key):
                (given, keywords), key = by_batch, by_key
        if self._runs[key]:
            made = run_split(func, given, keywords)
            if all(is_sound(each, _divides) for each in _pytree.tree_leaves(made)):
                return made if _changes(func) else _pytree.tree_map_only(DTensor, self._pinned(func, args), made)
            self._note(func, self._agreed("its result is of another shape"))
            self._runs[key] = False
        return self._on_whole(func, args, kwargs)

    def _pinned(self, func: Callable[..., Any], args: Sequence[Any]) -> Callable[[Any], Any]:
        """What has a result of a function placed as planned, and settled."""
        name = plain_name(func)
        # A view that changes no shape is in no plan.
        same = args[0].shape if name in _VIEWS and args and isinstance(args[0], torch.Tensor) else None

        def place(tensor: Any) -> Any:
            pinned = not self.inside and tensor.shape != same
            places = self._pins.get((name, tuple(tensor.shape))) if pinned else None
            return settled(tensor if places is None else tensor.redistribute(placements=list(places)))

        return place

    def _distributed(self, tensor: Any) -> Any:
        """As a DTensor with nothing left to sum."""
        return settle(tensor) if isinstance(tensor, DTensor) else self._wrapped(tensor)

    def _by_batch(self, func: Callable[..., Any], given: Any, keywords: Any) -> tuple[Any, Any]:
        """Arguments that are split in their first dim only, and their key; None where that changes nothing."""
        if _changes(func):
            return None, None
        changed = False

        def kept(tensor: Any) -> Any:
            nonlocal changed
            places = [place if place == Shard(0) else Replicate() for place in tensor.placements]
            if places == list(tensor.placements):
                return tensor
            changed = True
            return tensor.redistribute(placements=places)

        if not any(Shard(0) in leaf.placements for leaf in _pytree.tree_leaves((given, keywords)) if _is(leaf)):
            return None, None
        made = _pytree.tree_map_only(DTensor, kept, (given, keywords))
        return (made, _key(func, made)) if changed else (None, None)

    def _agreed(self, wrong: str) -> str:
        """What is wrong, with what other processes found too; empty if no process found anything."""
        found = DTensor.from_local(
            torch.tensor(float(bool(wrong)), device=self.mesh.device_type), self.mesh, [Partial("max")] * self.mesh.ndim
        )
        return (wrong or "it went wrong on another process") if found.full_tensor().item() else ""

    def _note(self, func: Callable[..., Any], wrong: str) -> None:
        self.whole.setdefault(resolve_name(func) or getattr(func, "__name__", str(func)), wrong)

    def _on_whole(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        target = _pytree.tree_leaves((args, kwargs))[0]
        writable: list[tuple[Any, Any, int]] = []

        def gather(tensor: Any) -> Any:
            made = gathered(tensor)
            if not tensor.requires_grad:
                writable.append((tensor, made, made._version))
            return made

        whole, keywords = _pytree.tree_map_only(DTensor, gather, (args, kwargs))
        if not _changes(func):
            made = func(*whole, **keywords)
            for tensor, each, before in writable:
                if each._version != before:  # named by `out`, or running statistics
                    tensor.copy_(self._wrapped(each).redistribute(placements=tensor.placements))
            return _pytree.tree_map_only(torch.Tensor, self._wrapped, made)
        if not isinstance(target, DTensor):
            return func(*whole, **keywords)
        changed = whole[0].clone()
        func(changed, *whole[1:], **keywords)
        target.copy_(self._wrapped(changed).redistribute(placements=target.placements))
        return target

    def _wrapped(self, tensor: Any) -> Any:
        return DTensor.from_local(tensor, self.mesh, self._replicated, run_check=False)


@functools.cache
def register_missing() -> None:
    """Tell DTensor how views of whole tensors are split, which it does not know of all: as they were."""

    @register_sharding(torch.ops.aten.alias.default)
    def _(tensor: Any) -> Any:
        return [([place], [place]) for place in (Replicate(), *map(Shard, range(len(tensor.shape))))]

    # What torch 2.9 has for it writes the shape of what is selected into what DTensor remembers of the op before.
    @register_sharding(torch.ops.aten.select.int)
    def _(tensor: Any, dim: int, index: int) -> Any:
        rank = len(tensor.shape)
        found: list[Any] = [([Replicate()], [Replicate(), None, None])]
        for own in range(rank):
            if own != dim % rank:
                found.append(([Shard(own - (own > dim % rank))], [Shard(own), None, None]))
        return found


def run_split(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function on DTensors, as DTensor runs it, or so that it can."""
    if func in ON_SHARDS:
        made = ON_SHARDS[func](func, args, kwargs)
        if made is not None:
            return made
    if func in (torch.cat, torch.concat) and args and isinstance(args[0], (list, tuple)):
        # Torch leaves an empty tensor of one dim out, such as a cache that holds nothing yet; DTensor fails on it.
        kept = [each for each in args[0] if tuple(each.shape) != (0,)]
        args = (kept or args[0], *args[1:])
    return func(*args, **kwargs)


def settled(tensor: Any) -> Any:
    """What a function gives, with splits that come out even, and with its gradient split alike.

    A gradient may come in any placement, which what DTensor was tried with does not cover.
    """
    if any(place.is_partial() and type(place) is not Partial for place in tensor.placements):
        tensor = settle(tensor)  # a lookup in a part of a table, which can be summed only once
    places = [p if _divides(tensor, p) else Replicate() for p in tensor.placements]
    made = tensor if places == list(tensor.placements) else tensor.redistribute(placements=places)
    if made.requires_grad and not made.is_leaf:
        wanted = [Replicate() if p.is_partial() else p for p in places]
        made.register_hook(PlacedGradient(wanted))
    return made


class PlacedGradient:
    """A hook of a tensor that has its gradient placed so; nothing in what is saved."""

    __torch_unserializable__ = True

    def __init__(self, places: Sequence[Any]) -> None:
        self._places = list(places)

    def __call__(self, gradient: Any) -> Any:
        if not isinstance(gradient, DTensor) or list(gradient.placements) == self._places:
            return gradient
        return gradient.redistribute(placements=self._places)


def gathered(tensor: Any) -> Any:
    """The whole of a DTensor as a plain tensor, the same on every process; gradients go back as they came."""
    return settle(tensor).redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def _divides(tensor: Any, placement: Any) -> bool:
    if not isinstance(placement, Shard):
        return True
    parts = 1
    for axis, other in enumerate(tensor.placements):
        if isinstance(other, Shard) and other.dim == placement.dim:
            parts *= tensor.device_mesh.size(axis)
    return tensor.shape[placement.dim] % parts == 0


def plain_name(func: Callable[..., Any]) -> str:
    """The name of a function as plans have it: `add` for `Tensor.__radd__`, `__iadd__` and `torch.add`."""
    name = getattr(func, "__name__", "")
    plain = name.strip("_")
    return plain[1:] if name.startswith("__") and plain[1:] in _REFLECTED else plain


_VIEWS = {"view", "reshape", "expand", "contiguous", "squeeze", "unsqueeze"}
_REFLECTED = set("add sub mul truediv".split())


def _is(leaf: Any) -> bool:
    return isinstance(leaf, DTensor)


def _changes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}


_READS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_contiguous,
    torch.Tensor.stride,
    torch.Tensor.requires_grad_,
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
"""What only asks about a tensor, or gives the same one."""


def _key(func: Callable[..., Any], given: Any) -> Any:
    """What decides whether DTensor runs a function: all about its arguments but their values."""
    grad = torch.is_grad_enabled()

    def told(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return tuple(leaf.shape), leaf.dtype, tuple(leaf.placements), leaf.requires_grad and grad
        return leaf if isinstance(leaf, (int, bool, str, type(None), torch.dtype)) else repr(leaf)[:80]

    leaves, spec = _pytree.tree_flatten(given)
    return func, spec, tuple(map(told, leaves))
