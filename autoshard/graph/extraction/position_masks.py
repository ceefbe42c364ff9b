"""Masks that follow from positions alone, such as causal masks and windows, and the share that they keep."""

import dataclasses
import math
from typing import Any

import numpy as np

from autoshard import mlir
from autoshard.graph.records import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Tensor of one repeated integer or boolean."""

    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """Tensor whose elements are their index along a dim, plus an offset."""

    dim: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Tensor of the index along `row` minus that along `column`, plus an offset; `row` is less than `column`."""

    row: int
    column: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """Boolean tensor that is true where the index along `row` minus that along `column` is from `low` to `high`."""

    row: int
    column: int
    low: float
    high: float

    def kept_share(self, shape: tuple[int, ...]) -> float:
        """Return the share of true elements of a tensor of this shape; half of the elements at an edge count."""
        rows, columns = np.arange(shape[self.row]), shape[self.column]

        def below(edge: float) -> float:
            """Return the number of elements whose difference is less than `edge`, with half of those equal to it."""
            if math.isinf(edge):
                return 0.0 if edge < 0 else float(len(rows) * columns)
            before = np.clip(columns - 1 - (rows - edge), 0, columns).sum()
            at = ((rows - edge >= 0) & (rows - edge < columns)).sum()
            return float(before + at / 2)

        return max(0.0, below(self.high) - below(self.low)) / (len(rows) * columns)


Known = Number | Position | Gap | Band
"""Value of a tensor that depends on positions alone."""

_OPPOSITE = {"GE": "LE", "LE": "GE", "GT": "LT", "LT": "GT"}


def known_value(op: Any, kind: str, operands: list[Known | None], takes: list[Tensor], gives: Tensor) -> Known | None:
    """Return the value of an op's only result from those of its operands; None if it is not of these kinds.

    - `op`, `kind`: the op of the module, and its kind.
    - `takes`, `gives`: its operands and its result.
    """
    if kind == "constant":
        return _number(op, gives)
    if kind == "iota":
        return Position(mlir.integer_of(op.attributes["iota_dimension"]), 0)
    if kind in ("broadcast_in_dim", "reshape", "convert") and takes:
        return _moved(op, kind, operands[0], takes[0], gives)
    if kind in ("add", "subtract") and len(operands) == 2:
        return _shifted(kind, operands[0], operands[1])
    if kind == "compare":
        return _band(mlir.compared(op), operands[0], operands[1])
    if kind == "and":
        return _both(operands[0], operands[1])
    if kind == "not" and isinstance(operands[0], Band):
        return _outside(operands[0])
    if kind == "select" and isinstance(operands[0], Band) and operands[1:] == [Number(1), Number(0)]:
        return operands[0]
    if kind == "select" and isinstance(operands[0], Band) and operands[1:] == [Number(0), Number(1)]:
        return _outside(operands[0])
    return None


def _number(op: Any, gives: Tensor) -> Known | None:
    """Return the integer or boolean of a constant without dims."""
    if gives.shape or not gives.dtype.startswith(("int", "uint", "bool")):
        return None
    value = int(mlir.scalar_of(op.attributes["value"]))
    return Number(int(value != 0) if gives.dtype == "bool" else value)


def _moved(op: Any, kind: str, value: Known | None, source: Tensor, gives: Tensor) -> Known | None:
    """Return a value with the dims of a broadcast, of a reshape that adds or drops dims of size 1, or of a conversion.

    A dim that is itself broadcast has no positions.
    """
    if value is None or isinstance(value, Number) or kind == "convert":
        return value
    if kind == "broadcast_in_dim":
        dims = dict(enumerate(mlir.numbers_of(op.attributes["broadcast_dimensions"])))
    else:
        old, new = ([d for d, size in enumerate(each.shape) if size > 1] for each in (source, gives))
        if [source.shape[d] for d in old] != [gives.shape[d] for d in new]:
            return None
        dims = dict(zip(old, new, strict=True))
    own = (value.dim,) if isinstance(value, Position) else (value.row, value.column)
    if any(d not in dims or source.shape[d] != gives.shape[dims[d]] for d in own):
        return None
    if isinstance(value, Position):
        return Position(dims[value.dim], value.offset)
    return dataclasses.replace(value, row=dims[value.row], column=dims[value.column])


def _shifted(kind: str, left: Known | None, right: Known | None) -> Known | None:
    """Return positions plus or minus a number, or the first dim's positions minus a later dim's."""
    if kind == "add" and isinstance(left, Number):
        left, right = right, left
    if isinstance(left, Position | Gap) and isinstance(right, Number):
        return dataclasses.replace(left, offset=left.offset + (right.value if kind == "add" else -right.value))
    if kind == "subtract" and isinstance(left, Position) and isinstance(right, Position) and left.dim < right.dim:
        return Gap(left.dim, right.dim, left.offset - right.offset)
    return None


def _band(direction: str, left: Known | None, right: Known | None) -> Band | None:
    """Return the band in which positions compare with others, or a gap with a number; None for `EQ` and `NE`."""
    if direction not in _OPPOSITE:
        return None
    if isinstance(right, Gap) or (isinstance(left, Position) and isinstance(right, Position) and left.dim > right.dim):
        left, right, direction = right, left, _OPPOSITE[direction]
    if isinstance(left, Gap) and isinstance(right, Number):
        row, column, edge = left.row, left.column, right.value - left.offset
    elif isinstance(left, Position) and isinstance(right, Position) and left.dim != right.dim:
        row, column, edge = left.dim, right.dim, right.offset - left.offset
    else:
        return None
    if direction in ("GE", "GT"):
        return Band(row, column, edge + (direction == "GT"), math.inf)
    return Band(row, column, -math.inf, edge - (direction == "LT"))


def _both(left: Known | None, right: Known | None) -> Known | None:
    """Return a mask that holds where both do; a mask of unknown values may hide more, which does not count."""
    bands = [each for each in (left, right) if isinstance(each, Band)]
    if Number(0) in (left, right) or not bands:
        return Number(0) if Number(0) in (left, right) else None
    if len(bands) == 2 and (bands[0].row, bands[0].column) != (bands[1].row, bands[1].column):
        return None
    low, high = max(band.low for band in bands), min(band.high for band in bands)
    return dataclasses.replace(bands[0], low=low, high=high)


def _outside(band: Band) -> Band | None:
    """Return the mask that is true where a band is false; None for a band with two edges."""
    if math.isinf(band.low) and not math.isinf(band.high):
        return dataclasses.replace(band, low=band.high + 1, high=math.inf)
    if math.isinf(band.high) and not math.isinf(band.low):
        return dataclasses.replace(band, low=-math.inf, high=band.low - 1)
    return None


def selected_share(operands: list[Known | None], shape: tuple[int, ...], free: list[bool]) -> float:
    """Return the share of elements that a select with a mask of positions takes from its computed operand; 1 for
    others.

    - `operands`: values of the predicate and of the two operands.
    - `free`: True for each operand that is generated, such as a constant.
    """
    mask = operands[0]
    if not isinstance(mask, Band) or free[1] == free[2]:
        return 1.0
    share = mask.kept_share(shape)
    return share if free[2] else 1.0 - share
