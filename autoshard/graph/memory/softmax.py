"""Softmaxes between matmuls with batch dims, as attention has them: what TPU compilers store of the scores.

Those matmuls compute what they take of the stored values, and the first sum or maximum over what they make stands in
their own kernel. What is stored depends on the local shape of the scores:

- Where a dim is one, split to single elements or so from the start, or where the rows are split: the scores, and their
  gradient as its matmul makes it. Probabilities are computed again from the scores in every kernel that takes them.
- Elsewhere the compiler makes one kernel of the whole softmax. It stores the exponentials as wide as they are computed,
  and is the scores' own matmul for rows of up to `ROW`. The gradient is stored a second time as the next matmuls take
  it.

Read from the programs of decoders, mixtures of experts and T5, and from attention alone in 16 shapes (v5e, libtpu
0.0.51). The compiler knows a softmax by its ops; reshapes, which a dim of one leaves there, and collectives hide it.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from autoshard.graph.clusters import Cluster, Structure
from autoshard.graph.memory.buffer_dtypes import widened
from autoshard.graph.records import FactorKind, Op, OpClass, OpGraph, is_batched


ROW = 2048
"""Longest row of scores that is kept on chip until its softmax is done: 2048 was seen to be, 4096 not."""

_Reach = dict[int, frozenset[int]]
"""For every value the stored ones that it follows from; itself if it is stored."""


@dataclasses.dataclass(frozen=True, slots=True)
class SoftmaxForm:
    """What the kernels of a softmax and its matmuls move and hold of the values that have the scores' spec."""

    moved: tuple[tuple[int, int], ...]
    """(tensor, times) that its bytes are written and read beyond what the prices of the matmuls count: each operand
    and result once. Negative for those that are not stored."""
    buffers: tuple[tuple[int, int, int, int], ...]
    """(tensor, start, stop, bytes of an element)"""


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax:
    """A softmax, with its gradient if the two share values."""

    cluster: int
    loop: int
    tensors: frozenset[int]
    """The cluster's: all values that have the scores' spec."""
    scores: int
    rows: tuple[int, ...]
    """The dims of `scores` that the softmax sums over."""
    whole: SoftmaxForm
    """What is held where one kernel computes the whole softmax."""
    again: SoftmaxForm
    """What is held where every kernel computes the probabilities again."""

    @property
    def taken_back(self) -> frozenset[int]:
        """Values whose bytes it takes off the matmuls beside it, in one of its forms, since they are not stored."""
        return frozenset(tensor for form in (self.whole, self.again) for tensor, times in form.moved if times < 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Region:
    """The values of one cluster, and in order the ops that make or take some."""

    graph: OpGraph
    members: frozenset[int]
    ops: tuple[Op, ...]
    users: Sequence[Sequence[Op]]

    def taken(self, op: Op) -> list[int]:
        return [t for t in op.operands if t in self.members]

    def made(self, op: Op) -> list[int]:
        return [t for t in op.results if t in self.members]

    def is_scores(self, tensor: int) -> bool:
        return is_batched(self.graph.ops[self.graph.tensors[tensor].producer])

    def enters_matmul(self, tensor: int) -> bool:
        return any(is_batched(user) for user in self.users[tensor])


def find_softmaxes(graph: OpGraph, structure: Structure) -> tuple[Softmax, ...]:
    """The softmaxes of scores that a matmul with batch dims makes, between it and others of the same loop.

    Not those of which a loop carries a part, such as saved probabilities: these are stored in any case.
    """
    users: list[list[Op]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        for tensor in set(op.operands):
            users[tensor].append(op)
    kept = {*graph.arguments, *graph.results}
    kept |= {t for loop in graph.loops for c in loop.carries for t in (c.init, c.body, c.update, c.result)}
    wide = widened(graph)
    found = []
    for number in sorted({structure.cluster_of[op.results[0]] for op in graph.ops if op.kind == "exponential"} - {-1}):
        cluster = structure.clusters[number]
        if kept.isdisjoint(cluster.tensors):
            found.append(_softmax(graph, structure, cluster, users, wide))
    return tuple(softmax for softmax in found if softmax is not None)


def _softmax(
    graph: OpGraph, structure: Structure, cluster: Cluster, users: Sequence[Sequence[Op]], wide: Mapping[int, int]
) -> Softmax | None:
    members = frozenset(cluster.tensors)
    ids = {graph.tensors[t].producer for t in members} | {op.id for t in members for op in users[t]}
    region = _Region(graph, members, tuple(graph.ops[i] for i in sorted(ids)), users)
    if len({op.loop for op in region.ops}) > 1 or not any(region.enters_matmul(t) for t in members):
        return None
    again = _reach(region, lambda op, tensor, before: op.op_class is OpClass.HEAVY)
    sums = {
        op.results[0]: user
        for op in region.ops
        if op.kind == "exponential" and any(region.is_scores(t) for t in again[op.results[0]])
        for user in users[op.results[0]]
        if user.kind == "reduce" and user.rule is not None
    }
    if not sums:
        return None
    whole = _reach(
        region,
        lambda op, tensor, before: (
            op.op_class is OpClass.HEAVY or tensor in sums or (len(before) > 1 and region.enters_matmul(tensor))
        ),
    )
    short = [t for t, user in sums.items() if math.prod(_summed(user).values()) <= ROW]
    scores = min(t for exponential in sums for t in again[exponential] if region.is_scores(t))
    factors = {structure.dims_of[t][dim] for t, user in sums.items() for dim in _summed(user)}
    rows = tuple(d for d, factor in enumerate(structure.dims_of[scores]) if factor in factors)
    forms = _form(region, whole, wide, short), _form(region, again, {})
    return Softmax(cluster.id, region.ops[0].loop, members, scores, rows, *forms)


def _summed(reduce: Op) -> dict[int, int]:
    """Size of every dim of its operand that a reduction takes away."""
    assert reduce.rule is not None
    sizes, kinds = reduce.rule.sizes, reduce.rule.kinds
    gone = {f for f, kind in enumerate(kinds) if kind is FactorKind.REDUCTION}
    dims = enumerate(reduce.rule.operands[0])
    return {d: math.prod(sizes[f] for f in dim) for d, dim in dims if gone.intersection(dim)}


def _reach(region: _Region, is_stored: Callable[[Op, int, frozenset[int]], bool]) -> _Reach:
    """What every value follows from. `is_stored` is asked for a value's maker, the value and what it follows from."""
    reach: _Reach = {}
    for op in region.ops:
        before = frozenset[int]().union(*(reach[t] for t in region.taken(op)))
        reach |= {t: frozenset((t,)) if is_stored(op, t, before) else before for t in region.made(op)}
    return reach


def _form(region: _Region, reach: _Reach, wide: Mapping[int, int], short: Collection[int] = ()) -> SoftmaxForm:
    """Traffic and lifetimes with these values stored. `wide`: bytes of an element where they are stored wider than
    typed. `short`: exponentials that the scores' own matmul makes."""
    moved: Counter[int] = Counter()
    readers: dict[int, list[Op]] = defaultdict(list)
    reduced: set[int] = set()
    for op in region.ops:
        taken, made = region.taken(op), region.made(op)
        written = [t for t in made if t in reach[t]]
        reads = set[int]().union(*(reach[t] for t in taken))
        if not taken or (made and not written):
            continue
        for tensor in reads:
            readers[tensor].append(op)
        if op.op_class is OpClass.HEAVY:
            moved.update(t for operand in taken for t in reach[operand])
            moved.subtract(taken)
            continue
        last = max(reads, key=lambda t: region.graph.tensors[t].producer, default=-1)
        if op.kind == "reduce" and last not in reduced:
            reduced.add(last)  # in the kernel that makes it
            reads.discard(last)
        moved.update((*written, *reads))
    held = {t: region.graph.tensors[t].producer for t in reach if t in reach[t]}
    for exponential in short:
        maker = region.graph.tensors[exponential].producer
        (scores, *others) = (t for t in held if any(op.id == maker for op in readers[t]))
        if not others and all(op.id == maker or op.kind == "reduce" for op in readers[scores]):
            moved[scores] -= 2  # neither written nor read
            held[exponential] = held.pop(scores)
    buffers = []
    for tensor, start in sorted(held.items()):
        record = region.graph.tensors[tensor]
        stop = max((op.id for op in readers[tensor]), default=record.producer) + 1
        width = wide.get(tensor, record.itemsize)
        buffers.append((tensor, start, stop, width))
    return SoftmaxForm(tuple((t, times) for t, times in sorted(moved.items()) if times), tuple(buffers))
