"""Softmaxes between matmuls with batch dims, as in attention: values that TPU compilers store of the scores.

The matmuls compute their operands from the stored values. The first sum or maximum over a matmul's result is part of
the matmul's kernel. The stored values depend on the local shape of the scores:

- If a dim has local size 1 or the rows are split: the scores, and their gradient as its matmul emits it. Every kernel
  that reads the probabilities recomputes them from the scores.
- Otherwise one kernel computes the whole softmax, and stores the exponentials in their computed dtype. For rows of up
  to `SOFTMAX_ROW` this kernel is the scores' own matmul. The gradient is stored a second time in the form that the next
  matmuls read.

Evidence: docs/compiler_behaviour.md, "Softmax between matmuls".
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from autoshard.graph.clusters import Cluster, Structure
from autoshard.graph.memory.buffer_dtypes import widened_values
from autoshard.graph.memory.operand_rounding import INSERTED
from autoshard.graph.records import FactorKind, Op, OpClass, OpGraph, is_batched


WIDE = 4
"""Bytes of an element of the scores that a matmul's kernel turns into probabilities at once."""
SOFTMAX_ROW = 2048
"""Longest row of scores that stays on chip until its softmax is done: fusion was observed at 2048, but not at 4096."""

_Reach = dict[int, frozenset[int]]
"""Maps every value to the stored values from which it is computed; a stored value maps to itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class SoftmaxForm:
    """Traffic and buffers of a softmax and its matmuls, for the values that have the scores' spec."""

    moved: tuple[tuple[int, int], ...]
    """The (tensor, times) pairs: how often the tensor's bytes are moved, beyond once for each operand and result of a
    matmul. The number is negative for tensors that are not stored, which the matmuls' prices must not count.
    """
    buffers: tuple[tuple[int, int, int, int], ...]
    """Live ranges as (tensor, start, stop, bytes of an element)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax:
    """A softmax, with its gradient if the two share values."""

    cluster: int
    """Id of the cluster of the scores."""
    loop: int
    """Loop in which all its ops lie; -1 for none."""
    tensors: frozenset[int]
    """All tensors of the cluster, which have the scores' spec."""
    scores: int
    """First result of a matmul that leads to an exponential."""
    rows: tuple[int, ...]
    """Dims of `scores` that the softmax sums over."""
    fused: SoftmaxForm
    """Traffic and buffers if one kernel computes the whole softmax."""
    recomputed: SoftmaxForm
    """Traffic and buffers if every kernel recomputes the probabilities."""
    rounded: SoftmaxForm
    """Traffic and buffers if a kernel stores what the program rounds for several matmuls; others recompute the rest."""
    narrow: bool = False
    """True if the program computes with the scores in less than 32 bits, so that every kernel reads them rounded."""

    @property
    def credited_tensors(self) -> frozenset[int]:
        """Values that one of the forms does not store, and whose bytes are subtracted from the adjacent matmuls."""
        return frozenset(tensor for form in (self.fused, self.recomputed) for tensor, times in form.moved if times < 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Region:
    """Values of one cluster, and the ops that read or compute them, in program order."""

    graph: OpGraph
    """The whole program."""
    members: frozenset[int]
    """Tensors of the cluster."""
    ops: tuple[Op, ...]
    """Ops that compute or read a member, by id."""

    def operands_of(self, op: Op) -> list[int]:
        """Return the op's operands in the region."""
        return [t for t in op.operands if t in self.members]

    def results_of(self, op: Op) -> list[int]:
        """Return the op's results in the region."""
        return [t for t in op.results if t in self.members]

    def maker_of(self, tensor: int) -> int:
        """Return the id of the op that computes a tensor; -1 for arguments."""
        return self.graph.tensors[tensor].producer

    def is_scores(self, tensor: int) -> bool:
        """Return True if a matmul with batch dims computes the tensor."""
        return is_batched(self.graph.ops[self.graph.tensors[tensor].producer])

    def enters_matmul(self, tensor: int) -> bool:
        """Return True if a matmul with batch dims reads the tensor."""
        return any(is_batched(user) for user in self.graph.users[tensor])


def find_softmaxes(graph: OpGraph, structure: Structure) -> tuple[Softmax, ...]:
    """Return the softmaxes of scores between matmuls with batch dims of the same block, in order of their clusters.

    Clusters with an argument, a result or a value that a loop carries are left out. Such values, for example saved
    probabilities, are stored in any case.
    """
    stored = {*graph.arguments, *graph.results}
    stored |= {t for loop in graph.loops for c in loop.carries for t in (c.init, c.body, c.update, c.result)}
    wide = widened_values(graph)
    softmaxes = []
    for number in sorted({structure.cluster_of[op.results[0]] for op in graph.ops if op.kind == "exponential"} - {-1}):
        cluster = structure.clusters[number]
        if stored.isdisjoint(cluster.tensors):
            softmaxes.append(_softmax(graph, structure, cluster, wide))
    return tuple(softmax for softmax in softmaxes if softmax is not None)


def _softmax(graph: OpGraph, structure: Structure, cluster: Cluster, wide: Mapping[int, int]) -> Softmax | None:
    """Return the softmax of a cluster; None if the cluster contains none.

    A softmax is an exponential, computed from a batched matmul's result, that a reduction sums. All ops must lie in one
    block, and a batched matmul must read a value of the cluster. `wide` is the result of `widened_values`.
    """
    members = frozenset(cluster.tensors)
    ids = {graph.tensors[t].producer for t in members} | {op.id for t in members for op in graph.users[t]}
    region = _Region(graph, members, tuple(graph.ops[i] for i in sorted(ids)))
    if len({op.loop for op in region.ops}) > 1 or not any(region.enters_matmul(t) for t in members):
        return None
    again = _reach(region, lambda op, tensor, before: op.op_class is OpClass.HEAVY)
    sums = {
        op.results[0]: user
        for op in region.ops
        if op.kind == "exponential" and any(region.is_scores(t) for t in again[op.results[0]])
        for user in graph.users[op.results[0]]
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
    short = [t for t, user in sums.items() if math.prod(_summed(user).values()) <= SOFTMAX_ROW]
    scores = min(t for exponential in sums for t in again[exponential] if region.is_scores(t))
    factors = {structure.dims_of[t][dim] for t, user in sums.items() for dim in _summed(user)}
    rows = tuple(d for d, factor in enumerate(structure.dims_of[scores]) if factor in factors)
    kept = _rounded(region)
    rounded = _reach(region, lambda op, tensor, before: op.op_class is OpClass.HEAVY or tensor in kept)
    forms = _form(region, whole, wide, short), _form(region, again, {}), _form(region, rounded, {}, early=kept)
    # Scores that are widened first are computed wide by their matmul.
    items = [graph.tensors[scores].itemsize, *(graph.tensors[op.results[0]].itemsize for op in graph.users[scores])]
    narrow = items[0] < WIDE and min(items[1:]) < WIDE
    return Softmax(cluster.id, region.ops[0].loop, members, scores, rows, *forms, narrow)


def _rounded(region: _Region) -> set[int]:
    """Return the values of a region that the program itself rounds and that several matmuls with batch dims read."""
    casts = (op for op in region.ops if op.kind == "convert" and op.number != INSERTED)
    results = (t for op in casts for t in region.results_of(op))
    return {t for t in results if sum(is_batched(user) for user in region.graph.users[t]) > 1}


def store_rounded(softmaxes: Iterable[Softmax], narrow: bool = False) -> tuple[Softmax, ...]:
    """Return softmaxes of a compiler that stores rounded probabilities instead of recomputing them.

    With `narrow` it does so for narrow scores alone.
    """
    return tuple(
        dataclasses.replace(softmax, recomputed=softmax.rounded) if softmax.narrow or not narrow else softmax
        for softmax in softmaxes
    )


def _summed(reduce: Op) -> dict[int, int]:
    """Map each dim of a reduction's operand that it reduces to the dim's size in elements."""
    assert reduce.rule is not None
    sizes, kinds = reduce.rule.sizes, reduce.rule.kinds
    gone = {f for f, kind in enumerate(kinds) if kind is FactorKind.REDUCTION}
    dims = enumerate(reduce.rule.operands[0])
    return {d: math.prod(sizes[f] for f in dim) for d, dim in dims if gone.intersection(dim)}


def _reach(region: _Region, is_stored: Callable[[Op, int, frozenset[int]], bool]) -> _Reach:
    """Map every value of a region to the stored values from which it is computed.

    `is_stored` receives the op that computes a value, the value, and the stored values from which it is computed.
    """
    reach: _Reach = {}
    for op in region.ops:
        before = frozenset[int]().union(*(reach[t] for t in region.operands_of(op)))
        reach |= {t: frozenset((t,)) if is_stored(op, t, before) else before for t in region.results_of(op)}
    return reach


def _form(
    region: _Region,
    reach: _Reach,
    wide: Mapping[int, int],
    short: Collection[int] = (),
    early: Collection[int] = (),
) -> SoftmaxForm:
    """Return traffic and buffers of a softmax with these stored values.

    - `reach`: maps every value to the stored values from which it is computed.
    - `wide`: bytes per element of values that are stored wider than typed.
    - `short`: exponentials with rows of at most `SOFTMAX_ROW`, which the scores' own matmul computes.
    - `early`: values whose readers run as soon as their other operands are there, since that frees the value.
    """
    moved: Counter[int] = Counter()
    readers: dict[int, list[Op]] = defaultdict(list)
    reduced: set[int] = set()
    for op in region.ops:
        taken, made = region.operands_of(op), region.results_of(op)
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
            reduced.add(last)  # summed in the kernel that computes it
            reads.discard(last)
        moved.update((*written, *reads))
    starts = {t: region.graph.tensors[t].producer for t in reach if t in reach[t]}
    for exponential in short:
        maker = region.graph.tensors[exponential].producer
        (scores, *others) = (t for t in starts if any(op.id == maker for op in readers[t]))
        if not others and all(op.id == maker or op.kind == "reduce" for op in readers[scores]):
            moved[scores] -= 2  # neither written nor read
            starts[exponential] = starts.pop(scores)
    buffers = []
    for tensor, start in sorted(starts.items()):
        record = region.graph.tensors[tensor]
        ends = [max(map(region.maker_of, op.operands)) if tensor in early else op.id for op in readers[tensor]]
        stop = max(ends, default=record.producer) + 1
        width = wide.get(tensor, record.itemsize)
        buffers.append((tensor, start, stop, width))
    return SoftmaxForm(tuple((t, times) for t, times in sorted(moved.items()) if times), tuple(buffers))
