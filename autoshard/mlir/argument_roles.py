"""The uses of a module's arguments, for files that do not state roles, and the flow of values between ops."""

import dataclasses
import enum
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from autoshard.mlir.inline import inline_calls
from autoshard.mlir.module import main_block, parse_module, to_bytes
from autoshard.mlir.module_results import place_of
from autoshard.mlir.numbering import BRANCHING, number_ops


class Use(enum.Enum):
    """What an argument's first op that takes another value besides makes of it."""

    NONE = "none"
    """There is no such op, or it tells nothing."""
    WEIGHT = "weight"
    """A table, a kernel, the right side of a matmul, or broadcast against something larger."""
    DATA = "data"
    """Multiplied by a weight, looked up with, summed, or carried by a loop."""
    PEER = "peer"
    """Meets a value of its own shape: a moment its gradient, a target its prediction."""
    WRITTEN = "written"
    """Part of it is overwritten: a cache."""


_VIEWS = frozenset(
    f"stablehlo.{name}"
    for name in (
        "convert",
        "transpose",
        "reshape",
        "slice",
        "reverse",
        "broadcast_in_dim",
        "negate",
        "reduce_precision",
    )
) | {"stablehlo.optimization_barrier", "stablehlo.bitcast_convert", "sdy.sharding_constraint"}
_MIXING = frozenset(
    f"stablehlo.{name}"
    for name in ("dot_general", "dot", "convolution", "transpose", "reverse", "fft", "cholesky", "triangular_solve")
) | {"stablehlo.custom_call"}
"""Ops without a region that may have operands and results of one shape and yet are not element by element."""
_UPDATES = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})


def argument_uses(module: Any) -> list[Use]:
    """The use of every argument of `main`, by its number. Leaves `module` as it is."""
    copy, block, _ = flat_main(module)
    reader = _Uses(len(block.arguments))
    reader.block(block, [(number, False) for number in range(len(block.arguments))])
    count = len(block.arguments)
    del copy  # not before: it owns the block
    return [reader.found.get(number, Use.NONE) for number in range(count)]


def updated_arguments(module: Any) -> dict[int, int]:
    """Argument -> the result that is its updated value: made from it element by element, and of its type.

    A result made from several (a parameter from its moments too) goes to the one that is left once results made
    from fewer have theirs. Leaves `module` as it is.
    """
    copy, block, results = flat_main(module)
    origins = _Origins()
    origins.block(block, [frozenset({number}) for number in range(len(block.arguments))])
    kinds = [argument.type for argument in block.arguments]
    candidates = {
        result: {a for a in origins.of.get(value, frozenset()) if kinds[a] == value.type}
        for result, value in enumerate(results)
    }
    del copy  # not before: it owns the values
    ties: dict[int, int] = {}
    for result in sorted(candidates, key=lambda r: (len(candidates[r]), r)):
        free = candidates[result] - set(ties)
        if len(free) == 1:
            ties[free.pop()] = result
    return ties


def flat_main(module: Any) -> tuple[Any, Any, list[Any]]:
    """An inlined copy, the block of its `main`, and the values that returns."""
    with module.context:
        copy = inline_calls(parse_module(to_bytes(module), module.context))
    block = main_block(copy)
    return copy, block, list(list(block.operations)[-1].operation.operands)


Source = tuple[int, bool] | None
"""The argument that a value is a view of, and whether it was broadcast; None for a computed value."""

_CONSTANT: Any = object()
"""The source of what depends on no argument."""


