"""How much more than its elements an array takes where compilers lay arrays out in tiles of registers, as on TPUs.

Two dims of an array lie in tiles of 128 lanes by 8 rows, whichever two waste least, the others around them: a decode
cache of heads of 64 lies with its positions along the lanes and wastes nothing, and so do attention scores. But a stack
that a loop takes a slice from, or puts one into, lies slice after slice, and what a matmul with batch dims makes or
takes lies matrix after matrix; these dims are in no tile. So states of 64 x 64 a head that a recurrence saves take
twice their bytes, however many steps there are. Read from programs that were compiled for v5e (libtpu 0.0.51): what
they are given, with up to five dims, in f32, bf16 and int8; recurrences with states of 16 x 16 to 128 x 64;
attention over 49 to 512 tokens; convolutions of 64 features. A stack whose slices no matmul takes may also lie with its
steps along the lanes, and is then smaller than this.

A kernel takes and makes matrices in their order, with the last dim along the lanes. Where they come from a stack, or go
into one, the stack of their shards lies so too, since a gather or scatter changes no layout: shards of 32 columns take
four times their bytes (seen in a mixture with experts in kernels whose width was split over 128 devices, compiled for
tpu7x; the parameter itself lies otherwise, what is narrowed of it before the loop does not).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost import BACKENDS, tile_padding
from autoshard.graph import GROUPED, GROUPED_GRADIENT, Op, OpClass, OpGraph, is_batched
from autoshard.plan.xla._states import Seconds, States, local_sizes


class Padding:
    """What tiles add to the tensors of a program, by how each is split."""

    def __init__(self, graph: OpGraph, backend: str) -> None:
        self.graph, self.tiled = graph, BACKENDS[backend].tiled
        self.outer = _outer_dims(graph) if self.tiled else {}
        self.in_order = _in_order(graph) if self.tiled else frozenset()
        self._known: dict[object, Seconds] = {}
        self._held: dict[object, int] = {}

    def ratio(self, tensor: int, states: States, axes: Sequence[int]) -> Seconds:
        """Bytes with padding over bytes without, of one device's part in every state over the dims of the tensor."""
        record = self.graph.tensors[tensor]
        if not self.tiled or len(record.shape) < 2:
            return np.ones(len(states))
        outer, in_order = self.lies(tensor)
        key = (record.shape, self._itemsize(tensor), outer, in_order, tuple(axes), states.shape, states.tobytes())
        if key not in self._known:
            local = local_sizes(states, record.shape, axes)
            self._known[key] = tile_padding(local, self._itemsize(tensor), outer, in_order)
        return self._known[key]

    def held(self, tensor: int, local: Sequence[int], itemsize: int) -> int:
        """Bytes of one device's part of a tensor, which has `local` dims there and elements of so many bytes."""
        outer, in_order = self.lies(tensor)
        key = (*local, itemsize, self._itemsize(tensor), outer, in_order)
        if key not in self._held:
            size = float(np.prod(local, dtype=np.float64)) * itemsize
            if self.tiled and len(local) > 1:
                dims = np.asarray([local], dtype=np.float64)
                size *= float(tile_padding(dims, self._itemsize(tensor), outer, in_order)[0])
            self._held[key] = int(np.rint(size))
        return self._held[key]

    def lies(self, tensor: int) -> tuple[tuple[int, ...], bool]:
        """Dims that are in no tile, and whether the tensor's matrices keep their order."""
        return self.outer.get(tensor, ()), tensor in self.in_order

    def _itemsize(self, tensor: int) -> int:
        record = self.graph.tensors[tensor]
        return record.itemsize


def _outer_dims(graph: OpGraph) -> Mapping[int, tuple[int, ...]]:
    """Dims that are in no tile: that of a stack's slices, and the batch dims of matmuls."""
    found: dict[int, set[int]] = {}
    for op in graph.ops:
        if op.op_class is OpClass.LAYER and op.loop >= 0:
            stacks = (op.operands[0], *op.results) if op.kind == "dynamic_update_slice" else op.operands[:1]
            for tensor in stacks:
                found.setdefault(tensor, set()).add(0)
        elif is_batched(op) and _multiplies_matrices(op):
            assert op.rule is not None
            left, right = op.rule.operands
            batch = {f for dim in left for f in dim} & {f for dim in right for f in dim}
            batch &= {f for dim in op.rule.results[0] for f in dim}
            for tensor, dims in op.sides:
                among = {d for d, factors in enumerate(dims) if factors and batch.issuperset(factors)}
                found.setdefault(tensor, set()).update(among)
    for loop in graph.loops:
        for carry in loop.carries:
            dims = found.get(carry.body, set()) | found.get(carry.result, set())
            if dims:
                for tensor in (carry.init, carry.body, carry.update, carry.result):
                    found.setdefault(tensor, set()).update(dims)
    return {tensor: tuple(sorted(dims)) for tensor, dims in found.items() if dims}


def _in_order(graph: OpGraph) -> frozenset[int]:
    """Stacks of matrices that kernels take or make; parameters are laid out by themselves."""
    makers = {tensor: op for op in graph.ops for tensor in op.results}
    users: dict[int, list[Op]] = {}
    for op in graph.ops:
        for tensor in op.operands:
            users.setdefault(tensor, []).append(op)
    found: set[int] = set()
    for op in graph.ops:
        if op.kind == GROUPED:
            maker = makers.get(op.operands[1])
            while maker is not None and maker.kind in _ALONG:
                maker = makers.get(maker.operands[0])
            if maker is not None and maker.op_class is OpClass.LAYER:
                found.add(maker.operands[0])
        elif op.kind == GROUPED_GRADIENT:
            last = users.get(op.results[0], [])
            while len(last) == 1 and last[0].kind in _ALONG:
                last = users.get(last[0].results[0], [])
            found |= {t for user in last if user.op_class is OpClass.LAYER for t in (user.operands[0], *user.results)}
    for loop in graph.loops:
        for carry in loop.carries:
            parts = {carry.init, carry.body, carry.update, carry.result}
            if parts & found:
                found |= parts
    return frozenset(found - set(graph.arguments))


_ALONG = frozenset({"convert", "reshape", "broadcast_in_dim", "sharding_constraint"})
"""What a matrix of a stack passes without another order of its dims."""


def _multiplies_matrices(op: Op) -> bool:
    """True if both sides have free dims and something is summed: else it is done element by element."""
    assert op.rule is not None
    left, right, out = (
        {f for dim in dims for f in dim if op.rule.sizes[f] > 1} for dims in (*op.rule.operands, op.rule.results[0])
    )
    return bool(left - right) and bool(right - left) and bool((left & right) - out)
