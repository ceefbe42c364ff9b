"""Exchange of keys and values where the sequence is split, and the price of ring attention."""

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
"""Values of a program's `exchange` for exchanges in which every device retains its queries."""


class ExchangeAsked:
    """Restrictions on the decisions around attentions by the exchange that a program requests; none for `auto`.

    `by_op` has the attentions by op. `between` has, for `gather` and `ring`, the sequence dim of the tensors around
    attentions by tensor; `stays` has the queries' tensors among them.
    """

    def __init__(self, program: Program, graph: OpGraph) -> None:
        """Find the attentions of the program's graph, if its exchange is not `auto`."""
        self.exchange = program.exchange
        attentions = find_attentions(graph) if self.exchange != "auto" else ()
        self.by_op = {each.op: each for each in attentions}
        self.between: dict[int, int] = {}
        self.stays: set[int] = set()
        if self.exchange in STAYS:
            for each in attentions:
                self.between |= each.values
                self.stays |= each.of_queries
        self.graph = graph

    def strategies(self, op: int, states: States) -> NDArray[np.bool_]:
        """Return a mask of an op's allowed strategies, [states]; all True for an op that is no attention.

        With an exchange of heads, no device may have only a part of the sequence inside a kernel.
        """
        attention = self.by_op.get(op)
        if attention is None or self.exchange != "heads":
            return np.ones(len(states), dtype=bool)
        allowed: NDArray[np.bool_] = np.all((states < 0) | np.isin(states, sorted(attention.leading)), axis=1)
        return allowed

    def forbids(self, tensor: int, op: int, source: States, target: States) -> NDArray[np.bool_] | None:
        """Return a mask of forbidden pairs, [source states, target states]; None if none is forbidden.

        A pair is forbidden if an axis moves between the sequence and another dim, around an attention in `STAYS`.

        The queries' sequence stays split as it is, unless a kernel consumes the whole sequence. A gathered sequence
        could otherwise be split by heads in the next reshard.

        - `tensor`, `op`: the resharded tensor, and the op that it enters or leaves.
        - `source`, `target`: states at both ends, [states, axes].
        """
        if tensor not in self.between:
            return None
        along = sequence_of(self.graph, tensor, op, self.between)
        crossing: NDArray[np.bool_] = moved_axes(source, target, along)
        consumer = self.by_op.get(op)
        if tensor in self.stays and (consumer is None or consumer.splits):
            crossing = np.isin(source, along)[:, None, :] != np.isin(target, along)[None, :, :]
        pairs: NDArray[np.bool_] = np.any(crossing, axis=2)
        return pairs if pairs.any() else None


def sequence_of(graph: OpGraph, tensor: int, op: int, between: Mapping[int, int]) -> tuple[int, ...]:
    """Return the sequence in a reshard's states: a dim of the tensor, or factors of the light op that consumes it.

    - `tensor`: the resharded tensor.
    - `op`: the op that it enters or leaves; for -1 and for a heavy op the result is the tensor's sequence dim.
    - `between`: sequence dim by tensor of an attention.
    """
    dim = between[tensor]
    if op < 0 or graph.ops[op].op_class is OpClass.HEAVY:
        return (dim,)
    consumer = graph.ops[op]
    assert consumer.rule is not None
    return tuple(f for t, dims in consumer.sides if t == tensor for f in dims[dim])


def moved_axes(source: States, target: States, sequence: Sequence[int]) -> NDArray[np.bool_]:
    """Return a mask of the axes that split the sequence on one side and another dim on the other.

    The shape is [source states, target states, axes]. `sequence` has the values of a state that stand for the sequence;
    an axis that splits nothing on one side has not moved.
    """
    before, after = source[:, None, :], target[None, :, :]
    here, there = np.isin(before, sequence), np.isin(after, sequence)
    return (here & ~there & (after >= 0)) | (there & ~here & (before >= 0))


