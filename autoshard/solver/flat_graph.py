"""A graph as flat arrays, the input of the compiled kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.solver.residual_graph import Graph, Ints


Floats = NDArray[np.float64]


class Flat(NamedTuple):
    """Flat arrays of a graph. Nodes are numbered from 0 in the order of the problem. Costs are float64, exact below
    2**53, and used for search only.
    """

    node_at: Ints
    """[N + 1] offsets of a node's alternatives in `cost`."""
    cost: Floats
    """Cost of each alternative of all nodes."""
    near_at: Ints
    """[N + 1] offsets of a node's directed edges."""
    near: Ints
    """Target node of each directed edge."""
    table_at: Ints
    """Offset of each directed edge's table in `tables`. The kernels of block moves need one table row for each
    alternative, in order.
    """
    back: Ints
    """Number of each directed edge's reverse edge."""
    tables: Floats
    """Costs of all tables, row-major, before multiplication by `scale`."""
    class_at: Ints
    """Offset in `classes` of each directed edge: the table row of each alternative of its source node."""
    classes: NDArray[np.int32]
    height: Ints
    """Number of table rows of each directed edge."""
    flipped: NDArray[np.bool_]
    """True for directed edges whose table is stored with the target node's rows first."""
    scale: Floats
    """Factor by which each directed edge's table is multiplied."""
    message_at: Ints
    """Offset of each directed edge's message over the alternatives of its target node; the last entry is the total
    size.
    """
    term_at: Ints
    """[N + 1] offsets of a node's memory terms."""
    start: Ints
    stop: Ints
    """Half-open interval of each memory term, as indices of `capacity`."""
    usage_at: Ints
    """Offset in `usages` of each term's bytes for each alternative."""
    usages: Ints
    """Bytes of all terms' alternatives."""
    most: Ints
    """Largest usage of each term."""
    capacity: Ints
    """[times] bytes that all terms together may use."""


def flatten(graph: Graph) -> tuple[list[int], Flat]:
    """Return the alive nodes, ascending, and the arrays in which their numbers are places in that list.

    Each direction of an edge has its own table with a row for each alternative of its source. Edges of a node are
    sorted by target. The offset is not part of the arrays.
    """
    names = sorted(graph.costs)
    index = {name: place for place, name in enumerate(names)}
    sizes = [len(graph.costs[name]) for name in names]
    near, table_at, tables, back, near_at = [], [], [], [], [0]
    place: dict[tuple[int, int], int] = {}
    filled = 0
    for name in names:
        for other in sorted(graph.edges[name]):
            table = graph.edges[name][other]
            place[name, other] = len(near)
            near.append(index[other])
            table_at.append(filled)
            tables.append(np.ascontiguousarray(table).ravel())
            filled += table.size
        near_at.append(len(near))
    for name in names:
        back += [place[other, name] for other in sorted(graph.edges[name])]
    start, stop, usage_at, usages, term_at = [], [], [], [], [0]
    used = 0
    for name in names:
        for (first, last), usage in sorted(graph.terms.get(name, {}).items(), key=lambda item: item[0]):
            start.append(first)
            stop.append(last)
            usage_at.append(used)
            usages.append(usage)
            used += len(usage)
        term_at.append(len(start))

    def ints(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    flat = Flat(
        node_at=ints([0, *np.cumsum(sizes).tolist()]),
        cost=np.concatenate([graph.costs[name] for name in names]).astype(np.float64),
        near_at=ints(near_at),
        near=ints(near),
        table_at=ints(table_at),
        back=ints(back),
        tables=np.concatenate(tables).astype(np.float64) if tables else np.zeros(0),
        class_at=ints([0] * len(near)),
        classes=np.arange(max(sizes, default=0), dtype=np.int32),
        height=ints([size for name, size in zip(names, sizes, strict=True) for _ in graph.edges[name]]),
        flipped=np.zeros(len(near), dtype=bool),
        scale=np.ones(len(near)),
        message_at=ints([0, *np.cumsum([sizes[other] for other in near]).tolist()]),
        term_at=ints(term_at),
        start=ints(start),
        stop=ints(stop),
        usage_at=ints(usage_at),
        usages=np.concatenate(usages).astype(np.int64) if usages else ints([]),
        most=ints([int(usage.max()) for usage in usages]),
        capacity=graph.capacity.copy(),
    )
    return names, flat


def offsets(counts: Sequence[int] | Ints) -> Ints:
    """Return the start of each of several consecutive parts with these sizes; the last entry is their total."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(counts, dtype=np.int64))])


def ragged(starts: Ints, counts: Ints) -> Ints:
    """Return the concatenation of ranges: for each k the `counts[k]` integers from `starts[k]` on."""
    at = offsets(counts)
    return np.arange(at[-1]) + np.repeat(starts - at[:-1], counts)
