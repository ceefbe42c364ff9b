"""Compiled pricing of transitions: the results of `waves` and `relayouts` for many pairs of states at once.

`waves` (numpy) is the reference, with the reasons, and prices single pairs. These kernels repeat it pair by pair and
return bitwise equal floats, which a test compares. They import numba, so only large tables use them.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.base.numba_jit import njit
from autoshard.cost import FIRST_POWER
from autoshard.planning.xla.axis_assignments import BUFFERS, PARTIAL, WHOLE


Floats = NDArray[np.float64]
"""Array of seconds, bytes or elements."""
Ints = NDArray[np.int64]
"""Array of states, kinds or sets of axes."""

GATHER, SCATTER, REDUCE, EXCHANGE, PERMUTE = range(5)
"""Positions of the kinds in `cost.KINDS`."""
AS_ONE, STAGED, AS_SUM = range(3)
"""Positions of the members of `Emitted`."""


class Rules(NamedTuple):
    """Emission and prices of collectives on one mesh; a group of mesh axes is a set of bits, the first axis is 1."""

    parts: Floats
    """Devices in a group, [groups]."""
    scattering: Ints
    """Form (`Emitted`) of a sum whose result is split, [groups]."""
    gathering: Ints
    """Form (`Emitted`) of a small all-gather, [groups]."""
    small: Floats
    """Largest gathered bytes of such an all-gather, [groups]."""
    tpu: bool
    """True if the compiler joins sums and gathers as TPU compilers do (`Traits.joins_sums`)."""
    tile: tuple[float, float]
    """Rows and lanes of a TPU's tile of 4-byte elements."""
    scratch: float
    """Bytes of on-chip memory that a reduce-scatter may use (`scatter_scratch`)."""
    launch: Floats
    """Launch seconds, [kinds, groups]."""
    latency: Floats
    """Least seconds on a kind of links, [kinds, levels, groups]."""
    per_byte: Floats
    """Seconds per byte on a kind of links, [kinds, levels, groups]."""
    phases: Floats
    """Number of repetitions of the whole transfer, [kinds]."""
    curves: Floats
    """Measured seconds at `2 ** POWERS` bytes, [kinds, groups, points]; no points for chips that were not measured."""


class Ends(NamedTuple):
    """States at both ends of a reshard, and the tensor's size at the source."""

    source: Ints
    """Dim that each mesh axis splits, [from, axes]."""
    target: Ints
    """Dim that each mesh axis splits, [to, axes]."""
    local: Floats
    """Elements on one device, [from]."""
    minor: Floats
    """Elements of the last two dims on one device, [from, 2]."""
    dims: int
    """Number of the tensor's dims."""


class Sizes(NamedTuple):
    """Bytes of an element, and the treatment of sums."""

    item: int
    """Bytes of an element outside of sums."""
    reduced: int
    """Bytes of an element where partial sums are reduced."""
    collected: bool
    """True if a sum is a gather of partial results, which every device then combines."""
    stacked: bool
    """True if partial results are stacks of matrices (`Path.stacked`)."""


class Steps(NamedTuple):
    """Collectives of one pair, in order."""

    place: Ints
    """Position of a collective among all that any pair can have."""
    kind: Ints
    """Position of its kind in `cost.KINDS`."""
    group: Ints
    """Mesh axes of its group as bits."""
    size: Floats
    """Bytes as `Collectives.time` counts them."""


@njit(cache=True, nogil=True)
def places(axes, dims):
    """Return the number of positions that `Steps.place` can have for so many mesh axes and dims.

    They are those of sums, one permute, gathers and all-to-alls, in this order.
    """
    return axes * (2 * (axes + 1) + 1) + 2 + 2 * (dims + axes) + 1 + axes


# The functions that run for every pair are inlined, since passing the records costs as much as the work.
@njit(cache=True, nogil=True, inline="always")
def _add(steps, count, place, kind, group, size):
    """Write a collective at position `count` of `steps` unless its group is empty; return the new count."""
    if group == 0:
        return count
    steps.place[count] = place
    steps.kind[count] = kind
    steps.group[count] = group
    steps.size[count] = size
    return count + 1


@njit(cache=True, nogil=True, inline="always")
def _tiled(rules, rows, lanes, packed):
    """Return the elements in the tiles of a matrix, as `axis_assignments.tiled_bytes` does."""
    tall = 8.0 if rows > 4 else 4.0 if rows > 2 else 2.0 if rows > 1 else 1.0
    tall = max(tall, float(packed))
    return np.ceil(rows / tall) * tall * (np.ceil(lanes / rules.tile[1]) * rules.tile[1])


