"""States of mesh axes, the alternatives of a decision, and the collectives between two states.

A state assigns each mesh axis to a dim: an int array [states, axes]. A value is the index of a dim (or factor), `WHOLE`
for an axis that splits nothing, or `PARTIAL - f`. The latter is an axis over which partial sums remain, since the axis
splits factor `f` of the op that computed the tensor.
"""

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES, TILE_ROWS, Collectives, Kind


WHOLE = -1
"""Value of an axis that splits nothing."""
PARTIAL = -2
"""Value of an axis over which partial sums remain for factor 0; `PARTIAL - f` for factor f."""

MAX_PADDING = 1.5
"""Largest padded size of an unevenly split dim over its size; more padding is wasted work."""

States = NDArray[np.int64]
"""States, [states, axes]."""
Seconds = NDArray[np.float64]
"""Seconds, bytes or shares by state or by pair of states."""
Bits = NDArray[np.int32]
"""Sets of mesh axes as bits; the first axis is 1."""


def enumerate_states(
    sizes: Sequence[int], axes: Sequence[int], blocked: Collection[int] = (), even: bool = False
) -> States:
    """Return every assignment of the mesh axes to one dim each or to none, the whole state first.

    An axis of size 1 splits nothing, a dim of size 1 is never split, and no dim has more shards than elements.

    - `sizes`: sizes of the dims.
    - `axes`: sizes of the mesh axes.
    - `blocked`: dims that no axis may split.
    - `even`: if True, only splits without padding; otherwise a dim may be padded by at most `MAX_PADDING`.
    """
    return _enumerated(tuple(sizes), tuple(axes), frozenset(blocked), even).copy()


@functools.lru_cache(maxsize=4096)
def _enumerated(sizes: tuple[int, ...], axes: tuple[int, ...], blocked: frozenset[int], even: bool) -> States:
    """Return the states of `enumerate_states`, cached; the array is shared and must not be changed."""
    choices = [WHOLE, *(d for d, size in enumerate(sizes) if d not in blocked and size > 1)]
    fitting = []
    for state in itertools.product(*(choices if axis > 1 else [WHOLE] for axis in axes)):
        if _fits(state, sizes, axes, even):
            fitting.append(state)
    return np.array(fitting, dtype=np.int64).reshape(len(fitting), len(axes))


