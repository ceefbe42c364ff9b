"""Sums over devices that XLA joins because only additions read them, or leaves whole because only slices do."""

from collections.abc import Collection, Mapping

from autoshard.graph import OpGraph, Structure
from autoshard.planning.xla.axis_assignments import Emitted
from autoshard.planning.xla.sums_after_loops import only_user


ADDED = ("dot_general", "scatter")
"""Kinds of ops whose partial results XLA adds before it sums them. A tied table has the gradient of both kinds."""


def added_sums(graph: OpGraph, structure: Structure, kinds: Collection[str] = ADDED) -> Mapping[int, int]:
    """Return by matmul or scatter the last op of the same addition, whose sum over devices stands for the sums of all.

    XLA adds the partial results and then sums once (`AllReduceReassociate`, `ReduceScatterReassociate`). An example is
    the gradient of a value that several weights multiply. Only additions may read the results, and all of them have
    one spec. The last op itself is left out.

    - `kinds`: kinds of ops whose sums are alike.

    Evidence: docs/compiler_behaviour.md, "Sums that are added".
    """
    leaves: dict[int, tuple[int, ...]] = {}
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.kind != "add" or len(op.operands) != 2:
            continue
        added: list[int] = []
        for tensor in op.operands:
            user, maker = only_user(graph, tensor), graph.maker(tensor)
            # XLA makes one matmul of a product and its transpose.
            while maker is not None and maker.kind == "transpose" and only_user(graph, maker.operands[0]):
                maker = graph.maker(maker.operands[0])
            alike = structure.cluster_of[tensor] == structure.cluster_of[op.results[0]] >= 0
            if maker is None or user is None or maker.loop != op.loop or not alike:
                break
            parts = (maker.id,) if maker.kind in kinds else leaves.get(maker.id, ())
            if not parts:
                break
            added += parts
        else:
            leaves[op.id] = tuple(added)
            last = max(added)
            found |= {each: last for each in added if each != last}
    return {op: last for op, last in found.items() if {op, last} <= set(structure.heavy)}


def summed_whole(graph: OpGraph, tensor: int) -> tuple[Emitted, ...]:
    """Return the forms in place of which TPU compilers sum an op's whole result and take a slice of it.

    If only slices read the tensor, the slice of an all-reduce becomes one with them, and the sum is no reduce-scatter.
    A scatter is summed by one all-reduce over all axes at once, however its result is pinned.

    Evidence: docs/compiler_behaviour.md, "Sums that are sliced".
    """
    users, maker = graph.users[tensor], graph.maker(tensor)
    if users and tensor not in graph.returned and all(user.kind == "slice" for user in users):
        return Emitted.SCATTER, Emitted.STAGED
    return (Emitted.STAGED,) if maker is not None and maker.kind == "scatter" else ()
