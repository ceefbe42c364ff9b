"""Memory of compilers beyond the elements: padding of tiles, scratch of sorts, and tables in another layout."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost import BACKENDS, LANES, shard_bytes, tile_padding
from autoshard.graph import GROUPED, GROUPED_GRADIENT, FactorKind, Op, OpClass, OpGraph, Tensor, is_batched
from autoshard.planning.xla.axis_assignments import WHOLE, Seconds, States, local_elements, local_sizes, relabel


class Padding:
    """Padding that tiles add to a program's tensors, by how each tensor is split; none on backends without tiles."""

    def __init__(self, graph: OpGraph, backend: str) -> None:
        """Find the layout of every tensor; results are cached in the object."""
        self.graph, self.tiled = graph, BACKENDS[backend].tiled
        self.outer = _outer_dims(graph) if self.tiled else {}
        self.in_order = _in_order(graph) if self.tiled else frozenset()
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
        outer, in_order = self.tile_layout(tensor)
        key = (record.shape, self._itemsize(tensor), outer, in_order, tuple(axes), states.shape, states.tobytes())
        if key not in self._known:
            local = local_sizes(states, record.shape, axes)
            self._known[key] = tile_padding(local, self._itemsize(tensor), outer, in_order)
        return self._known[key]

    def shard_bytes(self, tensor: int, local: Sequence[int], itemsize: int) -> int:
        """Return the padded bytes of a tensor's shard, rounded.

        - `local`: dims of the shard.
        - `itemsize`: bytes of an element of the shard, which may differ from the tensor's; tiles are the tensor's.
        """
        outer, in_order = self.tile_layout(tensor)
        key = (*local, itemsize, self._itemsize(tensor), outer, in_order)
        if key not in self._held:
            size = float(np.prod(local, dtype=np.float64)) * itemsize
            if self.tiled and len(local) > 1:
                dims = np.asarray([local], dtype=np.float64)
                size *= float(tile_padding(dims, self._itemsize(tensor), outer, in_order)[0])
            self._held[key] = int(np.rint(size))
        return self._held[key]

    def tile_layout(self, tensor: int) -> tuple[tuple[int, ...], bool]:
        """Return the tensor's dims outside tiles, and True if its matrices retain the order of their dims."""
        return self.outer.get(tensor, ()), tensor in self.in_order

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
    """Return the stacks of matrices that grouped kernels consume or compute, without arguments.

    Parameters have layouts of their own. A loop carries the property on to its other tensors.
    """
    stacks: set[int] = set()
    for op in graph.ops:
        if op.kind == GROUPED:
            maker = graph.maker(op.operands[1])
            while maker is not None and maker.kind in _ALONG:
                maker = graph.maker(maker.operands[0])
            if maker is not None and maker.op_class is OpClass.LAYER:
                stacks.add(maker.operands[0])
        elif op.kind == GROUPED_GRADIENT:
            last = graph.users[op.results[0]]
            while len(last) == 1 and last[0].kind in _ALONG:
                last = graph.users[last[0].results[0]]
            stacks |= {t for user in last if user.op_class is OpClass.LAYER for t in (user.operands[0], *user.results)}
    for loop in graph.loops:
        for carry in loop.carries:
            parts = {carry.init, carry.body, carry.update, carry.result}
            if parts & stacks:
                stacks |= parts
    return frozenset(stacks - set(graph.arguments))


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


MAX_UNPADDED_COLUMNS = 32
"""Largest number of columns of a table that a gather reads in its stored layout: 32 was observed, 64 was not."""


def table_of(graph: OpGraph, op: Op, backend: str) -> int | None:
    """Return the matrix whose whole rows a gather reads or a scatter updates; None for other ops and off TPUs.

    A table with another number of dims than two gives None.
    """
    if not BACKENDS[backend].tiled or op.rule is None or op.kind not in ("gather", "scatter"):
        return None
    table = op.operands[0]
    if len(graph.tensors[table].shape) != 2:
        return None
    rows = op.rule.results[0] if op.kind == "gather" else op.rule.operands[2]
    columns = op.rule.operands[0][1]
    row_factors = {factor for dim in rows for factor in dim}
    return table if len(columns) == 1 and columns[0] in row_factors else None


