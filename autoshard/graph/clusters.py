"""Clusters: tensors that must share one spec because only pointwise ops connect them.

A cluster has factors of its own. Each tensor in it has some of these factors as dims, each at most once. One tensor has
all factors that may be split. A spec of the cluster is thus a choice of mesh axes for its factors, for any number of
tensors.
"""

import dataclasses
from collections.abc import Collection, Mapping

from autoshard.graph.records import Op, OpClass, OpGraph
from autoshard.mlir import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """Tensors with one spec, given by the mesh axes of each factor."""

    id: int
    """Position in `Structure.clusters`."""
    sizes: tuple[int, ...]
    """Size in elements of each factor of the cluster, all above 1."""
    blocked: frozenset[int]
    """Factors that no axis may split, such as the layer dim of a stack."""
    tensors: tuple[int, ...]
    """Ids of its tensors, ascending."""


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """A value that connects two decisions, and that may need a reshard.

    - Operand of a heavy op: `operand` is set, `result` is -1.
    - Result of a heavy op: `operand` is -1, `result` is set.
    - Operand of another op: both are set, and the value is resharded from the operand's cluster to the result's.
    - Tie of an updated result to its argument: `op`, `operand` and `result` are -1.
    """

    tensor: int
    """Tensor whose value crosses the edge."""
    op: int
    """The op between the two decisions; -1 for a tie between an updated result and the argument that it replaces."""
    operand: int
    """Position of the tensor among the op's operands; -1 for a heavy op's result and for a tie."""
    result: int
    """Position of the op's result whose cluster consumes the value, or that is the value; -1 for a heavy op's operand
    and for a tie.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """Graph of decisions: its nodes are clusters and heavy ops, its edges the values between them."""

    clusters: tuple[Cluster, ...]
    """Clusters by id."""
    cluster_of: tuple[int, ...]
    """Cluster of every tensor; -1 for values that need no decision (scalars, tokens, and generated values that start no
    loop).
    """
    dims_of: tuple[tuple[int, ...], ...]
    """Cluster factor of each dim of every tensor; -1 for a dim of size one."""
    heavy: tuple[int, ...]
    """Ids of the ops that have strategies of their own."""
    edges: tuple[Edge, ...]
    """Edges by op (ties last), operand, result and tensor."""
    ties: tuple[tuple[int, int], ...]
    """The (result tensor, argument tensor) pairs that must end with one spec but are in different clusters."""


class _Merged:
    """Clusters under construction: a union-find that also unifies factors.

    Factors are numbered within each cluster. The smaller cluster is merged into the larger. `shapes` has None for
    tensors without a cluster, and `stored` are tensors whose clusters begin as stores.
    """

    def __init__(self, shapes: list[tuple[int, ...] | None], stored: Collection[int] = ()) -> None:
        self.owner = list(range(len(shapes)))
        self.stores = set(stored)
        """Clusters that contain a stored value."""
        self.members: list[list[int]] = [[t] for t in range(len(shapes))]
        self.sizes: list[list[int]] = []
        self.dims: list[list[int]] = []
        self.blocked: list[set[int]] = [set() for _ in shapes]
        for shape in shapes:
            dims, sizes = [], []
            for size in shape or ():
                dims.append(len(sizes) if size > 1 else -1)
                if size > 1:
                    sizes.append(size)
            self.dims.append(dims)
            self.sizes.append(sizes)

    def merge(self, a: int, b: int, pairs: list[tuple[int, int]]) -> bool:
        """Merge the clusters of tensors `a` and `b`, and return True; `pairs` are (dim of `a`, dim of `b`) that are the
        same.

        Return False, with both clusters unchanged, if the factors of the smaller cluster do not map one to one into the
        larger. Unmatched blocked factors may be added. Within one cluster return True if the pairs are the same factors
        already.
        """
        big, small = self.owner[a], self.owner[b]
        links = [(self.dims[a][p], self.dims[b][q]) for p, q in pairs]
        links = [(p, q) for p, q in links if p >= 0 and q >= 0]
        if big == small:
            return all(p == q for p, q in links)
        if self._extent(big) < self._extent(small):
            big, small = small, big
            links = [(q, p) for p, q in links]
        mapping: dict[int, int] = {}
        for into, factor in links:
            if mapping.setdefault(factor, into) != into or self.sizes[big][into] != self.sizes[small][factor]:
                return False
        if len(set(mapping.values())) != len(mapping) or not self._place_blocked(big, small, mapping):
            return False
        for tensor in self.members[small]:
            self.dims[tensor] = [mapping[f] if f >= 0 else -1 for f in self.dims[tensor]]
            self.owner[tensor] = big
        if small in self.stores:
            self.stores.add(big)
        self.members[big].extend(self.members[small])
        self.blocked[big].update(mapping[f] for f in self.blocked[small])
        self.members[small] = []
        return True

    def _extent(self, cluster: int) -> tuple[int, int]:
        """Return the number of factors of a cluster, then of its members; the smaller of two clusters is renumbered."""
        return len(self.sizes[cluster]), len(self.members[cluster])

    def _place_blocked(self, big: int, small: int, mapping: dict[int, int]) -> bool:
        """Map the small cluster's unmatched factors into the big cluster, in place in `mapping`; add factors where none
        fit.

        Only blocked factors (layer dims) can be mapped, to unused blocked ones of the same size; return False if
        another factor is unmatched.
        """
        rest = [f for f in range(len(self.sizes[small])) if f not in mapping]
        if any(f not in self.blocked[small] for f in rest):
            return False
        for f in rest:
            size, used = self.sizes[small][f], set(mapping.values())
            twin = next((b for b in self.blocked[big] - used if self.sizes[big][b] == size), None)
            if twin is None:
                twin = len(self.sizes[big])
                self.sizes[big].append(size)
                self.blocked[big].add(twin)
            mapping[f] = twin
        return True

    def block(self, tensor: int, dim: int) -> None:
        """Forbid every axis to split the factor of this dim; do nothing for a dim of size one."""
        if self.dims[tensor][dim] >= 0:
            self.blocked[self.owner[tensor]].add(self.dims[tensor][dim])


def build_structure(
    graph: OpGraph,
    parameters: Collection[int] = (),
    ties: Collection[tuple[int, int]] = (),
    whole: Collection[tuple[int, int]] = (),
    batch: Collection[int] = (),
) -> Structure:
    """Build the clusters, the list of heavy ops, and the edges between them.

    - `parameters`: argument tensors that are not merged with the update that replaces them. A parameter may then be
      whole although its optimizer state is split.
    - `ties`: (result tensor, argument tensor) pairs that must have one spec; pairs that cannot be merged become
      `Structure.ties` and edges.
    - `whole`: (tensor, dim) pairs that no axis may split.
    - `batch`: argument tensors with data, whose rows an axis may split although a loop runs over their outermost part.

    Values without shape, of at most one element, or generated (unless they start a loop) get no cluster.
    """
    trivial = {t.id for t in graph.tensors if t.elements <= 1 or not t.shape or t.dtype == "token"}
    # A generated value that starts a loop is stored like any other once the loop changes it.
    started = {c.init for loop in graph.loops for c in loop.carries}
    skip = trivial | (graph.generated - started)
    stored = set(parameters)
    union = _Merged([None if t.id in skip else t.shape for t in graph.tensors], stored)
    asked = {c.tensor: c.sharding for c in graph.constraints}
    unmerged: list[tuple[int, int, int]] = []
    for tensor, dim in whole:
        union.block(tensor, dim) if tensor not in skip else None

    for op in graph.ops:
        if op.op_class is OpClass.FREE:
            continue
        if op.op_class is OpClass.LAYER and op.rule is not None:
            union.block(op.operands[0], 0) if op.operands[0] not in skip else None
        if _writes_in_layer(graph, op) and op.results[0] not in skip:
            union.block(op.results[0], 0)
        for result in range(len(op.results)):
            unmerged.extend(_merge_op(union, op, result, skip, asked))
    _tie_carries(graph, union, skip, stored, asked)
    apart = []
    for result, argument in ties:
        if result in skip or argument in skip or result == argument:
            continue
        same = _all_dims(union, result)
        if union.owner[result] == union.owner[argument] and union.merge(result, argument, same):
            continue
        if argument in stored or not union.merge(argument, result, same):
            apart.append((result, argument))
    _block_whole_parts(graph, union, skip, batch)
    return _freeze(graph, union, skip, unmerged, apart)


def _writes_in_layer(graph: OpGraph, op: Op) -> bool:
    """Return True if an op in a loop writes a part of one layer into a carried stack, as decoders do with their
    caches.
    """
    if op.kind != "dynamic_update_slice" or op.loop < 0:
        return False
    whole, part = (graph.tensors[t].shape for t in op.operands[:2])
    carried = {c.update for c in graph.loops[op.loop].carries}
    return len(whole) > 1 and part[0] == 1 < whole[0] and op.results[0] in carried


def _tie_carries(
    graph: OpGraph, union: _Merged, skip: set[int], stored: set[int], asked: Mapping[int, Sharding]
) -> None:
    """Merge the four tensors of every carried value into one cluster; block dims that cannot be matched.

    - `skip`: tensors without a cluster.
    - `stored`: parameters.
    - `asked`: shardings that the program requests, by tensor.

    The initial value stays separate if it is a parameter, or if the program requests different specs for it and the
    update.
    """
    waiting = []
    for carry in (c for loop in graph.loops for c in loop.carries if c.body not in skip):
        others = [carry.update, carry.result]
        if carry.init not in stored and len({asked[t].dims for t in (carry.init, carry.update) if t in asked}) < 2:
            others.append(carry.init)
        waiting.extend((carry.body, t) for t in others if t not in skip)
    while waiting:
        # A merge may become possible once another one has merged a stack with its slices.
        unmerged = [(a, b) for a, b in waiting if not union.merge(a, b, _all_dims(union, a))]
        if len(unmerged) == len(waiting):
            break
        waiting = unmerged
    for a, b in waiting:
        for d in range(len(union.dims[a])):
            if union.owner[a] != union.owner[b] or union.dims[a][d] != union.dims[b][d]:
                union.block(a, d)
                union.block(b, d)


def _block_whole_parts(graph: OpGraph, union: _Merged, skip: set[int], batch: Collection[int]) -> None:
    """Block a dim that a reshape forms from several dims if the outermost of these, above size 1, is blocked (in
    place).

    Axes split the outermost part of a dim first, so a split of the joined dim would be moved at the reshape. An
    example is the layers of a stack that pipeline stages process in rounds. Reshapes in both directions count. The
    rows of `batch` are left free: a batch that a loop takes in microbatches enters split, and is exchanged once.
    """
    entering = {union.owner[t] for t in batch}
    for op in graph.ops:
        if op.kind != "reshape" or op.rule is None or skip.intersection((op.operands[0], op.results[0])):
            continue
        sides = ((op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0]))
        for (whole, joined), (parts, dims) in (sides, sides[::-1]):
            apart = {f[0]: d for d, f in enumerate(dims) if len(f) == 1}
            for dim, factors in enumerate(joined):
                real = [f for f in factors if op.rule.sizes[f] > 1]
                place = apart.get(real[0]) if len(real) > 1 else None
                free = whole == op.operands[0] and union.owner[whole] in entering
                if place is not None and not free and union.dims[parts][place] in union.blocked[union.owner[parts]]:
                    union.block(whole, dim)


def _all_dims(union: _Merged, tensor: int) -> list[tuple[int, int]]:
    """Return the pairs that match each dim of a tensor with itself."""
    return [(d, d) for d in range(len(union.dims[tensor]))]


def _merge_op(
    union: _Merged, op: Op, result: int, skip: set[int], asked: Mapping[int, Sharding]
) -> list[tuple[int, int, int]]:
    """Merge an op's operands with its result number `result` where one spec fits both; return the operands left
    separate.

    - `skip`: tensors without a cluster.
    - `asked`: shardings that the program requests, by tensor.

    Only pointwise ops, ops on layers, and reshapes and reductions of dims of size one merge. An operand stays separate
    if the program requests its spec, unless the op slices a layer of it. A stored operand stays separate if a pointwise
    op mixes it with values that are not stored. Heavy ops give an empty list. Each entry is (op, operand position,
    result position).
    """
    if op.op_class is OpClass.HEAVY or op.rule is None:
        return []
    out = op.results[result]
    if out in skip:
        return []
    apart = []
    operands = [k for k, t in enumerate(op.operands) if t not in skip]
    # Evaluated before the merges below, so that operands which this op merges with a store do not count as stored.
    of_store = [k for k in operands if union.owner[op.operands[k]] in union.stores]
    mixed = len(of_store) < len(operands)
    for k in operands:
        tensor = op.operands[k]
        pairs = _same_dims(op, k, result)
        mergeable = op.op_class in (OpClass.POINTWISE, OpClass.LAYER) or _trivial_reshape(op, k, result, pairs, union)
        if k in of_store and mixed and op.op_class is OpClass.POINTWISE:
            mergeable = False
        # A slice has its stack's spec, and is gathered afterwards. If it had another one, the partitioner would gather
        # the whole stack in every trip.
        if tensor in asked and op.op_class is not OpClass.LAYER or op.kind == "sharding_constraint":
            mergeable = False
        if not (mergeable and union.merge(out, tensor, pairs)):
            apart.append((op.id, k, result))
    return apart


def _same_dims(op: Op, operand: int, result: int) -> list[tuple[int, int]]:
    """Return the (result dim, operand dim) pairs that consist of the same single factor; empty for an op
    without rule.
    """
    if op.rule is None:
        return []
    where = {f[0]: d for d, f in enumerate(op.rule.operands[operand]) if len(f) == 1}
    return [(d, where[f[0]]) for d, f in enumerate(op.rule.results[result]) if len(f) == 1 and f[0] in where]


def _trivial_reshape(op: Op, operand: int, result: int, pairs: list[tuple[int, int]], union: _Merged) -> bool:
    """Return True for a reshape, broadcast or reduction that only adds or drops dims of size one.

    `pairs` are the (result dim, operand dim) pairs of `_same_dims`.
    """
    if op.kind not in ("reshape", "broadcast_in_dim", "reduce"):
        return False
    source, out = op.operands[operand], op.results[result]
    real = [(p, q) for p, q in pairs if union.dims[out][p] >= 0 and union.dims[source][q] >= 0]
    count = sum(f >= 0 for f in union.dims[out])
    return len(real) == count == sum(f >= 0 for f in union.dims[source])


def _freeze(
    graph: OpGraph, union: _Merged, skip: set[int], unmerged: list[tuple[int, int, int]], apart: list[tuple[int, int]]
) -> Structure:
    """Build the final `Structure`: clusters numbered by their first tensor, and edges sorted by op.

    - `skip`: tensors without a cluster.
    - `unmerged`: (op, operand position, result position) of values between clusters.
    - `apart`: ties that were not merged.

    A heavy op is left out if none of its tensors has a cluster.
    """
    numbers: dict[int, int] = {}
    clusters = []
    for tensor in range(len(graph.tensors)):
        owner = union.owner[tensor]
        if tensor in skip or owner in numbers:
            continue
        numbers[owner] = len(clusters)
        members = tuple(sorted(union.members[owner]))
        clusters.append(Cluster(len(clusters), tuple(union.sizes[owner]), frozenset(union.blocked[owner]), members))
    cluster_of = tuple(-1 if t in skip else numbers[union.owner[t]] for t in range(len(graph.tensors)))
    edges = [Edge(graph.ops[op].operands[k], op, k, r) for op, k, r in unmerged]
    heavy = []
    for op in graph.ops:
        if op.op_class is not OpClass.HEAVY:
            continue
        if all(cluster_of[t] < 0 for t in (*op.operands, *op.results)):
            continue
        heavy.append(op.id)
        edges.extend(Edge(t, op.id, k, -1) for k, t in enumerate(op.operands) if cluster_of[t] >= 0)
        edges.extend(Edge(t, op.id, -1, r) for r, t in enumerate(op.results) if cluster_of[t] >= 0)
    edges.extend(Edge(result, -1, -1, -1) for result, _ in apart)
    edges.sort(key=lambda e: (e.op if e.op >= 0 else len(graph.ops), e.operand, e.result, e.tensor))
    dims = tuple(tuple(d) for d in union.dims)
    return Structure(tuple(clusters), cluster_of, dims, tuple(heavy), tuple(edges), tuple(apart))
