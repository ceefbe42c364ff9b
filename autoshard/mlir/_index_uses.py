"""Which arguments a program indexes with, and the sizes of the dims that they index."""

from typing import Any

from autoshard.mlir._number import BRANCHING
from autoshard.mlir._uses import flat_main


_FIRST_INDEX = {"stablehlo.dynamic_slice": 1, "stablehlo.dynamic_update_slice": 2}


def indexed_sizes(module: Any) -> dict[int, tuple[int, ...]]:
    """Return the sizes of the dims that integer arguments of `main` index, by the argument's number.

    An argument that decides how often a loop runs is left out: no number of it is safe to change. Leaves `module` as
    it is.
    """
    copy, block, _ = flat_main(module)
    reader = _IndexUses()
    reader.block(block, [frozenset({n}) if _is_whole(v) else frozenset() for n, v in enumerate(block.arguments)])
    del copy  # not before: it owns the block
    return {number: tuple(sorted(sizes)) for number, sizes in reader.sizes.items() if number not in reader.counting}


class _IndexUses:
    """Integer arguments that reach each value, and the dims that they index."""

    def __init__(self) -> None:
        self.of: dict[Any, frozenset[int]] = {}
        self.sizes: dict[int, set[int]] = {}
        self.counting: set[int] = set()

    def block(self, block: Any, sources: list[frozenset[int]]) -> list[frozenset[int]]:
        """Read a block whose arguments have these sources; return the sources of what it returns."""
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
    """Return the arguments in each index of an op, with the size of the dim that it indexes."""
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
    from jaxlib.mlir import ir

    return isinstance(ir.RankedTensorType(value.type).element_type, ir.IntegerType)
