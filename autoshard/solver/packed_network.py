"""The remaining part of a `Network` as flat arrays: the kernels, and the data that pruning does not change."""

from collections.abc import Sequence

import numpy as np

from autoshard.base.numba_jit import njit
from autoshard.solver.flat_graph import Flat, Floats, offsets, ragged
from autoshard.solver.network import CLOSED, Network
from autoshard.solver.residual_graph import Ints


@njit(cache=True, nogil=True)
def _classes(ends, lines, line_at, lengths, places, kept, node_at, class_at, classes, used, used_at):
    """Fill `classes` with the table line of each remaining alternative, for every directed edge.

    Lines are rows or columns of a table, numbered among those in use, ascending. The arguments are as follows.

    - `ends`: source node of each edge.
    - `lines`, `line_at`, `lengths`: line of each alternative, offset of each edge in them, and number of lines.
    - `places`: positions of the edges in `class_at`.
    - `kept`, `node_at`: remaining alternatives as numbers within their node, and each node's offset in them.
    - `class_at`, `classes`: offset of each edge in `classes`, and the result.
    - `used`, `used_at`: receive the lines in use, and their offset for each edge.
    """
    most = 0
    for edge in range(len(ends)):
        most = max(most, lengths[edge])
    number = np.zeros(most, dtype=np.int32)
    filled = 0
    for edge in range(len(ends)):
        number[: lengths[edge]] = -1
        low, high, at = node_at[ends[edge]], node_at[ends[edge] + 1], line_at[edge]
        for a in range(low, high):
            number[lines[at + kept[a]]] = 0
        used_at[edge] = filled
        count = 0
        for line in range(lengths[edge]):
            if number[line] == 0:
                number[line] = count
                count += 1
                used[filled] = line
                filled += 1
        to = class_at[places[edge]]
        for a in range(low, high):
            classes[to + a - low] = number[lines[at + kept[a]]]
    used_at[len(ends)] = filled


@njit(cache=True, nogil=True)
def _close(links, ends, lines, line_at, tables, table_at, widths, whole_at, alive):
    """Remove alternatives from `alive` that a link allows with no living alternative of its other node.

    Repeat until nothing changes and return True; return False once a node has no alternatives. `tables` are masks of
    forbidden entries, `table_at` the offset of each link in them, `widths` the number of columns of each.
    """
    changed = True
    while changed:
        changed = False
        for link in links:
            first, second = ends[2 * link], ends[2 * link + 1]
            rows, columns = line_at[2 * link], line_at[2 * link + 1]
            low, high = whole_at[first], whole_at[first + 1]
            start, stop = whole_at[second], whole_at[second + 1]
            for side in range(2):
                left = False
                for a in range(low, high) if side == 0 else range(start, stop):
                    if not alive[a]:
                        continue
                    some = False
                    for b in range(start, stop) if side == 0 else range(low, high):
                        one, other = (a, b) if side == 0 else (b, a)
                        row, column = lines[rows + one - low], lines[columns + other - start]
                        if alive[b] and not tables[table_at[link] + row * widths[link] + column]:
                            some = True
                            break
                    if some:
                        left = True
                    else:
                        alive[a] = False
                        changed = True
                if not left:
                    return False
    return True


