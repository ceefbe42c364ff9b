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
    """Use of an argument, by the first op that reads it, or a view of it, and reveals one."""

    NONE = "none"
    """No such op exists, or the op does not reveal a use."""
    WEIGHT = "weight"
    """A table, a kernel, the right side of a matmul, or broadcast against something larger."""
    DATA = "data"
    """Multiplied by a weight, used as an index, summed, or carried by a loop."""
    PEER = "peer"
    """Combined with a value of its own shape: a moment with its gradient, a target with its prediction."""
    WRITTEN = "written"
    """Overwritten in part, such as a cache."""


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
"""Ops whose result is a view of their one operand."""
_MIXING = frozenset(
    f"stablehlo.{name}"
    for name in ("dot_general", "dot", "convolution", "transpose", "reverse", "fft", "cholesky", "triangular_solve")
) | {"stablehlo.custom_call"}
"""Ops without a region that are not elementwise, though their operands and results may have one shape."""
_UPDATES = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})
"""Ops that overwrite a part of their first operand."""


def argument_uses(module: Any) -> list[Use]:
    """Return the use of every argument of `main`, in order of the arguments. Leaves `module` unchanged."""
    copy, block, _ = flat_main(module)
    reader = _Uses(len(block.arguments))
    reader.block(block, [(number, False) for number in range(len(block.arguments))])
    count = len(block.arguments)
    del copy  # only now: the copy owns the block
    return [reader.found.get(number, Use.NONE) for number in range(count)]


def updated_arguments(module: Any) -> dict[int, int]:
    """Return the number of the result that is the updated value of each argument, by argument number.

    Such a result is an elementwise function of the argument and has its type. A result can depend on several arguments
    (a parameter on its moments too). It is then assigned to the argument that remains after results of fewer arguments
    are assigned. Arguments without such a result, and ambiguous ones, are missing. Leaves `module` unchanged.
    """
    copy, block, results = flat_main(module)
    origins = _Origins()
    origins.block(block, [frozenset({number}) for number in range(len(block.arguments))])
    kinds = [argument.type for argument in block.arguments]
    candidates = {
        result: {a for a in origins.of.get(value, frozenset()) if kinds[a] == value.type}
        for result, value in enumerate(results)
    }
    del copy  # only now: the copy owns the values
    ties: dict[int, int] = {}
    for result in sorted(candidates, key=lambda r: (len(candidates[r]), r)):
        free = candidates[result] - set(ties)
        if len(free) == 1:
            ties[free.pop()] = result
    return ties


def flat_main(module: Any) -> tuple[Any, Any, list[Any]]:
    """Return an inlined copy, the block of its `main`, and the values that the block returns.

    The copy owns the others: keep a reference to it while they are used.
    """
    with module.context:
        copy = inline_calls(parse_module(to_bytes(module), module.context))
    block = main_block(copy)
    return copy, block, list(list(block.operations)[-1].operation.operands)


Source = tuple[int, bool] | None
"""The argument that a value is a view of, and True if it was broadcast; None for a computed value."""

_CONSTANT: Any = object()
"""The source of a value that depends on no argument."""


