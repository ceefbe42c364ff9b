"""Gradients of max pooling in one form: a select_and_scatter with padding of its own.

JAX pads, scatters and slices in separate ops for some platforms; the padded value then no longer splits as the
value itself does, and platforms would have different programs.
"""

from typing import Any, cast

from autoshard.mlir._module import collect


_SCATTER = "stablehlo.select_and_scatter"


def fold_pooling(function: Any) -> None:
    """Fold pad, select_and_scatter, slice into one select_and_scatter wherever they undo each other (in place)."""
    for op in collect(function, {_SCATTER}):
        _fold(op)


def unfold_pooling(module: Any) -> Any:
    """The reverse, for platforms whose compilers cannot do padding in a select_and_scatter (in place)."""
    with module.context:
        for op in collect(module.operation, {_SCATTER}):
            _unfold(op)
    return module


def selects_extreme(op: Any) -> bool:
    """True if a select_and_scatter selects the largest or the smallest value of a window."""
    return _never_selected(op) is not None


def identity_of_selection(op: Any) -> Any:
    """A scalar constant that a select_and_scatter never selects, at the current insertion point.

    None if the selection is neither of the largest nor of the smallest value.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    number = _never_selected(op)
    if number is None:
        return None
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(op.operands[0].type).element_type)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, number))


def _never_selected(op: Any) -> Any | None:
    from jaxlib.mlir import ir

    first = op.regions[0].blocks[0].operations[0].operation
    if first.name != "stablehlo.compare":
        return None
    direction = str(first.attributes["comparison_direction"])
    largest = "GE" in direction or "GT" in direction
    if not largest and "LE" not in direction and "LT" not in direction:
        return None
    element = ir.RankedTensorType(op.operands[0].type).element_type
    if isinstance(element, ir.IntegerType):
        width = element.width
        if element.is_unsigned:
            return ir.IntegerAttr.get(element, 0 if largest else (1 << width) - 1)
        return ir.IntegerAttr.get(element, -(1 << (width - 1)) if largest else (1 << (width - 1)) - 1)
    number = float("-inf") if largest else float("inf")
    return ir.FloatAttr.get(element, number, loc=ir.Location.unknown(op.context))


def _fold(op: Any) -> None:
    from jaxlib.mlir import ir

    if any(any(row) for row in _padding(op)):
        return
    pad = _producer(op.operands[0])
    if pad is None or pad.name != "stablehlo.pad" or not _pads_with(pad, _never_selected(op)):
        return
    low, high, inner = (
        list(ir.DenseI64ArrayAttr(pad.attributes[key]))
        for key in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    shape = list(ir.RankedTensorType(pad.operands[0].type).shape)
    users = _slices(op)
    cropped = [size - b for size, b in zip(ir.RankedTensorType(op.results[0].type).shape, high, strict=True)]
    if any(inner) or min(*low, *high) < 0 or not users:
        return
    for user in users:
        if _attribute(user, "start_indices") != low or _attribute(user, "limit_indices") != cropped:
            return
        if list(ir.RankedTensorType(user.results[0].type).shape) != shape:
            return
    import numpy as np

    with op.location, ir.InsertionPoint(op):
        new = op.clone()
        new.operands[0] = pad.operands[0]
        new.results[0].set_type(pad.operands[0].type)
        rows = np.stack([low, high], axis=1).astype(np.int64)
        new.attributes["padding"] = cast(Any, ir.DenseElementsAttr).get(rows)
    for user in users:
        user.results[0].replace_all_uses_with(new.results[0])
        user.erase()
    for trivial in _users(op):
        trivial.erase()
    op.erase()
    if not _users(pad):
        pad.erase()


def _slices(op: Any) -> list[Any]:
    """The slices that crop the op's result, slices of everything between left out; none if something else uses it."""
    found: list[Any] = []
    for user in _users(op):
        if user.name != "stablehlo.slice":
            return []
        if user.results[0].type == user.operands[0].type:
            inner = _users(user)
            if not inner or any(u.name != "stablehlo.slice" for u in inner):
                return []
            found += inner
        else:
            found.append(user)
    return found


def _users(op: Any) -> list[Any]:
    return [user for result in op.results for user in _users_of(result)]


def _users_of(value: Any) -> list[Any]:
    return [use.owner.operation for use in value.uses]


def _producer(value: Any) -> Any | None:
    from jaxlib.mlir import ir

    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _attribute(op: Any, key: str) -> list[int]:
    from jaxlib.mlir import ir

    return list(ir.DenseI64ArrayAttr(op.attributes[key]))


def _pads_with(pad: Any, number: Any | None) -> bool:
    """True if what is padded is a constant of this number."""
    from jaxlib.mlir import ir

    source = _producer(pad.operands[1])
    if number is None or source is None or source.name != "stablehlo.constant":
        return False
    return source.attributes["value"] == ir.DenseElementsAttr.get_splat(pad.operands[1].type, number)


def _padding(op: Any) -> list[list[int]]:
    from jaxlib.mlir import ir

    rank = len(ir.RankedTensorType(op.operands[0].type).shape)
    if "padding" not in op.attributes:
        return [[0, 0]] * rank
    flat = [int(n) for n in ir.DenseIntElementsAttr(op.attributes["padding"])]
    return [flat[2 * i : 2 * i + 2] for i in range(rank)]


def _unfold(op: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    rows = _padding(op)
    if not any(any(row) for row in rows):
        return
    low, high = ([row[side] for row in rows] for side in (0, 1))
    shape = list(ir.RankedTensorType(op.operands[0].type).shape)
    with op.location, ir.InsertionPoint(op):
        fill = identity_of_selection(op)
        if fill is None:
            return
        wide = stablehlo.pad(op.operands[0], fill, low, high, [0] * len(shape))
        new = op.clone()
        new.operands[0] = wide
        new.results[0].set_type(wide.type)
        del new.attributes["padding"]
        stop = [a + size for a, size in zip(low, shape, strict=True)]
        cropped = stablehlo.slice(new.results[0], low, stop, [1] * len(shape))
    op.results[0].replace_all_uses_with(cropped)
    op.erase()