class Packer:
    """Flat arrays of a network over all alternatives, from which `pack` selects the remaining ones.

    Alternatives are numbered consecutively over all nodes.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        links = network.links
        self.whole_at = offsets([len(cost) for cost in network.costs])
        """[nodes + 1] offsets of each node's alternatives."""
        self.cost = np.concatenate(network.costs).astype(np.float64)
        """Cost of each alternative, without links from a node to itself."""
        self.node_of = np.repeat(np.arange(len(network.costs)), np.diff(self.whole_at))
        self.ends = _ints([node for link in links for node in (link.first, link.second)])
        """[2 x links] source node of each directed edge: first the edge from a link's first node, then that from its
        second.
        """
        sides = [side for link in links for side in (link.rows, link.columns)]
        self.lines = np.concatenate(sides).astype(np.int64) if sides else _ints([])
        """Rows and columns of every link's table, concatenated."""
        self.line_at = offsets([len(side) for side in sides])
        self.lengths = _ints([size for link in links for size in link.table.shape])
        """[2 x links] rows, then columns, of each link's table."""
        self.closed, self.shut, self.shut_at = self._closed()
        self._arrange()
        terms = network.terms if network.usage_limit is not None else []
        # Usage rises only where some term starts, so the limit needs a check at these times alone.
        self.times = np.unique(_ints([term.start for term in terms]))
        self.terms = sorted(terms, key=lambda term: (term.node, term.start, term.stop))
        self.usages = np.concatenate([t.usage for t in self.terms]).astype(np.int64) if self.terms else _ints([])
        self.usage_at = offsets([len(term.usage) for term in self.terms])
        self.term_node = _ints([term.node for term in self.terms])
        self.start = np.searchsorted(self.times, _ints([term.start for term in self.terms])).astype(np.int64)
        self.stop = np.searchsorted(self.times, _ints([term.stop for term in self.terms])).astype(np.int64)

    def _arrange(self) -> None:
        """Sort the directed edges for the flat arrays: by source node, then target node, then link.

        Set the attributes that follow from the order; links from a node to itself are left out (`places` -1).
        """
        self.own = np.array([link.first == link.second for link in self.network.links], dtype=bool)
        edges = np.flatnonzero(~np.repeat(self.own, 2))
        node, other = self.ends[edges], self.ends[edges ^ 1]
        self.edges = edges[np.lexsort((edges // 2, other, node))]
        """Directed edge at each position."""
        self.places = np.full(len(self.ends), -1, dtype=np.int64)
        self.places[self.edges] = np.arange(len(self.edges))
        self.near = self.ends[self.edges ^ 1]
        self.near_at = offsets(np.bincount(self.ends[self.edges], minlength=len(self.whole_at) - 1))
        scale = np.array([link.scale for link in self.network.links], dtype=np.float64)
        self.scale = scale[self.edges // 2]

    def _closed(self) -> tuple[Ints, np.ndarray, Ints]:
        """Return the forbidden pairs of the links, as three arrays.

        - Links between two nodes that forbid some pair.
        - Masks of forbidden entries, concatenated; equal tables share one mask.
        - Offset of each link in these masks, -1 for none.
        """
        masks: dict[int, int] = {}
        parts: list[np.ndarray] = []
        closed_links, at, filled = [], [], 0
        for number, link in enumerate(self.network.links):
            if id(link.table) not in masks:
                mask = link.table >= CLOSED
                masks[id(link.table)] = filled if mask.any() else -1
                if mask.any():
                    parts.append(mask.ravel())
                    filled += mask.size
            at.append(masks[id(link.table)])
            if at[-1] >= 0 and link.first != link.second:
                closed_links.append(number)
        return _ints(closed_links), np.concatenate(parts) if parts else np.zeros(0, dtype=bool), _ints(at)

    def reachable(self, kept: Ints) -> Ints | None:
        """Return the alternatives of `kept` without those that some link forbids with every one left at its other node.

        A link from a node to itself removes the alternatives that it forbids. Node costs are not examined. Returns None
        if a node has no alternatives left.
        """
        alive = np.zeros(len(self.cost), dtype=bool)
        alive[kept] = True
        for link in (self.network.links[number] for number in np.flatnonzero(self.own).tolist()):
            low, high = self.whole_at[link.first : link.first + 2]
            alive[low:high] &= link.table[link.rows, link.columns] < CLOSED
        if np.bincount(self.node_of[alive], minlength=len(self.whole_at) - 1).min(initial=1) == 0:
            return None
        some = len(self.closed) == 0 or _close(
            self.closed, self.ends, self.lines, self.line_at, self.shut, self.shut_at, self.lengths[1::2],
            self.whole_at, alive,
        )  # fmt: skip
        return np.flatnonzero(alive) if some else None

    def pack(self, kept: Ints) -> Flat:
        """Return flat arrays of the remaining alternatives `kept`, ascending; equal parts of one table are stored once.

        Links from a node to itself are added to its costs. Both directions of an edge share a table.
        """
        nodes = len(self.whole_at) - 1
        sizes = np.bincount(self.node_of[kept], minlength=nodes)
        node_at = offsets(sizes)
        own = kept - self.whole_at[self.node_of[kept]]
        cost = self.cost[kept]
        for link in (self.network.links[number] for number in np.flatnonzero(self.own).tolist()):
            part = slice(node_at[link.first], node_at[link.first + 1])
            cost[part] += link.scale * link.table[link.rows[own[part]], link.columns[own[part]]]
        class_at = offsets(sizes[self.ends[self.edges]])
        classes = np.zeros(class_at[-1], dtype=np.int32)
        used, used_at = (
            np.zeros(int(self.lengths[self.edges].sum()), dtype=np.int32),
            _ints([0] * (len(self.edges) + 1)),
        )
        _classes(
            self.ends[self.edges], self.lines, self.line_at[self.edges], self.lengths[self.edges],
            np.arange(len(self.edges)), own, node_at, class_at, classes, used, used_at,
        )  # fmt: skip
        tables, table_at = self._tables(used, used_at)
        back = self.places[self.edges ^ 1]
        usages, usage_at, most = self._terms(own, node_at, sizes)
        return Flat(
            node_at=node_at,
            cost=cost,
            near_at=self.near_at,
            near=self.near,
            table_at=table_at,
            back=back,
            tables=tables,
            class_at=class_at[:-1],
            classes=classes,
            height=np.diff(used_at),
            flipped=self.edges % 2 == 1,
            scale=self.scale,
            message_at=offsets(sizes[self.near]),
            term_at=offsets(np.bincount(self.term_node, minlength=nodes)),
            start=self.start,
            stop=self.stop,
            usage_at=usage_at,
            usages=usages,
            most=most,
            capacity=np.full(len(self.times), self.network.usage_limit or 0, dtype=np.int64),
        )

    def _tables(self, used: np.ndarray, used_at: Ints) -> tuple[Floats, Ints]:
        """Return the parts of tables in use, concatenated, and the offset of every directed edge's table in them.

        `used` and `used_at` are those of `_classes`, with edges in sorted order.
        """
        text, wide, at = used.tobytes(), used.itemsize, used_at.tolist()
        stored: dict[tuple[int, bytes, bytes], int] = {}
        parts: list[Floats] = []
        filled = 0
        table_at = np.zeros(len(self.edges), dtype=np.int64)
        places = self.places.tolist()
        for number, link in enumerate(self.network.links):
            row, column = places[2 * number], places[2 * number + 1]
            if row < 0:
                continue
            rows, columns = (text[at[p] * wide : at[p + 1] * wide] for p in (row, column))
            key = (id(link.table), rows, columns)
            if key not in stored:
                ends = (used[at[p] : at[p + 1]] for p in (row, column))
                stored[key] = filled
                parts.append(link.table[np.ix_(*ends)].ravel())
                filled += len(parts[-1])
            table_at[row] = table_at[column] = stored[key]
        return np.concatenate(parts) if parts else np.zeros(0), table_at

    def _terms(self, own: Ints, node_at: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
        """Return bytes of the remaining alternatives of every term, their offsets, and the largest of each term.

        - `own`: remaining alternatives as numbers within their node.
        - `node_at`, `sizes`: offset and number of the remaining alternatives of each node.
        """
        counts = sizes[self.term_node]
        at = offsets(counts)
        places = own[ragged(node_at[self.term_node], counts)] + np.repeat(self.usage_at[:-1], counts)
        usages = self.usages[places]
        most = np.maximum.reduceat(usages, at[:-1]) if len(usages) else _ints([])
        return usages, at[:-1], most


def _ints(values: Sequence[int]) -> Ints:
    """Return the numbers as an int64 array."""
    return np.array(values, dtype=np.int64)
