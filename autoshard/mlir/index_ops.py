"""Ops that read and write by index: guards where XLA computes wrong elements of split values, and index arguments."""

from collections.abc import Iterator
from typing import Any

from autoshard.mlir.annotations import CONSTRAINT, axes_of, pinned_axes
from autoshard.mlir.argument_roles import flat_main
from autoshard.mlir.module import argument_entries, collect, maker_of
from autoshard.mlir.numbering import BRANCHING


_SLICE, _UPDATE = "stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"
_GATHER, _SCATTER = "stablehlo.gather", "stablehlo.scatter"
_VIEWS = frozenset(f"stablehlo.{name}" for name in ("reshape", "transpose", "convert", "bitcast_convert", "slice"))
"""Ops that XLA's simplifier moves a slice through."""
_MOVING = frozenset({"stablehlo.reshape", "stablehlo.transpose"})
"""Views that renumber the dims."""
_BARRIER = "stablehlo.optimization_barrier"


def guard_indexing(module: Any) -> None:
    """Clamp starts, and put barriers between slices of pinned values and the ops that index the values (in place).

    Call it after `insert_pins`. It covers dynamic slices and updates, gathers and scatters in all regions.
    """
    with module.context:
        for op in collect(module.operation, {_SLICE, _UPDATE}):
            _clamp_starts(op)
        for op in collect(module.operation, {_GATHER}):
            _clamp_windows(op)
        for op in collect(module.operation, {_SLICE, _UPDATE, _GATHER, _SCATTER}):
            for pin in _pins_before(op):
                _separate(pin)


def _clamp_starts(op: Any) -> None:
    """Clamp the starts of a dynamic slice or update along dims that may be split (in place).

    Three kinds of starts stay as they are:

    - constants in range;
    - those of an update along dims that no axis splits, if the updated value has a known spec;
    - those of slices of one row.
    """
    shape = _shape(op.operands[0])
    update = op.name == _UPDATE
    window = _shape(op.operands[1] if update else op.results[0])
    first = 2 if update else 1
    spec = _pinned_spec(op.operands[0]) if update else None
    for dim, (size, part) in enumerate(zip(shape, window, strict=True)):
        start = op.operands[first + dim]
        # A dim of one row cannot be split, and XLA looks up whole rows before it moves them.
        if (part == 1 and not update) or (spec is not None and not spec[dim]) or _in_range(start, size - part):
            continue
        op.operands[first + dim] = _clamped(op, start, size - part)


def _clamp_windows(op: Any) -> None:
    """Clamp the starts of a gather of windows (in place): XLA lowers it to a slice where a shard reads one window.

    Gathers of single rows or of whole dims stay as they are.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes, windows = _shape(op.operands[0]), list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    if not any(1 < windows[dim] < sizes[dim] for dim in numbers.start_index_map):
        return
    starts = op.operands[1]
    kind = ir.RankedTensorType(starts.type)
    element = ir.IntegerType(kind.element_type)
    # The bound must be a number of the index type, even if the dim is longer.
    highest = 2 ** (element.width - (not element.is_unsigned)) - 1
    ends = [min(sizes[dim] - windows[dim], highest) for dim in numbers.start_index_map]
    with op.location, ir.InsertionPoint(op):
        vector = ir.RankedTensorType.get([len(ends)], element)
        low = stablehlo.constant(ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(element, 0)))
        high = stablehlo.constant(ir.DenseElementsAttr.get([ir.IntegerAttr.get(element, end) for end in ends], vector))
        if numbers.index_vector_dim == kind.rank:
            high = stablehlo.reshape(ir.RankedTensorType.get([], element), high)
        dims = [] if numbers.index_vector_dim == kind.rank else [numbers.index_vector_dim]
        high = stablehlo.broadcast_in_dim(kind, high, dims)
        op.operands[1] = stablehlo.clamp(low, starts, high)


def _clamped(op: Any, start: Any, last: int) -> Any:
    """Emit, before `op`, a clamp of a start to the range from 0 to `last`, and return its result."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    element = ir.RankedTensorType(start.type).element_type
    ends = [ir.DenseElementsAttr.get_splat(start.type, ir.IntegerAttr.get(element, end)) for end in (0, last)]
    with op.location, ir.InsertionPoint(op):
        low, high = map(stablehlo.constant, ends)
        return stablehlo.clamp(low, start, high)