class _Uses:
    def __init__(self, count: int) -> None:
        self.of: dict[Any, Any] = {}
        self.found: dict[int, Use] = {}

    def vote(self, source: Any, use: Use) -> None:
        if source is not None and source is not _CONSTANT:
            self.found.setdefault(source[0], use)

    def block(self, block: Any, sources: list[Any]) -> list[Any]:
        """Read a block whose arguments have these sources; the sources of what it returns."""
        for argument, source in zip(block.arguments, sources, strict=True):
            self.of[argument] = source
        returned: list[Any] = []
        for view in block.operations:
            op = view.operation
            operands = [self.of.get(value, _CONSTANT) for value in op.operands]
            if op.name in ("stablehlo.return", "func.return"):
                returned = operands
                continue
            results = self.op(op, operands)
            for value, source in zip(op.results, results, strict=True):
                self.of[value] = source
        return returned

    def op(self, op: Any, operands: list[Any]) -> list[Any]:
        count = len(op.results)
        if op.name == "stablehlo.while":
            return self.loop(op, operands)
        if op.name in BRANCHING:
            for region in op.regions:
                self.block(region.blocks[0], [])
            return [None] * count
        if all(source is _CONSTANT for source in operands):
            return [_CONSTANT] * count
        if op.name in _VIEWS:
            grown = op.name == "stablehlo.broadcast_in_dim" and _grows(op)
            return [(s[0], s[1] or grown) if isinstance(s, tuple) else s for s in operands]
        if op.name in ("stablehlo.gather", "stablehlo.dynamic_slice"):
            return [self.lookup(op, operands)]
        first, rest = operands[0], operands[1:]
        if op.name == "stablehlo.dot_general":
            if first is not _CONSTANT and rest[0] is not _CONSTANT:
                # `x @ w` of two arguments: the right one is the weight; beside a computed value any argument is.
                self.vote(first, Use.WEIGHT if rest[0] is None else Use.DATA)
                self.vote(rest[0], Use.WEIGHT)
        elif op.name == "stablehlo.convolution":
            self.vote(first, Use.DATA)
            self.vote(rest[0], Use.WEIGHT)
        elif op.name in _UPDATES:
            self.vote(first, Use.WRITTEN)
            for source in rest:
                self.vote(source, Use.DATA)
        elif op.name == "stablehlo.reduce":
            for source in operands:
                self.vote(source, Use.DATA)
        else:
            self.together(operands)
        alone = {s[0] for s in operands if isinstance(s, tuple)}
        if len(alone) == 1 and None not in operands and is_pointwise(op):
            (number,) = alone
            return [(number, any(isinstance(s, tuple) and s[1] for s in operands))] * count
        return [None] * count

    def together(self, operands: list[Any]) -> None:
        """Values of one shape meet element by element."""
        for place, source in enumerate(operands):
            if not isinstance(source, tuple):
                continue
            others = [s for i, s in enumerate(operands) if i != place and s is not _CONSTANT]
            if any(s is None or s[0] != source[0] for s in others):
                self.vote(source, Use.WEIGHT if source[1] else Use.PEER)

    def lookup(self, op: Any, operands: list[Any]) -> Any:
        """A row of a table is a new value; a layer of a stack, or what stands at fixed places, is a view of it."""
        table, indices = operands[0], operands[1:]
        counted = op.name == "stablehlo.dynamic_slice" and not any(isinstance(s, tuple) for s in indices)
        if counted or all(source is _CONSTANT for source in indices):
            return table
        self.vote(table, Use.WEIGHT)
        for source in indices:
            self.vote(source, Use.DATA)
        return None

    def loop(self, op: Any, operands: list[Any]) -> list[Any]:
        body = op.regions[1].blocks[0]
        kept = [
            value == argument
            for value, argument in zip(list(body.operations)[-1].operation.operands, body.arguments, strict=True)
        ]
        written = _written_in(body)
        for number, (source, same) in enumerate(zip(operands, kept, strict=True)):
            if not same:
                self.vote(source, Use.WRITTEN if number in written else Use.DATA)
        # What a loop counts is no data: a constant at the start stays one only if nothing is carried into it.
        inner = [
            source if same else (_CONSTANT if _is_counter(argument) else None)
            for source, same, argument in zip(operands, kept, body.arguments, strict=True)
        ]
        self.block(body, inner)
        return [source if same else None for source, same in zip(operands, kept, strict=True)]


def _written_in(body: Any) -> set[int]:
    """Carried values of a loop of which it overwrites a part."""
    returned = list(list(body.operations)[-1].operation.operands)
    found = set()
    for number, (value, argument) in enumerate(zip(returned, body.arguments, strict=True)):
        owner = value.owner
        if getattr(owner, "name", "") in _UPDATES and owner.operands[0] == argument:
            found.add(number)
    return found


def _is_counter(value: Any) -> bool:
    return str(value.type) in ("tensor<i32>", "tensor<i64>", "tensor<ui32>")


def _grows(op: Any) -> bool:
    from jaxlib.mlir import ir

    before, after = (ir.RankedTensorType(value.type).shape for value in (op.operands[0], op.results[0]))
    return sorted(n for n in before if n > 1) != sorted(n for n in after if n > 1)


def is_pointwise(op: Any) -> bool:
    """Element by element: every operand and result has one shape."""
    from jaxlib.mlir import ir

    shapes = [ir.RankedTensorType(value.type).shape for value in (*op.operands, *op.results)]
    return not op.regions and op.name not in _MIXING and all(shape == shapes[0] for shape in shapes)


class _Origins:
    """For every value: the arguments it is made from element by element."""

    def __init__(self) -> None:
        self.of: dict[Any, frozenset[int]] = {}

    def block(self, block: Any, sources: list[frozenset[int]]) -> list[frozenset[int]]:
        self.of.update(zip(block.arguments, sources, strict=True))
        returned: list[frozenset[int]] = []
        nothing: frozenset[int] = frozenset()
        for view in block.operations:
            op = view.operation
            operands = [self.of.get(value, nothing) for value in op.operands]
            if op.name in ("stablehlo.return", "func.return"):
                returned = operands
            elif op.name == "stablehlo.while":
                results = self.block(op.regions[1].blocks[0], operands)
                self.of.update(zip(op.results, results, strict=True))
            elif op.name in _UPDATES and len(op.results) == 1:
                self.of[op.results[0]] = operands[0]
            elif len(op.operands) and is_pointwise(op):
                self.of.update({value: frozenset().union(*operands) for value in op.results})
        return returned


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
