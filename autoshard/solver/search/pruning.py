"""Pruning of alternatives by message passing, and smaller problems around the best choices."""

import copy
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from autoshard.solver.clocks import Due, never
from autoshard.solver.flat_graph import Flat, Floats, offsets, ragged
from autoshard.solver.network import CLOSED, Messages, Network, Pruned
from autoshard.solver.reductions import reduce, restrict
from autoshard.solver.residual_graph import Graph, InfeasibleGraph, Ints, OverLimit, table_entries


_TURNS = 60
"""Most turns, each of message passing and a pruning attempt."""
_SWEEPS = 6
"""Rounds of message passing between two pruning attempts."""
_ENOUGH = 20_000
"""Table entries at which further pruning saves nothing."""
_MOST = 6_000_000
"""Largest number of table entries, written out, of the result."""
_PATIENCE = 5
"""Turns without a better bound before pruning ends."""


def prune(
    network: Network, hint: Ints | None = None, start: Messages | None = None, enough: float = math.inf
) -> Pruned:
    """Prune alternatives that cannot be part of useful choices: as good as the best found, and cheaper than `enough`.

    Message passing computes a lower bound on the cost of every alternative. An alternative is pruned if its slack
    exceeds the gap between useful choices and the bound. The gap includes a margin, since costs may later be rounded
    to whole picoseconds.

    - `hint`: choices of the whole network, [nodes]; counted only if they fit in memory and no hard constraint excludes
      them.
    - `start`: messages of a network with the same links and other costs; they save most of the work if the costs are
      similar.
    - `enough`: cost from which on choices are useless, so that pruning ends at this lower bound.

    If no choices satisfy the hard constraints, the result has all allowed alternatives, no choices, and the bound minus
    infinity. If the tables would exceed `_MOST` entries, more is pruned and `complete` is False.
    """
    state = _State(network)
    if not state.narrow_to_reachable():
        # No choices are feasible; the solver reports this.
        allowed = (np.flatnonzero(cost < CLOSED) for cost in network.costs)
        left = (mine if len(mine) else np.arange(len(c)) for mine, c in zip(allowed, network.costs, strict=True))
        return Pruned(tuple(left), -math.inf, None, True)
    if start is not None:
        state.begin(start)
    messages: Messages | None = None
    rounding = float(len(network.costs) + len(network.links) + 1)
    best, upper = (None, math.inf) if hint is None else state.offer(np.asarray(hint), None, math.inf)
    bound, idle = -math.inf, 0
    for _ in range(_TURNS):
        decoded = state.dual.ascend(_SWEEPS, min(upper, enough), 1.0)
        best, upper = state.offer(state.whole(decoded), best, upper)
        before, bound = bound, max(bound, min(state.dual.bound, upper))
        if bound >= enough:
            break
        gap = min(upper, enough) - bound + rounding + 1e-9 * abs(bound)
        idle = 0 if bound - before > 1e-4 * abs(bound) else idle + 1
        done = gap <= 2 * rounding + 1e-6 * abs(bound) or idle >= _PATIENCE
        if messages is None and (done or gap < 0.1 * abs(bound)):
            messages = state.messages()
        if done or gap < 0.5 * abs(bound):
            state.cut(gap, best, done)
        if done or state.entries <= _ENOUGH:
            break
    complete = state.written_out() <= _MOST
    if not complete:
        state.dual.ascend(_SWEEPS, upper, 1.0)
        state.cut_to(_MOST, best)
    return Pruned(state.left(), bound, best, complete, messages)


