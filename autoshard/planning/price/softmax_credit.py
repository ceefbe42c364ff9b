"""Correction for bytes that a softmax's price subtracts from adjacent matmuls which were never charged for them."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpClass
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.xla.axis_assignments import States


def uncharged_bytes(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> float:
    """Return the bytes that a softmax credits for a tensor but that the tensor's matmul was never charged for.

    The softmax does not store this tensor, so its cluster subtracts the tensor's local bytes from the matmul's traffic.
    A matmul whose own state splits the tensor finer was charged for fewer bytes. The figure is for one execution; it is
    0 for other tensors and for reshards at no heavy op.
    """
    tensor = reshard.tensor
    if tensor not in model.credited_tensors or reshard.op < 0:
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
    """Return the elements of a tensor on one device in one of its states; uneven shards are rounded up.

    - `states`: dim that each mesh axis splits, [states, axes].
    - `row`: index of the state.
    - `shape`: unsplit shape of the tensor.
    - `axis_sizes`: sizes of the mesh axes.
    """
    count = 1
    for dim, size in enumerate(shape):
        parts = math.prod(axis for axis, where in zip(axis_sizes, states[row], strict=True) if where == dim)
        count *= -(-size // parts)
    return count
