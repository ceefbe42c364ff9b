"""Where each mesh axis goes: the alternatives of a decision, and what it takes to get from one to another.

A state says for every mesh axis which dim it splits: an int array [number of states, number of axes] whose values
are a dim (or factor) index, `WHOLE` for an axis that splits nothing, or `PARTIAL - f` for an axis over which values
still have to be summed because it splits factor `f` of the op that made them.
"""

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES, Collectives, Kind


WHOLE = -1
PARTIAL = -2

MAX_PADDING = 1.5
"""An uneven split may make the padded dim at most this much larger; more is wasted work."""

States = NDArray[np.int64]
Seconds = NDArray[np.float64]
Bits = NDArray[np.int32]
"""Sets of mesh axes, the first axis as 1."""


def enumerate_states(
    sizes: Sequence[int], axes: Sequence[int], blocked: Collection[int] = (), even: bool = False
) -> States:
    """Every way to give each mesh axis (sizes `axes`) one dim (sizes `sizes`) or none, whole first.

    An axis of size 1 splits nothing. `even` keeps only splits without padding; otherwise a dim may be padded by at
    most `MAX_PADDING`.
    """
    return _enumerated(tuple(sizes), tuple(axes), frozenset(blocked), even).copy()


@functools.lru_cache(maxsize=4096)
def _enumerated(sizes: tuple[int, ...], axes: tuple[int, ...], blocked: frozenset[int], even: bool) -> States:
    choices = [WHOLE, *(d for d, size in enumerate(sizes) if d not in blocked and size > 1)]
    kept = []
    for state in itertools.product(*(choices if axis > 1 else [WHOLE] for axis in axes)):
        if _fits(state, sizes, axes, even):
            kept.append(state)
    return np.array(kept, dtype=np.int64).reshape(len(kept), len(axes))