def _in_range(start: Any, last: int) -> bool:
    """Return True if a start is a constant from 0 to `last`."""
    from jaxlib.mlir import ir

    maker = maker_of(start)
    if maker is None or maker.name != "stablehlo.constant":
        return False
    return 0 <= int(ir.DenseIntElementsAttr(maker.attributes["value"])[0]) <= last


def _pins_before(op: Any) -> Iterator[Any]:
    """Yield the constraints on an op's indexed operands that split an indexed dim, with only views in between.

    After a reshape or transpose any split counts. Constraints on one repeated number are left out.
    """
    indexed = _indexed_dims(op)
    count = len(op.results) if op.name == _SCATTER else 1
    for value in list(op.operands)[:count]:
        maker, dims = maker_of(value), indexed
        while maker is not None and maker.name in _VIEWS:
            if maker.name in _MOVING:
                dims = None
            maker = maker_of(maker.operands[0])
        if maker is None or maker.name != CONSTRAINT or _is_splat(maker.operands[0]):
            continue
        if any(axes and (dims is None or dim in dims) for dim, axes in enumerate(pinned_axes(maker))):
            yield maker


def _indexed_dims(op: Any) -> set[int]:
    """Return the dims of the first operand in which the op reads or writes a part, from a start.

    Gathers and scatters name them; for dynamic slices and updates they are the dims that the window does not fill.
    """
    from jaxlib.mlir.dialects import stablehlo

    if op.name == _SCATTER:
        numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        return set(numbers.scattered_dims_to_operand_dims)
    shape = _shape(op.operands[0])
    if op.name == _GATHER:
        numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        return set(numbers.start_index_map)
    window = _shape(op.operands[1] if op.name == _UPDATE else op.results[0])
    return {dim for dim, (size, part) in enumerate(zip(shape, window, strict=True)) if part < size}


def _is_splat(value: Any) -> bool:
    """Return True for one number that is repeated in a whole shape: XLA never slices it."""
    from jaxlib.mlir import ir

    maker = maker_of(value)
    while maker is not None and maker.name in (CONSTRAINT, *_VIEWS):
        maker = maker_of(maker.operands[0])
    if maker is not None and maker.name == "stablehlo.constant":
        numbers = maker.attributes["value"]
        return isinstance(numbers, ir.DenseElementsAttr) and numbers.is_splat
    return maker is not None and maker.name == "stablehlo.broadcast_in_dim" and not _shape(maker.operands[0])


def _separate(pin: Any) -> None:
    """Insert an optimization barrier between a constraint and all its users, unless it has one."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    value = pin.results[0]
    if any(use.owner.operation.name == _BARRIER for use in value.uses):
        return
    with pin.location, ir.InsertionPoint.after(pin):
        barrier = stablehlo.OptimizationBarrierOp([value]).operation
    value.replace_all_uses_except(barrier.results[0], barrier)


def _pinned_spec(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """Return the mesh axes per dim of a pinned value or of an argument of `@main`; None if it is left to
    propagation.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    if not isinstance(value.owner, ir.Block):
        return pinned_axes(value.owner.operation) if value.owner.operation.name == CONSTRAINT else None
    entries = argument_entries(value.owner.owner.operation, "arg_attrs")
    entry = entries[ir.BlockArgument(value).arg_number] if entries else {}
    return axes_of(sdy.TensorShardingAttr(entry["sdy.sharding"])) if "sdy.sharding" in entry else None


def _shape(value: Any) -> list[int]:
    """Return the sizes of a value's dims."""
    from jaxlib.mlir import ir

    return list(ir.RankedTensorType(value.type).shape)