class _State:
    """The remaining network as flat arrays, with its messages."""

    def __init__(self, network: Network):
        # Imported here, as below, because the kernels load numba, which most problems never need.
        from autoshard.solver.packed_network import Packer

        self.network, self.packer = network, Packer(network)
        self._cut = False

    def narrow_to_reachable(self) -> bool:
        """Start with all alternatives that hard constraints allow; return False if some node has none.

        Memory is no hard constraint here.
        """
        kept = self.packer.reachable(np.flatnonzero(self.packer.cost < CLOSED))
        if kept is None:
            return False
        self._pack(kept)
        return True

    def _pack(self, kept: Ints) -> None:
        """Set the flat arrays, and messages of zero, for the remaining alternatives `kept`, ascending."""
        from autoshard.solver.search.message_passing import Dual

        self.kept = kept
        """Remaining alternatives, numbered over all nodes."""
        self.flat = self.packer.pack(kept)
        self.dual = Dual(self.flat)
        self.node_of = self.packer.node_of[kept]

    def left(self) -> tuple[Ints, ...]:
        """Return the remaining alternatives of every node, numbered within it, ascending."""
        own, at = self.kept - self.packer.whole_at[self.node_of], self.flat.node_at.tolist()
        return tuple(own[low:high] for low, high in zip(at, at[1:], strict=False))

    def begin(self, start: Messages) -> None:
        """Start from the messages of a network with the same links, if they cover all remaining alternatives.

        Otherwise nothing changes.
        """
        if start.ends != self._ends():
            return
        counts = np.array([len(old) for old in start.alternatives], dtype=np.int64)
        old_at = offsets(counts)
        place = np.full(len(self.packer.cost), -1, dtype=np.int64)
        old = np.concatenate(start.alternatives) + np.repeat(self.packer.whole_at[:-1], counts)
        place[old] = np.arange(len(old)) - np.repeat(old_at[:-1], counts)
        places = place[self.kept]
        if (places < 0).any():
            return
        near, values = self.flat.near, np.concatenate(start.values) if start.values else np.zeros(0)
        into = np.diff(self.flat.message_at)
        positions = places[ragged(self.flat.node_at[near], into)] + np.repeat(offsets(counts[near])[:-1], into)
        self.dual.begin(values[positions])

    def messages(self) -> Messages | None:
        """Return the best messages so far; None once an alternative was pruned by its cost."""
        return None if self._cut else Messages(self.left(), self._ends(), tuple(self.dual.messages()))

    def _ends(self) -> tuple[tuple[int, int], ...]:
        """Return both end nodes of every link, by which networks with the same links are recognised."""
        return tuple((link.first, link.second) for link in self.network.links)

    @property
    def entries(self) -> int:
        """Number of stored table entries."""
        return len(self.flat.tables)

    def written_out(self, sizes: Ints | None = None) -> int:
        """Return the entries of all links' tables without sharing, for these numbers of alternatives of each node.

        None stands for the remaining ones.
        """
        sizes = np.diff(self.flat.node_at) if sizes is None else sizes
        ends = self.packer.ends
        return int((sizes[ends[0::2]] * sizes[ends[1::2]]).sum())

    def whole(self, chosen: Ints) -> Ints:
        """Return choices of the whole network, [nodes], from choices among the remaining alternatives."""
        return self.kept[self.flat.node_at[:-1] + chosen] - self.packer.whole_at[:-1]

    def offer(self, choices: Ints, best: Ints | None, upper: float) -> tuple[Ints | None, float]:
        """Return the cheaper of `choices` and `best`, both of the whole network, and its cost.

        `upper` is the cost of `best`. Choices that exceed memory, are forbidden or use a pruned alternative do not
        count, and neither do equally cheap ones.
        """
        from autoshard.solver.search.search_kernels import profile

        place = np.full(len(self.packer.cost), -1, dtype=np.int64)
        place[self.kept] = np.arange(len(self.kept)) - self.flat.node_at[self.node_of]
        places = place[self.packer.whole_at[:-1] + choices]
        if (places < 0).any():
            return best, upper
        used = np.zeros(len(self.flat.capacity), dtype=np.int64)
        cost, excess = profile(self.flat, places, used)
        return (choices, cost) if excess == 0 and cost < min(upper, CLOSED) else (best, upper)

    def cut(self, limit: float, best: Ints | None, always: bool) -> None:
        """Prune alternatives with more slack than `limit` if they are more than 30 %, or if `always`.

        Alternatives of `best` stay, and so does the one with least slack of each node.
        """
        stays = self._up_to(self.dual.slack(), limit, best)
        if always or np.count_nonzero(stays) < 0.7 * len(stays):
            self._keep(stays)

    def cut_to(self, most: int, best: Ints | None) -> None:
        """Prune the alternatives with most slack until the written-out tables have at most `most` entries.

        Steps of 20 % end at a share of 1 % of the alternatives. Alternatives of `best` stay, and so does the one with
        least slack of each node.
        """
        slack = self.dual.slack()
        share, stays = 1.0, np.ones(len(self.kept), dtype=bool)
        nodes = len(self.packer.whole_at) - 1
        while share > 0.01 and self.written_out(np.bincount(self.node_of[stays], minlength=nodes)) > most:
            share *= 0.8
            stays = self._up_to(slack, float(np.quantile(slack, share)), best)
        self._keep(stays)

    def _up_to(self, slack: Floats, limit: float, best: Ints | None) -> NDArray[np.bool_]:
        """Return a mask of alternatives that stay: slack up to `limit`, part of `best`, or least slack of the node."""
        least = np.minimum.reduceat(slack, self.flat.node_at[:-1])
        stays = slack <= np.maximum(limit, least)[self.node_of]
        if best is not None:
            stays |= self.kept == (self.packer.whole_at[:-1] + best)[self.node_of]
        return stays

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        """Prune all alternatives outside the mask `stays`, and continue from the best messages and their prices.

        Alternatives that hard constraints then exclude are pruned too; if that empties a node, nothing changes.
        """
        kept = self.packer.reachable(self.kept[stays])
        if kept is None:
            return
        left = np.zeros(len(self.packer.cost), dtype=bool)
        left[kept] = True
        stays = left[self.kept]
        near = self.flat.near
        entries = stays[ragged(self.flat.node_at[near], np.diff(self.flat.message_at))]
        values, old, self._cut = self.dual.best_messages[entries], self.dual, True
        self._pack(kept)
        self.dual.begin(values, old)


