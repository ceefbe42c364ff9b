"""Writes to DTensors that share memory in torch: a write to one of them reaches all others.

The memory of DTensors cannot show it. The view of a DTensor may be redistributed, or come from gathered values, and is
a copy then. Therefore every view has a *shadow*, a tensor on the meta device, which has no values. Its storage, strides
and offset are those that torch gives the view on one device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from autoshard.exec.dtensor.split_trial import settle


class SharedMemory:
    """Record of the DTensors of `mesh` that share memory in torch; it keeps no tensor alive.

    A plain tensor is recorded if a DTensor shares its memory; writes to other views of it do not reach that DTensor.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self._views: Any = WeakTensorKeyDictionary()
        """Tensor -> its `_View`."""
        self._copies: set[Any] = set()
        """Keys of calls whose results share no memory with arguments."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, which have no views: a view refers to tensors of this process."""
        return {"mesh": self.mesh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, key: Any) -> Any:
        """Return the result of a function, with its DTensors that share memory with arguments recorded as their views.

        - `key`: key of the call, equal for calls with arguments of equal shapes, dtypes, placements and plain values.

        Autograd does not know these views as such. In-place functions on them would need views of DTensor gradients.
        """
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        sources = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        given = {id(leaf) for leaf in sources}
        if not any(isinstance(each, DTensor) and id(each) not in given for each in _pytree.tree_leaves(result)):
            return result
        key = (key, tuple(map(self._layout, sources)))
        if key in self._copies:
            return result
        views = {id(leaf): self._view(leaf) for leaf in sources}
        shadows = [views[id(leaf)].shadow if id(leaf) in views else _shadow(leaf) for leaf in leaves]
        try:
            with torch.no_grad(), _python_dispatch._disable_current_modes():
                positional, named = _pytree.tree_unflatten(shadows, spec)
                expected = _pytree.tree_leaves(func(*positional, **named))
        except Exception:  # results whose shapes depend on values, or an operator without shapes
            if _declares_views(func):
                raise NotImplementedError(
                    f"{func} returns views of its arguments, but has no function for shapes, so that writes to them "
                    "could be lost: register one with torch.library.register_fake."
                ) from None
            expected = []
        results, form = _pytree.tree_flatten(result)
        storages = {_storage(view.shadow): view for view in views.values()}
        shared = False
        for number, (each, shadow) in enumerate(zip(results, expected, strict=False)):
            found = isinstance(each, DTensor) and isinstance(shadow, torch.Tensor) and len(results) == len(expected)
            source = storages.get(_storage(shadow)) if found and id(each) not in given else None
            if source is not None and shadow.shape == each.shape:
                shared = True
                results[number] = each = _untracked(each)
                follows = func not in _DETACHED and torch.is_grad_enabled()
                self._join(each, source.family, shadow, source.history if follows else object())
        if not shared:
            self._copies.add(key)
            return result
        for leaf in sources:
            self._keep(leaf, views[id(leaf)])
        return _pytree.tree_unflatten(results, form)

    def placed(self, tensor: Any, copy: Any) -> Any:
        """Return a DTensor in other placements, `copy`, recorded as a tensor that shares the memory of `tensor`."""
        if copy is not tensor:
            view = self._view(tensor)
            self._keep(tensor, view)
            self._join(copy, view.family, view.shadow, view.history)
        return copy

    def assign(self, target: Any, value: Any) -> None:
        """Write a DTensor's values and history to `target`, and to all tensors that share its memory.

        A plain `target` is written to as torch does.
        """
        if value is target:
            return
        if isinstance(target, DTensor) and (value.shape != target.shape or value.dtype != target.dtype):
            raise NotImplementedError(
                f"the shape or dtype of a distributed tensor would change in place, from {list(target.shape)} to "
                f"{list(value.shape)}: use the function that returns a new tensor."
            )
        view = self._views.get(target)
        if view is not None and _overlaps_itself(view.shadow):
            raise NotImplementedError("a write to a view with several elements at one place: write to a copy instead.")
        others = self._others(view)
        _become(target, value)
        self._spread(target, view, others)

    def spread(self, target: Any) -> None:
        """Write the values and history of a plain tensor to all DTensors that share its memory."""
        view = self._views.get(target)
        self._spread(target, view, self._others(view))

    def _spread(self, target: Any, view: Any, others: Sequence["_View"]) -> None:
        """Write the values and history of a tensor with this view to others."""
        for other in others:
            tensor = other.tensor()
            # Autograd does not follow writes through a detached tensor.
            with torch.set_grad_enabled(torch.is_grad_enabled() and other.history is view.history):
                merged = _merged(self._wrapped(tensor), other.shadow, self._wrapped(target), view.shadow)
                _become(tensor, merged)

    def _wrapped(self, tensor: Any) -> Any:
        """Return a DTensor itself, and a plain tensor as a replicated DTensor."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def _view(self, tensor: Any) -> "_View":
        """Return the view of a DTensor; a new one, not yet recorded, if it has none."""
        found = self._views.get(tensor)
        return _View(TensorWeakRef(tensor), _Family(), _shadow(tensor), object()) if found is None else found

    def _layout(self, tensor: Any) -> Any:
        """Return the strides and offset of a DTensor's shadow."""
        view = self._views.get(tensor)
        return tuple(tensor.stride()) if view is None else (view.shadow.stride(), view.shadow.storage_offset())

    def _keep(self, tensor: Any, view: "_View") -> None:
        """Record a DTensor's view, unless it is recorded."""
        if tensor not in self._views:
            view.family.add(view)
            self._views[tensor] = view

    def _join(self, tensor: Any, family: "_Family", shadow: Any, history: object) -> None:
        """Record a DTensor as one more view in a family."""
        self._keep(tensor, _View(TensorWeakRef(tensor), family, shadow, history))

    def _others(self, view: Any) -> list["_View"]:
        """Return the other views whose elements may be those of `view`, in equal order on all processes.

        All processes must call it. A view that is gone on one process can be read on none: garbage is collected at
        other times there.
        """
        if view is None or view.family.count < 2:
            return []
        family = view.family
        alive = {number: each for number, each in family.views.items() if each.tensor() is not None}
        first = int(self._least(torch.tensor([float(min(alive))])).item())
        here = self._least(torch.tensor([float(number in alive) for number in range(first, family.count)]))
        family.views = {number: alive[number] for number in alive if number >= first and here[number - first]}
        found = [each for each in family.views.values() if each is not view and _may_meet(each.shadow, view.shadow)]
        for each in found:
            if _unit(each.shadow) != _unit(view.shadow) or each.shadow.is_conj() or each.shadow.is_neg():
                raise NotImplementedError(
                    "a write to a tensor that another one views in another dtype, or conjugated: write to a copy."
                )
        return found

    def _least(self, values: Any) -> Any:
        """Return the elementwise least of numbers over all processes."""
        values = values.to(self.mesh.device_type, torch.float64 if self.mesh.device_type == "cpu" else torch.float32)
        return DTensor.from_local(values, self.mesh, [Partial("min")] * self.mesh.ndim).full_tensor().cpu()


