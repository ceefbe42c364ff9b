"""Alternatives pruned by message passing, and smaller problems around the best choices."""

import copy
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from autoshard.solver.flat_graph import Flat, Floats, offsets, ragged
from autoshard.solver.job_process import Due, never
from autoshard.solver.network import CLOSED, Messages, Narrowed, Network
from autoshard.solver.reductions import reduce, restrict
from autoshard.solver.residual_graph import Graph, InfeasibleGraph, Ints, OverLimit, table_entries


_TURNS = 60
_SWEEPS = 6
"""Rounds of message passing between two looks at what can go."""
_ENOUGH = 20_000
"""Table entries at which narrowing further saves nothing."""
_MOST = 6_000_000
"""Table entries, written out, that are handed on at most."""
_PATIENCE = 5
"""Turns without a better bound before giving up."""


def narrow(
    network: Network, hint: Ints | None = None, start: Messages | None = None, enough: float = math.inf
) -> Narrowed:
    """Leaves out alternatives with which no choices can be as good as the best met (`hint` among them).

    Message passing bounds from below what every alternative costs; the gap to the best choices decides. Costs may be
    rounded to whole picoseconds afterwards: what could be better by that is kept. `start` are messages of a network
    with the same links and other costs; they save most of the work if the costs are alike. A bound of `enough` ends
    it: then nothing more is left out.
    """
    state = _State(network)
    if not state.narrow_to_reachable():
        # There are no choices at all; that is for the solver to say.
        allowed = (np.flatnonzero(cost < CLOSED) for cost in network.costs)
        left = (mine if len(mine) else np.arange(len(c)) for mine, c in zip(allowed, network.costs, strict=True))
        return Narrowed(tuple(left), -math.inf, None, True)
    if start is not None:
        state.begin(start)
    messages: Messages | None = None
    rounding = float(len(network.costs) + len(network.links) + 1)
    best, upper = (None, math.inf) if hint is None else state.offer(np.asarray(hint), None, math.inf)
    bound, idle = -math.inf, 0
    for _ in range(_TURNS):
        found = state.dual.ascend(_SWEEPS, upper, 1.0)
        best, upper = state.offer(state.whole(found), best, upper)
        before, bound = bound, max(bound, min(state.dual.bound, upper))
        if bound >= enough:
            break
        gap = upper - bound + rounding + 1e-9 * abs(bound)
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
    return Narrowed(state.left(), bound, best, complete, messages)


