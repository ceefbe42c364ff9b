"""Price of one execution of a reshard under a choice: its collectives, relayouts and bytes without a charge."""

import dataclasses
import math
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.graph import OpClass
from autoshard.planning.price.reshard_paths import Relayouts, path_steps, relayouts
from autoshard.planning.space.decision_model import Model, Path, Reshard
from autoshard.planning.space.overlap import AT_NARROW, Overlap
from autoshard.planning.xla.axis_assignments import States


ReshardStep = tuple[str, tuple[str, ...], float, float]
"""(kind, axes, bytes, seconds) of one collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardTime:
    """Collectives and relayouts of one execution of a reshard under a choice."""

    steps: tuple[ReshardStep, ...]
    """(kind, axes, bytes, seconds) of each collective, in order; those without bytes are left out."""
    relayouts: Relayouts
    """Relayouts in addition to the collectives, as single figures."""
    relays: bool
    """True if there are any relayouts."""


def reshard_overlap(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> Overlap:
    """Return how a reshard may be hidden, given the chosen state of its matmul; a matmul that is too narrow gives
    `AT_NARROW`.
    """
    overlap = Overlap(reshard.overlap)
    if reshard.narrow is None:
        return overlap
    at_source = model.nodes[reshard.source].kind == "op"
    return AT_NARROW[overlap] if reshard.narrow[choices[reshard.source if at_source else reshard.target]] else overlap


_NEVER = ReshardTime((), Relayouts(np.array(0), np.array(0.0)), False)
"""Time of a reshard at pairs of states at which it does not run."""


@dataclasses.dataclass(slots=True)
class _Known:
    """Cached reshard times of one path."""

    path: Path
    """The path; the reference ensures that no other path gets its `id`."""
    times: dict[tuple[int, int], ReshardTime] = dataclasses.field(default_factory=dict)
    """Reshard times by (row, column) of the path."""


_known: "weakref.WeakKeyDictionary[Collectives, dict[int, _Known]]" = weakref.WeakKeyDictionary()
"""Cache by priced mesh and by `id` of the path: repeated layers share their paths, and so their reshard times."""


def reshard_time(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> ReshardTime:
    """Return the time of one execution of a reshard under a choice; cached. Raises `ValueError` if the pair of
    alternatives is forbidden.
    """
    row = int(reshard.rows[choices[reshard.source]])
    column = int(reshard.columns[choices[reshard.target]])
    if reshard.forbidden is not None and reshard.forbidden[row, column]:
        raise ValueError(f"nodes {reshard.source} and {reshard.target} take a pair of alternatives that is not allowed")
    if reshard.runs is not None and not reshard.runs[row, column]:
        return _NEVER
    path = reshard.path
    paths = _known.get(model.collectives)
    if paths is None:
        paths = _known.setdefault(model.collectives, {})
    known = paths.get(id(path))
    if known is None:
        known = paths[id(path)] = _Known(path)
    timing = known.times.get((row, column))
    if timing is None:
        ends = (path.source_dims[row], path.passed_dims[row], path.source[row], path.target[column])
        held, kept, source, target = (end[None, :] for end in ends)
        one = dataclasses.replace(path, source_dims=held, passed_dims=kept, source=source, target=target)
        timing = known.times[row, column] = _reshard_time_of(one, model.collectives)
    return timing


def _reshard_time_of(path: Path, collectives: Collectives) -> ReshardTime:
    """Return the collectives and relayouts of a path that has one state at each end; collectives without bytes are left
    out.
    """
    priced_steps: list[ReshardStep] = []
    gathers, pair_steps = path_steps(path, collectives)
    for step in (*gathers, *pair_steps):
        size = float(step.size[0, 0])
        if size > 0:
            axes = tuple(collectives.mesh.names[a] for a in step.axes)
            priced_steps.append((step.kind, axes, size, float(collectives.time(step.kind, axes, size))))
    relayout = relayouts(path, collectives).at(0, 0)
    return ReshardTime(tuple(priced_steps), relayout, relayout.any())


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


def cluster_names(model: Model) -> dict[int, str]:
    """Return by cluster the name of its first argument; other clusters have no entry.

    An argument with which a loop begins also names the cluster of the loop's carried tensor, unless that has an
    argument of its own.
    """
    arguments = {model.graph.arguments[i]: a.name for i, a in enumerate(model.program.arguments)}
    carried = {
        model.structure.cluster_of[carry.body]: arguments[carry.init]
        for loop in model.graph.loops
        for carry in reversed(loop.carries)
        if carry.init in arguments
    }
    return carried | {
        number: arguments[tensor]
        for number, cluster in enumerate(model.structure.clusters)
        if (tensor := next((t for t in cluster.tensors if t in arguments), None)) is not None
    }


def reshard_cause(model: Model, reshard: Reshard, named: dict[int, str]) -> str:
    """Return the name of the resharded tensor: the argument behind it, else its own, else the op that computes it.

    An unnamed result of a heavy op has the name of its cluster. `named` is the result of `cluster_names`.
    """
    node = model.nodes[reshard.source]
    if node.kind == "copy":
        node = model.nodes[model.cluster_node[model.structure.cluster_of[node.ref]]]
    end = model.nodes[reshard.target]
    if node.kind == "op" and end.kind == "cluster" and end.name and not model.graph.tensors[reshard.tensor].name:
        return end.name
    for side in (node, end):
        if side.kind == "cluster" and side.ref in named:
            return named[side.ref]
    return model.graph.tensors[reshard.tensor].name or node.name


def reshard_line(model: Model, reshard: Reshard) -> str:
    """Return the source line of the op that the tensor enters or leaves, else of the op that computes it; empty if
    neither has one.
    """
    ops = model.graph.ops
    maker = model.graph.tensors[reshard.tensor].producer
    return next((ops[op].line for op in (reshard.op, maker) if op >= 0 and ops[op].line), "")
