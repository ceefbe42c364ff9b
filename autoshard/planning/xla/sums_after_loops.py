"""Sums over devices that XLA moves from a loop to the place after it."""

from collections.abc import Iterator, Mapping

from autoshard.graph import Carry, Op, OpGraph, Structure


_RELAID = frozenset({"convert", "reshape", "transpose"})
"""Ops that may stand between a sum, the addition and the carried value."""


def sums_after_loops(graph: OpGraph, structure: Structure) -> Mapping[int, int]:
    """Return by tensor the loop after which the tensor's sum over devices runs, once instead of in every trip.

    A loop only adds such a tensor to a carried value that it does not use otherwise. An example is the gradient of a
    weight that a recurrence uses in every step. XLA then adds up the partial sums of all trips
    (`WhileLoopAllReduceCodeMotion`). A tensor that may have another spec than the carried value is left out, since no
    slice may be between them.

    Evidence: docs/compiler_behaviour.md, "Sums that leave a loop".
    """
    found: dict[int, int] = {}
    for loop in graph.loops:
        for carry in loop.carries:
            added = _addition(graph, carry)
            if added is not None and added.loop == loop.id and structure.cluster_of[carry.body] >= 0:
                alike = structure.clusters[structure.cluster_of[carry.body]].tensors
                found |= dict.fromkeys(set(_summed(graph, carry, added)).intersection(alike), loop.id)
    return found


def adds_up(graph: OpGraph, carry: Carry) -> bool:
    """Return True if a loop uses a carried value only to add to it."""
    return _addition(graph, carry) is not None


def _addition(graph: OpGraph, carry: Carry) -> Op | None:
    """Return the addition that alone updates a carried value; None if the loop uses the value otherwise."""
    tensor, added = carry.body, None
    while tensor != carry.update:
        user = only_user(graph, tensor)
        if user is None or len(user.results) != 1:
            return None
        if user.kind == "add" and added is None:
            added = user
        elif user.kind not in _RELAID:
            return None
        (tensor,) = user.results
    return added if not graph.users[tensor] else None


def _summed(graph: OpGraph, carry: Carry, added: Op) -> Iterator[int]:
    """Yield the tensor that is added to a carried value, and those of which it is another layout or dtype."""
    own = carry.body
    while own not in added.operands:
        (own,) = graph.users[own][0].results
    tensor = next((each for each in added.operands if each != own), None)
    while tensor is not None and only_user(graph, tensor) is not None:
        yield tensor
        maker = graph.maker(tensor)
        again = maker is not None and (maker.kind in _RELAID or _reduces_nothing(graph, maker))
        tensor = maker.operands[0] if maker is not None and again and maker.loop == added.loop else None


def only_user(graph: OpGraph, tensor: int) -> Op | None:
    """Return the op that alone reads a tensor; None for several and none, and for a tensor that leaves its block."""
    users = graph.users[tensor]
    return users[0] if len(users) == 1 and tensor not in graph.returned else None


def _reduces_nothing(graph: OpGraph, op: Op) -> bool:
    """Return True for a reduction over dims of size 1, which XLA makes a reshape."""
    return op.kind == "reduce" and graph.tensors[op.operands[0]].elements == graph.tensors[op.results[0]].elements
