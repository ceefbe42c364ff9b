"""Any torch code on DTensors: what DTensor cannot run is run on whole tensors, by every device alike.

DTensor knows how to split most of torch's operators, but not all; of some it knows the operator and not its gradient;
and it refuses to mix its tensors with plain ones. A mode that sees every call of a torch function stands in between.
It works above autograd: what runs on whole tensors also has its gradient computed on whole tensors.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree

from autoshard.exec.apply._split_trial import is_sound, settle, trial


class SplitOps(TorchFunctionMode):
    """While it is entered, torch functions that take DTensors of `mesh` take plain tensors too and do not fail on them.

    A plain tensor is taken to be the same on every process. A function is tried when it is first met with arguments of
    such shapes and placements: if DTensor fails on it or on its gradient, or comes to other values than one device
    does, its arguments are gathered and every device runs it whole, from then on. Sums that are left over are done
    before the next function sees them, and what cannot be split evenly is whole.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        register_missing()
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
            self._runs[key] = self._agreed(func, trial(func, run_split, given, keywords, _changes(func)))
        if self._runs[key]:
            made = run_split(func, given, keywords)
            if all(is_sound(each, _divides) for each in _pytree.tree_leaves(made)):
                return made if _changes(func) else _pytree.tree_map_only(DTensor, settled, made)
            self._runs[key] = self._agreed(func, "its result is of another shape")
        return self._on_whole(func, args, kwargs)

    def _distributed(self, tensor: Any) -> Any:
        """As a DTensor with nothing left to sum."""
        return settle(tensor) if isinstance(tensor, DTensor) else self._wrapped(tensor)

    def _agreed(self, func: Callable[..., Any], wrong: str) -> bool:
        """Whether no process found anything wrong; what this one found is noted."""
        found = DTensor.from_local(
            torch.tensor(float(bool(wrong)), device=self.mesh.device_type), self.mesh, [Partial("max")] * self.mesh.ndim
        )
        if not found.full_tensor().item():
            return True
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        self.whole.setdefault(name, wrong or "it went wrong on another process")
        return False

    def _on_whole(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        target = _pytree.tree_leaves((args, kwargs))[0]
        whole, keywords = _pytree.tree_map_only(DTensor, gathered, (args, kwargs))
        if not _changes(func):
            return _pytree.tree_map_only(torch.Tensor, self._wrapped, func(*whole, **keywords))
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


def _attend(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Attention on the shards of each device, which are of some batches and some heads; None if there is no such way.

    DTensor knows the kernels of some backends only, and takes no mask that is split.
    """
    if len(given) > 3 or not all(isinstance(each, DTensor) and each.ndim == 4 for each in given[:3]):
        return None
    query, mask = given[0], keywords.get("attn_mask")
    masks = [] if mask is None else [mask]
    places: list[Any] = []
    for place in query.placements:
        dim = place.dim if isinstance(place, Shard) else 3
        fits = dim == 1 or (dim == 0 and all(each.shape[0] == query.shape[0] for each in given[:3]))
        places.append(Shard(dim) if fits else Replicate())
    shared = [axis for axis, place in enumerate(places) if place == Shard(1)]
    if any(each.shape[1] % math.prod(query.device_mesh.size(axis) for axis in shared) for each in given[:3]):
        places = [Replicate() if axis in shared else place for axis, place in enumerate(places)]

    def local(tensor: Any) -> Any:
        ahead = 4 - tensor.ndim
        own, grads = [], []
        for place in places:
            dim = place.dim - ahead if isinstance(place, Shard) else -1
            whole = dim < 0 or tensor.shape[dim] == 1
            own.append(Replicate() if whole else Shard(dim))
            grads.append(Partial() if whole and isinstance(place, Shard) else own[-1])
        return tensor.redistribute(placements=own).to_local(grad_placements=grads)

    if masks:
        keywords = keywords | {"attn_mask": local(mask)}
    made = func(*map(local, given), **keywords)
    return DTensor.from_local(made, query.device_mesh, places, run_check=False)


def run_split(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function on DTensors, as DTensor runs it, or so that it can."""
    if func is torch.nn.functional.scaled_dot_product_attention:
        made = _attend(func, args, kwargs)
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
