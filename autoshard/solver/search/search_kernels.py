"""Compiled local search: free a random block of nodes, choose all of them again at once, accept if no worse.

Prices on the times that a block can exceed are updated by a subgradient method (`Held, Wolfe and Crowder, Math. Prog.
6, 1974`). It ends when the block's own dual bound proves that nothing better exists, or after a fixed number of steps.
"""

import numpy as np

from autoshard.base.numba_jit import njit
from autoshard.solver.search.block_kernels import minimise, plan
from autoshard.solver.search.message_kernels import entry


@njit(cache=True, nogil=True)
def profile(f, chosen, used):
    """Fill `used` [times] with the bytes that `chosen` uses; return node and edge costs, and bytes above capacity.

    The bytes above capacity are summed over all times. `f` is a `Flat`.
    """
    total, excess = 0.0, 0.0
    used[:] = 0
    for node in range(len(chosen)):
        total += f.cost[f.node_at[node] + chosen[node]]
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other = f.near[edge]
            if other > node:
                total += entry(f, edge, chosen[node], chosen[other])
        for term in range(f.term_at[node], f.term_at[node + 1]):
            amount = f.usages[f.usage_at[term] + chosen[node]]
            if f.start[term] < f.stop[term]:
                used[f.start[term]] += amount
                if f.stop[term] < len(used):
                    used[f.stop[term]] -= amount
    for time in range(len(f.capacity)):
        if time > 0:  # turns changes at each time into totals
            used[time] += used[time - 1]
        if used[time] > f.capacity[time]:
            excess += used[time] - f.capacity[time]
    return total, excess


@njit(cache=True, nogil=True)
def _live(f, node, time):
    """Return True if a node has memory in use at a time."""
    for term in range(f.term_at[node], f.term_at[node + 1]):
        if f.start[term] <= time < f.stop[term]:
            return True
    return False


@njit(cache=True, nogil=True)
def _grow(f, w, used, broken, goal, inside):
    """Choose the members of a block around one or several random seeds; return their number.

    Seeds are often live at a time near or above capacity, always if memory is `broken`. `goal` is the target size.
    `w.mark` of a member becomes `inside`, that of a candidate `inside - 1`. Blocks grow along edges: half of them
    breadth first, the others from random or the latest candidates. `used` are the present bytes, [times].
    """
    count, times = len(f.node_at) - 1, len(f.capacity)
    seeds = 1
    if np.random.random() < 0.4:
        seeds = 1 + int(np.random.random() * goal / 4)
    aim = -1
    if times > 0 and (broken or np.random.random() < 0.6):
        for _ in range(40):
            time = int(np.random.random() * times)
            if used[time] * 1.02 >= f.capacity[time]:
                aim = time
                break
        if broken:
            begin = int(np.random.random() * times)
            for shift in range(times):
                time = (begin + shift) % times
                if used[time] > f.capacity[time]:
                    aim = time
                    break
    waiting = 0
    for _ in range(seeds):
        node = int(np.random.random() * count)
        if aim >= 0:
            for _ in range(60):
                if _live(f, node, aim):
                    break
                node = int(np.random.random() * count)
        if w.mark[node] < inside - 1:
            w.mark[node] = inside - 1
            w.frontier[waiting] = node
            waiting += 1
    size = 0
    style = np.random.random()
    head = 0
    while waiting > head and size < goal:
        if style < 0.5:
            # Breadth first gives a compact ball.
            node = w.frontier[head]
            head += 1
        else:
            pick = waiting - 1
            if style < 0.85:
                pick = head + int(np.random.random() * (waiting - head))
            node = w.frontier[pick]
            waiting -= 1
            w.frontier[pick] = w.frontier[waiting]
        w.mark[node] = inside
        w.spot[node] = size
        w.members[size] = node
        size += 1
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other = f.near[edge]
            if w.mark[other] < inside - 1:
                w.mark[other] = inside - 1
                w.frontier[waiting] = other
                waiting += 1
    return size


