"""Rolls: slices that are concatenated in the other order become one op, which the partitioner recognises.

`jnp.roll` lowers to two slices and a concatenation. Its gradient lowers to two slices, padded and added. Planned
separately, each op would gather a split dim. As one op, XLA emits a collective-permute of the elements that cross from
one shard to the next. Pipelined programs shift their stages in this way.
"""

import dataclasses
from collections.abc import Mapping

from autoshard.graph.records import FactorKind, Op, OpClass, Rule, Tensor


ROTATE = "rotate"
"""Kind of the op that replaces a roll."""

Cut = tuple[tuple[int, ...], ...]
"""Attributes of a slice (starts, limits, strides), a pad (low, high, interior) or a concatenation ((dim,),)."""


def join_rolls(ops: list[Op], tensors: list[Tensor], cuts: Mapping[int, Cut], results: set[int]) -> list[Op]:
    """Return the ops with every roll replaced by one op of kind `rotate`; its parts stay in place and become free.

    - `ops`: all ops by id.
    - `tensors`: all tensors by id.
    - `cuts`: attributes of slices, pads and concatenations, by op id.
    - `results`: tensors that the program or a loop returns.

    The parts of a roll must have no other users, and must not be in `results`.
    """
    users: dict[int, list[int]] = {}
    for op in ops:
        for tensor in op.operands:
            users.setdefault(tensor, []).append(op.id)
    joined = list(ops)

    def made(tensor: int, kind: str, user: int) -> Op | None:
        """Return the op of that kind that computes a tensor used only by the op `user`; None for any other tensor."""
        producer = tensors[tensor].producer
        if producer < 0 or users.get(tensor) != [user] or tensor in results:
            return None
        return ops[producer] if ops[producer].kind == kind and producer in cuts else None

    for op in ops:
        if op.kind == "concatenate" and len(op.operands) == 2 and op.id in cuts:
            slices = [made(t, "slice", op.id) for t in op.operands]
            pads: list[Op] = []
        elif op.kind == "add":
            padded = [made(t, "pad", op.id) for t in op.operands]
            if any(pad is None for pad in padded):
                continue
            pads = [pad for pad in padded if pad is not None]
            slices = [made(pad.operands[0], "slice", pad.id) for pad in pads]
        else:
            continue
        parts = [part for part in slices if part is not None]
        if len(parts) < 2 or parts[0].operands[0] != parts[1].operands[0]:
            continue
        shift = _shift(tensors, op, parts, pads, cuts)
        if shift is None:
            continue
        dim, amount = shift
        joined[op.id] = _rotation(op, tensors, parts, dim, amount)
        for part in (*parts, *pads):
            joined[part.id] = dataclasses.replace(
                part, op_class=OpClass.FREE, operands=(), operand_numbers=(), rule=None
            )
    return joined


def strided_dims(kind: str, cut: Cut) -> tuple[int, ...]:
    """Return the dims in which a slice steps by more than one, or a pad inserts places between elements.

    Other kinds, and an empty cut, have none.
    """
    least = {"slice": 1, "pad": 0}.get(kind)
    if least is None or not cut:
        return ()
    return tuple(dim for dim, step in enumerate(cut[2]) if step > least)


def _shift(
    tensors: list[Tensor], op: Op, slices: list[Op], pads: list[Op], cuts: Mapping[int, Cut]
) -> tuple[int, int] | None:
    """Return (dim, shift) if the two slices are the two ends of one dim in swapped order; None otherwise.

    The element at i moves to i + shift, modulo the size; shift is the size of the slice from the upper end. `pads` are
    empty for a concatenation `op`, and otherwise the pads of the slices, in order.
    """
    shape = tensors[slices[0].operands[0]].shape
    if tensors[op.results[0]].shape != shape:
        return None
    spans = [cuts[part.id] for part in slices]
    dims = [d for d, size in enumerate(shape) if any((s[0][d], s[1][d]) != (0, size) for s in spans)]
    if len(dims) != 1 or any(set(s[2]) - {1} for s in spans):
        return None
    (dim,) = dims
    order = sorted(range(2), key=lambda k: spans[k][0][dim])
    low, high = (spans[k] for k in order)
    amount = shape[dim] - high[0][dim]
    if low[0][dim] or low[1][dim] != high[0][dim] or high[1][dim] != shape[dim]:
        return None
    if not pads:
        return (dim, amount) if cuts[op.id] == ((dim,),) and order == [1, 0] else None
    # The upper part goes to the bottom and the lower part to the top.
    rest = shape[dim] - amount
    wanted = {order[1]: (0, rest), order[0]: (amount, 0)}
    for k, pad in enumerate(pads):
        below, above, between = cuts[pad.id]
        if any(between) or (below[dim], above[dim]) != wanted[k]:
            return None
        if any(n for d in range(len(shape)) if d != dim for n in (below[d], above[d])):
            return None
    return dim, amount


def _rotation(op: Op, tensors: list[Tensor], slices: list[Op], dim: int, amount: int) -> Op:
    """Build the `rotate` op that replaces `op`, a roll's last op; it permutes along `dim` by `amount` elements."""
    shape = tensors[op.results[0]].shape
    kinds = tuple(FactorKind.PERMUTATION if d == dim else FactorKind.PARALLEL for d in range(len(shape)))
    same = (tuple((d,) for d in range(len(shape))),)
    seats = tuple((part.number, 0) for part in slices)
    return dataclasses.replace(
        op,
        kind=ROTATE,
        op_class=OpClass.HEAVY,
        operands=(slices[0].operands[0],),
        operand_numbers=(0,),
        rule=Rule(shape, kinds, same, same),
        operand_uses=seats,
        barriers=(),
        shift=amount,
    )
