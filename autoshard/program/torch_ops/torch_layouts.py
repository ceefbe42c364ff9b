"""The memory layout that torch would give each tensor, which decides if an operation returns a view or a copy.

torchax's tensors have shapes and no strides. Here each tensor whose elements are not in row-major order has a torch
tensor on the meta device with the strides of eager torch. All other tensors are contiguous.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.program.torch_ops.views import root_of


_AS_THEY_LIE = frozenset({"view", "reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"})
"""Operations for which torch returns a view or a copy, depending on the strides of the operand."""


def viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the argument of a torch operation that its results may be views of, by the operation's schema.

    The result is None if there is no such argument. The argument may be of any type.
    """
    place = _place(func)
    if place is None:
        return None
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


@functools.cache
def _place(func: Any) -> tuple[int, str] | None:
    """Return position and name of the argument that an operation's results may be views of, or None.

    All overloads of an operation without a fixed one are searched; writes in place do not count.
    """
    import torch

    name = str(getattr(func, "__name__", func))
    if isinstance(func, torch._ops.OpOverload):
        schemas = [func._schema]
    else:
        packet = func if isinstance(func, torch._ops.OpOverloadPacket) else getattr(torch.ops.aten, name, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or name.startswith("__"):
            return None
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    for schema in schemas:
        aliases = [each.alias_info for each in schema.returns if each.alias_info and not each.alias_info.is_write]
        returned = {name for each in aliases for name in each.before_set}
        for position, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            listed = alias is not None and "*" in alias.after_set  # the result is a list of views
            if alias is not None and not alias.is_write and (listed or returned & alias.before_set):
                return position, argument.name
    return None


def is_told(tensors: list[Any]) -> bool:
    """Return True if the root of one of some torchax tensors is recorded as not contiguous, or as of unknown layout."""
    return any("_layout" in root_of(each).__dict__ for each in tensors)


def note(tensor: Any, layout: Any) -> None:
    """Record `layout`, a meta tensor, as the layout of a torchax tensor; None if it is unknown.

    A contiguous layout is not recorded, since it is the default.
    """
    if layout is None or not layout.is_contiguous():
        tensor.__dict__["_layout"] = layout


def as_torch(func: Any, args: Any, kwargs: Any, parent: Any = None) -> list[tuple[bool | None, Any]] | None:
    """Return, for each result of an operation, True if torch makes it a view of `parent`, and its layout in torch.

    The operation runs on meta tensors with the operands' layouts. The whole result is None if an operand's layout is
    unknown or if the meta device cannot run the operation. An impossible view gives one copy with a placeholder as
    layout.
    """
    import torch
    from torch.utils import _pytree

    layouts: dict[int, Any] = {}

    def layout(tensor: Any) -> Any:
        """Return the layout of an operand, computed once."""
        return layouts.setdefault(id(tensor), layout_of(tensor))

    args, kwargs = _pytree.tree_map_only(torch.Tensor, layout, (args, kwargs))
    if any(each is None for each in layouts.values()):
        return None
    own = layouts.get(id(parent))
    with torch_alone():
        try:
            results = [each for each in _pytree.tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        except RuntimeError:  # no view is possible, so that `reshape` makes a copy
            return [(False, torch.empty((), device="meta"))] if depends(func) else None
        except Exception:  # the op has no meta kernel
            return None
        place = None if own is None else own.untyped_storage()._cdata
        return [(each.untyped_storage()._cdata == place, each) for each in results]


def depends(func: Any) -> bool:
    """Return True if an operation returns a view or a copy depending on the strides of its operand."""
    return str(getattr(func, "__name__", func)).partition(".")[0] in _AS_THEY_LIE


def layout_of(tensor: Any) -> Any:
    """Return a meta tensor with a tensor's shape, dtype and strides in torch, or None if they are unknown.

    Torchax tensors without a record are contiguous; plain torch tensors have their own strides.
    """
    import torch

    info = getattr(tensor, "view_info", None)
    if info is not None:
        base = layout_of(tensor.parent)
        with torch_alone():
            return None if base is None else base[info.slices]
    if "_layout" in tensor.__dict__:
        return tensor.__dict__["_layout"]
    with torch_alone():
        if not hasattr(tensor, "_env"):  # a tensor of plain torch
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Disable torchax's dispatch while inside, so that torch's operations are its own."""
    import torch
    from torch.utils import _mode_utils

    with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield


def outputs(func: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names in `kwargs` of the tensors that an operation writes its results to, such as `out`."""
    schema = getattr(func, "_schema", None)
    names = {"out"} if schema is None else {each.name for each in schema.arguments if each.is_out}
    return [name for name, each in kwargs.items() if name in names and each is not None]


def written(run: Callable[..., Any], func: Any, args: Any, kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Run an operation without the tensors that it writes to, write its results to them, and return them.

    - `run`: function that runs an operation on `args` and `kwargs`.
    - `names`: result of `outputs`.

    Raises `NotImplementedError` if torch would resize a tensor, or if it has no operation without them.
    """
    import torch
    from torch.utils import _pytree

    given = {name: each for name, each in kwargs.items() if name not in names}
    targets = kwargs[names[0]] if len(names) == 1 else tuple(kwargs[name] for name in names)
    results = run(_without_outputs(func), args, given)
    for target, result in zip(_pytree.tree_leaves(targets), _pytree.tree_leaves(results), strict=True):
        if target.shape != result.shape:
            raise NotImplementedError(
                f"`out` of shape {tuple(target.shape)}: give it that of the result, {tuple(result.shape)}"
            )
        run(torch.ops.aten.copy_.default, (target, result), {})
    return targets


def _without_outputs(func: Any) -> Any:
    """Return the overload of an operation that returns new results; a function is returned unchanged.

    Raises `NotImplementedError` if there is none.
    """
    if not hasattr(func, "_schema"):
        return func
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments if not each.is_out]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        if [(each.name, str(each.type)) for each in other._schema.arguments] == wanted:
            return other
    raise NotImplementedError(f"`{func}`, which has no form without `out`: write it out")
