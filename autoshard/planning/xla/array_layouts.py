"""Memory of compilers beyond the elements: padding of tiles, and scratch of sorts."""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost import BACKENDS, LANES, tile_padding
from autoshard.graph import GROUPED, GROUPED_GRADIENT, FactorKind, Op, OpClass, OpGraph, is_batched
from autoshard.planning.xla.axis_assignments import Seconds, States, local_sizes
from autoshard.planning.xla.image_layouts import Image, find_images


class Padding:
    """Padding that tiles add to a program's tensors, by how each tensor is split; none on backends without tiles."""

    def __init__(self, graph: OpGraph, backend: str) -> None:
        """Find the layout of every tensor; results are cached in the object."""
        self.graph, self.tiled = graph, BACKENDS[backend].tiled
        self.outer = _outer_dims(graph) if self.tiled else {}
        self.in_order = _in_order(graph) if self.tiled else frozenset()
        self.images = find_images(graph) if self.tiled else {}
        self._known: dict[object, Seconds] = {}
        self._held: dict[object, int] = {}

    def ratio(self, tensor: int, states: States, axes: Sequence[int]) -> Seconds:
        """Return the padded over the unpadded bytes of a tensor's shard, [states]; 1 for fewer than two dims.

        - `tensor`: number of the tensor.
        - `states`: dim that each mesh axis splits, [states, axes].
        - `axes`: sizes of the mesh axes.
        """
        record = self.graph.tensors[tensor]
        if not self.tiled or len(record.shape) < 2:
            return np.ones(len(states))
        layout = self.tile_layout(tensor)
        key = (record.shape, self._itemsize(tensor), layout, tuple(axes), states.shape, states.tobytes())
        if key not in self._known:
            self._known[key] = self._padding(tensor, local_sizes(states, record.shape, axes))
        return self._known[key]

    def shard_bytes(self, tensor: int, local: Sequence[int], itemsize: int) -> int:
        """Return the padded bytes of a tensor's shard, rounded.

        - `local`: dims of the shard.
        - `itemsize`: bytes of an element of the shard, which may differ from the tensor's; tiles are the tensor's.
        """
        key = (*local, itemsize, self._itemsize(tensor), self.tile_layout(tensor))
        if key not in self._held:
            size = float(np.prod(local, dtype=np.float64)) * itemsize
            if self.tiled and len(local) > 1:
                size *= float(self._padding(tensor, np.asarray([local], dtype=np.float64))[0])
            self._held[key] = int(np.rint(size))
        return self._held[key]

    def tile_layout(self, tensor: int) -> tuple[tuple[int, ...], bool, Image | None]:
        """Return the tensor's dims outside tiles, True if its matrices retain the order of their dims, and the dims of
        an image.
        """
        return self.outer.get(tensor, ()), tensor in self.in_order, self.images.get(tensor)

    def _padding(self, tensor: int, local: Seconds) -> Seconds:
        """Return the padded over the unpadded bytes of shards with the dims of each row of `local`."""
        outer, in_order, image = self.tile_layout(tensor)
        if image is not None:
            return image.padding(local, self._itemsize(tensor))
        return tile_padding(local, self._itemsize(tensor), outer, in_order)

    def _itemsize(self, tensor: int) -> int:
        """Return the bytes of an element of the tensor."""
        record = self.graph.tensors[tensor]
        return record.itemsize


def _outer_dims(graph: OpGraph) -> Mapping[int, tuple[int, ...]]:
    """Return the dims of each tensor that are outside tiles: the dim of a stack's slices, and batch dims of matmuls.

    Tensors that a loop carries have the dims of its body and result. Tensors without such dims are absent.
    """
    outer: dict[int, set[int]] = {}
    for op in graph.ops:
        if op.op_class is OpClass.LAYER and op.loop >= 0:
            stacks = (op.operands[0], *op.results) if op.kind == "dynamic_update_slice" else op.operands[:1]
            for tensor in stacks:
                outer.setdefault(tensor, set()).add(0)
        elif is_batched(op) and _multiplies_matrices(op):
            assert op.rule is not None
            left, right = op.rule.operands
            batch = {f for dim in left for f in dim} & {f for dim in right for f in dim}
            batch &= {f for dim in op.rule.results[0] for f in dim}
            for tensor, dims in op.sides:
                batch_dims = {d for d, factors in enumerate(dims) if factors and batch.issuperset(factors)}
                outer.setdefault(tensor, set()).update(batch_dims)
    for loop in graph.loops:
        for carry in loop.carries:
            dims = outer.get(carry.body, set()) | outer.get(carry.result, set())
            if dims:
                for tensor in (carry.init, carry.body, carry.update, carry.result):
                    outer.setdefault(tensor, set()).update(dims)
    return {tensor: tuple(sorted(dims)) for tensor, dims in outer.items() if dims}