class _Uses:
    """Reader of the uses of arguments, from a walk over the ops.

    `of` has the source of each value, `found` the use by argument number.
    """

    def __init__(self, count: int) -> None:
        self.of: dict[Any, Any] = {}
        self.found: dict[int, Use] = {}

    def vote(self, source: Any, use: Use) -> None:
        """Record the use of a source's argument, unless an earlier op has decided it; do nothing for a computed
        value.
        """
        if source is not None and source is not _CONSTANT:
            self.found.setdefault(source[0], use)

    def block(self, block: Any, sources: list[Any]) -> list[Any]:
        """Read a block whose arguments have these sources; return the sources of its terminator's operands.

        Values from outside that were not read before count as constants.
        """
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
        """Record what an op whose operands have these sources reveals; return the sources of its results.

        - A matmul's right argument is a weight, its left one data, or a weight if the right side is computed.
        - A convolution's input is data, its kernel a weight.
        - An update's first operand is written, its others are data; a reduction's operands are data.
        - All other ops count as elementwise (`together`).

        Results of views, and of elementwise ops of one argument and constants, are views of that argument. Results of
        constants are constants, and all others computed.
        """
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
                # In `x @ w` of two arguments the right one is the weight. If the other operand is computed, any
                # argument is.
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
        """Record the uses of operands that an elementwise op combines with another argument or a computed value.

        An operand that was broadcast is a weight, any other a peer.
        """
        for place, source in enumerate(operands):
            if not isinstance(source, tuple):
                continue
            others = [s for i, s in enumerate(operands) if i != place and s is not _CONSTANT]
            if any(s is None or s[0] != source[0] for s in others):
                self.vote(source, Use.WEIGHT if source[1] else Use.PEER)

    def lookup(self, op: Any, operands: list[Any]) -> Any:
        """Record the uses that a slice or gather reveals, and return the source of its result.

        A row of a table is a computed value: the table is a weight, and its indices are data. A layer of a stack, or a
        slice at fixed places, is a view of its operand.
        """
        table, indices = operands[0], operands[1:]
        counted = op.name == "stablehlo.dynamic_slice" and not any(isinstance(s, tuple) for s in indices)
        if counted or all(source is _CONSTANT for source in indices):
            return table
        self.vote(table, Use.WEIGHT)
        for source in indices:
            self.vote(source, Use.DATA)
        return None

    def loop(self, op: Any, operands: list[Any]) -> list[Any]:
        """Read a loop, whose changed carried values are written or data; return the sources of its results.

        These are the sources of the values that it carries unchanged, and None for the others.
        """
        body = op.regions[1].blocks[0]
        unchanged = [
            value == argument
            for value, argument in zip(list(body.operations)[-1].operation.operands, body.arguments, strict=True)
        ]
        written = _written_in(body)
        for number, (source, same) in enumerate(zip(operands, unchanged, strict=True)):
            if not same:
                self.vote(source, Use.WRITTEN if number in written else Use.DATA)
        # A loop's counter is not data. Any other carried value that the loop changes is computed, even if it starts as
        # a constant.
        inner = [
            source if same else (_CONSTANT if _is_counter(argument) else None)
            for source, same, argument in zip(operands, unchanged, body.arguments, strict=True)
        ]
        self.block(body, inner)
        return [source if same else None for source, same in zip(operands, unchanged, strict=True)]


def _written_in(body: Any) -> set[int]:
    """Return the numbers of the carried values of which a loop's body overwrites a part."""
    returned = list(list(body.operations)[-1].operation.operands)
    written = set()
    for number, (value, argument) in enumerate(zip(returned, body.arguments, strict=True)):
        owner = value.owner
        if getattr(owner, "name", "") in _UPDATES and owner.operands[0] == argument:
            written.add(number)
    return written


def _is_counter(value: Any) -> bool:
    """Return True for a scalar of 32 or 64 bits that may count a loop's trips."""
    return str(value.type) in ("tensor<i32>", "tensor<i64>", "tensor<ui32>")


def _grows(op: Any) -> bool:
    """Return True if a broadcast enlarges a tensor by more than dims of size 1."""
    from jaxlib.mlir import ir

    before, after = (ir.RankedTensorType(value.type).shape for value in (op.operands[0], op.results[0]))
    return sorted(n for n in before if n > 1) != sorted(n for n in after if n > 1)


def is_pointwise(op: Any) -> bool:
    """Return True for an elementwise op: all operands and results have one shape, and no dims are mixed.

    Ops with regions, and those of `_MIXING`, are not elementwise.
    """
    from jaxlib.mlir import ir

    shapes = [ir.RankedTensorType(value.type).shape for value in (*op.operands, *op.results)]
    return not op.regions and op.name not in _MIXING and all(shape == shapes[0] for shape in shapes)


