"""Dim groups: dims of the whole program that ops tie together, such as batch, sequence and heads."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from autoshard.graph import ROTATE, FactorKind, Op, OpGraph, Structure
from autoshard.planning.xla.axis_assignments import WHOLE, States, relabel
from autoshard.program import WEIGHTS, Program, Role


_EXPERTS = "experts"
"""Name of a dim that counts the experts of a parameter."""

# Name of a dim group and the parameters' names that suggest it, the most specific first.
_HINTS = (
    (
        "vocabulary",
        re.compile(r"embed_tokens|lm_head|wte|shared\.weight|embed(ding)?s?(\.|$)|unembed|head$|vocab", re.I),
    ),
    (_EXPERTS, re.compile(r"expert|moe", re.I)),
    ("kv heads", re.compile(r"(^|[._])(k_proj|v_proj|wk|wv|key|value|k|v)([._]|$)", re.I)),
    ("heads", re.compile(r"attn|attention|q_proj|o_proj|(^|[._])(wq|wo|q|o|query)([._]|$)", re.I)),
    ("ffn", re.compile(r"mlp|ffn|feed_?forward|fc|up|gate|down|intermediate|w[123gud]($|[._])", re.I)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Dim groups of a program, and the names that a person would give them."""

    of_factor: dict[tuple[int, int], int]
    """Dim group by (cluster, factor)."""
    sizes: dict[int, int]
    """Smallest size among a group's factors, which an axis must divide to split the whole group evenly.

    Groups that no axis may split are absent.
    """
    names: dict[int, str]
    """Name of each group in `sizes`: `batch`, `sequence`, `hidden`, `stage`, `image height`, `heads` or such.

    A group that no rule names is `dim N of` its first parameter, or `channels of` its layer, or empty without a
    parameter.
    """
    parameters: dict[int, tuple[int, ...]]
    """Argument positions of the parameters with a dim of the group."""
    batch: int | None
    """Group of the first dim of batch arguments (`_batch`); None without one."""
    sequence: int | None
    """Group of the second dim of a batch argument, if no parameter has it; None without one."""
    hidden: int | None
    """Group that most parameters share (that of the residual stream), None without one."""
    space: tuple[int, ...] = ()
    """Groups of the batch's dims along which windows slide (height, width), in their order."""
    examples: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Position of each batch argument with examples -> the dim that counts them."""


class _Ties:
    """Union-find over numbered items; the first item of a set represents the set."""

    def __init__(self, count: int) -> None:
        """Create `count` sets of one item each."""
        self.of = list(range(count))

    def find(self, thing: int) -> int:
        """Return the first item of the set of `thing`, and shorten the way to it."""
        of = self.of
        while of[thing] != thing:
            of[thing] = thing = of[of[thing]]
        return thing

    def join(self, a: int, b: int) -> None:
        """Merge the sets of two items; the first of all items then represents both."""
        first, second = self.find(a), self.find(b)
        self.of[max(first, second)] = min(first, second)


def find_groups(program: Program, graph: OpGraph, structure: Structure) -> Groups:
    """Find the dim groups of a program: cluster factors that ops, and ties of results to arguments, join.

    Groups are numbered in the order of the clusters. The first factor above size 1 represents a merged dim. Rows of a
    batch that a loop takes in microbatches are represented by the rows of a microbatch, since no axis splits a loop.
    """
    # Items of the union-find: the factors of all clusters, then those of all ops.
    clusters = list(itertools.accumulate((len(each.sizes) for each in structure.clusters), initial=0))
    ops = list(itertools.accumulate((len(op.rule.sizes) if op.rule else 0 for op in graph.ops), initial=clusters[-1]))
    union = _Ties(ops[-1])
    for op in graph.ops:
        if op.rule is None:
            continue
        looped = looped_factors(structure, op)
        for tensor, dims in op.sides:
            cluster = structure.cluster_of[tensor]
            if cluster < 0:
                continue
            for dim, factors in enumerate(dims):
                own = structure.dims_of[tensor][dim]
                real = [f for f in factors if op.rule.sizes[f] > 1]
                if own >= 0 and real:
                    free = own not in structure.clusters[cluster].blocked
                    shown = next((f for f in real if free and f not in looped), real[0])
                    union.join(clusters[cluster] + own, ops[op.id] + shown)
    for result, argument in structure.ties:
        for dim, own in enumerate(structure.dims_of[result]):
            other = structure.dims_of[argument][dim]
            if own >= 0 and other >= 0:
                first, second = structure.cluster_of[result], structure.cluster_of[argument]
                union.join(clusters[first] + own, clusters[second] + other)
    numbers: dict[int, int] = {}
    of_factor: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}
    for cluster in structure.clusters:
        for factor, size in enumerate(cluster.sizes):
            group = numbers.setdefault(union.find(clusters[cluster.id] + factor), len(numbers))
            of_factor[(cluster.id, factor)] = group
            if factor not in cluster.blocked:
                sizes[group] = min(sizes.get(group, size), size)
    return _describe(program, graph, structure, of_factor, sizes)


def looped_factors(structure: Structure, op: Op) -> frozenset[int]:
    """Return the factors of a reshape that form a dim which no axis may split, as a loop over microbatches does."""
    if op.kind != "reshape" or op.rule is None:
        return frozenset()
    return frozenset(
        factors[0]
        for tensor, dims in op.sides
        if structure.cluster_of[tensor] >= 0
        for factors, own in zip(dims, structure.dims_of[tensor], strict=True)
        if len(factors) == 1 and own in structure.clusters[structure.cluster_of[tensor]].blocked
    )


def tensor_groups(structure: Structure, of_factor: dict[tuple[int, int], int], tensor: int) -> list[int | None]:
    """Return the group of each dim of a tensor; None for a dim of size 1 and for a dim that must stay whole."""
    cluster = structure.cluster_of[tensor]
    if cluster < 0:
        return [None] * len(structure.dims_of[tensor])
    blocked = structure.clusters[cluster].blocked
    return [of_factor[(cluster, f)] if f >= 0 and f not in blocked else None for f in structure.dims_of[tensor]]


def _describe(
    program: Program,
    graph: OpGraph,
    structure: Structure,
    of_factor: dict[tuple[int, int], int],
    sizes: dict[int, int],
) -> Groups:
    """Identify the batch, sequence and hidden groups, and name all groups in `sizes`.

    - `of_factor`: dim group by (cluster, factor).
    - `sizes`: smallest size of each group that may be split.
    """
    holders: dict[int, list[int]] = {}
    stacked: set[int] = set()
    weight: dict[int, int] = {}
    matrices: dict[int, int] = {}
    matrix_bytes = 0
    inputs: dict[int, list[int | None]] = {}
    for position, (argument, tensor) in enumerate(zip(program.arguments, graph.arguments, strict=True)):
        groups = tensor_groups(structure, of_factor, tensor)
        if argument.role in WEIGHTS:
            real = [g for g in groups if g is not None]
            for group in set(real):
                holders.setdefault(group, []).append(position)
            if len(real) > 2:
                stacked.add(real[0])
            if len(real) > 1:
                matrix_bytes += graph.tensors[tensor].bytes
                for group in set(real):
                    weight[group] = weight.get(group, 0) + graph.tensors[tensor].bytes
                    matrices[group] = matrices.get(group, 0) + 1
        elif argument.role is Role.BATCH and groups:
            inputs[position] = groups
    data = [groups for groups in inputs.values() if groups[0] is not None]
    batch = _batch(data, holders, lambda: _stored_by_group(graph, structure, of_factor))
    sequence = next((g[1] for g in data if len(g) > 1 and g[1] is not None and g[1] not in holders), None)
    # The inner dim of an MLP is shared by two matrices. A residual stream is shared by more, or is a dim of the data.
    shifted, stages = _shifted(graph, structure, of_factor)
    counting = stacked & _batches_of_products(graph, structure, of_factor)
    streams = [g for g in weight if g not in counting and (matrices[g] > 2 or any(g in groups for groups in data))]
    hidden = max(streams, key=lambda g: (weight[g], -g), default=None)
    # In a model with a residual stream nearly all matrices have its dim.
    if hidden is not None and weight[hidden] < 0.6 * matrix_bytes:
        hidden = None
    space, channels = _space(graph, structure, of_factor), _channels(graph, structure, of_factor)
    names = {}
    for group in sizes:
        if group == batch:
            names[group] = "batch"
        elif group == sequence and not space.get(group, "").startswith("image"):
            names[group] = "sequence"
        elif group == hidden:
            names[group] = "hidden"
        elif group in stages or group in shifted and group in holders:
            names[group] = "stage"
        elif group in space:
            names[group] = space[group]
        else:
            held = holders.get(group, [])
            dim = tensor_groups(structure, of_factor, graph.arguments[held[0]]).index(group) if held else 0
            of = [program.arguments[position].name for position in held]
            names[group] = _hint(of, dim, group in stacked, group in counting, group in channels)
    own = tuple(dict.fromkeys(g for groups in data for g in groups if g is not None and g in space and g in sizes))
    shapes = {position: program.arguments[position].shape for position in inputs}
    read = {tensor for op in graph.ops for tensor in op.operands}
    rows = 0 if batch is None else sizes[batch]
    # An input that no op reads has no examples, unless it has as many rows as the batch.
    counted = {p: own for p, own in inputs.items() if graph.arguments[p] in read or shapes[p][0] == rows}
    examples = _examples(counted, shapes, batch, holders)
    return Groups(
        of_factor, sizes, names, {g: tuple(p) for g, p in holders.items()}, batch, sequence, hidden, own, examples
    )


def _batch(
    data: Sequence[Sequence[int | None]], held: Collection[int], stored: Callable[[], Mapping[int | None, int]]
) -> int | None:
    """Return the group of examples: the first dim of batch arguments; None if `data` is empty.

    - `data`: groups of the dims of each batch argument whose first dim has one.
    - `held`: groups of dims of parameters.
    - `stored`: function that returns the elements of tensors with a dim of each group.

    An input such as a table of positions or a bias for each head has no examples. Its first dim is an inner dim of
    another input, or a dim of parameters. Among other first dims, that of most inputs is chosen, then that of most
    elements.
    """
    firsts = Counter(groups[0] for groups in data)
    inner = {group for groups in data for group in groups[1:]}
    ranks = {group: (group in inner, group in held, -count) for group, count in firsts.items()}
    best = [group for group, rank in ranks.items() if rank == min(ranks.values())]
    if len(best) < 2:
        return next(iter(best), None)
    elements = stored()
    return max(best, key=lambda group: elements.get(group, 0))


def _stored_by_group(
    graph: OpGraph, structure: Structure, of_factor: dict[tuple[int, int], int]
) -> Counter[int | None]:
    """Return the elements of all tensors that have a dim of each group."""
    found: Counter[int | None] = Counter()
    for tensor, each in enumerate(graph.tensors):
        for group in set(tensor_groups(structure, of_factor, tensor)):
            found[group] += math.prod(each.shape)
    return found


def _examples(
    inputs: Mapping[int, Sequence[int | None]],
    shapes: Mapping[int, tuple[int, ...]],
    batch: int | None,
    held: Collection[int],
) -> dict[int, int]:
    """Return the dim of examples of each batch argument with examples, by position.

    - `inputs`, `shapes`: groups of the dims of each batch argument, and its shape.
    - `batch`: group of examples.
    - `held`: groups of dims of parameters.

    Ops may not tie the examples of two inputs, and a graph has edges as well as nodes. So the first dim counts examples
    in other inputs too, unless it is an inner dim of another input or a dim of parameters.
    """
    elsewhere = {group for groups in inputs.values() for group in groups[1:] if group is not None} | set(held)
    found: dict[int, int] = {}
    for position, groups in inputs.items():
        if batch is not None and batch in groups:
            found[position] = groups.index(batch)
        elif shapes[position][0] > 1 and groups[0] not in elsewhere:
            found[position] = 0
    return found


def _space(graph: OpGraph, structure: Structure, of_factor: dict[tuple[int, int], int]) -> dict[int, str]:
    """Return the groups of dims along which convolutions and pools slide, with the names of such image dims.

    Names are `length` for one spatial dim, `image height` and `image width` for two, with `depth` first for three.
    """
    words = {1: ("length",), 2: ("image height", "image width"), 3: ("depth", "image height", "image width")}
    name_of: dict[int, str] = {}
    for op in graph.ops:
        tensor = op.operands[0] if op.halos and op.kind in ("convolution", "reduce_window") else -1
        if tensor < 0 or structure.cluster_of[tensor] < 0:
            continue
        names = words.get(len(graph.tensors[tensor].shape) - 2, ())
        dims = sorted(halo.dim.source for halo in op.halos)
        for dim, name in zip(dims, names, strict=False) if len(dims) == len(names) else ():
            own = structure.dims_of[tensor][dim]
            if own >= 0:
                name_of.setdefault(of_factor[(structure.cluster_of[tensor], own)], name)
    return name_of


def _shifted(graph: OpGraph, structure: Structure, of_factor: dict[tuple[int, int], int]) -> tuple[set[int], set[int]]:
    """Return the groups of rolled dims, and those that a loop rolls by one as the first dim of a carried tensor.

    A program written as a pipeline passes a stage's result to the next stage in this way, and its parameters need not
    show it.
    """
    rolled: set[int] = set()
    stages: set[int] = set()
    for op in graph.ops:
        if op.kind == ROTATE and op.rule is not None:
            tensor = op.operands[0]
            dim = op.rule.kinds.index(FactorKind.PERMUTATION)
            if structure.cluster_of[tensor] >= 0 and structure.dims_of[tensor][dim] >= 0:
                group = of_factor[(structure.cluster_of[tensor], structure.dims_of[tensor][dim])]
                rolled.add(group)
                if op.loop >= 0 and dim == 0 and op.shift in (1, graph.tensors[tensor].shape[0] - 1):
                    stages.add(group)
    return rolled, stages


def _batches_of_products(graph: OpGraph, structure: Structure, of_factor: dict[tuple[int, int], int]) -> set[int]:
    """Return the groups of dims that both operands and the result of a product have, as experts of a mixture do."""
    found: set[int] = set()
    for op in graph.ops:
        if op.kind == "dot_general" and op.rule is not None:
            shared = set.intersection(*({f for dim in dims for f in dim} for _, dims in op.sides))
            found |= _groups_of(op, shared, structure, of_factor)
    return found


def _channels(graph: OpGraph, structure: Structure, of_factor: dict[tuple[int, int], int]) -> set[int]:
    """Return the groups of dims that the kernel of a convolution shares with its input or its result."""
    found: set[int] = set()
    for op in graph.ops:
        if op.kind == "convolution" and op.rule is not None:
            images, kernel, result = ({f for dim in dims for f in dim} for _, dims in op.sides)
            found |= _groups_of(op, kernel & (images | result), structure, of_factor)
    return found


def _groups_of(op: Op, kept: set[int], structure: Structure, of_factor: dict[tuple[int, int], int]) -> set[int]:
    """Return the groups of the dims of an op's operands and results that have factors in `kept` alone."""
    found: set[int] = set()
    for tensor, dims in op.sides:
        cluster = structure.cluster_of[tensor]
        if cluster < 0:
            continue  # a constant of one value has no dims to split
        for own, factors in zip(structure.dims_of[tensor], dims, strict=True):
            if own >= 0 and kept.issuperset(factors) and factors:
                found.add(of_factor[(cluster, own)])
    return found