def _in_order(graph: OpGraph) -> frozenset[int]:
    """Return what kernels read and write, and the stacks of it, without arguments.

    Kernels are Pallas calls, and those of grouped rows for their matrices alone. Parameters have layouts of their own.
    A loop carries the property on to its other tensors.

    Evidence: docs/compiler_behaviour.md, "Operands of Pallas kernels in memory".
    """
    ordered: set[int] = set()
    for op in graph.ops:
        if op.kind == GROUPED:
            ordered |= _stacks_read(graph, op.operands[1])
        elif op.kind == GROUPED_GRADIENT:
            ordered |= _stacks_written(graph, op.results[0])
        elif op.kind == "custom_call":
            ordered.update(op.operands, op.results)
            for tensor in op.operands:
                ordered |= _stacks_read(graph, tensor)
            for tensor in op.results:
                ordered |= _stacks_written(graph, tensor)
    count = -1
    while count < len(ordered):
        count = len(ordered)
        for loop in graph.loops:
            for carry in loop.carries:
                parts = {carry.init, carry.body, carry.update, carry.result}
                if parts & ordered:
                    ordered |= parts
    return frozenset(ordered - set(graph.arguments))


def _stacks_read(graph: OpGraph, tensor: int) -> set[int]:
    """Return the stack of which a tensor is a slice, in its order of dims; nothing if there is none."""
    maker = graph.maker(tensor)
    while maker is not None and maker.kind in _ALONG:
        maker = graph.maker(maker.operands[0])
    return {maker.operands[0]} if maker is not None and maker.op_class is OpClass.LAYER else set()


def _stacks_written(graph: OpGraph, tensor: int) -> set[int]:
    """Return the stacks to which a tensor is written, in its order of dims, and their next values."""
    found = set[int]()
    for user in graph.users[tensor]:
        if user.op_class is OpClass.LAYER:
            found.update((user.operands[0], *user.results))
        elif user.kind in _ALONG:
            found |= _stacks_written(graph, user.results[0])
    return found


_ALONG = frozenset({"convert", "reshape", "broadcast_in_dim", "sharding_constraint"})
"""Ops between a stack and a kernel that leave the order of a matrix's dims unchanged."""


def _multiplies_matrices(op: Op) -> bool:
    """Return True if both sides of a dot have free dims and a dim is contracted; otherwise the dot is elementwise."""
    assert op.rule is not None
    left, right, out = (
        {f for dim in dims for f in dim if op.rule.sizes[f] > 1} for dims in (*op.rule.operands, op.rule.results[0])
    )
    return bool(left - right) and bool(right - left) and bool((left & right) - out)


SORTS = frozenset({"sort", "top_k"})
"""Ops that order a whole dim; compilers emit a top-k as a sort or as steps of one."""
_INDEX = 4
"""Bytes of an index."""


def scratch_itemsize(graph: OpGraph, op: Op, backend: str) -> int:
    """Return an op's scratch bytes, beyond operands and results, for each element of the first operand.

    Sorts on TPUs and GPUs copy all operands, with indices for a top-k and, on TPUs, for a sort of one operand.
    Cumulative ops have their copies. All other ops have 0.
    """
    tiled = BACKENDS[backend].tiled
    if op.kind in SORTS and (tiled or BACKENDS[backend].gpu_kernels):
        indexed = op.kind == "top_k" or (tiled and len(op.operands) == 1)
        return sum(graph.tensors[t].itemsize for t in op.operands) + (_INDEX if indexed else 0)
    passes = cumulative_copies(graph, op, backend)
    return passes * graph.tensors[op.operands[0]].itemsize if passes else 0


def cumulative_copies(graph: OpGraph, op: Op, backend: str) -> int:
    """Return the number of copies of a cumulative op on a TPU: 2 along the last dim, 1 along others; 0 for other ops.

    Dims of at most `LANES` elements need no copy.
    """
    if op.kind != "reduce_window" or op.rule is None or not BACKENDS[backend].tiled:
        return 0
    first, result = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
    halos = {halo.factor for halo in op.halos}
    along = [
        dim
        for dim, factors in enumerate(op.rule.operands[0])
        for factor in factors
        if op.rule.kinds[factor] is FactorKind.PERMUTATION and factor not in halos
    ]
    if first.shape != result.shape or len(along) != 1 or first.shape[along[0]] <= LANES:
        return 0
    return 2 if along[0] == len(first.shape) - 1 else 1
