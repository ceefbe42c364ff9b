"""Leaving out alternatives: message passing on a `Network`, again and again on what is left."""

import math
from collections.abc import Sequence

import numpy as np

from ._flat import Flat, Floats
from ._graph import Ints
from ._network import Messages, Narrowed, Network


_TURNS = 60
_SWEEPS = 6
"""Rounds of message passing between two looks at what can go."""
_ENOUGH = 20_000
"""Table entries at which narrowing further saves nothing."""
_MOST = 6_000_000
"""Table entries, written out, that are handed on at most."""
_PATIENCE = 5
"""Turns without a better bound before giving up."""
_CLOSED = 1e17
"""Costs from here on are not allowed."""


def narrow(
    network: Network, hint: Ints | None = None, start: Messages | None = None, enough: float = math.inf
) -> Narrowed:
    """Leaves out alternatives with which no choices can be as good as the best met (`hint` among them).

    Message passing bounds from below what every alternative costs; the gap to the best choices decides. Costs may be
    rounded to whole picoseconds afterwards: what could be better by that is kept. `start` are messages of a network
    with the same links and other costs; they save most of the work if the costs are alike. A bound of `enough` ends
    it: then nothing more is left out.
    """
    kept = [np.flatnonzero(cost < _CLOSED) for cost in network.costs]
    reachable = _reachable(network, kept)
    if reachable is None:
        # There are no choices at all; that is for the solver to say.
        left = (mine if len(mine) else np.arange(len(c)) for mine, c in zip(kept, network.costs, strict=True))
        return Narrowed(tuple(left), -math.inf, None, True)
    state = _State(network, reachable)
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
    return Narrowed(tuple(state.kept), bound, best, complete, messages)


def _dual(flat: Flat):
    # Imported here, as below: the kernels bring numba, which most problems never need.
    from ._dual import Dual

    return Dual(flat)


class _State:
    """The network without what is gone, as flat arrays, and the messages on it."""

    def __init__(self, network: Network, kept: list[Ints]):
        self.network, self.kept, self._cut = network, kept, False
        self.flat = _pack(network, kept)
        self.dual = _dual(self.flat)

    def begin(self, start: Messages) -> None:
        """Takes over messages of a network with the same links that has all of these alternatives."""
        places = [np.searchsorted(old, mine) for old, mine in zip(start.kept, self.kept, strict=True)]
        held = all(
            (place < len(old)).all() and (old[place] == mine).all()
            for place, old, mine in zip(places, start.kept, self.kept, strict=True)
        )
        if held and start.ends == self._ends():
            near = self.flat.near.tolist()
            self.dual.begin([values[places[node]] for values, node in zip(start.values, near, strict=True)])

    def messages(self) -> Messages | None:
        """The best so far, over what is left; None once something has been left out by its cost."""
        return None if self._cut else Messages(tuple(self.kept), self._ends(), tuple(self.dual.messages()))

    def _ends(self) -> tuple[tuple[int, int], ...]:
        return tuple((link.first, link.second) for link in self.network.links)

    @property
    def entries(self) -> int:
        return len(self.flat.tables)

    def written_out(self) -> int:
        return sum(len(self.kept[link.first]) * len(self.kept[link.second]) for link in self.network.links)

    def whole(self, chosen: Ints) -> Ints:
        """Choices of the whole network from those of what is left."""
        return np.array([mine[c] for mine, c in zip(self.kept, chosen.tolist(), strict=True)], dtype=np.int64)

    def offer(self, choices: Ints, best: Ints | None, upper: float) -> tuple[Ints | None, float]:
        """The better of two choices of the whole network, and its cost; those that exceed memory are of no use."""
        from ._search import profile

        pairs = list(zip(self.kept, choices.tolist(), strict=True))
        places = np.array([np.searchsorted(mine, c) for mine, c in pairs], dtype=np.int64)
        if any(place >= len(mine) or mine[place] != c for place, (mine, c) in zip(places.tolist(), pairs, strict=True)):
            return best, upper
        used = np.zeros(len(self.flat.capacity), dtype=np.int64)
        cost, excess = profile(self.flat, places, used)
        return (choices, cost) if excess == 0 and cost < min(upper, _CLOSED) else (best, upper)

    def cut(self, limit: float, best: Ints | None, always: bool) -> None:
        """Leaves out what has more slack than `limit` if that is a good part, or `always`."""
        kept = self._up_to(self.dual.slack(), limit, best)
        if always or sum(map(len, kept)) < 0.7 * sum(map(len, self.kept)):
            self._keep(kept)

    def cut_to(self, most: int, best: Ints | None) -> None:
        """Leaves out the dearest until the tables, written out, have about so many entries."""
        slack = self.dual.slack()
        share, kept = 1.0, self.kept
        while share > 0.01 and sum(len(kept[k.first]) * len(kept[k.second]) for k in self.network.links) > most:
            share *= 0.8
            kept = self._up_to(slack, float(np.quantile(slack, share)), best)
        self._keep(kept)

    def _up_to(self, slack: Floats, limit: float, best: Ints | None) -> list[Ints]:
        """What has at most `limit` slack, what `best` uses, and the least of every node."""
        kept = []
        for node, mine in enumerate(self.kept):
            own = slack[self.flat.node_at[node] : self.flat.node_at[node + 1]]
            keep = own <= max(limit, own.min())
            if best is not None:
                keep |= mine == best[node]
            kept.append(mine[keep])
        return kept

    def _keep(self, kept: list[Ints]) -> None:
        reachable = _reachable(self.network, kept)
        if reachable is None:
            return
        places = [np.searchsorted(mine, left) for mine, left in zip(self.kept, reachable, strict=True)]
        near = self.flat.near.tolist()
        values = [message[places[node]] for message, node in zip(self.dual.messages(), near, strict=True)]
        self.kept, self._cut, old = reachable, True, self.dual
        self.flat = _pack(self.network, reachable)
        self.dual = _dual(self.flat)
        self.dual.begin(values, old)


