"""Exchange of keys and values where the sequence is split, and the price of a ring of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Compute, Mesh
from autoshard.errors import UserError
from autoshard.graph import RING, Attention, Op, OpClass, OpGraph, find_attentions
from autoshard.planning.record.spec import axis_words
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.spec_constraints import mesh_text
from autoshard.planning.xla.axis_assignments import WHOLE, Seconds, States, local_elements
from autoshard.planning.xla.spatial_splits import Inner
from autoshard.program import Program, ring_side


EXCHANGES = ("keys and values gathered", "queries gathered", "ring", "heads exchanged")
"""Roles of an axis that splits the sequence of an attention: how queries, keys and values meet."""

STAYS = ("gather", "ring")
"""Exchanges in which every device keeps its queries."""


class ExchangeAsked:
    """What a program's exchange leaves of the decisions around its attentions; everything, if it asks for none."""

    def __init__(self, program: Program, graph: OpGraph) -> None:
        self.exchange = program.exchange
        found = find_attentions(graph) if self.exchange != "auto" else ()
        self.by_op = {each.op: each for each in found}
        self.between: dict[int, int] = {}
        self.stays: set[int] = set()
        if self.exchange in STAYS:
            for each in found:
                self.between |= each.values
                self.stays |= each.of_queries
        self.graph = graph

    def strategies(self, op: int, states: States) -> NDArray[np.bool_]:
        """Those of an op that may be: with an exchange of heads no device has a part of the sequence in a kernel."""
        attention = self.by_op.get(op)
        if attention is None or self.exchange != "heads":
            return np.ones(len(states), dtype=bool)
        kept: NDArray[np.bool_] = np.all((states < 0) | np.isin(states, sorted(attention.leading)), axis=1)
        return kept

    def forbids(self, tensor: int, op: int, source: States, target: States) -> NDArray[np.bool_] | None:
        """Pairs of states, over what a value of an attention is moved in, between which its sequence goes to heads.

        What has the queries' sequence keeps it where it is, but for a kernel that takes the whole of it: gathered, it
        could be split by heads next.
        """
        if tensor not in self.between:
            return None
        along = sequence_of(self.graph, tensor, op, self.between)
        found: NDArray[np.bool_] = moved_axes(source, target, along)
        taker = self.by_op.get(op)
        if tensor in self.stays and (taker is None or taker.splits):
            found = np.isin(source, along)[:, None, :] != np.isin(target, along)[None, :, :]
        pairs: NDArray[np.bool_] = np.any(found, axis=2)
        return pairs if pairs.any() else None


def sequence_of(graph: OpGraph, tensor: int, op: int, between: Mapping[int, int]) -> tuple[int, ...]:
    """What of a move's states is the sequence of its value: a dim, or factors of the light op that takes it."""
    dim = between[tensor]
    if op < 0 or graph.ops[op].op_class is OpClass.HEAVY:
        return (dim,)
    taker = graph.ops[op]
    assert taker.rule is not None
    return tuple(f for t, dims in taker.sides if t == tensor for f in dims[dim])


def moved_axes(source: States, target: States, sequence: Sequence[int]) -> NDArray[np.bool_]:
    """[source states, target states, axes]: which axes split the sequence on one side and another dim on the other."""
    before, after = source[:, None, :], target[None, :, :]
    here, there = np.isin(before, sequence), np.isin(after, sequence)
    return (here & ~there & (after >= 0)) | (there & ~here & (before >= 0))


def check_exchange(program: Program, graph: OpGraph, mesh: Mesh | None) -> None:
    """Refuse an exchange that no attention of the program can have, on a mesh where one is given.

    Raises `UserError` for one of heads where no axis divides them, for a ring where none divides the sequence, and for
    either where no kernel computes the attention.
    """
    if program.exchange == "auto":
        return
    found = [each for each in find_attentions(graph) if each.forward]
    if program.exchange == "ring" and not any(each.ring for each in found):
        raise UserError(
            "no attention of the program can go around a ring, as its notes say: exchange by `gather` or `heads`, or "
            f"leave the exchange out. {' '.join(note for note in program.notes if 'ring' in note)}".rstrip()
        )
    if not found:
        raise UserError(
            f"exchange `{program.exchange}` is for attention that a kernel computes, and the program has none: plan it "
            "with `--attention splash`, or leave the exchange out."
        )
    if mesh is None:
        return
    axes = {name: size for name, size in mesh.axes.items() if size > 1}
    listed = mesh_text(axes) or "one device"
    if program.exchange == "heads":
        wide = next((each for each in found if not _divides(axes, (*each.heads, math.prod(each.heads)))), None)
        if wide is not None:
            keys, shared = wide.heads
            raise UserError(
                f"an exchange of heads needs a mesh axis that divides the {keys} key-value heads of an attention"
                f"{f', or the {shared} query heads of each' if shared > 1 else ''}, and the mesh has {listed}: take a "
                "smaller axis, repeat keys and values for more heads, or exchange by `gather` or `ring`."
            )
    if program.exchange == "ring":
        rings = [(each, graph.ops[each.op]) for each in found if each.ring]
        parts = [op.rule.sizes[each.of_sequence] for each, op in rings if op.rule is not None]
        if not any(_divides(axes, (count,)) for count in parts):
            raise UserError(
                f"a ring needs a mesh axis that divides the {max(parts)} parts of its sequence, and the mesh has "
                f"{listed}: plan with a --mesh that has one, or exchange by `gather`."
            )


