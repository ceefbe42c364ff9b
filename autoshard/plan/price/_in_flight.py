"""What collectives hold beside the values of a program, where the compiler gives them memory of their own.

A gathered operand is held from its first use to its last one; what is not summed yet, until it is summed. XLA's GPU
compiler joins collectives of one kind over the same axes into one of at most `JOINED` bytes: gathered operands come
with the first of them, sums wait for the last one (`openxla/xla`, `service/collective_utils.h` and its combiners).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpClass
from autoshard.plan.model._model import Model, Reshard
from autoshard.plan.xla._states import local_elements


JOINED = 30 * 2**20 + 7
"""Bytes up to which collectives are joined: the default of the GPU compiler's thresholds."""

_Steps = Iterable[tuple[str, tuple[str, ...], float, float]]
_Group = tuple[str, tuple[str, ...], int]
"""Kind, mesh axes and block."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffered:
    """What one collective holds on a device during [start, stop)."""

    start: int
    stop: int
    size: int
    tensor: int


def in_flight(
    model: Model, choices: NDArray[np.int64], steps: Sequence[_Steps]
) -> list[tuple[int, int, int, str, int]]:
    """(first op, end, bytes, kind, tensor) of what collectives hold; `steps` are those of every reshard in its turn."""
    gathers: dict[_Group, list[_Buffered]] = defaultdict(list)
    sums: dict[_Group, list[_Buffered]] = defaultdict(list)
    users = _users(model)
    for number, reshard in enumerate(model.reshards):
        kinds = {kind: axes for kind, axes, *_ in steps[number]}
        if "all-gather" in kinds and (held := _gathered(model, reshard, choices, users)) is not None:
            gathers["all-gather", kinds["all-gather"], reshard.block].append(held)
        kind = next((kind for kind in ("reduce-scatter", "all-reduce") if kind in kinds), None)
        if kind is not None and model.nodes[reshard.source].kind == "op":
            sums[kind, kinds[kind], reshard.block].append(_unsummed(model, reshard, choices))
    return [
        (held.start, held.stop, held.size, kind, held.tensor)
        for kind, groups in (("gathered", gathers), ("temporaries", sums))
        for held in _joined(groups, first=groups is gathers)
    ]


def _users(model: Model) -> dict[tuple[int, int], list[int]]:
    """The heavy ops that take a tensor, by the tensor and their block."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for edge in model.structure.edges:
        if edge.op >= 0 and edge.operand >= 0 and model.graph.ops[edge.op].op_class is OpClass.HEAVY:
            found[edge.tensor, model.graph.ops[edge.op].loop].append(edge.op)
    return found


def _gathered(
    model: Model, reshard: Reshard, choices: NDArray[np.int64], users: Mapping[tuple[int, int], list[int]]
) -> _Buffered | None:
    """An operand of matmuls and the like as they take it; None for what else is gathered, and for what has a memory
    term of its own."""
    node, graph = model.nodes[reshard.target], model.graph
    if node.kind == "cluster" or node.memory and node.kind == "copy":
        return None
    block = graph.ops[reshard.op].loop
    taken = users[reshard.tensor, block] if node.kind == "copy" else [reshard.op]
    start, stop = min(taken), max(taken) + 1
    home, loop = graph.tensors[reshard.tensor].loop, block
    while loop not in (home, -1):  # gathered once, before the loops that leave it as it is
        start, stop = graph.loops[loop].start, graph.loops[loop].stop
        loop = graph.loops[loop].parent
    column = int(reshard.columns[int(choices[reshard.target])])
    return _Buffered(start, stop, _bytes(model, reshard, reshard.path.target[[column]]), reshard.tensor)


def _unsummed(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> _Buffered:
    """An op's result as one device computes it."""
    row = int(reshard.rows[int(choices[reshard.source])])
    return _Buffered(reshard.op, reshard.op + 1, _bytes(model, reshard, reshard.path.source[[row]]), reshard.tensor)


def _bytes(model: Model, reshard: Reshard, state: NDArray[np.int64]) -> int:
    elements = local_elements(state, reshard.path.factors, model.axis_sizes)
    return round(float(elements[0]) * reshard.path.itemsize)


def _joined(groups: Mapping[_Group, list[_Buffered]], first: bool) -> Iterator[_Buffered]:
    """The same, with what is joined held from the first on, or to the last one."""
    for members in groups.values():
        together: list[_Buffered] = []
        for held in (*sorted(members, key=lambda each: each.start), None):
            if together and (held is None or sum(each.size for each in together) + held.size > JOINED):
                start, stop = min(each.start for each in together), max(each.stop for each in together)
                for each in together:
                    ends = {"start": start} if first else {"stop": stop}
                    yield dataclasses.replace(each, **ends)
                together = []
            if held is not None:
                together.append(held)