def _declares_views(func: Any) -> bool:
    """Return True if an operator's schema says that a result is a view of an argument; False for other functions."""
    overloads = getattr(func, "overloads", None)
    each = [func] if overloads is None else [getattr(func, name) for name in overloads()]
    schemas = [op._schema for op in each if isinstance(op, torch._ops.OpOverload)]
    aliases = [result.alias_info for schema in schemas for result in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@dataclasses.dataclass(eq=False)
class _View:
    """A DTensor, among those that share memory."""

    tensor: Any
    """Weak reference to it."""
    family: "_Family"
    """All that share its memory."""
    shadow: Any
    """Tensor on the meta device, whose storage is that of the whole family."""
    history: object
    """Equal for the views between which autograd follows writes: a detached view starts another."""


@dataclasses.dataclass(eq=False)
class _Family:
    """Views of one memory, numbered as they are made, which is alike on all processes."""

    views: dict[int, _View] = dataclasses.field(default_factory=dict)
    count: int = 0

    def add(self, view: _View) -> None:
        """Add a view, and drop those whose tensors are gone."""
        self.views = {number: each for number, each in self.views.items() if each.tensor() is not None}
        self.views[self.count] = view
        self.count += 1


_DETACHED = {torch.Tensor.detach, torch.Tensor.data.__get__}  # pyrefly: ignore[missing-attribute]
"""Functions that return the same memory without its history."""


class Become(torch.autograd.Function):
    """Function that gives a DTensor the values and history of another, and leaves its old memory as it is.

    Autograd may have saved the old memory.
    """

    @staticmethod
    def forward(ctx: Any, target: Any, value: Any) -> Any:
        """Return the target, with the other's shard."""
        ctx.mark_dirty(target)
        ctx.places = list(value.placements)
        target._local_tensor = value._local_tensor
        return target

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return no gradient for the old values, and all of it for the new ones, placed like them."""
        return None, gradients[0].redistribute(placements=ctx.places)


def _become(target: Any, value: Any) -> None:
    """Give a tensor the values and history of a DTensor of its shape and dtype; parameters and plain tensors keep their
    memory.
    """
    if not isinstance(target, DTensor):
        target.copy_(settle(value).redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local())
        return
    value = settle(value).redistribute(placements=list(target.placements))
    if isinstance(target, torch.nn.Parameter):
        target.copy_(value)
    elif torch.is_grad_enabled() and (target.requires_grad or value.requires_grad):
        Become.apply(target, value)
    else:
        target._local_tensor = value._local_tensor
        torch.autograd.graph.increment_version(target)


def _untracked(tensor: Any) -> Any:
    """Return the same DTensor, with its gradient, which autograd does not know as a view."""
    tensor = settle(tensor)
    return tensor.redistribute(placements=list(tensor.placements)) if tensor._is_view() else tensor


def _shadow(leaf: Any) -> Any:
    """Return a tensor on the meta device with the shape, strides and dtype of a tensor; any other value unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # A checkpoint counts the ops of a module, and those of this file differ as it runs again.
    with _python_dispatch._disable_current_modes():
        return torch.empty_strided(tuple(leaf.shape), leaf.stride(), dtype=leaf.dtype, device="meta")


def _storage(shadow: Any) -> int:
    """Return a number that is equal for tensors of one storage."""
    return shadow.untyped_storage()._cdata


def _unit(shadow: Any) -> Any:
    """Return the dtype whose elements a tensor consists of: that of the parts of complex numbers."""
    return shadow.dtype.to_real() if shadow.is_complex() else shadow.dtype


def _geometry(shadow: Any) -> tuple[list[int], list[int], int]:
    """Return sizes, strides and offset of a tensor in its storage; complex numbers are a last dim of two parts."""
    sizes, strides, offset = list(shadow.shape), list(shadow.stride()), shadow.storage_offset()
    if shadow.is_complex():
        return [*sizes, 2], [*(2 * each for each in strides), 1], 2 * offset
    return sizes, strides, offset


def _end(sizes: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """Return the place after the last element."""
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _may_meet(one: Any, other: Any) -> bool:
    """Return False if two tensors of one storage lie one behind the other, or if one is empty."""
    if not one.numel() or not other.numel():
        return False
    (sizes, strides, offset), (others, steps, start) = _geometry(one), _geometry(other)
    return offset < _end(others, steps, start) and start < _end(sizes, strides, offset)


def _overlaps_itself(shadow: Any) -> bool:
    """Return True if several elements of a tensor lie at one place."""
    end = 0
    dims = sorted((stride, size) for size, stride in zip(shadow.shape, shadow.stride(), strict=True) if size > 1)
    for stride, size in dims:
        if stride <= end:
            return True
        end += (size - 1) * stride
    return False


def _merged(old: Any, old_shadow: Any, new: Any, new_shadow: Any) -> Any:
    """Return the values of `old` with those of `new` where both have the same elements, as a DTensor with gradients.

    Each device does so for its own rows if both have the same rows in their first dim; else all devices gather all.
    """
    (sizes, strides, offset), (new_sizes, new_strides, new_offset) = _geometry(old_shadow), _geometry(new_shadow)
    rows = bool(old.ndim and new.ndim) and sizes[0] == new_sizes[0] and strides[0] == new_strides[0] and all(
        _end(each[1:], steps[1:], start) <= strides[0]
        for each, steps, start in ((sizes, strides, offset), (new_sizes, new_strides, new_offset))
    )  # fmt: skip
    places = [place if rows and place == Shard(0) else Replicate() for place in old.placements]

    def part(tensor: Any) -> Any:
        """Return this device's rows of a DTensor, as real numbers."""
        own = settle(tensor).redistribute(placements=places).to_local(grad_placements=places).resolve_conj()
        return torch.view_as_real(own) if own.is_complex() else own

    mine, taken = part(old), part(new)
    extent = max(_end(mine.shape, strides, offset), _end(taken.shape, new_strides, new_offset), 0)
    memory = taken.new_zeros(extent)
    memory.as_strided(taken.shape, new_strides, new_offset).copy_(taken)
    written = torch.zeros(extent, dtype=torch.bool, device=taken.device)
    written.as_strided(taken.shape, new_strides, new_offset).fill_(True)
    # A layout of rows is one of all rows: only their number differs.
    values = torch.where(
        written.as_strided(mine.shape, strides, offset), memory.as_strided(mine.shape, strides, offset), mine
    )
    if old.is_complex():
        values = torch.view_as_complex(values.contiguous())
    return DTensor.from_local(values, old.device_mesh, places, run_check=False)