@njit(cache=True, nogil=True)
def _residual(f, w, chosen, used, prices, penalty, done, inside):
    """Compute the costs of the block with all other nodes fixed, and the times at which the block can exceed memory.

    The costs go to `w.base`, the times to `w.rank`, `w.room` and `w.price`, with prices capped by `penalty`. Returns
    the number of these times, and the bytes above capacity at present, summed over them.
    """
    times = len(f.capacity)
    first, last = times, 0
    for step in range(done):
        k = w.order[step]
        node = w.members[k]
        low, width = w.at[k], w.at[k + 1] - w.at[k]
        for a in range(width):
            w.base[low + a] = f.cost[f.node_at[node] + a]
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other = f.near[edge]
            if w.mark[other] != inside:
                row = f.table_at[f.back[edge]] + chosen[other] * width
                for a in range(width):
                    w.base[low + a] += f.tables[row + a]
        for term in range(f.term_at[node], f.term_at[node + 1]):
            first = min(first, f.start[term])
            last = max(last, f.stop[term])
    if first >= last:
        return 0, 0.0
    for time in range(first, last + 1):
        w.low[time] = 0
        w.high[time] = 0
    for step in range(done):
        node = w.members[w.order[step]]
        for term in range(f.term_at[node], f.term_at[node + 1]):
            amount = f.usages[f.usage_at[term] + chosen[node]]
            w.low[f.start[term]] += amount
            w.low[f.stop[term]] -= amount
            w.high[f.start[term]] += f.most[term]
            w.high[f.stop[term]] -= f.most[term]
    count, now, high = 0, 0, 0
    excess = 0.0
    for time in range(first, last):
        w.rank[time] = count
        now += w.low[time]
        high += w.high[time]
        left = f.capacity[time] - used[time] + now
        if high > left:
            w.room[count] = left
            w.price[count] = min(prices[time], penalty)
            if now > left:
                excess += now - left
            count += 1
    w.rank[last] = count
    return count, excess


@njit(cache=True, nogil=True)
def _price(f, w, kept, done):
    """Fill `w.value` with the block's costs plus memory at the current prices.

    Return the value of the block's room at these prices. `kept` is the number of critical times, `done` that of
    eliminated members.
    """
    w.sums[0] = 0.0
    paid = 0.0
    for k in range(kept):
        w.sums[k + 1] = w.sums[k] + w.price[k]
        paid += w.price[k] * w.room[k]
    for step in range(done):
        k = w.order[step]
        low, width = w.at[k], w.at[k + 1] - w.at[k]
        for a in range(low, low + width):
            w.value[a] = w.base[a]
        if kept > 0:
            node = w.members[k]
            for term in range(f.term_at[node], f.term_at[node + 1]):
                rate = w.sums[w.rank[f.stop[term]]] - w.sums[w.rank[f.start[term]]]
                if rate > 0:
                    at = f.usage_at[term]
                    for a in range(width):
                        w.value[low + a] += rate * f.usages[at + a]
    return paid


@njit(cache=True, nogil=True)
def _block_cost(f, w, picks, done, inside):
    """Return the cost of the choices `picks` [members] of a block: nodes, and edges inside of and out of the block."""
    total = 0.0
    for step in range(done):
        k = w.order[step]
        node = w.members[k]
        total += w.base[w.at[k] + picks[k]]
        for edge in range(f.near_at[node], f.near_at[node + 1]):
            other = f.near[edge]
            if other > node and w.mark[other] == inside:
                j = w.spot[other]
                total += f.tables[f.table_at[edge] + picks[k] * (w.at[j + 1] - w.at[j]) + picks[j]]
    return total


@njit(cache=True, nogil=True)
def _overload(f, w, picks, kept, done):
    """Fill `w.load` with the block's bytes above room (negative below) at each of the `kept` critical times.

    Return the sum of the positive ones, and the sum of squares at times that are above room or have a price.
    """
    for k in range(kept + 1):
        w.load[k] = 0
    for step in range(done):
        k = w.order[step]
        node = w.members[k]
        for term in range(f.term_at[node], f.term_at[node + 1]):
            amount = f.usages[f.usage_at[term] + picks[k]]
            w.load[w.rank[f.start[term]]] += amount
            w.load[w.rank[f.stop[term]]] -= amount
    run = 0
    excess, square = 0.0, 0.0
    for k in range(kept):
        run += w.load[k]
        over = run - w.room[k]
        w.load[k] = over
        if over > 0:
            excess += over
        if over > 0 or w.price[k] > 0:
            square += float(over) * float(over)
    return excess, square


