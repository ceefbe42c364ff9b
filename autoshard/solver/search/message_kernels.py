"""Compiled message passing: a lower bound by sequential tree-reweighted messages, with memory priced by multipliers.

The method is TRW-S (Kolmogorov, PAMI 28, 2006). A sweep visits the nodes in order. Each node distributes its
reparametrised cost among the edges that lead onward. After a sweep, the costs are split into one function for each node
and one for each edge. This holds for any messages, so the sum of the minima is a lower bound. Multipliers on memory
only change the node costs (Lagrangian relaxation).
"""

import numpy as np

from autoshard.base.numba_jit import njit


@njit(cache=True, nogil=True)
def entry(f, edge, a, b):
    """Return the cost of a directed edge between alternative `a` of its source node and `b` of its target node.

    `f` is a `Flat`; the cost is scaled.
    """
    back = f.back[edge]
    row, column = f.classes[f.class_at[edge] + a], f.classes[f.class_at[back] + b]
    if f.flipped[edge]:
        return f.scale[edge] * f.tables[f.table_at[edge] + column * f.height[edge] + row]
    return f.scale[edge] * f.tables[f.table_at[edge] + row * f.height[back] + column]


@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def _least_rows(f, edge, values, out):
    """Fill `out` [classes of the target node] with the minimum of `values` [classes of the source node] plus the
    table.
    """
    rows, columns = f.height[edge], f.height[f.back[edge]]
    at, scale = f.table_at[edge], f.scale[edge]
    if f.flipped[edge]:
        for c in range(columns):
            line = f.tables[at : at + rows]
            least = np.inf
            for r in range(len(line)):
                total = values[r] + scale * line[r]
                least = total if total < least else least
            out[c] = least
            at += rows
        return
    for c in range(columns):
        out[c] = np.inf
    for r in range(rows):
        add = values[r]
        line = f.tables[at : at + columns]
        for c in range(len(line)):
            total = add + scale * line[c]
            out[c] = total if total < out[c] else out[c]
        at += columns


@njit(cache=True, nogil=True)
def sweep(f, messages, unary, forward, decode, chosen, keep_slack, slack):
    """Run one sweep over all nodes of a `Flat`, ascending if `forward`, else descending; return the lower bound.

    The bound is for the sum of `unary` and edges; the value of the memory capacity is not subtracted.

    - `messages`: for each directed edge, one value per alternative of its target node; updated.
    - `unary`: node costs plus priced memory, [alternatives].
    - `decode`: if True, `chosen` [nodes] receives choices decoded on the way, which may exceed memory.
    - `keep_slack`: if True, `slack` [alternatives] receives a lower bound on each alternative's cost above the bound.
    """
    count = len(f.node_at) - 1
    widest = 0
    for node in range(count):
        widest = max(widest, f.node_at[node + 1] - f.node_at[node])
    own, guess = np.zeros(widest), np.zeros(widest)
    value, out, left = np.zeros(widest), np.zeros(widest), np.zeros(widest)
    bound = 0.0
    if keep_slack:
        slack[:] = 0.0
    for turn in range(count):
        node = turn if forward else count - 1 - turn
        low = f.node_at[node]
        width = f.node_at[node + 1] - low
        ahead, behind = 0, 0
        for a in range(width):
            own[a] = unary[low + a]
            guess[a] = unary[low + a]
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other = f.near[edge]
            at = f.message_at[f.back[edge]]
            for a in range(width):
                own[a] += messages[at + a]
            if (other > node) == forward:
                ahead += 1
                for a in range(width):
                    guess[a] += messages[at + a]
            else:
                behind += 1
                if decode:
                    for a in range(width):
                        guess[a] += entry(f, f.back[edge], chosen[other], a)
        least = own[0]
        for a in range(1, width):
            least = min(least, own[a])
        if decode:
            pick = 0
            for a in range(1, width):
                if guess[a] < guess[pick]:
                    pick = a
            chosen[node] = pick
        parts = max(ahead, behind, 1)
        share = 1.0 / parts
        rest = (parts - ahead) * share
        bound += rest * least
        if keep_slack:
            for a in range(width):
                slack[low + a] += rest * (own[a] - least)
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other, back = f.near[edge], f.back[edge]
            if (other > node) != forward:
                continue
            mine, here, there = f.message_at[back], f.class_at[edge], f.class_at[back]
            for r in range(f.height[edge]):
                value[r] = np.inf
            for a in range(width):
                r = f.classes[here + a]
                value[r] = min(value[r], share * own[a] - messages[mine + a])
            _least_rows(f, edge, value, out)
            small = np.inf
            for c in range(f.height[back]):
                small = min(small, out[c])
            bound += small
            to = f.message_at[edge]
            for b in range(f.node_at[other + 1] - f.node_at[other]):
                messages[to + b] = out[f.classes[there + b]] - small
            if keep_slack:
                # With its new message every column of the edge has minimum 0. The rest of a row is slack of its
                # alternative. The column's minimum is 0, so the target node gets no slack from this edge.
                for c in range(f.height[back]):
                    out[c] = -out[c]
                _least_rows(f, back, out, left)
                for a in range(width):
                    row = share * own[a] - messages[mine + a] + left[f.classes[here + a]]
                    slack[low + a] += max(row, 0.0)
    return bound


@njit(cache=True, nogil=True)
def price_memory(f, prices, unary):
    """Fill `unary` [alternatives] with node costs plus memory at `prices` [times] for each byte.

    Return the value of the capacity at these prices, to subtract from a bound.
    """
    times = len(f.capacity)
    sums = np.zeros(times + 1)
    paid = 0.0
    for time in range(times):
        sums[time + 1] = sums[time] + prices[time]
        paid += prices[time] * f.capacity[time]
    for node in range(len(f.node_at) - 1):
        low, high = f.node_at[node], f.node_at[node + 1]
        for a in range(low, high):
            unary[a] = f.cost[a]
        for term in range(f.term_at[node], f.term_at[node + 1]):
            rate = sums[f.stop[term]] - sums[f.start[term]]
            if rate > 0:
                at = f.usage_at[term]
                for a in range(high - low):
                    unary[low + a] += rate * f.usages[at + a]
    return paid