def _hint(names: list[str], dim: int, stacked: bool, counting: bool, channels: bool) -> str:
    """Return the first name in `_HINTS` that more than half of the parameters' names suggest for their common dim.

    Without one it is `dim N of` the first parameter, or `channels of` its layer; it is empty without parameters.

    - `dim`: position of the dim in the first parameter.
    - `channels`: True for channels of a convolution.
    - `counting`: True if the products of these matrices are independent. In a feed-forward layer such a dim counts
      experts, also where no name says so.
    - `stacked`: True if the dim counts matrices of a parameter, as a dim of experts does. Features of an expert are
      none.
    """
    for word, pattern in _HINTS:
        if stacked or word != _EXPERTS:
            if names and sum(bool(pattern.search(name)) for name in names) * 2 > len(names):
                return _EXPERTS if word == "ffn" and counting else word
    if not names:
        return ""
    return f"channels of {names[0].rpartition('.')[0] or names[0]}" if channels else f"dim {dim} of {names[0]}"


def factor_states(states: States, dims: Sequence[Sequence[int]]) -> States:
    """Convert states over an op's factors to states over the dims of one of its tensors; axes on others are `WHOLE`.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `dims`: factors of each of the tensor's dims.
    """
    count = int(states.max(initial=0)) + 1
    mapping = [WHOLE] * max(count, max((f + 1 for dim in dims for f in dim), default=0))
    for dim, factors in enumerate(dims):
        for factor in factors:
            mapping[factor] = dim
    return relabel(states, mapping)