def _fits(state: tuple[int, ...], sizes: Sequence[int], axes: Sequence[int], even: bool) -> bool:
    for dim in set(state) - {WHOLE}:
        parts = math.prod(n for d, n in zip(state, axes, strict=True) if d == dim)
        if sizes[dim] % parts and (
            even or parts > sizes[dim] or -(-sizes[dim] // parts) * parts > MAX_PADDING * sizes[dim]
        ):
            return False
    return True


def distinct(rows: States) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First index of every distinct row, and for each row which of them it is.

    In the order of `numpy.unique` over rows, which compares them as records and takes several times as long.
    """
    low = int(rows.min(initial=0))
    base = int(rows.max(initial=0)) - low + 1
    if base ** rows.shape[1] >= 1 << 63:
        _, first, place = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        return first, place.ravel()
    keys = np.zeros(len(rows), dtype=np.int64)
    for column in range(rows.shape[1]):
        keys = keys * base + (rows[:, column] - low)
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    return first, place


def local_elements(states: States, sizes: Sequence[int], axes: Sequence[int]) -> NDArray[np.float64]:
    """Elements of one device's shard in every state, padding included."""
    return local_sizes(states, sizes, axes).prod(axis=1)


def local_sizes(states: States, sizes: Sequence[int], axes: Sequence[int]) -> NDArray[np.float64]:
    """[state, dim] the dims of one device's shard in every state, padding included."""
    dims = np.arange(len(sizes))[None, :, None]
    parts = np.where(states[:, None, :] == dims, np.asarray(axes, dtype=np.float64), 1.0).prod(axis=2)
    return np.ceil(np.asarray(sizes, dtype=np.float64) / parts)


def relabel(states: States, mapping: Sequence[int]) -> States:
    """The same states with value v >= 0 replaced by `mapping[v]`; negative values stay."""
    table = np.array([*mapping, WHOLE], dtype=np.int64)
    return np.where(states >= 0, table[np.maximum(states, WHOLE)], states)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One collective of a transition, for all pairs of states at once."""

    kind: Kind
    axes: tuple[int, ...]
    size: NDArray[np.float64]
    """[from, to] bytes as `Collectives.time` counts them; 0 where the pair does not need it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wave:
    """Collectives of one kind, at most one for each pair of states, over axes that differ from pair to pair."""

    kind: Kind
    groups: Bits
    """[from, to] the mesh axes of the pair's collective as bits (axis 0 is 1); 0 for none."""
    size: NDArray[np.float64]
    """[from, to] bytes as `Collectives.time` counts them, where there is one."""


class Emitted(enum.Enum):
    """What a sum over a group that ends split becomes."""

    SCATTER = enum.auto()
    """One reduce-scatter."""
    STAGED = enum.auto()
    """One for each axis, because the plan pins the axes one after the other."""
    SUM = enum.auto()
    """An all-reduce of everything and a slice."""


def emitted(collectives: Collectives, axes: Sequence[int]) -> Emitted:
    """How the backend's compiler ends a sum over these mesh axes (by number) that ends split.

    TPU compilers turn a reduce-scatter over all devices of a slice into an all-reduce; asked for one axis at a time
    they emit real ones (seen on every generation, v5e:4x4 as 4x4 to v4:4x4x4 as 16x4). Not so between slices: the
    slice axis, major in the spec, would have to come first, at the full size.
    """
    names = tuple(collectives.mesh.names[a] for a in axes)
    if collectives.partial_to_split_kind(names) == "reduce-scatter":
        return Emitted.SCATTER
    mesh = collectives.mesh
    crossing = any(segment.kind == "network" for name in names for segment in mesh.segments(name))
    return _in_turn(collectives, axes) if not crossing else Emitted.SUM


def emitted_gather(collectives: Collectives, axes: Sequence[int]) -> Emitted:
    """The same of an all-gather: `SUM` is an all-reduce of the gathered tensor."""
    if collectives.gather_kind(tuple(collectives.mesh.names[a] for a in axes)) == "all-gather":
        return Emitted.SCATTER
    return _in_turn(collectives, axes)


def _in_turn(collectives: Collectives, axes: Sequence[int]) -> Emitted:
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
    """The collectives of `waves`, one entry for every kind and group."""
    found = waves(source, target, sizes, itemsize, reduce_itemsize, collectives)
    return [step for wave in found for step in split(wave)]


def split(wave: Wave) -> list[Step]:
    """A wave as one entry for every group."""
    groups = np.flatnonzero(np.bincount(wave.groups.ravel())).tolist()
    return [Step(wave.kind, members(g), np.where(wave.groups == g, wave.size, 0.0)) for g in groups if g]


def members(bits: int) -> tuple[int, ...]:
    """The axes that the bits stand for."""
    return tuple(a for a in range(bits.bit_length()) if bits >> a & 1)


def waves(
    source: States,
    target: States,
    sizes: Sequence[int],
    itemsize: int,
    reduce_itemsize: int,
    collectives: Collectives,
) -> list[Wave]:
    """Collectives that bring a tensor from each source state to each target state, as XLA's partitioner does it.

    In its order (each pair of states of a 3-dim tensor on two axes was compiled alone and read): sums first, as a
    reduce-scatter where an axis ends split and the backend has one for that group, else as one all-reduce;
    then slices (free; after the gathers if there are any), gathers, and moves between dims, one all-to-all for each
    axis. A move of one of several axes of a dim together with another change gathers the whole tensor instead
    (XLA's "involuntary full rematerialization"). An axis that changes on a dim whose minor axes stay costs a
    collective-permute of the shard. TPU compilers have no reduce-scatter that leaves an odd number of whole vector
    registers of the last dim (`LANES`): they sum everything and take a slice.
    """
    axis_sizes = collectives.mesh.sizes
    count = len(axis_sizes)
    tpu = collectives.mesh.topology.traits.joins_sums
    pairs = (len(source), len(target))
    local = np.broadcast_to(local_elements(source, sizes, axis_sizes)[:, None], pairs)
    f, t = source[:, None, :], target[None, :, :]
    every = [members(bits) for bits in range(1 << count)]
    parts = np.array([math.prod(axis_sizes[a] for a in axes) for axes in every], dtype=np.float64)
    scattering = [emitted(collectives, axes) for axes in every]
    gathering = [emitted_gather(collectives, axes) for axes in every]
    found: list[Wave] = []

    def mask(condition: NDArray[np.bool_]) -> Bits:
        bits = np.zeros(pairs, dtype=np.int32)
        for axis in range(count):
            bits |= condition[..., axis].astype(np.int32) << axis
        return bits

    def only(groups: Bits, table: list[Emitted], how: Emitted) -> Bits:
        return groups * np.array([each is how for each in table])[groups]

    def add(kind: Kind, groups: Bits, item: int) -> None:
        if groups.any():
            found.append(Wave(kind, groups, local * item))

    last = len(sizes) - 1
    minor = np.broadcast_to(extents(source, sizes, axis_sizes)[:, None], pairs)
    summed = np.zeros(pairs, dtype=np.int32)
    totals: list[Bits] = []
    for axis in range(count):
        # Axes that split one factor are summed together, those of different factors one factor after the other.
        first = (f[..., axis] <= PARTIAL) & ~(f[..., :axis] == f[..., axis : axis + 1]).any(axis=2)
        if not first.any():
            continue
        own = (f == f[..., axis : axis + 1]) & first[..., None]
        scatter, total = mask(own & (t >= 0)), mask(own & (t < 0))
        sliced = only(scatter, scattering, Emitted.SUM)
        together, staged = only(scatter, scattering, Emitted.SCATTER), only(scatter, scattering, Emitted.STAGED)
        for groups in (together, *(staged & 1 << a for a in range(count))):
            minor = minor / parts[groups & mask(t == last)]
            whole = groups * (tpu & (groups & mask(t == last) > 0) & (minor % (2 * LANES) == LANES))
            add("all-reduce", whole, reduce_itemsize)
            add("reduce-scatter", groups ^ whole, reduce_itemsize)
            local = local / parts[groups]
        if tpu:
            totals.append(total | sliced)
        else:
            add("all-reduce", total | sliced, reduce_itemsize)
        summed |= sliced
    if totals:  # after every reduce-scatter, and in one
        add("all-reduce", functools.reduce(np.bitwise_or, totals), reduce_itemsize)
    local = local / parts[summed]

    moved = (f >= 0) & (t >= 0) & (f != t)
    gathered = (f >= 0) & (t == WHOLE)
    gather, whole, joint, swaps = mask(gathered), *_tangled(f, t, moved, gathered)
    local = local / parts[np.where((gather == 0) & ~whole, mask((f == WHOLE) & (t >= 0)), 0)]
    add("collective-permute", np.where((swaps > 0) & ~whole, swaps | 1 << (count - 1), 0), itemsize)
    everything = np.where(whole, mask(np.broadcast_to(f >= 0, (*pairs, count))), gather)
    staged = only(everything, gathering, Emitted.STAGED)
    # One gather for each dim, the last dim first, unless pinned axis by axis; TPU compilers make one of them.
    together = everything ^ staged
    by_dim = [together] if tpu else [together & mask(f == dim) for dim in reversed(range(len(sizes)))]
    for groups in (*by_dim, *(staged & 1 << a for a in reversed(range(count)))):
        local = local * parts[groups]
        add("all-reduce", only(groups, gathering, Emitted.SUM), itemsize)
        add("all-gather", groups ^ only(groups, gathering, Emitted.SUM), itemsize)
    reshards = np.where(whole, 0, mask(moved))
    add("all-to-all", np.where(joint, reshards, 0), itemsize)
    for axis in range(count):
        add("all-to-all", np.where(joint, 0, reshards & 1 << axis), itemsize)
    return found


def extents(states: States, sizes: Sequence[int], axis_sizes: Sequence[int]) -> NDArray[np.float64]:
    """Each state's elements of the last dim on one device."""
    parts = np.where(states == len(sizes) - 1, np.array(axis_sizes), 1).prod(axis=1)
    return (sizes[-1] if sizes else 1) / parts


def _tangled(
    f: States, t: States, moved: NDArray[np.bool_], gathered: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Bits]:
    """Pairs that gather everything, pairs whose moves are one, and axes (as bits) that need a permute."""
    pairs, count = moved.shape[:2], moved.shape[2]
    shares = np.zeros(pairs, dtype=bool)
    together = np.ones(pairs, dtype=bool)
    swaps = np.zeros(pairs, dtype=np.int32)
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            crowd = ((f[..., a] == f[..., b]) & (f[..., b] >= 0)) | ((t[..., a] == t[..., b]) & (t[..., b] >= 0))
            shares |= moved[..., a] & crowd
            both = moved[..., a] & moved[..., b]
            together &= ~both | ((f[..., a] == f[..., b]) & (t[..., a] == t[..., b]))
            if b > a:
                stays = (f[..., b] >= 0) & (f[..., b] == t[..., b])
                changes = moved[..., a] | gathered[..., a] | ((f[..., a] <= WHOLE) & (t[..., a] >= 0))
                near = stays & changes & ((f[..., a] == f[..., b]) | (t[..., a] == t[..., b]))
                # What moves to a dim that is sliced over a minor axis first would end inside of that.
                below = moved[..., a] & (f[..., b] == WHOLE) & (t[..., b] == t[..., a])
                swaps |= (near | below).astype(np.int32) << a
    several = (moved | gathered).sum(axis=2) > 1
    joint = together & (moved.sum(axis=2) > 1) & ~gathered.any(axis=2)
    return shares & several & ~joint, joint, swaps


def decompose(
    states: States, dims: Sequence[Sequence[int]], factors: Sequence[int], axes: Sequence[int]
) -> tuple[States, States]:
    """States over dims as states over the factors that make up each dim (major first).

    Axes fill the factors of a dim from the major one on; an axis fits a factor only if it divides what is left
    of it, and a later factor takes axes only once the earlier ones are split to single elements. An axis that does
    not fit is dropped. Gives the states over factors, and the given states without the dropped axes.
    """
    result = np.full_like(states, WHOLE)
    result[states <= PARTIAL] = states[states <= PARTIAL]
    kept = states.copy()
    for dim, parts in enumerate(dims):
        if len(parts) == 1:
            result[states == dim] = parts[0]
            continue
        for row in np.flatnonzero((states == dim).any(axis=1)):
            left = [factors[p] for p in parts]
            position = 0
            for axis in np.flatnonzero(states[row] == dim).tolist():
                while position < len(parts) - 1 and left[position] == 1:
                    position += 1
                if not parts or left[position] % axes[axis]:
                    kept[row, axis] = WHOLE
                    continue
                left[position] //= axes[axis]
                result[row, axis] = parts[position]
    return result, kept