class _Origins:
    """The arguments that each value is an elementwise function of, in `of`; loops and updates of a part count as
    elementwise.
    """

    def __init__(self) -> None:
        self.of: dict[Any, frozenset[int]] = {}

    def block(self, block: Any, sources: list[frozenset[int]]) -> list[frozenset[int]]:
        """Read a block whose arguments have these origins; return the origins of its terminator's operands."""
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
"""Number of the op that computes a value, and number of the result; `(-1, i)` is argument `i` of `@main`."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """The operands of each op of a module, by the op's number."""

    operands: Sequence[tuple[Value | None, ...]]
    """Operands of each op; None for arguments of a region. Ops without results, which end a region, have none."""
    elementwise_operands: Sequence[tuple[Value | None, ...]]
    """Operands of elementwise ops with one result; empty for all other ops."""
    products: frozenset[int]
    """Numbers of the ops that contract dims."""
    lookups: frozenset[int]
    """Numbers of the ops that gather from dims, or scatter to them."""
    views: Mapping[int, tuple[int | None, ...]]
    """Dim of the result where each dim of the operand begins, for reshapes and transposes, by the op's number.

    None for a dim that does not begin a dim of the result.
    """
    unreduced_dims: Mapping[int, tuple[int, ...]]
    """Dims of the first operand that a reduction does not reduce."""
    broadcast_dims: Mapping[int, tuple[int, ...]]
    """Dims of the result that an operand of a broadcast becomes."""

    @functools.cached_property
    def users(self) -> Mapping[Value, list[int]]:
        """Numbers of the ops that read each value, ascending, one entry for each operand; values without readers are
        missing.
        """
        users: dict[Value, list[int]] = {}
        for op, operands in enumerate(self.operands):
            for value in operands:
                if value is not None:
                    users.setdefault(value, []).append(op)
        return users

    def between(self, taken: Collection[Value], made: Value) -> set[int]:
        """Return the numbers of the ops that compute `made` from the values `taken` (and from arguments), backwards."""
        ops: set[int] = set()
        queue = [made[0]]
        for op in queue:  # grows as it is walked
            if op < 0 or op in ops:
                continue
            ops.add(op)
            queue += [value[0] for value in self.operands[op] if value is not None and value not in taken]
        return ops

    def unchanged(self, ops: Collection[int], made: Value) -> Iterator[Value]:
        """Yield the values from which elementwise ops within `ops` compute `made`, nearest first.

        The ops that compute the yielded values are in `ops` too; `made` is not yielded.
        """
        queue, seen = [made], {made}
        for value in queue:
            before = self.elementwise_operands[value[0]] if value[0] in ops else ()
            for other in before:
                if other is not None and other not in seen and other[0] in ops:
                    seen.add(other)
                    queue.append(other)
                    yield other


def flow(module: Any) -> Flow:
    """Read the flow of values in a module with calls inlined (`inline_calls`); numbers are those of `number_ops`."""
    ops = number_ops(module)
    numbers = {op: number for number, op in enumerate(ops)}
    operands = [tuple(place_of(v, numbers) for v in op.operands) if len(op.results) else () for op in ops]
    alike = []
    for op, inputs in zip(ops, operands, strict=True):
        alike.append(inputs if len(op.results) == 1 and is_pointwise(op) else ())
    products = frozenset(number for number, op in enumerate(ops) if op.name in _PRODUCTS)
    lookups = frozenset(number for number, op in enumerate(ops) if op.name in _LOOKUPS)
    views = {number: _FLOW_VIEWS[op.name](op) for number, op in enumerate(ops) if op.name in _FLOW_VIEWS}
    retained = {number: _kept(op) for number, op in enumerate(ops) if op.name == "stablehlo.reduce"}
    spread = {number: _spread(op) for number, op in enumerate(ops) if op.name == "stablehlo.broadcast_in_dim"}
    return Flow(operands, alike, products, lookups, views, retained, spread)


def _reshaped(reshape: Any) -> tuple[int | None, ...]:
    """Map each dim of a reshape's operand to the dim of its result before which equally many elements stand.

    None if there is no such dim. Dims of size 1 of the result count as none.
    """
    from jaxlib.mlir import ir

    shapes = [list(ir.RankedTensorType(value.type).shape) for value in (reshape.operands[0], reshape.results[0])]
    before, after = ([math.prod(shape[:dim]) for dim in range(len(shape))] for shape in shapes)
    begins = {outside: dim for dim, outside in enumerate(after) if shapes[1][dim] != 1}
    return tuple(begins.get(outside) for outside in before)


def _transposed(transpose: Any) -> tuple[int | None, ...]:
    """Map each dim of a transpose's operand to its dim of the result."""
    order = list(transpose.attributes["permutation"])
    return tuple(order.index(dim) for dim in range(len(order)))


def _spread(broadcast: Any) -> tuple[int, ...]:
    """Return the dims of the result that the dims of a broadcast's operand become."""
    return tuple(broadcast.attributes["broadcast_dimensions"])


def _kept(reduction: Any) -> tuple[int, ...]:
    """Return the dims of its first operand that a reduction does not reduce."""
    from jaxlib.mlir import ir

    reduced = set(reduction.attributes["dimensions"])
    rank = ir.RankedTensorType(reduction.operands[0].type).rank
    return tuple(dim for dim in range(rank) if dim not in reduced)


_PRODUCTS = {"stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution"}
_FLOW_VIEWS = {"stablehlo.reshape": _reshaped, "stablehlo.transpose": _transposed}
_LOOKUPS = {"stablehlo.gather", "stablehlo.dynamic_gather", "stablehlo.scatter"}
