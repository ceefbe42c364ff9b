"""What TPU kernels do beside the op that they are for: the pointwise ops that follow it, and sums of what they make.

The kernel of a matmul or a convolution goes on with the pointwise values that follow from its result and from what is
in memory, and stores the last of them instead. Any kernel also sums what it makes, or takes, over some dims: means of
norms, gradients of biases and scales. Read from the scheduled programs of decoders, ViT, a ResNet and MLPs in float32
(v4 to v6e, libtpu 0.0.51): of the sums of a layer norm, a batch norm and a bias none reads memory again.

Where a matmul's result is summed over devices first, its kernel cannot go on; that is not told apart, as what the sum
itself takes is many times more.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autoshard.graph._records import Fusion, OpClass, OpGraph


_SMALL = 8
"""What has so many times fewer elements than a sum takes does not decide where it is made."""


def meetings(graph: OpGraph, consumers: Sequence[Sequence[int]], apart: Collection[int]) -> dict[int, int]:
    """By value with several users the op of its loop where all ways from it meet, over pointwise ops alone.

    Up to there its users are parts of one kernel, which makes it once. `apart`: ops that end a kernel before another
    begins, which no way leads through.
    """
    after = [-1] * len(graph.ops)
    """By op the next op that all ways from it lead to, -1 for none."""
    found: dict[int, int] = {}

    def met(users: Sequence[int], loop: int) -> int:
        at = -1
        for number, user in enumerate(sorted(set(users))):
            other = graph.ops[user]
            if other.loop != loop or other.op_class is not OpClass.POINTWISE or user in apart:
                return -1
            if not number:
                at = user
                continue
            mine, theirs = at, user
            while mine != theirs:  # ops are numbered in their order
                if mine < theirs:
                    mine = after[mine]
                else:
                    theirs = after[theirs]
                if mine < 0 or theirs < 0:
                    return -1
            at = mine
        return at

    for op in reversed(graph.ops):
        users = [user for tensor in op.results for user in consumers[tensor]]
        if not users or op.id in apart:
            continue
        after[op.id] = met(users, op.loop)
        if len(op.results) == 1 and len(set(users)) > 1 and after[op.id] >= 0:
            found[op.results[0]] = after[op.id]
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Continued:
    """Fusions of which some do their work inside of others' kernels."""

    fusions: list[Fusion]
    stores: Mapping[int, int]
    """Result of a matmul or convolution, which is not stored -> what its kernel stores instead."""


def continued(
    graph: OpGraph,
    fusions: Sequence[Fusion],
    matmuls: Collection[int],
    pinned: Collection[int],
    bases: Mapping[int, Collection[int]],
) -> Continued:
    """The same fusions: those that go on with the result of one of `matmuls` do not read it, and what they write takes
    the place of what it would; sums of what was just made, or taken, read nothing large.

    `pinned`: values that are stored in any case. `bases`: by slice the values that it is read from.
    """
    readers: dict[int, list[int]] = {}
    for number, fusion in enumerate(fusions):
        for tensor in fusion.reads:
            for source in {tensor, *bases.get(tensor, ())}:
                readers.setdefault(source, []).append(number)
    made = list(fusions)
    stores: dict[int, int] = {}
    for number, fusion in enumerate(fusions):
        root = graph.ops[fusion.root]
        if root.op_class is not OpClass.POINTWISE or len(fusion.writes) != 1 or fusion.moved != fusion.writes:
            continue
        written = graph.tensors[fusion.writes[0]]
        before = [
            t
            for t in fusion.reads
            if graph.tensors[t].producer in matmuls
            and readers[t] == [number]
            and t not in pinned
            and graph.ops[graph.tensors[t].producer].loop == root.loop
            and graph.tensors[t].elements == written.elements
        ]
        if before:
            source = max(before, key=lambda t: graph.tensors[t].producer)
            stores[source] = written.id
            made[number] = dataclasses.replace(fusion, reads=tuple(t for t in fusion.reads if t != source), moved=())
    _sum_inside(graph, fusions, made, matmuls)
    return Continued(made, stores)


def _sum_inside(graph: OpGraph, fusions: Sequence[Fusion], made: list[Fusion], matmuls: Collection[int]) -> None:
    """Takes what sums read off those that another kernel of their loop makes beside its own work."""
    maker = {tensor: number for number, fusion in enumerate(fusions) for tensor in fusion.writes}
    sums: dict[int, list[int]] = {}
    for number, fusion in enumerate(fusions):
        root = graph.ops[fusion.root]
        if root.kind != "reduce":
            continue
        elements = max(graph.tensors[t].elements for t in root.operands)
        large = {t for t in fusion.reads if graph.tensors[t].elements * _SMALL > elements}
        small = [t for t in fusion.reads if t not in large]
        if not large:
            continue
        latest = max(large, key=lambda t: graph.tensors[t].producer)
        hosts = [*sums.get(root.loop, ()), *([maker[latest]] if latest in maker else ())]
        for host in hosts:
            other = graph.ops[fusions[host].root]
            goes_on = other.op_class is OpClass.POINTWISE or other.id in matmuls or other.kind == "reduce"
            there = {*fusions[host].reads, *fusions[host].writes}
            if not goes_on or other.loop != root.loop or not large <= there:
                continue
            if all(graph.tensors[t].producer < other.id for t in small):
                made[number] = dataclasses.replace(fusion, reads=tuple(small))
                break
        sums.setdefault(root.loop, []).append(number)
