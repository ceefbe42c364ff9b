"""Tables that TPU compilers lay out anew to gather from them or to add to them row by row.

An array with a narrow last dim is stored with its rows along the lanes of a register, which wastes nothing. A scatter
needs the columns there: it makes its result with rows padded to whole registers of 128 lanes, and copies that to the
narrow layout. A gather copies the table in the same way, but for one so narrow that it is gathered from as it is. So a
table of a million rows that is split to 2 columns a device takes 64 times its bytes there. Read from the compiled
gathers and scatters of tables of 2 to 160 columns in f32 and bf16, 8 to 640 MiB (v5e, libtpu 0.0.51). Rows that a
scatter adds are padded as its result is: two million rows of 16 columns take 1,176 MiB and 3.2 ms on v5e, and as many
bytes in rows of 128 columns 163 MiB and 0.56 ms (libtpu 0.0.52).
"""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.cost import BACKENDS, LANES, shard_bytes
from autoshard.graph import Op, OpGraph, Tensor
from autoshard.plan.xla._states import WHOLE, Seconds, States, local_elements, relabel


AS_IT_IS = 32
"""Most columns of a table that is gathered from as it is stored: 32 were seen to be, 64 not."""


def table_of(graph: OpGraph, op: Op, backend: str) -> int | None:
    """The matrix whose rows a gather takes or a scatter adds to; None if that is not what the op does, or no TPU."""
    if not BACKENDS[backend].tiled or op.rule is None or op.kind not in ("gather", "scatter"):
        return None
    table = op.operands[0]
    if len(graph.tensors[table].shape) != 2:
        return None
    rows = op.rule.results[0] if op.kind == "gather" else op.rule.operands[2]
    columns = op.rule.operands[0][1]
    taken = {factor for dim in rows for factor in dim}
    return table if len(columns) == 1 and columns[0] in taken else None


def padded_bytes(kind: str, shape: Sequence[int], itemsize: int) -> int:
    """Bytes of the padded copy of one device's part of a table in a `gather` or `scatter`; 0 where there is none."""
    if shape[1] % LANES == 0 or (kind == "gather" and shape[1] <= AS_IT_IS):
        return 0
    return shard_bytes(shape, itemsize, tiled=True)


def padded_tables(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> Seconds:
    """`padded_bytes` of the table of an op in every state; 0 for an op without one."""
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
    """Return the bytes that padding adds to the rows that a scatter adds, in every state; 0 for an op without such.

    What the program makes is written padded at once; of an argument a padded copy is made.
    """
    table = table_of(graph, op, backend)
    if table is None or op.kind != "scatter":
        return np.zeros(len(states))
    _, columns = local_dims(graph, op, 0, states, axes)
    own = math.prod(local_dims(graph, op, 2, states, axes), start=np.ones(len(states)))
    return padded_row_bytes(graph.tensors[op.operands[2]], own, columns)


def padded_row_bytes(rows: Tensor, elements: Seconds, columns: Seconds) -> Seconds:
    """Return the bytes that padding adds to so many elements of the rows; 0 where rows fill whole registers."""
    copied = elements if rows.producer >= 0 else 0.0
    padded = elements / np.maximum(columns, 1.0) * (np.ceil(columns / LANES) * LANES)
    return np.where(columns % LANES > 0, (padded - copied) * rows.itemsize, 0.0)


def local_dims(graph: OpGraph, op: Op, operand: int, states: States, axes: Sequence[int]) -> list[Seconds]:
    """Return the dims of one device's part of an operand, by its number, in every state of the op."""
    assert op.rule is not None
    shape, dims = graph.tensors[op.operands[operand]].shape, op.rule.operands[operand]
    parts = []
    for size, factors in zip(shape, dims, strict=True):
        mapping = [0 if f in factors else WHOLE for f in range(len(op.rule.sizes))]
        parts.append(local_elements(relabel(states, mapping), (size,), axes))
    return parts


def relaid_bytes(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> Seconds:
    """Return what padded copies of a table, and of rows, add to an op's memory traffic in every state.

    A scatter fills and reads both; a gather reads the table and writes its copy.
    """
    padded = padded_tables(graph, op, states, axes, backend)
    if op.kind == "scatter":
        return 2.0 * (padded + padded_rows(graph, op, states, axes, backend))
    if not padded.any():
        return padded
    record = graph.tensors[op.operands[0]]
    own = math.prod(local_dims(graph, op, 0, states, axes)) * record.itemsize
    return np.where(padded > 0, padded + own, 0.0)
