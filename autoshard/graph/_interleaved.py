"""Stacks whose layers lie inside of a register's tiles, and the copies that take them apart.

Where parameters are stacked along their second dim ([d, layers, f], MaxText's `param_scan_axis` of 1), a loop over the
layers needs them along the first. TPUs tile the last two dims of an array, so such a stack has the rows of eight layers
in one tile. Where layers do not fill tiles, XLA lays the argument out with its layers outermost, which pads nothing,
and the loop takes it as it is. Where they do (a multiple of eight, or two or four, for which tiles are made smaller),
arguments and results keep their tiles, and every stack is copied row by row: the parameter before the loop, and what
the update makes of its gradient (parameter and moments) after it. Seen in decoders of 4 and 5 layers compiled for v5p
(libtpu 0.0.51): 12 such copies of 3 stacks with 4 layers, none with 5.
"""

from collections.abc import Iterator

from autoshard.graph._records import Op, OpClass, OpGraph
from autoshard.graph._turned import Passes, exchanges_outer


_SUBLANES = 8
_SMALL_TILES = (2, 4)
"""Sizes of a second-minor dim below eight for which tiles are made that they fill."""
_LEAST = 1 << 20
"""Bytes below which a stack is not looked at."""


def interleaved_passes(graph: OpGraph) -> tuple[Passes, ...]:
    """Copies of stacks, row by row, that take layers out of tiles or put them back; for TPUs alone."""
    arguments, results = set(graph.arguments), set(graph.results)
    carried = {carry.result for loop in graph.loops if not loop.branches for carry in loop.carries}
    consumers: list[list[Op]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        for tensor in set(op.operands):
            consumers[tensor].append(op)
    found = []
    for op in graph.ops:
        if op.kind != "transpose" or op.loop >= 0 or not exchanges_outer(op):
            continue
        source, turned = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
        if source.bytes < _LEAST or len(source.shape) != 3:
            continue
        if source.id in arguments and _fills_tiles(source.shape[1]):
            found.append(Passes(source.id, -1, 1, by_rows=True))
        elif source.id in carried and _fills_tiles(turned.shape[1]):
            made = sorted(set(_followed(graph, consumers, turned.id)) & results)
            found += [Passes(tensor, -1, 1, by_rows=True) for tensor in made]
    return tuple(found)


def _fills_tiles(layers: int) -> bool:
    return layers % _SUBLANES == 0 or layers in _SMALL_TILES


def _followed(graph: OpGraph, consumers: list[list[Op]], tensor: int) -> Iterator[int]:
    """A tensor, and what elementwise ops make of it in its shape."""
    seen, todo = {tensor}, [tensor]
    while todo:
        current = todo.pop()
        yield current
        for op in consumers[current]:
            if op.op_class is not OpClass.POINTWISE:
                continue
            for result in op.results:
                if result not in seen and graph.tensors[result].shape == graph.tensors[tensor].shape:
                    seen.add(result)
                    todo.append(result)