def padded_bytes(kind: str, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of the padded copy of a table's shard in a `gather` or `scatter`; 0 if there is no copy.

    Columns in whole registers need none, nor does a gather of at most `MAX_UNPADDED_COLUMNS` columns.

    - `kind`: kind of op.
    - `shape`: rows and columns of the shard.
    - `itemsize`: bytes of an element.
    """
    if shape[1] % LANES == 0 or (kind == "gather" and shape[1] <= MAX_UNPADDED_COLUMNS):
        return 0
    return shard_bytes(shape, itemsize, tiled=True)


def padded_tables(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> Seconds:
    """Return the `padded_bytes` of an op's table in every state; 0 for an op without a table.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    table = table_of(graph, op, backend)
    if table is None:
        return np.zeros(len(states))
    record = graph.tensors[table]
    rows, columns = (part.astype(np.int64) for part in local_dims(graph, op, 0, states, axes))
    itemsize = record.itemsize
    shapes, which = np.unique(np.stack([rows, columns], axis=1), axis=0, return_inverse=True)
    sizes = [padded_bytes(op.kind, [int(n) for n in shape], itemsize) for shape in shapes]
    return np.asarray(sizes, dtype=np.float64)[which.reshape(-1)]


def padded_rows(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> Seconds:
    """Return the bytes that padding adds to a scatter's updates in every state; 0 for other ops.

    Updates that the program computes are written padded. Updates that are an argument are copied.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    table = table_of(graph, op, backend)
    if table is None or op.kind != "scatter":
        return np.zeros(len(states))
    _, columns = local_dims(graph, op, 0, states, axes)
    own = math.prod(local_dims(graph, op, 2, states, axes), start=np.ones(len(states)))
    return padded_row_bytes(graph.tensors[op.operands[2]], own, columns)


def padded_row_bytes(rows: Tensor, elements: Seconds, columns: Seconds) -> Seconds:
    """Return the bytes that padding adds to `elements` of a scatter's updates; 0 if rows fill whole registers.

    Updates that are an argument are copied, so their own bytes are added too.

    - `rows`: the tensor of the updates.
    - `columns`: local columns of the table.
    """
    copied = elements if rows.producer >= 0 else 0.0
    padded = elements / np.maximum(columns, 1.0) * (np.ceil(columns / LANES) * LANES)
    return np.where(columns % LANES > 0, (padded - copied) * rows.itemsize, 0.0)


def local_dims(graph: OpGraph, op: Op, operand: int, states: States, axes: Sequence[int]) -> list[Seconds]:
    """Return the dims of an operand's shard in every state of the op, one array [states] for each dim.

    - `operand`: position of the operand.
    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    assert op.rule is not None
    shape, dims = graph.tensors[op.operands[operand]].shape, op.rule.operands[operand]
    parts = []
    for size, factors in zip(shape, dims, strict=True):
        mapping = [0 if f in factors else WHOLE for f in range(len(op.rule.sizes))]
        parts.append(local_elements(relabel(states, mapping), (size,), axes))
    return parts


def relaid_bytes(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> Seconds:
    """Return the memory traffic of padded copies of an op's table and updates, [states].

    A scatter fills and reads both copies; a gather reads the table and writes its copy.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    padded = padded_tables(graph, op, states, axes, backend)
    if op.kind == "scatter":
        return 2.0 * (padded + padded_rows(graph, op, states, axes, backend))
    if not padded.any():
        return padded
    record = graph.tensors[op.operands[0]]
    own = math.prod(local_dims(graph, op, 0, states, axes)) * record.itemsize
    return np.where(padded > 0, padded + own, 0.0)