def _divides(axes: Mapping[str, int], sizes: Sequence[int]) -> bool:
    return any(size % parts == 0 for parts in axes.values() for size in sizes)


def exchange_words(model: Model, choices: NDArray[np.int64]) -> tuple[str, ...]:
    """A sentence for every way in which attentions of a plan bring queries, keys and values together.

    Such as `keys and values gathered over model`; none where no axis splits the sequence. Of ways that not every
    attention has, it says of how many.
    """
    counts = exchanges(model, choices)
    attentions = sum(counts.values())
    lines = []
    for ways, count in counts.items():
        some = f" in {count} of {attentions} attentions" if count < attentions else ""
        lines += [f"{exchange} over {_listed(axis_words(axes))}{some}" for exchange, axes in ways]
    return tuple(dict.fromkeys(lines))


def exchanges(model: Model, choices: NDArray[np.int64]) -> dict[tuple[tuple[str, tuple[str, ...]], ...], int]:
    """Count the forward attentions by their exchanges: pairs of one of `EXCHANGES` and the axes that it runs over."""
    by_tensor: dict[int, list[Reshard]] = {}
    for reshard in model.reshards:
        by_tensor.setdefault(reshard.tensor, []).append(reshard)
    attentions = (each for each in find_attentions(model.graph) if each.forward and each.op in model.op_node)
    return dict(Counter(_exchanges_of(model, choices, each, by_tensor) for each in attentions))


def splits_sequence(axis_roles: Mapping[str, Sequence[str]]) -> bool:
    """Return True if an axis splits the sequence of an attention; `axis_roles` are those of a plan."""
    return any(role in EXCHANGES for roles in axis_roles.values() for role in roles)