def check_exchange(program: Program, graph: OpGraph, mesh: Mesh | None) -> None:
    """Refuse an exchange that no attention of the program can have, on `mesh` if there is one.

    Raises `UserError` in these cases:

    - the exchange is `heads` and no axis divides the heads of some attention;
    - the exchange is `ring` and no attention can form a ring, or no axis divides the sequence of any;
    - no kernel computes the attention.

    The exchange `auto` is never refused.
    """
    if program.exchange == "auto":
        return
    attentions = [each for each in find_attentions(graph) if each.forward]
    if program.exchange == "ring" and not any(each.ring for each in attentions):
        raise UserError(
            "no attention of the program can go around a ring, as its notes say: exchange by `gather` or `heads`, or "
            f"leave the exchange out. {' '.join(note for note in program.notes if 'ring' in note)}".rstrip()
        )
    if not attentions:
        raise UserError(
            f"exchange `{program.exchange}` is for attention that a kernel computes, and the program has none: plan it "
            "with `--attention splash`, or leave the exchange out."
        )
    if mesh is None:
        return
    axes = {name: size for name, size in mesh.axes.items() if size > 1}
    listed = mesh_text(axes) or "one device"
    if program.exchange == "heads":
        wide = next((each for each in attentions if not _divides(axes, (*each.heads, math.prod(each.heads)))), None)
        if wide is not None:
            keys, shared = wide.heads
            raise UserError(
                f"an exchange of heads needs a mesh axis that divides the {keys} key-value heads of an attention"
                f"{f', or the {shared} query heads of each' if shared > 1 else ''}, and the mesh has {listed}; use a "
                "smaller axis, repeat keys and values for more heads, or exchange by `gather` or `ring`."
            )
    if program.exchange == "ring":
        rings = [(each, graph.ops[each.op]) for each in attentions if each.ring]
        parts = [op.rule.sizes[each.of_sequence] for each, op in rings if op.rule is not None]
        if not any(_divides(axes, (count,)) for count in parts):
            raise UserError(
                f"a ring needs a mesh axis that divides the {max(parts)} parts of its sequence, and the mesh has "
                f"{listed}: plan with a --mesh that has one, or exchange by `gather`."
            )


def _divides(axes: Mapping[str, int], sizes: Sequence[int]) -> bool:
    """Return True if the size of some axis divides one of `sizes`."""
    return any(size % parts == 0 for parts in axes.values() for size in sizes)


def exchange_words(model: Model, choices: NDArray[np.int64]) -> tuple[str, ...]:
    """Return a phrase for every way in which a plan's attentions exchange queries, keys and values.

    An example is `keys and values gathered over model`. There is none if no axis splits the sequence. A phrase states
    how many attentions it is true for if not for all.
    """
    counts = exchanges(model, choices)
    attentions = sum(counts.values())
    lines = []
    for ways, count in counts.items():
        some = f" in {count} of {attentions} attentions" if count < attentions else ""
        lines += [f"{exchange} over {_listed(axis_words(axes))}{some}" for exchange, axes in ways]
    return tuple(dict.fromkeys(lines))


def exchanges(model: Model, choices: NDArray[np.int64]) -> dict[tuple[tuple[str, tuple[str, ...]], ...], int]:
    """Count the forward attentions by their exchanges: pairs of one of `EXCHANGES` and the axes that it runs over.

    The key is empty for attentions that exchange nothing.
    """
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
    """Return the exchanges of one attention under the choices with their axes, in the order of `EXCHANGES`.

    `by_tensor` has the model's reshards by tensor. Exchanges without axes are left out.
    """
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
    """Join words by commas and, before the last, "and"; there must be a word."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_F32 = 4
"""Bytes of a float32."""


def is_ring(op: Op) -> bool:
    """Return True if an op sends keys and values around a ring."""
    return (op.opaque.target if op.opaque is not None else op.kind).startswith(RING)


def _is_back(op: Op) -> bool:
    """Return True if a ring attention is a backward pass, by the name of its call or kind."""
    return "_backward" in (op.opaque.target if op.opaque is not None else op.kind)


def _exchanges(op: Op) -> bool:
    """Return True if shards of the sequence are permuted to balance the devices' work under a causal mask."""
    return op.opaque is not None and "_causal" in op.opaque.target


def _sequence(op: Op) -> int:
    """Return the factor of the sequence: that of the next to last dim of the first operand, the queries."""
    assert op.rule is not None
    return op.rule.operands[0][-2][0]