@njit(cache=True, nogil=True, inline="always")
def _breaks_matrix(rules, first, last, on_first, on_last, packed, devices):
    """Return True if a matrix is summed as a whole, as `axis_assignments._breaks_matrix` does for one pair.

    - `first`, `last`: elements of both dims on one device.
    - `on_first`, `on_last`: True if the sum ends split in this dim.
    - `packed`: elements in 4 bytes.
    - `devices`: devices in the group.
    """
    first, last = np.ceil(first), np.ceil(last)
    turned = _tiled(rules, last, first, packed) < _tiled(rules, first, last, packed)
    rows, lanes = (last, first) if turned else (first, last)
    across, down = (on_first, on_last) if turned else (on_last, on_first)
    odd = lanes % (rules.tile[1] * packed) != 0.0 or 2 * rows <= rules.tile[0]
    odd |= 4.0 * rules.tile[0] * lanes > rules.scratch / (devices + BUFFERS)
    return (across and odd) or (down and rows % rules.tile[0] != 0.0)


@njit(cache=True, nogil=True, inline="always")
def _sum(rules, f, t, last, minor, local, sizes, steps):
    """Fill in the reductions of a pair in `steps`; return their number and the elements left on a device.

    - `f`, `t`: states at the source and at the target, [axes].
    - `last`: number of the last dim.
    - `minor`: elements of the last two dims on one device, [2].
    - `local`: elements on one device.
    - `sizes`: bytes of an element, and the treatment of sums.
    """
    axes = len(f)
    count, summed, totals, ends_last, ends_rows = 0, 0, 0, 0, 0
    item, packed = sizes.reduced, max(1, 4 // sizes.reduced)
    rows, lanes = minor[0], minor[1]
    for axis in range(axes):
        if t[axis] == last:
            ends_last |= 1 << axis
        elif t[axis] == last - 1:
            ends_rows |= 1 << axis
    for axis in range(axes):
        place = axis * (2 * (axes + 1) + 1)
        counted = f[axis] > PARTIAL
        for earlier in range(axis):
            counted |= f[earlier] == f[axis]
        if counted:
            continue
        scatter, total, split, dims = 0, 0, -1, 0
        for other in range(axes):
            if f[other] == f[axis]:
                if t[other] >= 0:
                    scatter |= 1 << other
                else:
                    total |= 1 << other
            # GPU compilers first make one sum of those over all factors.
            if t[other] >= 0 and (f[other] == f[axis] or not rules.tpu and f[other] <= PARTIAL):
                dims += t[other] != split
                split = t[other]
        how = rules.scattering[scatter]
        if how == AS_ONE and dims > 1:  # a reduce-scatter splits one dim
            how = AS_SUM
        # Turn 0 reduces all axes at once; each later turn reduces one axis.
        begin = 1 if how == STAGED else 0
        end = axes + 1 if how == STAGED else 1 if how == AS_ONE else 0
        for turn in range(begin, end):
            group = scatter & 1 << turn - 1 if how == STAGED else scatter
            if group == 0:
                continue
            rows /= rules.parts[group & ends_rows]
            lanes /= rules.parts[group & ends_last]
            broken = sizes.stacked and (group & ends_rows) > 0 and rows % (packed * rules.tile[0]) != 0.0
            if last < 2:
                on_rows, on_last = (group & ends_rows) > 0, (group & ends_last) > 0
                devices = rules.parts[group]
                broken = last == 0 or _breaks_matrix(rules, rows, lanes, on_rows, on_last, packed, devices)
            elif (group & ends_last) > 0 and (sizes.stacked or lanes % rules.tile[1] == 0.0):
                broken |= lanes % (packed * rules.tile[1]) != 0.0
            whole = rules.tpu and broken
            kind = REDUCE if whole else SCATTER
            count = _add(steps, count, place + 2 * turn + (not whole), kind, group, local * item)
            local /= rules.parts[group]
        sliced = scatter if how == AS_SUM else 0
        if rules.tpu:
            totals |= total | sliced
        else:
            count = _add(steps, count, place + 2 * (axes + 1), REDUCE, total | sliced, local * item)
        summed |= sliced
    count = _add(steps, count, axes * (2 * (axes + 1) + 1), REDUCE, totals, local * item)
    return count, local / rules.parts[summed]


@njit(cache=True, nogil=True, inline="always")
def _conflicts(f, t, moved, gathered):
    """Return True if the pair gathers everything, True if its moves are one, and the axes that need a permute.

    The axes are a set of bits, as are `moved` and `gathered`. `f` and `t` are the states at both ends. It repeats
    `axis_assignments._conflicts` for one pair.
    """
    axes = len(f)
    shares, together, swaps, reshards, several = False, True, 0, 0, 0
    for a in range(axes):
        here = (moved >> a & 1) == 1
        reshards += here
        several += here or (gathered >> a & 1) == 1
        for b in range(axes):
            if a == b:
                continue
            same_from, same_to = f[a] == f[b], t[a] == t[b]
            if here and ((same_from and f[b] >= 0) or (same_to and t[b] >= 0)):
                shares = True
            if here and moved >> b & 1 and not (same_from and same_to):
                together = False
            if b > a and f[b] >= 0 and f[b] == t[b] and (same_from or same_to):
                if here or gathered >> a & 1 or (f[a] <= WHOLE and t[a] >= 0):
                    swaps |= 1 << a
            if b > a and here and same_to and f[b] == WHOLE:
                swaps |= 1 << a
    joint = together and reshards > 1 and gathered == 0
    return shares and several > 1 and not joint, joint, swaps


@njit(cache=True, nogil=True, inline="always")
def _steps(rules, f, t, summed, shared, dims, minor, local, sizes, steps):
    """Fill in the collectives of one pair as `waves` has them; return their number.

    - `f`, `t`: states at the source and at the target, [axes].
    - `summed`: True if there are partial sums.
    - `shared`: True if axes share a dim at either end.
    - `dims`: number of the tensor's dims.
    - `minor`, `local`: elements of the last two dims, and of the tensor, on one device.
    - `steps`: filled with the collectives.
    """
    axes, count = len(f), 0
    if summed:
        count, local = _sum(rules, f, t, dims - 1, minor, local, sizes, steps)
    place = axes * (2 * (axes + 1) + 1) + 1
    moved, gathered, sliced, split = 0, 0, 0, 0
    changed = False
    for axis in range(axes):
        changed |= f[axis] != t[axis]
        if f[axis] >= 0:
            split |= 1 << axis
            if t[axis] == WHOLE:
                gathered |= 1 << axis
            elif t[axis] >= 0 and t[axis] != f[axis]:
                moved |= 1 << axis
        elif f[axis] == WHOLE and t[axis] >= 0:
            sliced |= 1 << axis
    whole, joint, swaps = False, False, 0
    if changed and shared:  # otherwise no two moves interact
        whole, joint, swaps = _conflicts(f, t, moved, gathered)
    if gathered == 0 and not whole:
        local /= rules.parts[sliced]
    if swaps > 0 and not whole:
        count = _add(steps, count, place, PERMUTE, swaps | 1 << axes - 1, local * sizes.item)
    place += 1
    everything = split if whole else gathered
    small = local * rules.parts[everything] * sizes.item <= rules.small[everything]
    together = 0 if small and rules.gathering[everything] == STAGED else everything
    # Gathers are all joined or all staged, and a TPU emits joined gathers as one. Other turns are empty.
    begin = 0 if together else dims
    end = dims + axes if together == 0 else 1 if rules.tpu else dims
    for turn in range(begin, end if everything else begin):
        group = 0
        if turn >= dims:
            group = (everything ^ together) & 1 << dims + axes - 1 - turn
        elif not rules.tpu:
            for axis in range(axes):
                if f[axis] == dims - 1 - turn:
                    group |= together & 1 << axis
        else:
            group = together
        local *= rules.parts[group]
        kind = REDUCE if small and together > 0 and rules.gathering[everything] == AS_SUM else GATHER
        count = _add(steps, count, place + 2 * turn + (kind == GATHER), kind, group, local * sizes.item)
    place += 2 * (dims + axes)
    reshards = 0 if whole else moved
    if joint:
        return _add(steps, count, place, EXCHANGE, reshards, local * sizes.item)
    for axis in range(axes if reshards else 0):
        count = _add(steps, count, place + 1 + axis, EXCHANGE, reshards & 1 << axis, local * sizes.item)
    return count


@njit(cache=True, nogil=True, inline="always")
def _seconds(rules, kind, group, size):
    """Return the seconds of one collective of `size` bytes, as `Collectives.time_of_groups` does.

    Measured curves are interpolated linearly between powers of two, and extended by their last segment.
    """
    points = rules.curves.shape[2]
    if points > 0:
        size = max(size, 2.0**FIRST_POWER)
        below = min(math.frexp(size)[1] - 1 - FIRST_POWER, points - 2)
        first, second = rules.curves[kind, group, below], rules.curves[kind, group, below + 1]
        return first + (second - first) * (math.ldexp(size, -(below + FIRST_POWER)) - 1.0)
    seconds = rules.launch[kind, group]
    for level in range(rules.latency.shape[1]):
        seconds += max(rules.latency[kind, level, group], size * rules.per_byte[kind, level, group])
    return seconds * rules.phases[kind]


@njit(cache=True, nogil=True, inline="always")
def _charge(rules, shares, links, least_of, steps, count, before, rank, spent, first):
    """Add the seconds of a pair's collectives to `spent`, [links], whose last entry is the exposed channel.

    The larger of the two hidden parts counts, and it goes to every link of the group.

    - `shares`: hidden shares, [2, kinds, groups]: of a collective's whole time, and of the time for its bytes only.
    - `links`: mesh axes of each link as bits.
    - `least_of`: seconds of collectives without bytes, [kinds, groups].
    - `before`, `rank`: position of this pair's collectives in the order of all charges.
    - `first`: lowest position of a charge to each link; updated.
    """
    for step in range(count):
        kind, group = steps.kind[step], steps.group[step]
        seconds = _seconds(rules, kind, group, steps.size[step])
        hidden = max(shares[0, kind, group] * seconds, shares[1, kind, group] * (seconds - least_of[kind, group]))
        for link in range(len(spent)):
            mine = seconds - hidden
            if link < len(links):
                mine = hidden if links[link] & group else 0.0
            if mine != 0.0:
                spent[link] += mine
                first[link] = min(first[link], rank + (before + steps.place[step]) * len(spent) + link)


@njit(cache=True, nogil=True)
def _shares_dim(state):
    """Return True if two axes split one dim."""
    for a in range(len(state)):
        for b in range(a):
            if state[a] >= 0 and state[a] == state[b]:
                return True
    return False


@njit(cache=True, nogil=True)
def _has_sums(state):
    """Return True if the tensor is a partial sum over some axis."""
    for entry in state:
        if entry <= PARTIAL:
            return True
    return False


@njit(cache=True, nogil=True)
def charge_pairs(rules, shares, links, early, ends, sizes, turns, tables, first):
    """Fill `tables`, [links, from, to], with the seconds of all pairs; the last link is the exposed channel.

    - `shares`: hidden shares, [2, kinds, groups]: of a collective's whole time, and of the time for its bytes only.
    - `links`: mesh axes of each link as bits.
    - `early`: ends of the gathers that run first, one for each row; empty if there are none.
    - `ends`: states at both ends, [from] and [to].
    - `sizes`: bytes of an element, and the treatment of sums.
    - `turns`: turn of each row, [from].
    - `first`: filled with the order in which tables receive their first entry: by turn, then by collective. Entries of
      empty tables are unchanged.
    """
    axes = ends.source.shape[1]
    most = places(axes, max(ends.dims, early.dims))
    steps = Steps(np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most))
    plain = Sizes(sizes.item, sizes.reduced, False, False)
    row, spent = np.zeros(len(tables)), np.zeros(len(tables))
    least = np.zeros(rules.launch.shape)
    for kind in range(len(rules.launch)):
        for group in range(1, len(rules.parts)):
            least[kind, group] = _seconds(rules, kind, group, 0.0)
    shared = np.zeros(len(ends.target), np.bool_)
    for j in range(len(ends.target)):
        shared[j] = _shares_dim(ends.target[j])
    for i in range(len(ends.source)):
        rank = turns[i] * 2 * most * len(tables)
        row[:] = 0.0
        if len(early.source):
            f, t = early.source[i], early.target[i]
            alike = _shares_dim(f) or _shares_dim(t)
            count = _steps(rules, f, t, _has_sums(f), alike, early.dims, early.minor[i], early.local[i], plain, steps)
            _charge(rules, shares, links, least, steps, count, 0, rank, row, first)
        f = ends.source[i]
        summed, doubled = _has_sums(f), _shares_dim(f)
        for j in range(len(ends.target)):
            t = ends.target[j]
            alike = doubled or shared[j]
            count = _steps(rules, f, t, summed, alike, ends.dims, ends.minor[i], ends.local[i], sizes, steps)
            if sizes.collected:
                for step in range(count):
                    if steps.kind[step] == REDUCE or steps.kind[step] == SCATTER:
                        steps.kind[step] = GATHER
                        steps.size[step] *= rules.parts[steps.group[step]]
            spent[:] = row
            _charge(rules, shares, links, least, steps, count, most, rank, spent, first)
            for link in range(len(tables)):
                tables[link, i, j] = spent[link]


@njit(cache=True, nogil=True)
def count_fusions(source, target, last, found):
    """Add to `found`, [from, to], the fusions that `relayouts` counts: at most one for gathers, one for scatters.

    There is one if the axes of that way change several dims, or the `last` dim.
    """
    for i in range(len(source)):
        for j in range(len(target)):
            for way in range(2):
                low, high = last + 1, WHOLE
                for axis in range(source.shape[1]):
                    f, t = source[i, axis], target[j, axis]
                    dim = WHOLE
                    if way == 0 and f >= 0 and t == WHOLE:
                        dim = f
                    elif way == 1 and f <= PARTIAL and t >= 0:
                        dim = t
                    if dim >= 0:
                        low, high = min(low, dim), max(high, dim)
                if high >= 0 and (low != high or high == last):
                    found[i, j] += 1