def _exchanges_of(
    model: Model, choices: NDArray[np.int64], each: Attention, by_tensor: Mapping[int, Sequence[Reshard]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    node = model.op_node[each.op]
    state = model.nodes[node].states[int(choices[node])]
    exchanged = np.zeros(len(state), dtype=bool)
    for tensor in each.values:
        for reshard in by_tensor.get(tensor, ()):
            row = reshard.path.source[int(reshard.rows[int(choices[reshard.source])])][None, :]
            column = reshard.path.target[int(reshard.columns[int(choices[reshard.target])])][None, :]
            along = sequence_of(model.graph, tensor, reshard.op, each.values)
            exchanged |= moved_axes(row, column, along)[0, 0]
    on_queries = np.isin(state, sorted(each.queries - each.keys))
    kinds = dict(
        zip(
            EXCHANGES,
            (
                on_queries,
                np.isin(state, sorted(each.keys - each.queries)),
                np.isin(state, sorted(each.queries & each.keys)),
                exchanged & np.isin(state, sorted(each.leading)) & (state != WHOLE),
            ),
            strict=True,
        )
    )
    names = np.array(model.axis_names)
    return tuple((kind, tuple(str(name) for name in names[mask])) for kind, mask in kinds.items() if mask.any())


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_F32 = 4


def is_ring(op: Op) -> bool:
    """Whether an op sends keys and values around a ring."""
    return (op.opaque.target if op.opaque is not None else op.kind).startswith(RING)


def _is_back(op: Op) -> bool:
    return "_backward" in (op.opaque.target if op.opaque is not None else op.kind)


def _exchanges(op: Op) -> bool:
    """Whether parts change places, so that all devices have the same work under a causal mask."""
    return op.opaque is not None and "_causal" in op.opaque.target


def _sequence(op: Op) -> int:
    """The factor of the sequence."""
    assert op.rule is not None
    return op.rule.operands[0][-2][0]


def ring_parts(op: Op, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Devices of a ring, in every state; 1 where the sequence is whole."""
    return np.where(states == _sequence(op), np.asarray(axes, dtype=np.float64), 1.0).prod(axis=1)


def _local(graph: OpGraph, op: Op, states: States, axes: Sequence[int], operand: int) -> Seconds:
    """Elements of a shard of an operand."""
    assert op.rule is not None
    tensor = graph.tensors[op.operands[operand]]
    return local_elements(factor_states(states, op.rule.operands[operand]), tensor.shape, axes)


def ring_work(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> tuple[Seconds, Seconds]:
    """Share of the call's flops that a device computes in all turns, and steps of its kernels, of a call of our own.

    Halves of a shard that are narrower than the kernel's blocks take smaller ones, and more steps. Without a kernel the
    call on one device computes the scores that are masked too; of n devices each then computes (n + 1) / 2n of that.
    """
    assert op.rule is not None
    factors = [max(1, n) for n in op.rule.sizes]
    share = local_elements(states, factors, axes) / math.prod(factors)
    parts, length = ring_parts(op, states, axes), graph.tensors[op.operands[0]].shape[-2]
    if not op.steps:
        return (share * (parts + 1.0) / (2.0 * parts) if _exchanges(op) else share), share * 0.0
    each = np.array([ring_side(length // int(n) // 2) for n in parts])
    return share, op.steps * share * (ring_side(length // 2) / each) ** 2


def turn_traffic(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> Seconds:
    """Bytes that adding up the turns moves: sums in fp32 read and written, and what is added read."""
    parts = ring_parts(op, states, axes)
    sums = _local(graph, op, states, axes, 0)
    if _is_back(op):
        sums = sums + _local(graph, op, states, axes, 1) + _local(graph, op, states, axes, 2)
    return np.where(parts > 1, parts * 3 * _F32 * sums, 0.0)


def ring_memory(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.int64]:
    """Bytes that a call holds beside its operands and results: what travels, twice, sums, and parts in their order."""
    item = graph.tensors[op.operands[0]].itemsize
    queries, keys = _local(graph, op, states, axes, 0), _pair(graph, op, states, axes)
    held = 2 * keys * item + queries * _F32
    if _is_back(op):
        held = held + 2 * keys * _F32
    if _exchanges(op):
        held = held + (queries * (3 if _is_back(op) else 1) + keys) * item
    return np.where(ring_parts(op, states, axes) > 1, np.rint(held), 0).astype(np.int64)


def _pair(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> Seconds:
    """Elements of a shard of keys and values."""
    return _local(graph, op, states, axes, 1) + _local(graph, op, states, axes, 2)


def ring_permutes(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], busy: Seconds, collectives: Collectives
) -> list[Inner]:
    """The permutes of a ring in every state; `busy` are the seconds of its compute, a part of which is each turn's."""
    assert op.rule is not None
    found = []
    on_sequence = states == _sequence(op)
    item = graph.tensors[op.operands[0]].itemsize
    pair = _pair(graph, op, states, axes)
    whole = np.zeros(len(states))
    for tensor, dims in op.sides:
        record = graph.tensors[tensor]
        whole = whole + local_elements(factor_states(states, dims), record.shape, axes) * record.itemsize
    for used in np.unique(on_sequence, axis=0):
        group = tuple(np.flatnonzero(used).tolist())
        parts = math.prod(axes[a] for a in group)
        if parts == 1:
            continue
        same = (on_sequence == used).all(axis=1)
        names = tuple(collectives.mesh.names[a] for a in group)
        keys, sums = (np.where(same, pair * each, 0.0) for each in (item, _F32))
        turn = busy / parts
        waits = collectives.time("collective-permute", names, keys)
        back = collectives.time("collective-permute", names, sums) if _is_back(op) else np.zeros(len(states))
        # Both travel at once, on the same links.
        hidden = np.minimum(turn, waits + back)
        share = hidden / np.maximum(waits + back, 1e-30)
        found.append(Inner("collective-permute", group, keys, count=parts - 1, hidden=share))
        if _is_back(op):
            found.append(Inner("collective-permute", group, sums, count=parts - 1, hidden=share))
            found.append(Inner("collective-permute", group, sums))
        if _exchanges(op):
            found.append(Inner("collective-permute", group, np.where(same, whole, 0.0), as_kind="all-to-all"))
    return found


def ring_seconds(graph: OpGraph, op: Op, states: States, axes: Sequence[int], compute: Compute) -> Seconds:
    """What adding up the turns takes."""
    return compute.op_seconds(np.zeros(len(states)), turn_traffic(graph, op, states, axes))