@njit(cache=True, nogil=True)
def _kind(w):
    """Return the size class (0 to 3) of the next block: mostly the one with the best recent gain per effort.

    In 30 % of calls, and without any gain, it is the one with least effort. Gains and efforts decay by 0.2 % a call.
    """
    best, rate, even = 0, -1.0, 0
    for kind in range(4):
        if w.gain[kind] / w.effort[kind] > rate:
            best, rate = kind, w.gain[kind] / w.effort[kind]
        if w.effort[kind] < w.effort[even]:
            even = kind
    for kind in range(4):
        w.gain[kind] *= 0.998
        w.effort[kind] *= 0.998
    if np.random.random() < 0.3 or rate <= 0:
        # The class with the least effort, so that all get about the same time.
        return even
    return best


@njit(cache=True, nogil=True)
def improve(f, w, prices, chosen, used, seed, moves, penalty, largest, steps, slack, best, state):
    """Run `moves` block moves on `chosen` and its memory profile `used`, both changed in place.

    A move is accepted if the merit (cost plus penalty) does not exceed the present one, or the best by `slack`. Size
    classes of blocks are 2 %, 8 %, 30 % and all of `largest`, each times a random factor from 0.5 to 1.

    - `f`, `w`: `Flat` from `flatten`, and its `Workspace`.
    - `prices`: initial memory prices, [times].
    - `penalty`: cost of one byte above the limit at one time.
    - `largest`: largest number of nodes of a block.
    - `steps`: subgradient steps of one move.
    - `slack`: largest merit above the best that a move may leave.
    - `best`: receives the best choices within memory.
    - `state`: cost; excess bytes summed over times; best cost without excess; best merit.
    """
    np.random.seed(seed)
    stamp = w.mark.max() // 2 + 1
    for _ in range(moves):
        stamp += 1
        inside = 2 * stamp + 1
        kind = _kind(w)
        goal = max(2, int(largest * (0.02, 0.08, 0.3, 1.0)[kind] * (0.5 + 0.5 * np.random.random())))
        size = _grow(f, w, used, state[1] > 0, goal, inside)
        done, slots = plan(f, w, size, inside)
        effort = w.sums[0]
        w.effort[kind] += len(f.capacity) + size * size
        if done == 0:
            continue
        kept, excess = _residual(f, w, chosen, used, prices, penalty, done, inside)
        for step in range(done):
            k = w.order[step]
            w.trial[k] = chosen[w.members[k]]
        old_cost = _block_cost(f, w, w.trial, done, inside)
        old_merit = old_cost + penalty * excess
        allowed = old_merit + max(slack + state[3] - (state[0] + penalty * state[1]), 0.0)
        flip = np.random.random() < 0.5
        new_merit, new_cost, new_excess = np.inf, 0.0, 0.0
        pace, top = 1.0, -np.inf
        for step in range(steps):
            paid = _price(f, w, kept, done)
            bound = minimise(f, w, done, slots, flip) - paid
            w.effort[kind] += effort + kept
            trial_cost = _block_cost(f, w, w.trial, done, inside)
            trial_excess, square = _overload(f, w, w.trial, kept, done)
            merit = trial_cost + penalty * trial_excess
            if merit < new_merit:
                new_merit, new_cost, new_excess = merit, trial_cost, trial_excess
                w.found[:size] = w.trial[:size]
            if square == 0.0 or new_merit <= bound + 0.5 or bound >= allowed:
                break
            if bound > top:
                top = bound
            else:
                pace *= 0.7
            target = min(old_merit, new_merit)
            # Polyak's step: (target - bound) / squared norm of the subgradient; the second term keeps it positive.
            stride = pace * (max(target - bound, 0.0) + 1e-3 * abs(target) / (step + 1)) / square
            for k in range(kept):
                w.price[k] = min(max(w.price[k] + stride * w.load[k], 0.0), penalty)
        if not new_merit <= allowed:  # no trial is known to be better; also true for NaN
            continue
        w.gain[kind] += max(old_merit - new_merit, 0.0)
        for step in range(done):
            k = w.order[step]
            node = w.members[k]
            if w.found[k] == chosen[node]:
                continue
            for term in range(f.term_at[node], f.term_at[node + 1]):
                at = f.usage_at[term]
                change = f.usages[at + w.found[k]] - f.usages[at + chosen[node]]
                if change:
                    for time in range(f.start[term], f.stop[term]):
                        used[time] += change
            chosen[node] = w.found[k]
        state[0] += new_cost - old_cost
        state[1] += new_excess - excess
        state[3] = min(state[3], state[0] + penalty * state[1])
        if state[1] <= 0 and state[0] < state[2]:
            state[2] = state[0]
            best[:] = chosen