def _reachable(network: Network, kept: list[Ints]) -> list[Ints] | None:
    """`kept` without alternatives that some link allows with none of the other node's; None if a node loses all."""
    kept = list(kept)
    for link in network.links:
        if link.first == link.second:
            mine = kept[link.first]
            kept[link.first] = mine[link.table[link.rows[mine], link.columns[mine]] < _CLOSED]
    if not all(map(len, kept)):
        return None
    pairs = [(link, link.table >= _CLOSED) for link in network.links if link.first != link.second]
    closed = [(link, table) for link, table in pairs if table.any()]
    changed = True
    while changed:
        changed = False
        for link, table in closed:
            open_ = ~table[np.ix_(link.rows[kept[link.first]], link.columns[kept[link.second]])]
            for node, some in ((link.first, open_.any(axis=1)), (link.second, open_.any(axis=0))):
                if not some.all():
                    changed = True
                    kept[node] = kept[node][some]
                if not len(kept[node]):
                    return None
                if node == link.first:
                    open_ = open_[some]
    return kept


def _used(values: Ints, count: int) -> tuple[Ints, Ints]:
    """`np.unique` with the inverse, for numbers below `count`: without sorting, several times as fast."""
    used = np.zeros(count, dtype=bool)
    used[values] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[values]


def _pack(network: Network, kept: list[Ints]) -> Flat:
    """Flat arrays of what is left; equal parts of one table are stored once."""
    sizes = [len(mine) for mine in kept]
    around: list[list[tuple[int, int, Ints, int, bool, int, float]]] = [[] for _ in kept]
    stored: dict[tuple[int, bytes, bytes], int] = {}
    tables, filled = [], 0
    costs = [cost[mine].astype(np.float64) for cost, mine in zip(network.costs, kept, strict=True)]
    for number, link in enumerate(network.links):
        if link.first == link.second:
            mine = kept[link.first]
            costs[link.first] += link.scale * link.table[link.rows[mine], link.columns[mine]]
            continue
        used_rows, rows = _used(link.rows[kept[link.first]], link.table.shape[0])
        used_columns, columns = _used(link.columns[kept[link.second]], link.table.shape[1])
        key = (id(link.table), used_rows.tobytes(), used_columns.tobytes())
        if key not in stored:
            part = link.table[np.ix_(used_rows, used_columns)]
            stored[key] = filled
            tables.append(part.ravel())
            filled += part.size
        at = stored[key]
        around[link.first].append((link.second, number, rows, len(used_rows), False, at, link.scale))
        around[link.second].append((link.first, number, columns, len(used_columns), True, at, link.scale))
    place: dict[tuple[int, int], int] = {}
    near_at = [0]
    for node, edges in enumerate(around):
        edges.sort(key=lambda edge: edge[:2])
        for edge in edges:
            place[node, edge[1]] = len(place)
        near_at.append(len(place))
    flat = [(node, edge) for node, edges in enumerate(around) for edge in edges]

    def ints(values: Sequence[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    times = np.unique([term.start for term in network.terms]) if network.usage_limit is not None else ints([])
    terms = sorted(network.terms, key=lambda term: (term.node, term.start, term.stop)) if len(times) else []
    usages = [term.usage[kept[term.node]] for term in terms]
    return Flat(
        node_at=ints([0, *np.cumsum(sizes).tolist()]),
        cost=np.concatenate(costs),
        near_at=ints(near_at),
        near=ints([edge[0] for _, edge in flat]),
        table_at=ints([edge[5] for _, edge in flat]),
        back=ints([place[edge[0], edge[1]] for _, edge in flat]),
        tables=np.concatenate(tables) if tables else np.zeros(0),
        class_at=ints([0, *np.cumsum([len(edge[2]) for _, edge in flat]).tolist()][:-1] if flat else []),
        classes=np.concatenate([edge[2] for _, edge in flat]).astype(np.int32) if flat else np.zeros(0, np.int32),
        height=ints([edge[3] for _, edge in flat]),
        flipped=np.array([edge[4] for _, edge in flat], dtype=bool),
        scale=np.array([edge[6] for _, edge in flat], dtype=np.float64),
        message_at=ints([0, *np.cumsum([sizes[edge[0]] for _, edge in flat]).tolist()]),
        term_at=ints([0, *np.cumsum(np.bincount([t.node for t in terms], minlength=len(kept))).tolist()]),
        start=np.searchsorted(times, [t.start for t in terms]).astype(np.int64),
        stop=np.searchsorted(times, [t.stop for t in terms]).astype(np.int64),
        usage_at=ints([0, *np.cumsum([len(u) for u in usages]).tolist()][:-1] if usages else []),
        usages=np.concatenate(usages).astype(np.int64) if usages else ints([]),
        most=ints([int(u.max()) for u in usages]),
        capacity=np.full(len(times), network.usage_limit or 0, dtype=np.int64),
    )
