"""What a softmax takes off the matmuls beside it, where one of them never paid for it."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpClass
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.xla.axis_assignments import States


def unpaid_bytes(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> float:
    """Of a value that a softmax does not store the bytes that its cluster takes off a matmul and that this never moved.

    They are those of one execution. The matmul moves less where its own state splits the value finer.
    """
    tensor = reshard.tensor
    if tensor not in model.taken_back or reshard.op < 0:
        return 0.0
    if model.graph.ops[reshard.op].op_class is not OpClass.HEAVY:
        return 0.0
    record = model.graph.tensors[tensor]
    path, rows, columns = reshard.path, reshard.rows, reshard.columns
    source = _elements(path.source, int(rows[int(choices[reshard.source])]), record.shape, model.axis_sizes)
    target = _elements(path.target, int(columns[int(choices[reshard.target])]), record.shape, model.axis_sizes)
    paid, taken = (source, target) if model.nodes[reshard.source].kind == "op" else (target, source)
    moved, owed = (float(model.residency.streamed(tensor, n * record.itemsize)) for n in (paid, taken))
    return max(0.0, owed - moved)


def _elements(states: States, row: int, shape: tuple[int, ...], axis_sizes: Sequence[int]) -> int:
    """Elements of a value on one device in one of its states."""
    count = 1
    for dim, size in enumerate(shape):
        parts = math.prod(axis for axis, where in zip(axis_sizes, states[row], strict=True) if where == dim)
        count *= -(-size // parts)
    return count
