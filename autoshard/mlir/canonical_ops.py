"""Batch norms and gradients of max pooling, rewritten in one canonical form."""

import math
import re
from typing import Any, cast

from autoshard.mlir.module import collect, compared, main_block, numbers_of, pairs_of, parse_module, replace_by_block


_NORMS = frozenset({"stablehlo.batch_norm_training", "stablehlo.batch_norm_grad", "stablehlo.batch_norm_inference"})
_ROUGH = frozenset({"bf16", "f16"})
"""Types whose norms are computed in f32."""


def expand_norms(module: Any) -> None:
    """Replace every batch norm of the module by elementary ops, as StableHLO's specification defines it (in place).

    Norms of bf16 and f16 are computed in f32. New ops have the norm's location.
    """
    from jaxlib.mlir import ir

    for op in collect(module.operation, _NORMS):
        donor = parse_module(_Expansion(op).text(), module.context)
        block = main_block(donor)
        for each in block.operations:

            def place(inner: Any, location: Any = op.location) -> Any:
                inner.location = location
                return ir.WalkResult.ADVANCE

            each.operation.walk(place, ir.WalkOrder.PRE_ORDER)
        replace_by_block(op, block)


class _Expansion:
    """Writer of the text of a function that computes one batch norm.

    Methods that emit append lines to the text, and accept and return names of values.
    """

    def __init__(self, op: Any) -> None:
        from jaxlib.mlir import ir

        self.kind = op.name.rpartition("batch_norm_")[2]
        self.takes = [str(value.type) for value in op.operands]
        self.gives = [str(value.type) for value in op.results]
        shape = list(ir.RankedTensorType(op.operands[0].type).shape)
        self.feature = ir.IntegerAttr(op.attributes["feature_index"]).value
        self.epsilon = ir.FloatAttr(op.attributes["epsilon"]).value
        element = str(ir.RankedTensorType(op.operands[0].type).element_type)
        self.element = "f32" if element in _ROUGH else element
        self.whole = f"tensor<{'x'.join(map(str, shape))}x{self.element}>"
        self.row = f"tensor<{shape[self.feature]}x{self.element}>"
        self.others = [d for d in range(len(shape)) if d != self.feature]
        self.count = math.prod(shape[d] for d in self.others)
        self.lines: list[str] = []

    def text(self) -> str:
        """Return the function's text, with the op's operands as arguments and its results."""
        arguments = [f"%a{k}" for k in range(len(self.takes))]
        values = [self.as_type(a, old, self.wide(old)) for a, old in zip(arguments, self.takes, strict=True)]
        results = getattr(self, self.kind)(*values)
        results = [self.as_type(r, self.wide(new), new) for r, new in zip(results, self.gives, strict=True)]
        signature = ", ".join(f"{a}: {kind}" for a, kind in zip(arguments, self.takes, strict=True))
        body = "\n".join(self.lines)
        types = ", ".join(self.gives)
        return f"func.func public @main({signature}) -> ({types}) {{\n{body}\nreturn {', '.join(results)} : {types}\n}}"

    def training(self, x: str, scale: str, offset: str) -> tuple[str, str, str]:
        """Emit the norm with the batch's own mean and variance; return the result, the mean and the variance."""
        mean = self.mean(x)
        centred = self.op("subtract", x, self.spread(mean))
        variance = self.mean(self.op("multiply", centred, centred))
        return self.scaled(centred, scale, offset, variance), mean, variance

    def inference(self, x: str, scale: str, offset: str, mean: str, variance: str) -> tuple[str]:
        """Emit the norm with a given mean and variance."""
        return (self.scaled(self.op("subtract", x, self.spread(mean)), scale, offset, variance),)

    def grad(self, x: str, scale: str, mean: str, variance: str, g: str) -> tuple[str, str, str]:
        """Emit the gradients of the input, the scale and the offset, from the gradient `g` of the output.

        `mean` and `variance` are those of the batch.
        """
        inverse = self.inverse(variance)
        unit = self.op("multiply", self.op("subtract", x, self.spread(mean)), self.spread(inverse))
        of_scale, of_offset = self.sum(self.op("multiply", g, unit)), self.sum(g)
        along = self.op("multiply", unit, self.spread(self.divided(of_scale)))
        rest = self.op("subtract", self.op("subtract", g, self.spread(self.divided(of_offset))), along)
        slope = self.op("multiply", scale, inverse, self.row)
        return self.op("multiply", rest, self.spread(slope)), of_scale, of_offset

    def scaled(self, centred: str, scale: str, offset: str, variance: str) -> str:
        """Emit the centred input over the deviation, times the scale, plus the offset."""
        slope = self.op("multiply", scale, self.inverse(variance), self.row)
        return self.op("add", self.op("multiply", centred, self.spread(slope)), self.spread(offset))

    def inverse(self, variance: str) -> str:
        """Emit one over the standard deviation: the reciprocal root of the variance plus epsilon."""
        return self.new(
            f"stablehlo.rsqrt {self.op('add', variance, self.constant(self.epsilon, self.row), self.row)} : {self.row}"
        )

    def mean(self, value: str) -> str:
        """Emit the mean over all dims but the feature."""
        return self.divided(self.sum(value))

    def divided(self, row: str) -> str:
        """Emit the quotient of one number per feature and the count of elements summed."""
        return self.op("divide", row, self.constant(self.count, self.row), self.row)

    def sum(self, value: str) -> str:
        """Emit the sum over all dims but the feature."""
        zero = self.constant(0, f"tensor<{self.element}>")
        return self.new(
            f"stablehlo.reduce({value} init: {zero}) applies stablehlo.add across dimensions = {self.others} : "
            f"({self.whole}, tensor<{self.element}>) -> {self.row}"
        )

    def spread(self, row: str) -> str:
        """Emit the broadcast of one number per feature to the whole shape."""
        return self.new(f"stablehlo.broadcast_in_dim {row}, dims = [{self.feature}] : ({self.row}) -> {self.whole}")

    def constant(self, number: float, kind: str) -> str:
        """Emit a constant of type `kind` that repeats `number`."""
        return self.new(f"stablehlo.constant dense<{number:.17e}> : {kind}")

    def op(self, name: str, a: str, b: str, kind: str = "") -> str:
        """Emit the binary op `name`, of type `kind` or by default of the whole shape."""
        return self.new(f"stablehlo.{name} {a}, {b} : {kind or self.whole}")

    def wide(self, kind: str) -> str:
        """Return the tensor type of the same shape with the elements in which the norm is computed: f32 for bf16 and
        f16.
        """
        return re.sub(r"(?<=[x<])[a-z]+\d+(?=>)", self.element, kind)

    def as_type(self, value: str, old: str, new: str) -> str:
        """Emit a conversion of a value from type `old` to type `new`; return the value if they are equal."""
        return value if old == new else self.new(f"stablehlo.convert {value} : ({old}) -> {new}")

    def new(self, line: str) -> str:
        """Append a line that defines a new value; return the value's name."""
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {line}")
        return name


