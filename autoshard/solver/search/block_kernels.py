"""Compiled kernels that find the best choices of a block while all other nodes stay, with memory priced at each time.

A block is eliminated node by node, each into at most two neighbours, so its width is two. Nodes that prevent this keep
their choice. One plan serves several price vectors.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.base.numba_jit import njit
from autoshard.solver.flat_graph import Flat, Floats
from autoshard.solver.residual_graph import Ints


class Workspace(NamedTuple):
    """Scratch arrays of the kernels; one workspace for each thread."""

    mark: Ints
    """[nodes] state of each node: `inside` for members of the present block, `inside - 1` for nodes next to them.

    Smaller values are of earlier moves.
    """
    spot: Ints
    """[nodes] number of each member within the block; valid for members only."""
    members: Ints
    """[block] node of each member."""
    frontier: Ints
    """Candidates for the block that grows."""
    slot: NDArray[np.int32]
    """[block, block] slot of each pair of members, -1 for none."""
    degree: Ints
    """Number of undecided neighbours of each member within the block."""
    fate: Ints
    """State of each member: 0 undecided, 1 eliminated, 2 keeps its choice."""
    order: Ints
    """Member that each step eliminates."""
    up: Ints
    """[block, 2] members into which each step eliminates, -1 for none."""
    slot_at: Ints
    """Offset in `pool` of each filled slot's table, -1 for others."""
    slot_edge: Ints
    """Directed edge of each slot, from its first member to its second; -1 if elimination created the pair."""
    slot_ends: Ints
    """[slots, 2] members of each slot: rows and columns of its table."""
    filled: Ints
    """1 for slots to which elimination adds costs, so that their table is in `pool`."""
    pool: Floats
    """Tables of filled slots."""
    scratch: Floats
    """Two halves for transposed tables."""
    at: Ints
    """[block + 1] offsets of each member's alternatives in `base` and `value`."""
    base: Floats
    """Cost of each alternative with all nodes outside the block fixed."""
    value: Floats
    """`base` plus priced memory; `minimise` changes it."""
    message: Floats
    """Minimum over a member for each alternative of the member into which it is eliminated."""
    trial: Ints
    """[block] choices of the last `minimise`."""
    found: Ints
    """[block] best choices of the present move."""
    low: Ints
    high: Ints
    """[times + 1] changes at each time of the block's present bytes, and of its largest bytes."""
    rank: Ints
    """[times + 1] number of critical times before each time: times at which the block can exceed memory."""
    room: Ints
    """[critical times] bytes that the block may use."""
    price: Floats
    """[critical times] cost of one byte."""
    sums: Floats
    """Running sums of `price` from 0; after `plan`, entry 0 has the effort of one solve."""
    load: Ints
    """[critical times] bytes of the block above its room, negative below."""
    gain: Floats
    """Merit gained recently by each size class of blocks."""
    effort: Floats
    """Table entries touched recently by each size class of blocks."""


def workspace(flat: Flat, largest: int) -> Workspace:
    """Allocate the arrays for blocks of up to `largest` nodes of `flat`, which must not exceed its number of nodes."""
    count, times = len(flat.node_at) - 1, len(flat.capacity)
    widest = int(np.diff(flat.node_at).max())
    biggest = int(np.sort(np.diff(flat.node_at))[-largest:].sum())

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    return Workspace(
        mark=ints(count),
        spot=ints(count),
        members=ints(largest),
        frontier=ints(count + largest),
        slot=np.full((largest, largest), -1, dtype=np.int32),
        degree=ints(largest),
        fate=ints(largest),
        order=ints(largest),
        up=ints(largest, 2),
        slot_at=ints(12 * largest),
        slot_edge=ints(12 * largest),
        slot_ends=ints(12 * largest, 2),
        filled=ints(12 * largest),
        pool=np.zeros(1_000_000),
        scratch=np.zeros(2 * widest * widest),
        at=ints(largest + 1),
        base=np.zeros(biggest),
        value=np.zeros(biggest),
        message=np.zeros(widest),
        trial=ints(largest),
        found=ints(largest),
        low=ints(times + 1),
        high=ints(times + 1),
        rank=ints(times + 1),
        room=ints(times + 1),
        price=np.zeros(times + 1),
        sums=np.zeros(times + 1),
        load=ints(times + 1),
        gain=np.zeros(4),
        effort=np.ones(4),
    )


