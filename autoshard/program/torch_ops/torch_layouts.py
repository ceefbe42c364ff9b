"""How torch itself would lay tensors out: which operations give a view of what they take, and which a copy.

torchax's tensors have shapes and no strides. Here each whose elements do not lie in order has a tensor of torch's
without elements (of its meta device) that lies as it would in torch; all others lie in order.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from autoshard.program.torch_ops.views import root_of


_AS_THEY_LIE = frozenset({"view", "reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"})
"""Operations of which torch makes a view of tensors that lie one way, and a copy of others."""


def viewed(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument of a torch operation of which its results may be views, by its schema; None if it has none."""
    place = _place(func)
    if place is None:
        return None
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


@functools.cache
def _place(func: Any) -> tuple[int, str] | None:
    """Where an operation takes the tensor of which its results may be views."""
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
            listed = alias is not None and "*" in alias.after_set  # what lists of views are views of
            if alias is not None and not alias.is_write and (listed or returned & alias.before_set):
                return position, argument.name
    return None


def is_told(tensors: list[Any]) -> bool:
    """Whether one of some torchax tensors does not lie in order, or may not."""
    return any("_layout" in root_of(each).__dict__ for each in tensors)


def note(tensor: Any, layout: Any) -> None:
    """Remember how a torchax tensor lies; None: nobody knows."""
    if layout is None or not layout.is_contiguous():
        tensor.__dict__["_layout"] = layout


def as_torch(func: Any, args: Any, kwargs: Any, parent: Any = None) -> list[tuple[bool | None, Any]] | None:
    """Of each tensor that an operation makes: whether torch makes it a view of `parent`, and how it lies there.

    What nobody knows is None.
    """
    import torch
    from torch.utils import _pytree

    layouts: dict[int, Any] = {}

    def layout(tensor: Any) -> Any:
        return layouts.setdefault(id(tensor), _layout(tensor))

    args, kwargs = _pytree.tree_map_only(torch.Tensor, layout, (args, kwargs))
    if any(each is None for each in layouts.values()):
        return None
    own = layouts.get(id(parent))
    with _torch_alone():
        try:
            results = [each for each in _pytree.tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        except RuntimeError:  # no view can be made of what lies so: `reshape`, which torch takes apart, makes a copy
            return [(False, torch.empty((), device="meta"))] if depends(func) else None
        except Exception:  # of operations that torch knows only with elements
            return None
        place = None if own is None else own.untyped_storage()._cdata
        return [(each.untyped_storage()._cdata == place, each) for each in results]


def depends(func: Any) -> bool:
    """Whether it depends on how a tensor lies if an operation gives a view of it."""
    return str(getattr(func, "__name__", func)).partition(".")[0] in _AS_THEY_LIE


def _layout(tensor: Any) -> Any:
    import torch

    info = getattr(tensor, "view_info", None)
    if info is not None:
        whole = _layout(tensor.parent)
        with _torch_alone():
            return None if whole is None else whole[info.slices]
    if "_layout" in tensor.__dict__:
        return tensor.__dict__["_layout"]
    with _torch_alone():
        if not hasattr(tensor, "_env"):  # one of torch's own
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def _torch_alone() -> Iterator[None]:
    """While inside, torch's operations are its own."""
    import torch
    from torch.utils import _mode_utils

    with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        yield