@dataclasses.dataclass(frozen=True, slots=True)
class Restricted:
    """A restricted and reduced problem."""

    graph: Graph | None
    """Reduced graph; None when no choices in it are feasible."""
    size: int
    """Number of entries of all edge tables; 0 without a graph."""
    proves: bool
    """True if every alternative that could lead to a lower cost is included."""


def clone(graph: Graph) -> Graph:
    """Return a copy that can be reduced further without changing `graph`; it has the same undo steps so far."""
    edges: dict[int, dict[int, Ints]] = {node: {} for node in graph.edges}
    for node, near in graph.edges.items():
        for other, table in near.items():
            if node < other:
                edges[node][other] = table.copy()
                edges[other][node] = edges[node][other].T
    return Graph(
        costs={node: cost.copy() for node, cost in graph.costs.items()},
        edges=edges,
        terms={node: dict(terms) for node, terms in graph.terms.items()},
        capacity=graph.capacity.copy(),
        times=graph.times.copy(),
        offset=graph.offset,
        undo=copy.copy(graph.undo),
        size=graph.size,
    )


def restricted(
    graph: Graph,
    names: list[int],
    flat: Flat,
    slack: np.ndarray,
    limit: float,
    gap: float,
    chosen: Ints | None,
    due: Due = never,
) -> Restricted:
    """Return `graph` with only the alternatives with slack up to `limit` and those of `chosen`, reduced until `due`.

    - `names`, `flat`: the result of `flatten(graph)`.
    - `slack`: slack of each alternative, [alternatives].
    - `gap`: best cost minus bound; a `limit` of at least this makes the result a proof.
    - `chosen`: flat choices that stay included; None for none. A node without any alternative left has its one with
      least slack.

    `graph` stays unchanged.
    """
    smaller = clone(graph)
    keeps: dict[int, Ints] = {}
    for place, name in enumerate(names):
        low, high = int(flat.node_at[place]), int(flat.node_at[place + 1])
        keep = slack[low:high] <= limit
        if chosen is not None:
            keep[chosen[place]] = True
        if not keep.any():
            keep[np.argmin(slack[low:high])] = True
        if not keep.all():
            keeps[name] = np.flatnonzero(keep)
    proves = limit >= gap
    try:
        restrict(smaller, keeps)
        reduce(smaller, due)
    except (InfeasibleGraph, OverLimit):
        return Restricted(None, 0, proves)
    return Restricted(smaller, table_entries(smaller), proves)