class _State:
    """The network without what is gone, as flat arrays, and the messages on it."""

    def __init__(self, network: Network):
        # Imported here, as below: the kernels bring numba, which most problems never need.
        from autoshard.solver.packed_network import Packer

        self.network, self.packer = network, Packer(network)
        self._cut = False

    def narrow_to_reachable(self) -> bool:
        """Begins with what may be chosen at all; False if there are no such choices."""
        kept = self.packer.reachable(np.flatnonzero(self.packer.cost < CLOSED))
        if kept is None:
            return False
        self._pack(kept)
        return True

    def _pack(self, kept: Ints) -> None:
        from autoshard.solver.search.message_passing import Dual

        self.kept = kept
        """Of all alternatives of all nodes those left."""
        self.flat = self.packer.pack(kept)
        self.dual = Dual(self.flat)
        self.node_of = self.packer.node_of[kept]

    def left(self) -> tuple[Ints, ...]:
        """For every node the alternatives left."""
        own, at = self.kept - self.packer.whole_at[self.node_of], self.flat.node_at.tolist()
        return tuple(own[low:high] for low, high in zip(at, at[1:], strict=False))

    def begin(self, start: Messages) -> None:
        """Takes over messages of a network with the same links that has all of these alternatives."""
        if start.ends != self._ends():
            return
        counts = np.array([len(old) for old in start.kept], dtype=np.int64)
        old_at = offsets(counts)
        place = np.full(len(self.packer.cost), -1, dtype=np.int64)
        old = np.concatenate(start.kept) + np.repeat(self.packer.whole_at[:-1], counts)
        place[old] = np.arange(len(old)) - np.repeat(old_at[:-1], counts)
        places = place[self.kept]
        if (places < 0).any():
            return
        near, values = self.flat.near, np.concatenate(start.values) if start.values else np.zeros(0)
        into = np.diff(self.flat.message_at)
        taken = places[ragged(self.flat.node_at[near], into)] + np.repeat(offsets(counts[near])[:-1], into)
        self.dual.begin(values[taken])

    def messages(self) -> Messages | None:
        """The best so far, over what is left; None once something has been left out by its cost."""
        return None if self._cut else Messages(self.left(), self._ends(), tuple(self.dual.messages()))

    def _ends(self) -> tuple[tuple[int, int], ...]:
        return tuple((link.first, link.second) for link in self.network.links)

    @property
    def entries(self) -> int:
        return len(self.flat.tables)

    def written_out(self, sizes: Ints | None = None) -> int:
        """Entries of all tables, written out, for so many alternatives of each node."""
        sizes = np.diff(self.flat.node_at) if sizes is None else sizes
        ends = self.packer.ends
        return int((sizes[ends[0::2]] * sizes[ends[1::2]]).sum())

    def whole(self, chosen: Ints) -> Ints:
        """Choices of the whole network from those of what is left."""
        return self.kept[self.flat.node_at[:-1] + chosen] - self.packer.whole_at[:-1]

    def offer(self, choices: Ints, best: Ints | None, upper: float) -> tuple[Ints | None, float]:
        """The better of two choices of the whole network, and its cost; those that exceed memory are of no use."""
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
        """Leaves out what has more slack than `limit` if that is a good part, or `always`."""
        stays = self._up_to(self.dual.slack(), limit, best)
        if always or np.count_nonzero(stays) < 0.7 * len(stays):
            self._keep(stays)

    def cut_to(self, most: int, best: Ints | None) -> None:
        """Leaves out the dearest until the tables, written out, have about so many entries."""
        slack = self.dual.slack()
        share, stays = 1.0, np.ones(len(self.kept), dtype=bool)
        nodes = len(self.packer.whole_at) - 1
        while share > 0.01 and self.written_out(np.bincount(self.node_of[stays], minlength=nodes)) > most:
            share *= 0.8
            stays = self._up_to(slack, float(np.quantile(slack, share)), best)
        self._keep(stays)

    def _up_to(self, slack: Floats, limit: float, best: Ints | None) -> NDArray[np.bool_]:
        """Whether each has at most `limit` slack, is what `best` uses, or the least of its node."""
        least = np.minimum.reduceat(slack, self.flat.node_at[:-1])
        stays = slack <= np.maximum(limit, least)[self.node_of]
        if best is not None:
            stays |= self.kept == (self.packer.whole_at[:-1] + best)[self.node_of]
        return stays

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        kept = self.packer.reachable(self.kept[stays])
        if kept is None:
            return
        left = np.zeros(len(self.packer.cost), dtype=bool)
        left[kept] = True
        stays = left[self.kept]
        near = self.flat.near
        taken = stays[ragged(self.flat.node_at[near], np.diff(self.flat.message_at))]
        values, old, self._cut = self.dual.best_messages[taken], self.dual, True
        self._pack(kept)
        self.dual.begin(values, old)


@dataclasses.dataclass(frozen=True, slots=True)
class Restricted:
    graph: Graph | None
    """None when nothing is left that could be better."""
    size: int
    """Entries of all edge tables."""
    proves: bool
    """No alternative that could lead to a lower cost was left out."""


def clone(graph: Graph) -> Graph:
    """A copy that can be reduced further; its way back goes through the original's."""
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
    """`graph` with only alternatives whose `slack` is at most `limit`, and those of `chosen`, reduced until `due`."""
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
