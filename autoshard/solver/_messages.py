"""Compiled message passing: a lower bound by sequential tree-reweighted messages, memory priced by multipliers.

TRW-S: Kolmogorov, PAMI 28, 2006. Nodes are taken in order; each shares its reparametrised cost out among the edges that
lead onward. After a sweep, costs are split into one function per node and one per edge, whatever the messages are, so
the sum of their minima is a lower bound; multipliers on memory only change the node costs (Lagrangian).
"""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def sweep(f, messages, unary, forward, decode, chosen, keep_slack, slack):
    """One sweep over all nodes, ascending when `forward`; returns the lower bound.

    `messages` [directed edge -> alternatives of the node it leads to]; `unary` [alternatives] node costs with memory
    priced in. With `decode`, `chosen` [nodes] is filled with choices made on the way. With `keep_slack`, `slack`
    [alternatives] is filled with a bound on what an alternative costs above the lower bound.
    """
    count = len(f.node_at) - 1
    widest = 0
    for node in range(count):
        widest = max(widest, f.node_at[node + 1] - f.node_at[node])
    own, out, guess = np.zeros(widest), np.zeros(widest), np.zeros(widest)
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
                    row = f.table_at[f.back[edge]] + chosen[other] * width
                    for a in range(width):
                        guess[a] += f.tables[row + a]
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
            other = f.near[edge]
            if (other > node) != forward:
                continue
            span = f.node_at[other + 1] - f.node_at[other]
            at = f.table_at[edge]
            mine = f.message_at[f.back[edge]]
            for b in range(span):
                out[b] = np.inf
            for a in range(width):
                add = share * own[a] - messages[mine + a]
                for b in range(span):
                    out[b] = min(out[b], add + f.tables[at + b])
                at += span
            small = out[0]
            for b in range(1, span):
                small = min(small, out[b])
            bound += small
            to = f.message_at[edge]
            for b in range(span):
                messages[to + b] = out[b] - small
            if keep_slack:
                _edge_slack(f, messages, own, share, small, edge, node, slack)
    return bound


@njit(cache=True, nogil=True)
def _edge_slack(f, messages, own, share, small, edge, node, slack):
    """With its new message every column of the edge has least 0; what a row has left over is slack of its alternative.

    A column is 0 at its least, so the far end gets nothing from this edge.
    """
    low, width = f.node_at[node], f.node_at[node + 1] - f.node_at[node]
    other = f.near[edge]
    span = f.node_at[other + 1] - f.node_at[other]
    at, mine, to = f.table_at[edge], f.message_at[f.back[edge]], f.message_at[edge]
    for a in range(width):
        add = share * own[a] - messages[mine + a] - small
        row = np.inf
        for b in range(span):
            row = min(row, add + f.tables[at + b] - messages[to + b])
        slack[low + a] += max(row, 0.0)
        at += span


@njit(cache=True, nogil=True)
def price_memory(f, prices, unary):
    """Fills `unary` with node costs plus memory at `prices` [times]; returns what the prices pay for the capacity."""
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