_FIRST_INDEX = {"stablehlo.dynamic_slice": 1, "stablehlo.dynamic_update_slice": 2}
"""Position of the first index among the operands of ops that slice."""


def indexed_sizes(module: Any) -> dict[int, tuple[int, ...]]:
    """Return the sizes of the dims that integer arguments of `main` index, by the argument's number.

    An argument that decides the number of a loop's iterations is omitted, since no value of it is safe to change.
    Leaves `module` unchanged.
    """
    copy, block, _ = flat_main(module)
    reader = _IndexUses()
    reader.block(block, [frozenset({n}) if _is_whole(v) else frozenset() for n, v in enumerate(block.arguments)])
    del copy  # only now: the copy owns the block
    return {number: tuple(sorted(sizes)) for number, sizes in reader.sizes.items() if number not in reader.counting}


class _IndexUses:
    """Reader of the integer arguments that reach each value, and of the dims that they index.

    - `of`: numbers of the arguments by value.
    - `sizes`: sizes of the dims that an argument indexes.
    - `counting`: arguments that reach a loop's condition.
    """

    def __init__(self) -> None:
        self.of: dict[Any, frozenset[int]] = {}
        self.sizes: dict[int, set[int]] = {}
        self.counting: set[int] = set()

    def block(self, block: Any, sources: list[frozenset[int]]) -> list[frozenset[int]]:
        """Read a block whose arguments have these sources; return the sources of its terminator's operands.

        A value that is no integer has no sources.
        """
        self.of.update(zip(block.arguments, sources, strict=True))
        returned: list[frozenset[int]] = []
        for view in block.operations:
            op = view.operation
            operands = [self.of.get(value, frozenset()) for value in op.operands]
            if op.name in ("stablehlo.return", "func.return"):
                returned = operands
                continue
            for value, source in zip(op.results, self.op(op, operands), strict=True):
                self.of[value] = source if _is_whole(value) else frozenset()
        return returned

    def op(self, op: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        """Record the dims that an op indexes; return the sources of its results: all arguments of its operands."""
        if op.name == "stablehlo.while":
            return self.loop(op, operands)
        if op.name in BRANCHING:
            branches = [self.block(region.blocks[0], []) for region in op.regions]
            return [frozenset().union(*each) for each in zip(*branches, strict=True)]
        for numbers, size in _indexed(op, operands):
            for number in numbers:
                self.sizes.setdefault(number, set()).add(size)
        return [frozenset().union(*operands)] * len(op.results)

    def loop(self, op: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        """Read a loop until its sources no longer grow; return the sources of its results."""
        carried = operands
        while True:
            (ends,) = self.block(op.regions[0].blocks[0], carried)
            updated = self.block(op.regions[1].blocks[0], carried)
            self.counting |= ends
            joined = [before | after for before, after in zip(carried, updated, strict=True)]
            if joined == carried:
                return carried
            carried = joined


def _indexed(op: Any, operands: list[frozenset[int]]) -> list[tuple[frozenset[int], int]]:
    """Return the arguments in each index of an op, with the size of the dim that it indexes; empty for ops without
    index.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if op.name in _FIRST_INDEX:
        first = _FIRST_INDEX[op.name]
        return list(zip(operands[first:], ir.RankedTensorType(op.operands[0].type).shape, strict=True))
    if op.name == "stablehlo.gather":
        numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        dims, indices = numbers.start_index_map, operands[1]
    elif op.name == "stablehlo.scatter":
        numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        dims, indices = numbers.scattered_dims_to_operand_dims, operands[len(op.results)]
    else:
        return []
    shape = list(ir.RankedTensorType(op.operands[0].type).shape)
    return [(indices, shape[dim]) for dim in dims]


def _is_whole(value: Any) -> bool:
    """Return True for a tensor of integers (booleans included)."""
    from jaxlib.mlir import ir

    return isinstance(ir.RankedTensorType(value.type).element_type, ir.IntegerType)