@njit(cache=True, nogil=True)
def plan(f, w, size, inside):
    """Plan the elimination of the `size` members of a block of `f` (`Flat`), whose `mark` is `inside`.

    Returns the numbers of eliminated members and of slots, both 0 when the block has too many edges. Afterwards `mark`
    is `inside` for eliminated members only; `inside - 1` marks members that keep their choice. `sums[0]` is about the
    number of table entries that one solve touches. `order`, `up` and the slots of `w` (`Workspace`) have the plan.
    """
    effort = 0.0
    slots = 0
    for k in range(size):
        w.degree[k] = 0
        w.fate[k] = 0
        w.slot[k, :size] = -1
    for k in range(size):
        node = w.members[k]
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other = f.near[edge]
            if w.mark[other] == inside and other > node:
                if slots >= len(w.slot_at):
                    return 0, 0
                j = w.spot[other]
                w.slot[k, j] = slots
                w.slot[j, k] = slots
                w.slot_edge[slots] = edge
                w.slot_ends[slots, 0] = k
                w.slot_ends[slots, 1] = j
                w.filled[slots] = 0
                w.slot_at[slots] = -1
                w.degree[k] += 1
                w.degree[j] += 1
                slots += 1
    done, left, used = 0, size, 0
    while left > 0:
        # Lowest degree first, random among equals. If all have degree three or more, the node of highest degree keeps
        # its choice.
        shift = int(np.random.random() * size)
        pick, busiest = -1, -1
        for turn in range(size):
            k = turn + shift
            if k >= size:
                k -= size
            if w.fate[k] != 0:
                continue
            if pick < 0 or w.degree[k] < w.degree[pick]:
                pick = k
                if w.degree[k] <= 1:
                    break
            if busiest < 0 or w.degree[k] > w.degree[busiest]:
                busiest = k
        one, two = -1, -1
        if w.degree[pick] <= 2:
            for j in range(size):
                if w.slot[pick, j] >= 0 and w.fate[j] == 0:
                    if one < 0:
                        one = j
                    else:
                        two = j
                        break
        fits = w.degree[pick] <= 2
        a, b, c = 1, 1, 1
        if fits and two >= 0:
            a = f.node_at[w.members[pick] + 1] - f.node_at[w.members[pick]]
            b = f.node_at[w.members[one] + 1] - f.node_at[w.members[one]]
            c = f.node_at[w.members[two] + 1] - f.node_at[w.members[two]]
            pair = w.slot[one, two]
            extra = 0 if pair >= 0 and w.filled[pair] else b * c
            if a * b * c > 200_000 or used + extra > len(w.pool) or slots >= len(w.slot_at):
                fits = False
                busiest = pick
        if not fits:
            w.fate[busiest] = 2
            for j in range(size):
                if w.slot[busiest, j] >= 0 and w.fate[j] == 0:
                    w.degree[j] -= 1
            left -= 1
            continue
        w.fate[pick] = 1
        left -= 1
        w.order[done] = pick
        w.up[done, 0] = one
        w.up[done, 1] = two
        done += 1
        effort += 50
        if one >= 0:
            w.degree[one] -= 1
            effort += (f.node_at[w.members[pick] + 1] - f.node_at[w.members[pick]]) * (
                f.node_at[w.members[one] + 1] - f.node_at[w.members[one]]
            )
        if two >= 0:
            w.degree[two] -= 1
            effort += a * b * c
            pair = w.slot[one, two]
            if pair < 0:
                pair = slots
                slots += 1
                w.slot[one, two] = pair
                w.slot[two, one] = pair
                w.slot_edge[pair] = -1
                w.slot_ends[pair, 0] = one
                w.slot_ends[pair, 1] = two
                w.filled[pair] = 0
                w.degree[one] += 1
                w.degree[two] += 1
            if w.filled[pair] == 0:
                w.filled[pair] = 1
                w.slot_at[pair] = used
                used += b * c
    w.sums[0] = effort
    w.at[0] = 0
    for k in range(size):
        node = w.members[k]
        w.at[k + 1] = w.at[k] + f.node_at[node + 1] - f.node_at[node]
        if w.fate[k] == 2:
            w.mark[node] = inside - 1
    # A member may keep its choice after others were eliminated into it. It is then fixed, like nodes outside the block.
    for step in range(done):
        if w.up[step, 1] >= 0 and w.fate[w.up[step, 1]] == 2:
            w.up[step, 1] = -1
        if w.up[step, 0] >= 0 and w.fate[w.up[step, 0]] == 2:
            w.up[step, 0] = w.up[step, 1]
            w.up[step, 1] = -1
    return done, slots