_SCATTER = "stablehlo.select_and_scatter"


def fold_pooling(function: Any) -> None:
    """Fold every pad, select_and_scatter and slice into one padded select_and_scatter (in place).

    They are folded only if the slice undoes the pad, and if the pad's value is one that the op never selects.
    """
    for op in collect(function, {_SCATTER}):
        _fold(op)


def unfold_pooling(module: Any) -> Any:
    """Split padded select_and_scatters into pad, select_and_scatter and slice (in place), and return the module.

    Ops that select neither the largest nor the smallest value stay padded. Compilers of some platforms cannot pad in a
    select_and_scatter.
    """
    with module.context:
        for op in collect(module.operation, {_SCATTER}):
            _unfold(op)
    return module


def selects_extreme(op: Any) -> bool:
    """Return True if a select_and_scatter selects the largest or the smallest value of a window."""
    return _never_selected(op) is not None


def identity_of_selection(op: Any) -> Any:
    """Emit a scalar constant that a select_and_scatter never selects, at the current insertion point.

    Return None if the selection is neither of the largest nor of the smallest value.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    number = _never_selected(op)
    if number is None:
        return None
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(op.operands[0].type).element_type)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, number))


def _never_selected(op: Any) -> Any | None:
    """Return the smallest value of the element type as an attribute if the op selects the largest, and conversely.

    Floats have infinities. None if the op's selection begins with anything but an ordering.
    """
    from jaxlib.mlir import ir

    first = op.regions[0].blocks[0].operations[0].operation
    if first.name != "stablehlo.compare":
        return None
    direction = compared(first)
    if direction in ("EQ", "NE"):
        return None
    largest = direction in ("GE", "GT")
    element = ir.RankedTensorType(op.operands[0].type).element_type
    if isinstance(element, ir.IntegerType):
        width = element.width
        if element.is_unsigned:
            return ir.IntegerAttr.get(element, 0 if largest else (1 << width) - 1)
        return ir.IntegerAttr.get(element, -(1 << (width - 1)) if largest else (1 << (width - 1)) - 1)
    number = float("-inf") if largest else float("inf")
    return ir.FloatAttr.get(element, number, loc=ir.Location.unknown(op.context))


def _fold(op: Any) -> None:
    """Fold one select_and_scatter with its pad and the slices of its result (in place); do nothing if they do not
    match.
    """
    from jaxlib.mlir import ir

    if any(any(row) for row in _padding(op)):
        return
    pad = _producer(op.operands[0])
    if pad is None or pad.name != "stablehlo.pad" or not _pads_with(pad, _never_selected(op)):
        return
    low, high, inner = (
        numbers_of(pad.attributes[key]) for key in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    shape = list(ir.RankedTensorType(pad.operands[0].type).shape)
    users = _slices(op)
    cropped = [size - b for size, b in zip(ir.RankedTensorType(op.results[0].type).shape, high, strict=True)]
    if any(inner) or min(*low, *high) < 0 or not users:
        return
    for user in users:
        if [numbers_of(user.attributes[key]) for key in ("start_indices", "limit_indices")] != [low, cropped]:
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
    """Return the slices that crop the op's result; empty if it has any other user.

    A slice of the whole result is skipped; the slices of it count instead.
    """
    slices: list[Any] = []
    for user in _users(op):
        if user.name != "stablehlo.slice":
            return []
        if user.results[0].type == user.operands[0].type:
            inner = _users(user)
            if not inner or any(u.name != "stablehlo.slice" for u in inner):
                return []
            slices += inner
        else:
            slices.append(user)
    return slices


def _users(op: Any) -> list[Any]:
    """Return the ops that use a result of `op`, one entry for each use."""
    return [user for result in op.results for user in _users_of(result)]


def _users_of(value: Any) -> list[Any]:
    """Return the ops that use a value, one entry for each use."""
    return [use.owner.operation for use in value.uses]


def _producer(value: Any) -> Any | None:
    """Return the op that computes a value; None for an argument of a block."""
    from jaxlib.mlir import ir

    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _pads_with(pad: Any, number: Any | None) -> bool:
    """Return True if the pad's value is a constant of this number; False if `number` is None."""
    from jaxlib.mlir import ir

    source = _producer(pad.operands[1])
    if number is None or source is None or source.name != "stablehlo.constant":
        return False
    return source.attributes["value"] == ir.DenseElementsAttr.get_splat(pad.operands[1].type, number)


def _padding(op: Any) -> list[list[int]]:
    """Return [low, high] padding in elements of each dim of a select_and_scatter; zeros by default."""
    from jaxlib.mlir import ir

    rank = len(ir.RankedTensorType(op.operands[0].type).shape)
    if "padding" not in op.attributes:
        return [[0, 0]] * rank
    return pairs_of(op.attributes["padding"])


def _unfold(op: Any) -> None:
    """Split one padded select_and_scatter (in place); do nothing if it has no padding or selects no extreme."""
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