def _fits(state: tuple[int, ...], sizes: Sequence[int], axes: Sequence[int], even: bool) -> bool:
    """Return True if every dim divides by its axes, or needs no more padding than `MAX_PADDING` allows.

    With `even` all must divide. More shards than elements never fit.
    """
    for dim in set(state) - {WHOLE}:
        parts = math.prod(n for d, n in zip(state, axes, strict=True) if d == dim)
        if sizes[dim] % parts and (
            even or parts > sizes[dim] or -(-sizes[dim] // parts) * parts > MAX_PADDING * sizes[dim]
        ):
            return False
    return True


def distinct(rows: States) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first index of every distinct row, in ascending order of rows, and for each row its distinct row.

    The order is that of `numpy.unique` over rows, which compares rows as records and is several times slower.
    """
    low = int(rows.min(initial=0))
    base = int(rows.max(initial=0)) - low + 1
    # Rows are encoded as digits of one int64, unless they have too many digits.
    if base ** rows.shape[1] >= 1 << 63:
        _, first, place = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        return first, place.ravel()
    keys = np.zeros(len(rows), dtype=np.int64)
    for column in range(rows.shape[1]):
        keys = keys * base + (rows[:, column] - low)
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    return first, place


def local_elements(states: States, sizes: Sequence[int], axes: Sequence[int]) -> NDArray[np.float64]:
    """Return the elements of one device's shard in every state, [states]; uneven dims are rounded up.

    - `states`: dim that each mesh axis splits, [states, axes].
    - `sizes`: dims of the tensor.
    - `axes`: sizes of the mesh axes.
    """
    return local_sizes(states, sizes, axes).prod(axis=1)


def local_sizes(states: States, sizes: Sequence[int], axes: Sequence[int]) -> NDArray[np.float64]:
    """Return the dims of one device's shard in every state, [states, dims]; arguments as in `local_elements`."""
    dims = np.arange(len(sizes))[None, :, None]
    parts = np.where(states[:, None, :] == dims, np.asarray(axes, dtype=np.float64), 1.0).prod(axis=2)
    return np.ceil(np.asarray(sizes, dtype=np.float64) / parts)


def relabel(states: States, mapping: Sequence[int]) -> States:
    """Return the states with every value v >= 0 replaced by `mapping[v]`; negative values are unchanged."""
    table = np.array([*mapping, WHOLE], dtype=np.int64)
    return np.where(states >= 0, table[np.maximum(states, WHOLE)], states)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One collective of a transition, for all pairs of states at once."""

    kind: Kind
    axes: tuple[int, ...]
    """Mesh axes of the group, by number."""
    size: NDArray[np.float64]
    """Bytes as `Collectives.time` counts them, [from, to]; 0 for pairs that do not need the collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wave:
    """Collectives of one kind, at most one for each pair of states, over axes that differ between pairs."""

    kind: Kind
    groups: Bits
    """Mesh axes of the pair's collective as bits (axis 0 is 1), [from, to]; 0 for no collective."""
    size: NDArray[np.float64]
    """Bytes as `Collectives.time` counts them, [from, to], for pairs with a collective."""


class Emitted(enum.Enum):
    """Collective that XLA emits for a sum whose result is split over the group."""

    SCATTER = enum.auto()
    """One reduce-scatter."""
    STAGED = enum.auto()
    """One reduce-scatter for each axis, because the plan pins the axes one after the other."""
    SUM = enum.auto()
    """An all-reduce of the whole tensor and a slice."""


def emitted(collectives: Collectives, axes: Sequence[int]) -> Emitted:
    """Return the form in which the backend's compiler emits a sum whose result is split over these mesh axes (numbers).

    It is `SCATTER` if the backend has a reduce-scatter for the group. Else it is `STAGED` within a slice, if the
    backend stages collectives and several axes are larger than 1. Else it is `SUM`.

    TPU compilers turn a reduce-scatter over all devices of a slice into an all-reduce. For one axis at a time they emit
    real reduce-scatters. Between slices staging does not help: the slice axis is major in the spec and would be first,
    at the full size.

    Evidence: docs/compiler_behaviour.md, "Reduce-scatter over a whole slice".
    """
    names = tuple(collectives.mesh.names[a] for a in axes)
    if collectives.partial_to_split_kind(names) == "reduce-scatter":
        return Emitted.SCATTER
    mesh = collectives.mesh
    crossing = any(segment.kind == "network" for name in names for segment in mesh.segments(name))
    return _in_turn(collectives, axes) if not crossing else Emitted.SUM


def emitted_gather(collectives: Collectives, axes: Sequence[int]) -> tuple[Emitted, float]:
    """Return the form of small all-gathers over these mesh axes (numbers), and the most gathered bytes that have it.

    `STAGED` is one gather for each axis, `SUM` an all-reduce of the gathered tensor. Larger ones are one gather.
    """
    return _in_turn(collectives, axes), collectives.summed_gathers(tuple(collectives.mesh.names[a] for a in axes))


def _in_turn(collectives: Collectives, axes: Sequence[int]) -> Emitted:
    """Return `STAGED` if the backend stages collectives and several axes are larger than 1, else `SUM`."""
    large = [a for a in axes if collectives.mesh.sizes[a] > 1]
    return Emitted.STAGED if collectives.mesh.topology.traits.stages and len(large) > 1 else Emitted.SUM


def transition(
    source: States,
    target: States,
    sizes: Sequence[int],
    itemsize: int,
    reduce_itemsize: int,
    collectives: Collectives,
) -> list[Step]:
    """Return the collectives of `waves` with one entry for every kind and group.

    - `source`, `target`: states at both ends, [states, axes].
    - `sizes`: dims of the tensor.
    - `itemsize`: bytes of an element.
    - `reduce_itemsize`: bytes of an element where partial sums are reduced.
    - `collectives`: prices of the collectives on the mesh.
    """
    emitted_waves = waves(source, target, sizes, itemsize, reduce_itemsize, collectives)
    return [step for wave in emitted_waves for step in split(wave)]


def split(wave: Wave) -> list[Step]:
    """Split a wave into one step for every group of mesh axes that it has, by ascending bits."""
    groups = np.flatnonzero(np.bincount(wave.groups.ravel())).tolist()
    return [Step(wave.kind, members(g), np.where(wave.groups == g, wave.size, 0.0)) for g in groups if g]


def members(bits: int) -> tuple[int, ...]:
    """Return the numbers of the axes that a set of bits contains, ascending."""
    return tuple(a for a in range(bits.bit_length()) if bits >> a & 1)


def waves(
    source: States,
    target: States,
    sizes: Sequence[int],
    itemsize: int,
    reduce_itemsize: int,
    collectives: Collectives,
    stacked: bool = False,
    whole_sums: Collection[Emitted] = (),
) -> list[Wave]:
    """Return the collectives of XLA's partitioner that reshard a tensor from each source to each target state.

    They are in the partitioner's order:

    1. Sums: a reduce-scatter if one dim of the result is split and the backend has one for that group, else one
       all-reduce. On TPUs one all-reduce for all factors follows the reduce-scatters.
    2. Slices, which are free; they follow the gathers if there are any.
    3. Gathers: one for each dim, the last dim first; on TPUs one for all dims.
    4. Moves between dims: one all-to-all for each axis. Several axes that leave one dim for one other dim move in one,
       unless something is gathered.

    Three cases differ. If one of several axes of a dim moves together with another change, the whole tensor is gathered
    (XLA's "involuntary full rematerialization"). If an axis changes on a dim whose minor axes stay, the shard is sent
    by a collective-permute. TPU compilers reduce everything and slice if a reduce-scatter would leave parts of tiles
    (`_breaks_tiles`, `_breaks_matrix`).

    Evidence: docs/compiler_behaviour.md, "Collectives of a reshard".

    - `source`, `target`: states at both ends, [states, axes].
    - `sizes`: dims of the tensor.
    - `itemsize`: bytes of an element.
    - `reduce_itemsize`: bytes of an element where partial sums are reduced.
    - `collectives`: prices of the collectives on the mesh.
    - `stacked`: True if partial results are stacks of matrices (`Path.stacked`).
    - `whole_sums`: forms in place of which a sum is an all-reduce and a slice.
    """
    axis_sizes = collectives.mesh.sizes
    count = len(axis_sizes)
    tpu = collectives.mesh.topology.traits.joins_sums
    pairs = (len(source), len(target))
    local = np.broadcast_to(local_elements(source, sizes, axis_sizes)[:, None], pairs)
    f, t = source[:, None, :], target[None, :, :]
    group_axes = [members(bits) for bits in range(1 << count)]
    parts = np.array([math.prod(axis_sizes[a] for a in axes) for axes in group_axes], dtype=np.float64)
    scattering = [emitted(collectives, axes) for axes in group_axes]
    scattering = [Emitted.SUM if form in whole_sums else form for form in scattering]
    gathers = [emitted_gather(collectives, axes) for axes in group_axes]
    gathering, limits = [form for form, _ in gathers], np.array([limit for _, limit in gathers])
    emitted_waves: list[Wave] = []

    def mask(condition: NDArray[np.bool_]) -> Bits:
        """Convert a condition [from, to, axes] to the axes for which it is true, as bits [from, to]."""
        bits = np.zeros(pairs, dtype=np.int32)
        for axis in range(count):
            bits |= condition[..., axis].astype(np.int32) << axis
        return bits

    def only(groups: Bits, table: list[Emitted], how: Emitted) -> Bits:
        """Return the groups that `table` emits in the form `how`, and 0 in place of the others."""
        return groups * np.array([each is how for each in table])[groups]

    def add(kind: Kind, groups: Bits, item: int) -> None:
        """Append a wave of the present local elements, `item` bytes each, unless no pair has a group."""
        if groups.any():
            emitted_waves.append(Wave(kind, groups, local * item))

    last = len(sizes) - 1
    rows, minor = (np.broadcast_to(each[:, None], pairs) for each in extents(source, sizes, axis_sizes).T)
    stacked = is_stack(sizes, stacked)
    scratch = scatter_scratch(collectives.mesh.topology.chip.name)
    summed = np.zeros(pairs, dtype=np.int32)
    totals: list[Bits] = []
    for axis in range(count):
        # Axes that split one factor are reduced together, and factors are reduced one after the other.
        first = (f[..., axis] <= PARTIAL) & ~(f[..., :axis] == f[..., axis : axis + 1]).any(axis=2)
        if not first.any():
            continue
        own = (f == f[..., axis : axis + 1]) & first[..., None]
        scatter, total = mask(own & (t >= 0)), mask(own & (t < 0))
        together, staged = only(scatter, scattering, Emitted.SCATTER), only(scatter, scattering, Emitted.STAGED)
        # A reduce-scatter splits one dim. GPU compilers first make one sum of those over all factors.
        split = np.where(own if tpu else f <= PARTIAL, t, WHOLE)
        together = together * ~((split >= 0) & (split != split.max(axis=2, keepdims=True))).any(axis=2)
        sliced = scatter ^ together ^ staged
        for groups in (together, *(staged & 1 << a for a in range(count))):
            ends_last, ends_rows = groups & mask(t == last), groups & mask(t == last - 1)
            minor, rows = minor / parts[ends_last], rows / parts[ends_rows]
            splits = (ends_rows > 0, ends_last > 0)
            if len(sizes) < 3:
                most = scratch / (parts[groups] + BUFFERS)
                broken = _breaks_matrix((rows, minor), splits, reduce_itemsize, most, vector=last == 0)
            else:
                broken = splits[1] & _breaks_tiles(minor, LANES, reduce_itemsize, not stacked)
                broken |= splits[0] & stacked & _breaks_tiles(rows, TILE_ROWS, reduce_itemsize)
            whole = groups * (tpu & broken)
            add("all-reduce", whole, reduce_itemsize)
            add("reduce-scatter", groups ^ whole, reduce_itemsize)
            local = local / parts[groups]
        if tpu:
            totals.append(total | sliced)
        else:
            add("all-reduce", total | sliced, reduce_itemsize)
        summed |= sliced
    if totals:  # one all-reduce after all reduce-scatters
        add("all-reduce", functools.reduce(np.bitwise_or, totals), reduce_itemsize)
    local = local / parts[summed]

    moved = (f >= 0) & (t >= 0) & (f != t)
    gathered = (f >= 0) & (t == WHOLE)
    gather, whole, joint, swaps = mask(gathered), *_conflicts(f, t, moved, gathered)
    local = local / parts[np.where((gather == 0) & ~whole, mask((f == WHOLE) & (t >= 0)), 0)]
    add("collective-permute", np.where((swaps > 0) & ~whole, swaps | 1 << (count - 1), 0), itemsize)
    everything = np.where(whole, mask(np.broadcast_to(f >= 0, (*pairs, count))), gather)
    small = everything * (local * parts[everything] * itemsize <= limits[everything])
    summed, staged = (only(small, gathering, how) for how in (Emitted.SUM, Emitted.STAGED))
    # One gather for each dim, the last dim first, unless axes are pinned one by one. TPU compilers emit a single
    # gather.
    together = everything ^ staged
    by_dim = [together] if tpu else [together & mask(f == dim) for dim in reversed(range(len(sizes)))]
    for groups in (*by_dim, *(staged & 1 << a for a in reversed(range(count)))):
        local = local * parts[groups]
        add("all-reduce", groups & summed, itemsize)
        add("all-gather", groups & ~summed, itemsize)
    reshards = np.where(whole, 0, mask(moved))
    add("all-to-all", np.where(joint, reshards, 0), itemsize)
    for axis in range(count):
        add("all-to-all", np.where(joint, 0, reshards & 1 << axis), itemsize)
    return emitted_waves


def is_stack(sizes: Sequence[int], stacked: bool) -> bool:
    """Return True if a tensor of these dims, whose matrices are `stacked`, has more than one matrix."""
    return stacked and math.prod(sizes[:-2]) > 1


def scatter_scratch(chip: str) -> float:
    """Return the bytes of on-chip memory that one reduce-scatter of a TPU may use."""
    return _SCATTER_SCRATCH.get(chip, _SCATTER_SCRATCH[""])


BUFFERS = 4
"""Number of buffers of a reduce-scatter along the lanes beyond one for each device; each has a shard's row of tiles."""
_SCATTER_SCRATCH = {"": 14.3 * 2**20, "v6e": 29.3 * 2**20}
"""Bytes of on-chip memory that a reduce-scatter may use, by chip; the empty name is that of all other chips.

Read from libtpu 0.0.52. The longest shards on 16, 8 and 4 devices of v5e have 182, 304 and 456 tiles, whose buffers are
14.2 to 14.3 MiB. v5p has the limit of v5e on 4 devices. On v6e 624 and 936 tiles take 29.2 to 29.4 MiB.
"""


def _breaks_matrix(
    local: tuple[Seconds, Seconds],
    splits: tuple[NDArray[np.bool_], NDArray[np.bool_]],
    itemsize: int,
    most: Seconds,
    vector: bool,
) -> NDArray[np.bool_]:
    """Return True where a TPU's compiler sums a matrix as a whole instead of scattering it; vectors always.

    The shard has the layout that pads least. A split of the rows must leave whole tiles of 8 rows. A split of the lanes
    must leave whole registers, of more than half a tile of rows. A row of tiles of the shard must also fit on the chip
    several times.

    - `local`: elements of both dims on one device.
    - `splits`: True where the sum ends split in this dim.
    - `itemsize`: bytes of an element.
    - `most`: bytes of the largest row of tiles.

    Evidence: docs/compiler_behaviour.md, "Collectives of a reshard".
    """
    if vector:
        return np.ones_like(splits[1])
    first, last = (np.ceil(each) for each in local)
    packed = max(1, 4 // itemsize)
    turned = tiled_bytes(last, first, packed) < tiled_bytes(first, last, packed)
    rows, lanes = np.where(turned, last, first), np.where(turned, first, last)
    across, down = (np.where(turned, *pair) for pair in (splits, splits[::-1]))
    long = 4.0 * TILE_ROWS * lanes > most
    odd = (lanes % (LANES * packed) != 0) | (2 * rows <= TILE_ROWS) | long
    return (across & odd) | (down & (rows % TILE_ROWS != 0))


def tiled_bytes(rows: NDArray[np.float64], lanes: NDArray[np.float64], packed: int) -> NDArray[np.float64]:
    """Return the elements that tiles of a matrix have, with padding; few rows have tiles of fewer rows.

    - `packed`: elements in 4 bytes.
    """
    tall = np.where(rows > 4, 8.0, np.where(rows > 2, 4.0, np.where(rows > 1, 2.0, 1.0)))
    tall = np.maximum(tall, float(packed))
    return np.ceil(rows / tall) * tall * (np.ceil(lanes / LANES) * LANES)


def _breaks_tiles(size: NDArray[np.float64], tile: int, itemsize: int, relaid: bool = False) -> NDArray[np.bool_]:
    """Return True where shards have parts of a TPU's tiles, so that the compiler has no reduce-scatter to them.

    Elements below 4 bytes share the words of a register, so that a tile has more of them in the last two dims. With
    `relaid`, the compiler lays a shard of partial registers out along another dim, which breaks nothing.

    - `size`: elements of a dim on one device.
    - `tile`: elements of 4 bytes along this dim.
    - `itemsize`: bytes of an element.
    """
    broken = size % (tile * max(1, 4 // itemsize)) != 0
    return broken & (size % tile == 0) if relaid else broken


def extents(states: States, sizes: Sequence[int], axis_sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return the elements of the last two dims on one device in each state, not rounded, [states, 2].

    Absent dims count as one element. Arguments are as in `local_elements`.
    """
    rank = len(sizes)
    last = (*(1, 1), *sizes)[-2:]
    parts = [np.where(states == rank - 2 + k, np.array(axis_sizes), 1).prod(axis=1) for k in range(2)]
    return np.stack([last[k] / (parts[k] if rank - 2 + k >= 0 else np.ones(len(states))) for k in range(2)], axis=1)


def _conflicts(
    f: States, t: States, moved: NDArray[np.bool_], gathered: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Bits]:
    """Return the pairs that gather everything, the pairs whose moves are one, and the axes that need a permute.

    A pair gathers everything if an axis moves that shares a dim with another axis, and anything else changes. Its moves
    are one if all leave one dim for one other and nothing is gathered. An axis needs a permute if it changes on a dim
    whose minor axis stays, or moves to a dim that a minor axis slices.

    The first two are masks [from, to], the axes are bits. `f` and `t` are the states at both ends, `moved` and
    `gathered` are masks [from, to, axes].
    """
    pairs, count = moved.shape[:2], moved.shape[2]
    leaves_shared = np.zeros(pairs, dtype=bool)
    together = np.ones(pairs, dtype=bool)
    swaps = np.zeros(pairs, dtype=np.int32)
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            shared_dim = ((f[..., a] == f[..., b]) & (f[..., b] >= 0)) | ((t[..., a] == t[..., b]) & (t[..., b] >= 0))
            leaves_shared |= moved[..., a] & shared_dim
            both = moved[..., a] & moved[..., b]
            together &= ~both | ((f[..., a] == f[..., b]) & (t[..., a] == t[..., b]))
            if b > a:
                stays = (f[..., b] >= 0) & (f[..., b] == t[..., b])
                changes = moved[..., a] | gathered[..., a] | ((f[..., a] <= WHOLE) & (t[..., a] >= 0))
                next_to_staying = stays & changes & ((f[..., a] == f[..., b]) | (t[..., a] == t[..., b]))
                # An axis that moves to a dim which is first sliced over a minor axis would end inside that slice.
                below = moved[..., a] & (f[..., b] == WHOLE) & (t[..., b] == t[..., a])
                swaps |= (next_to_staying | below).astype(np.int32) << a
    several = (moved | gathered).sum(axis=2) > 1
    joint = together & (moved.sum(axis=2) > 1) & ~gathered.any(axis=2)
    return leaves_shared & several & ~joint, joint, swaps


def decompose(
    states: States,
    dims: Sequence[Sequence[int]],
    factors: Sequence[int],
    axes: Sequence[int],
    looped: Collection[int] = (),
) -> tuple[States, States]:
    """Convert states over dims to states over the factors that make up each dim (major first).

    Axes fill a dim's factors from the major factor on. An axis fits a factor only if it divides the factor's local
    size. A later factor is split only once the earlier factors have local size 1. An axis that does not fit is dropped.

    An axis may exceed a factor in `looped` that divides it. The rest of the axis then splits the next factor. All of
    the axis leaves the factor in one exchange, so the whole axis counts as splitting it.

    The result is the states over factors, and the given states without the dropped axes.

    - `states`: dim that each mesh axis splits, [states, axes].
    - `dims`: factors of each dim.
    - `factors`: sizes of the factors.
    - `axes`: sizes of the mesh axes.
    - `looped`: factors that a loop runs over, from which an axis has to leave.
    """
    result = np.full_like(states, WHOLE)
    result[states <= PARTIAL] = states[states <= PARTIAL]
    kept = states.copy()
    for dim, parts in enumerate(dims):
        if len(parts) == 1:
            result[states == dim] = parts[0]
            continue
        for row in np.flatnonzero((states == dim).any(axis=1)):
            local_factors = [factors[p] for p in parts]
            position = 0
            for axis in np.flatnonzero(states[row] == dim).tolist():
                while position < len(parts) - 1 and local_factors[position] == 1:
                    position += 1
                if not parts:
                    kept[row, axis] = WHOLE
                    continue
                mine = math.gcd(local_factors[position], axes[axis]) if parts[position] in looped else axes[axis]
                beyond = axes[axis] // mine
                last = position + 1 == len(parts)
                if (
                    local_factors[position] % mine
                    or beyond > 1
                    and (mine < local_factors[position] or last or local_factors[position + 1] % beyond)
                ):
                    kept[row, axis] = WHOLE
                    continue
                local_factors[position] //= mine
                result[row, axis] = parts[position]
                if beyond > 1:
                    local_factors[position + 1] //= beyond
    return result, kept


def exchanged_sizes(
    dims: Sequence[Sequence[int]], factors: Sequence[int], axes: Sequence[int], looped: Collection[int]
) -> list[int]:
    """Return the sizes of factors with which the shards of `decompose` have the elements that an exchange moves.

    An axis larger than a factor in `looped` leaves it in two exchanges: one among all devices, one among the parts of
    the factor. Each moves at most the shard, so the shard counts at most twice. Arguments are those of `decompose`.
    """
    sizes = list(factors)
    for parts in dims:
        if len(parts) < 2 or parts[0] not in looped:
            continue
        first, rest = factors[parts[0]], factors[parts[1]]
        beyond = [n for n in axes if n > 2 * first and n % first == 0 and rest % (n // first) == 0]
        if beyond:
            # Half an axis of rows, rounded up to one row on a device: twice the shard.
            sizes[parts[0]], sizes[parts[1]] = -(-max(beyond) // 2), 2 * first * rest // max(beyond)
    return sizes
