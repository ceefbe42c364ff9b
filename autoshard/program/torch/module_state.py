"""Calls of torch modules with other tensors, and restoring of their state."""

import collections
import contextlib
import functools
import operator
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.errors import UserError


_LONGEST = 10_000
"""Largest container that is restored; a larger one is data that code only reads."""
_COPIED = 1 << 24
"""Most elements of a tensor that is restored."""


def call_with(module: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `module` with the tensors of `state` in place of its parameters and buffers of these names.

    The result is that of the module. A tensor that the module has under several names, in plain attributes, or in
    lists and tuples of these, is replaced everywhere. Tensors that `state` does not name stay. A tensor that the
    module assigns to a parameter or buffer is written into the tensor of `state`. The module's own tensors are
    restored afterwards, also after an error.

    - `state`: torchax tensors by the name of a parameter or buffer of `module`; an unknown name is a `KeyError`.

    Raises `UserError` if the module assigns a tensor of another shape or dtype.
    """
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    given = {id(own[name]): value for name, value in state.items()}
    names = {id(own[name]): name for name in state}
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    registered: dict[str, tuple[dict[str, Any], str]] = {}
    for child in module.modules():
        for kind in (child._parameters, child._buffers):
            for key, tensor in kind.items():
                if id(tensor) in given:
                    replaced.append((kind, key, tensor))
                    registered.setdefault(names[id(tensor)], (kind, key))
        attributes = child.__dict__
        replaced += [(attributes, key, value) for key, value in attributes.items() if _holds(value, given)]
    try:
        for kind, key, value in replaced:
            kind[key] = _with(value, given)
        result = module(*args, **kwargs)
        for name, (kind, key) in registered.items():
            _write(state[name], kind.get(key), name)
        return result
    finally:
        for kind, key, value in replaced:
            kind[key] = value


def _write(tensor: Any, assigned: Any, name: str) -> None:
    """Write `assigned`, which a module stored in place of the torchax tensor `tensor`, into `tensor`.

    Nothing happens if `assigned` is None (the name was removed) or `tensor` itself. `name` is for the error.

    Raises `UserError` if the shape or dtype differs.
    """
    from autoshard.program.torch_ops.torchax_environment import environment

    if assigned is None or assigned is tensor:
        return
    value = environment().t2j_iso(assigned)
    if (value.shape, value.dtype) != (tuple(tensor.shape), environment().t2j_iso(tensor).dtype):
        raise UserError(
            f"the module assigns {value.dtype}{list(value.shape)} to `{name}`, which is {list(tensor.shape)}: a step "
            "gives back buffers of the shape and dtype that it takes."
        )
    tensor._elem = value


def _holds(value: Any, given: Mapping[int, Any]) -> bool:
    """Return True if `given` has the `id` of `value`, or of an item of `value` if it is a plain list or tuple.

    `_flat_weights` of an RNN is such a list. Deeper containers are not searched.
    """
    if type(value) in (list, tuple):
        return any(id(each) in given for each in value)
    return id(value) in given


def _with(value: Any, given: Mapping[int, Any]) -> Any:
    """Return the replacement of a tensor, or a new list or tuple with its tensors replaced, other items unchanged.

    - `given`: replacements by the `id` of the module's own tensor.
    """
    if type(value) in (list, tuple):
        return type(value)(given.get(id(each), each) for each in value)
    return given[id(value)]


@contextlib.contextmanager
def own_forward(layer: Any, forward: Any) -> Iterator[None]:
    """Replace the stand-in in the layer's `__dict__["forward"]` by `forward` while inside; put it back on exit.

    - `forward`: entry that the layer's `__dict__` had before the stand-in; None if its class defines `forward`.
    """
    stand_in = layer.__dict__["forward"]
    replace_forward(layer, forward)
    try:
        yield
    finally:
        layer.__dict__["forward"] = stand_in


def replace_forward(layer: Any, forward: Any) -> Any:
    """Store `forward` in the layer's `__dict__`, or nothing if it is None; return the previous entry."""
    before = layer.__dict__.pop("forward", None)
    if forward is not None:
        layer.__dict__["forward"] = forward
    return before


@contextlib.contextmanager
def preserved(module: Any) -> Iterator[dict[str, None]]:
    """Restore on exit, also after an error, all state that `reachable` lists, and the elements of its tensors.

    A module's code may assign attributes, write to tensors, append to lists and fill caches; traced values must not
    stay there. The yielded dict is empty while inside. On exit it receives the paths of module attributes that were
    numbers or tensors and were changed.
    """
    import torch

    before = [Content(each) for each in reachable(module)]
    paths = {id(child.__dict__): f"{path}." if path else "" for path, child in module.named_modules()}
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    copies: dict[int, Any] = {}
    # The trace reads the memory of a tensor later, so its code must not write to the module's own.
    for holder in (content.holder for content in before if id(content.holder) in paths):
        for key, value in holder.items():
            if type(value) is torch.Tensor and id(value) not in own and value.numel() <= _COPIED:
                copies.setdefault(id(value), (value, value.detach().clone().requires_grad_(value.requires_grad)))
                holder[key] = copies[id(value)][1]
    originals = {id(copy): value for value, copy in copies.values()}
    assigned: dict[str, None] = {}
    try:
        yield assigned
    finally:
        for content in before:
            path = paths.get(id(content.holder))
            for key, value in content.holder.items() if path is not None else ():
                if id(value) in originals:
                    assigned |= {f"{path}{key}": None} if value._version else {}
                    content.holder[key] = originals[id(value)]
        for content in before:
            if content.is_changed():
                path = paths.get(id(content.holder))
                assigned |= dict.fromkeys(f"{path}{key}" for key in content.assigned() if path is not None)
                content.restore()


class Content:
    """A snapshot of the references in `holder`: a dict, list, set, deque or cell of a closure."""

    __slots__ = ("holder", "keys", "values")

    def __init__(self, holder: Any) -> None:
        """Store the present content of the holder."""
        self.holder = holder
        self.keys, self.values = _content(holder)

    def is_changed(self) -> bool:
        """Return True if the holder's present content differs: in length, in a key or in a value, by `_same`.

        Keys are compared by identity and in order. Changes inside a value do not count.
        """
        keys, values = _content(self.holder)
        if len(values) != len(self.values) or not all(map(operator.is_, keys, self.keys)):
            return True
        return not all(map(operator.is_, values, self.values)) and not all(map(_same, values, self.values))

    def assigned(self) -> list[Any]:
        """List the keys of a dict whose stored values are numbers or tensors, and whose present values differ.

        Booleans and removed keys do not count. The list is empty for other holders.
        """
        import torch

        kinds = (int, float, torch.Tensor)
        pairs = [(key, value) for key, value in zip(self.keys, self.values, strict=False) if isinstance(value, kinds)]
        return [
            key
            for key, value in pairs
            if not isinstance(value, bool) and key in self.holder and not _same(self.holder[key], value)
        ]

    def restore(self) -> None:
        """Put the stored keys and values back into the same holder object, in their order."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = self.values[0]
            return
        self.holder.clear()
        if isinstance(self.holder, dict):
            self.holder.update(zip(self.keys, self.values, strict=True))
        elif isinstance(self.holder, set):
            self.holder.update(self.values)
        else:
            self.holder.extend(self.values)


def _content(holder: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the keys of a dict (an empty tuple for other holders), and the values of any holder, in order.

    An empty cell has the value None.
    """
    if isinstance(holder, dict):
        return tuple(holder), tuple(holder.values())
    return (), (_in_cell(holder),) if isinstance(holder, types.CellType) else tuple(holder)


def _same(a: Any, b: Any) -> bool:
    """Return True for the same object, and for equal texts or numbers of one type."""
    return a is b or isinstance(a, str | int | float) and type(a) is type(b) and a == b


def reachable(module: Any) -> list[Any]:
    """List the objects that can store state of a module, found by following references from it; each once.

    These are attribute dicts of modules and objects, dicts, lists, sets, deques, and cells of closures. Tuples,
    partials, methods and defaults of functions are followed but not listed. Tensors, classes and Python modules are
    not followed, nor containers of more than `_LONGEST` items.
    """
    import torch

    passed = (torch.Tensor, type, types.ModuleType, str, bytes, int, float, complex, torch.dtype, torch.device)
    seen: set[int] = set()
    holders: list[Any] = []
    pending: list[Any] = [module]
    while pending:
        value = pending.pop()
        if value is None or isinstance(value, passed) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            cells = value.__closure__ or ()
            holders += cells
            pending += [_in_cell(cell) for cell in cells]
            pending += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, types.MethodType):
            pending += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            pending += [value.func, value.args, value.keywords]
        elif isinstance(value, dict | list | set | collections.deque | tuple | frozenset):
            if len(value) > _LONGEST:
                continue
            if not isinstance(value, tuple | frozenset):
                holders.append(value)
            pending += value.values() if isinstance(value, dict) else value
        with contextlib.suppress(AttributeError):  # objects that have only slots
            attributes = object.__getattribute__(value, "__dict__")
            holders.append(attributes)
            pending += attributes.values()
    return holders


def _in_cell(cell: Any) -> Any:
    """Return the value of a closure's cell, or None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:  # the name has no value yet
        return None


@contextlib.contextmanager
def without_stale_hooks() -> Iterator[None]:
    """Remove the saved-tensor hooks that a torch checkpoint leaves behind when an error leaves the context.

    The error is raised again; without an error nothing happens. The hooks are installed in a generator of torch, which
    removes them once no frame of a traceback refers to it. Until then they intercept the tensors of all eager torch
    code. The frames of the error and of its causes are cleared, so that their locals are lost.
    """
    from torch._C import _autograd

    before = _autograd._top_saved_tensors_default_hooks(True)
    try:
        yield
    except BaseException as error:
        raised: BaseException | None = error
        while raised is not None and _autograd._top_saved_tensors_default_hooks(True) != before:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        raise
