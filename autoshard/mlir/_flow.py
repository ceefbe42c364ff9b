"""Which values flow into which, by the numbers of ops."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from autoshard.mlir._number import number_ops
from autoshard.mlir._results import place_of
from autoshard.mlir._uses import is_pointwise


Value = tuple[int, int]
"""Number of the op that makes it and which of its results; `(-1, i)` is argument `i` of `@main`."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """What each op of a module takes, by its number."""

    operands: Sequence[tuple[Value | None, ...]]
    """None for what is made inside of a region by no op. What only ends a region takes nothing."""
    alike: Sequence[tuple[Value | None, ...]]
    """As `operands`, for ops that work element by element; the other ops have nothing here."""
    products: frozenset[int]
    """The ops that contract dims, by their numbers."""
    lookups: frozenset[int]
    """Ops that look up in dims, or write there."""
    views: Mapping[int, tuple[int | None, ...]]
    """Ops that only put the same elements into other dims: where each dim of the operand is found in the result.

    None for what is not the outermost part of a dim there.
    """
    kept: Mapping[int, tuple[int, ...]]
    """Dims of their first operand that reductions do not reduce."""
    spread: Mapping[int, tuple[int, ...]]
    """Ops that spread an operand over further dims: those of the result in which it is found again."""

    @functools.cached_property
    def users(self) -> Mapping[Value, list[int]]:
        """Ops that take a value."""
        found: dict[Value, list[int]] = {}
        for op, operands in enumerate(self.operands):
            for value in operands:
                if value is not None:
                    found.setdefault(value, []).append(op)
        return found

    def between(self, taken: Collection[Value], made: Value) -> set[int]:
        """Ops that make a value of `taken` (and of arguments)."""
        found: set[int] = set()
        queue = [made[0]]
        for op in queue:  # grows as it is walked
            if op < 0 or op in found:
                continue
            found.add(op)
            queue += [value[0] for value in self.operands[op] if value is not None and value not in taken]
        return found

    def unchanged(self, ops: Collection[int], made: Value) -> Iterator[Value]:
        """Values that become `made` element by element within `ops`, nearest first."""
        queue, seen = [made], {made}
        for value in queue:
            before = self.alike[value[0]] if value[0] in ops else ()
            for other in before:
                if other is not None and other not in seen and other[0] in ops:
                    seen.add(other)
                    queue.append(other)
                    yield other


def flow(module: Any) -> Flow:
    """Read a module. Call `inline_calls` first."""
    ops = number_ops(module)
    numbers = {op: number for number, op in enumerate(ops)}
    operands = [tuple(place_of(v, numbers) for v in op.operands) if len(op.results) else () for op in ops]
    alike = []
    for op, taken in zip(ops, operands, strict=True):
        alike.append(taken if len(op.results) == 1 and is_pointwise(op) else ())
    products = frozenset(number for number, op in enumerate(ops) if op.name in _PRODUCTS)
    lookups = frozenset(number for number, op in enumerate(ops) if op.name in _LOOKUPS)
    views = {number: _FLOW_VIEWS[op.name](op) for number, op in enumerate(ops) if op.name in _FLOW_VIEWS}
    kept = {number: _kept(op) for number, op in enumerate(ops) if op.name == "stablehlo.reduce"}
    spread = {number: _spread(op) for number, op in enumerate(ops) if op.name == "stablehlo.broadcast_in_dim"}
    return Flow(operands, alike, products, lookups, views, kept, spread)


def _reshaped(reshape: Any) -> tuple[int | None, ...]:
    """Dims begin where the elements outside of them are as many."""
    from jaxlib.mlir import ir

    shapes = [list(ir.RankedTensorType(value.type).shape) for value in (reshape.operands[0], reshape.results[0])]
    before, after = ([math.prod(shape[:dim]) for dim in range(len(shape))] for shape in shapes)
    begins = {outside: dim for dim, outside in enumerate(after) if shapes[1][dim] != 1}
    return tuple(begins.get(outside) for outside in before)


def _transposed(transpose: Any) -> tuple[int | None, ...]:
    order = list(transpose.attributes["permutation"])
    return tuple(order.index(dim) for dim in range(len(order)))


def _spread(broadcast: Any) -> tuple[int, ...]:
    return tuple(broadcast.attributes["broadcast_dimensions"])


def _kept(reduction: Any) -> tuple[int, ...]:
    from jaxlib.mlir import ir

    reduced = set(reduction.attributes["dimensions"])
    rank = ir.RankedTensorType(reduction.operands[0].type).rank
    return tuple(dim for dim in range(rank) if dim not in reduced)


_PRODUCTS = {"stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"}
_FLOW_VIEWS = {"stablehlo.reshape": _reshaped, "stablehlo.transpose": _transposed}
_LOOKUPS = {"stablehlo.gather", "stablehlo.dynamic_gather", "stablehlo.scatter"}