def ring_parts(op: Op, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Return the number of devices of a ring in every state, [states]; 1 if the sequence is whole.

    `axes` has the sizes of the mesh axes.
    """
    return np.where(states == _sequence(op), np.asarray(axes, dtype=np.float64), 1.0).prod(axis=1)


def _local(graph: OpGraph, op: Op, states: States, axes: Sequence[int], operand: int) -> Seconds:
    """Return the elements of the shard of the operand at position `operand`, [states]."""
    assert op.rule is not None
    tensor = graph.tensors[op.operands[operand]]
    return local_elements(factor_states(states, op.rule.operands[operand]), tensor.shape, axes)


def ring_work(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> tuple[Seconds, Seconds]:
    """Return the share of the call's FLOPs that a device computes in all turns, and its grid steps, each [states].

    If the halves of a shard are narrower than the kernel's blocks, the blocks are smaller and there are more steps.
    Without a kernel (`op.steps` is 0) there are no grid steps. A causal call on one device then also computes the
    masked scores; each of n devices computes (n + 1) / 2n of its part.
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
    """Return the bytes that the accumulation of turns reads and writes, [states]; 0 if the sequence is whole.

    In each turn the float32 sums are read and written, and the addend is read. The sums have the queries' shape; a
    backward pass also has those of the keys and values.
    """
    parts = ring_parts(op, states, axes)
    sums = _local(graph, op, states, axes, 0)
    if _is_back(op):
        sums = sums + _local(graph, op, states, axes, 1) + _local(graph, op, states, axes, 2)
    return np.where(parts > 1, parts * 3 * _F32 * sums, 0.0)


def ring_memory(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.int64]:
    """Return the bytes of a ring call in addition to its operands and results, [states]; 0 if the sequence is whole.

    They are two buffers for the keys and values in transit, the float32 sums, and under a causal mask the permuted
    shards. A backward pass also has float32 sums of keys and values in transit.
    """
    item = graph.tensors[op.operands[0]].itemsize
    queries, keys = _local(graph, op, states, axes, 0), _pair(graph, op, states, axes)
    size = 2 * keys * item + queries * _F32
    if _is_back(op):
        size = size + 2 * keys * _F32
    if _exchanges(op):
        size = size + (queries * (3 if _is_back(op) else 1) + keys) * item
    return np.where(ring_parts(op, states, axes) > 1, np.rint(size), 0).astype(np.int64)


def _pair(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> Seconds:
    """Return the elements of the shards of keys and values together, [states]."""
    return _local(graph, op, states, axes, 1) + _local(graph, op, states, axes, 2)


def ring_permutes(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], busy: Seconds, collectives: Collectives
) -> list[Inner]:
    """Return the permutes of a ring in every state, one group of them for each set of axes that splits the sequence.

    Keys and values pass to each next device, in a backward pass with their gradients, hidden behind a turn's compute.
    A backward pass sends the gradients once more, exposed. Under a causal mask all operands and results are exchanged,
    exposed, at the price of an all-to-all.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    - `busy`: seconds of the ring's compute, [states]; each turn has an equal part.
    - `collectives`: prices of the collectives on the mesh.
    """
    assert op.rule is not None
    permutes = []
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
        # Keys and sums are sent at once on the same links.
        hidden = np.minimum(turn, waits + back)
        share = hidden / np.maximum(waits + back, 1e-30)
        permutes.append(Inner("collective-permute", group, keys, count=parts - 1, hidden=share))
        if _is_back(op):
            permutes.append(Inner("collective-permute", group, sums, count=parts - 1, hidden=share))
            permutes.append(Inner("collective-permute", group, sums))
        if _exchanges(op):
            permutes.append(Inner("collective-permute", group, np.where(same, whole, 0.0), as_kind="all-to-all"))
    return permutes


def ring_seconds(graph: OpGraph, op: Op, states: States, axes: Sequence[int], compute: Compute) -> Seconds:
    """Return the seconds of the memory traffic of `turn_traffic`, [states]."""
    return compute.op_seconds(np.zeros(len(states)), turn_traffic(graph, op, states, axes))