@njit(cache=True, nogil=True)
def _table(f, w, first, second, part):
    """Return (array, offset) of the table of two members with a slot, [alternatives of first, of second], row-major.

    A table stored the other way round is transposed into half `part` (0 or 1) of `scratch`.
    """
    slot = w.slot[first, second]
    edge = w.slot_edge[slot]
    if w.filled[slot] == 0:
        if w.slot_ends[slot, 0] == first:
            return f.tables, f.table_at[edge]
        return f.tables, f.table_at[f.back[edge]]
    at = w.slot_at[slot]
    if w.slot_ends[slot, 0] == first:
        return w.pool, at
    rows = w.at[first + 1] - w.at[first]
    columns = w.at[second + 1] - w.at[second]
    to = part * (len(w.scratch) // 2)
    for b in range(columns):
        for a in range(rows):
            w.scratch[to + a * columns + b] = w.pool[at + b * rows + a]
    return w.scratch, to


@njit(cache=True, nogil=True)
def minimise(f, w, done, slots, flip):
    """Return the minimum over the planned block of `value` (changed) plus edges; fill `trial` with its choices.

    Only entries of eliminated members are filled. `done` and `slots` are the result of `plan`. Ties go to a member's
    last alternative if `flip`, else to its first.
    """
    for slot in range(slots):
        if w.filled[slot]:
            one, two = w.slot_ends[slot, 0], w.slot_ends[slot, 1]
            amount = (w.at[one + 1] - w.at[one]) * (w.at[two + 1] - w.at[two])
            at = w.slot_at[slot]
            edge = w.slot_edge[slot]
            if edge < 0:
                for k in range(amount):
                    w.pool[at + k] = 0.0
            else:
                source = f.table_at[edge]
                for k in range(amount):
                    w.pool[at + k] = f.tables[source + k]
    total = 0.0
    for step in range(done):
        node, one, two = w.order[step], w.up[step, 0], w.up[step, 1]
        low, width = w.at[node], w.at[node + 1] - w.at[node]
        if one < 0:
            least = w.value[low]
            for a in range(1, width):
                least = min(least, w.value[low + a])
            total += least
            continue
        first, at = _table(f, w, node, one, 0)
        columns = w.at[one + 1] - w.at[one]
        if two < 0:
            for b in range(columns):
                w.message[b] = w.value[low] + first[at + b]
            for a in range(1, width):
                add = w.value[low + a]
                at += columns
                for b in range(columns):
                    w.message[b] = min(w.message[b], add + first[at + b])
            to = w.at[one]
            for b in range(columns):
                w.value[to + b] += w.message[b]
            continue
        slot = w.slot[one, two]
        if w.slot_ends[slot, 0] != one:
            one, two = two, one
            first, at = _table(f, w, node, one, 0)
            columns = w.at[one + 1] - w.at[one]
        second, start = _table(f, w, node, two, 1)
        span = w.at[two + 1] - w.at[two]
        to = w.slot_at[slot]
        for b in range(columns):
            for c in range(span):
                w.message[c] = np.inf
            for a in range(width):
                add = w.value[low + a] + first[at + a * columns + b]
                if add >= 1e17:
                    continue
                row = start + a * span
                for c in range(span):
                    w.message[c] = min(w.message[c], add + second[row + c])
            for c in range(span):
                w.pool[to + c] += min(w.message[c], 1e18)
            to += span
    for step in range(done - 1, -1, -1):
        node, one, two = w.order[step], w.up[step, 0], w.up[step, 1]
        low, width = w.at[node], w.at[node + 1] - w.at[node]
        if one >= 0:
            first, at = _table(f, w, node, one, 0)
            columns = w.at[one + 1] - w.at[one]
            at += w.trial[one]
            for a in range(width):
                w.value[low + a] += first[at + a * columns]
        if two >= 0:
            first, at = _table(f, w, node, two, 0)
            columns = w.at[two + 1] - w.at[two]
            at += w.trial[two]
            for a in range(width):
                w.value[low + a] += first[at + a * columns]
        pick = 0
        for a in range(1, width):
            if w.value[low + a] < w.value[low + pick] or (flip and w.value[low + a] == w.value[low + pick]):
                pick = a
        w.trial[node] = pick
    return total
