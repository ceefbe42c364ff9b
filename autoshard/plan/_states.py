"""Where each mesh axis goes: the alternatives of a decision, and what it takes to get from one to another.

A state says for every mesh axis which dim it splits: an int array [number of states, number of axes] whose values
are a dim (or factor) index, `WHOLE` for an axis that splits nothing, or `PARTIAL - f` for an axis over which values
still have to be summed because it splits factor `f` of the op that made them.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Kind


WHOLE = -1
PARTIAL = -2

MAX_PADDING = 1.5
"""An uneven split may make the padded dim at most this much larger; more is wasted work."""

States = NDArray[np.int64]
Seconds = NDArray[np.float64]


def enumerate_states(
    sizes: Sequence[int], axes: Sequence[int], blocked: Collection[int] = (), even: bool = False
) -> States:
    """Every way to give each mesh axis (sizes `axes`) one dim (sizes `sizes`) or none, whole first.

    `even` keeps only splits without padding; otherwise a dim may be padded by at most `MAX_PADDING`.
    """
    choices = [WHOLE, *(d for d, size in enumerate(sizes) if d not in blocked and size > 1)]
    kept = []
    for state in itertools.product(choices, repeat=len(axes)):
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


def local_elements(states: States, sizes: Sequence[int], axes: Sequence[int]) -> NDArray[np.float64]:
    """Elements of one device's shard in every state, padding included."""
    elements = np.ones(len(states))
    for dim, size in enumerate(sizes):
        parts = np.ones(len(states))
        for axis, n in enumerate(axes):
            parts[states[:, axis] == dim] *= n
        elements *= np.ceil(size / parts)
    return elements


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

    TPU compilers turn reduce-scatters and all-gathers of all devices together, when those are many, into
    all-reduces; asked for one axis at a time they emit real ones (seen on v5p:4x4x4 as 16x4).
    """
    names = tuple(collectives.mesh.names[a] for a in axes)
    if collectives.partial_to_split_kind(names) == "reduce-scatter":
        return Emitted.SCATTER
    large = [a for a in axes if collectives.mesh.sizes[a] > 1]
    return Emitted.STAGED if collectives.mesh.topology.backend == "tpu" and len(large) > 1 else Emitted.SUM


def emitted_gather(collectives: Collectives, axes: Sequence[int]) -> Emitted:
    """The same of an all-gather: `SUM` is an all-reduce of the gathered tensor.

    Only on 3-D tori: v5p:4x4x4 turns a gather over all devices into one, v5e:8x8 and v6e:8x8 do not.
    """
    topology = collectives.mesh.topology
    if topology.backend != "tpu" or len(topology.shape) < 3:
        return Emitted.SCATTER
    return emitted(collectives, axes)


def transition(
    source: States,
    target: States,
    sizes: Sequence[int],
    itemsize: int,
    reduce_itemsize: int,
    collectives: Collectives,
) -> list[Step]:
    """Collectives that bring a tensor from each source state to each target state, as XLA's partitioner does it.

    In its order (each pair of states of a 3-dim tensor on two axes was compiled alone and read): sums first, as a
    reduce-scatter where an axis ends split and the backend has one for that group, else as one all-reduce;
    then slices (free; after the gathers if there are any), gathers, and moves between dims, one all-to-all for each
    axis. A move of one of several axes of a dim together with another change gathers the whole tensor instead
    (XLA's "involuntary full rematerialization"). An axis that changes on a dim whose minor axes stay costs a
    collective-permute of the shard.
    """
    names = list(collectives.mesh.axes)
    count = len(names)
    axis_sizes = list(collectives.mesh.axes.values())
    pairs = (len(source), len(target))
    local = np.broadcast_to(local_elements(source, sizes, axis_sizes)[:, None], pairs)
    f, t = source[:, None, :], target[None, :, :]
    steps: list[Step] = []

    def mask(condition: NDArray[np.bool_]) -> NDArray[np.int64]:
        bits = np.zeros(pairs, dtype=np.int64)
        for axis in range(count):
            bits |= condition[..., axis].astype(np.int64) << axis
        return bits

    def members(bits: int) -> tuple[int, ...]:
        return tuple(a for a in range(count) if bits >> a & 1)

    def parts(bits: int) -> int:
        return math.prod(axis_sizes[a] for a in members(bits))

    def groups(bits: int, how: Emitted) -> list[int]:
        """The axes of one collective, or each alone where that is how it is pinned."""
        return [1 << a for a in members(bits)] if how is Emitted.STAGED else [bits]

    def add(kind: Kind, bits: int, where: NDArray[np.bool_], elements: NDArray[np.float64], item: int) -> None:
        steps.append(Step(kind, members(bits), np.where(where, elements * item, 0.0)))

    for axis in range(count):
        # Axes that split one factor are summed together, those of different factors one factor after the other.
        first = (f[..., axis] <= PARTIAL) & ~(f[..., :axis] == f[..., axis : axis + 1]).any(axis=2)
        own = (f == f[..., axis : axis + 1]) & first[..., None]
        scatter, total = mask(own & (t >= 0)), mask(own & (t < 0))
        summed = np.zeros_like(scatter)
        for bits in _distinct(scatter):
            if emitted(collectives, members(bits)) is Emitted.SUM:
                summed = np.where(scatter == bits, bits, summed)
        total, scatter = total | summed, np.where(summed > 0, 0, scatter)
        for bits in _distinct(scatter):
            for group in groups(bits, emitted(collectives, members(bits))):
                add("reduce-scatter", group, scatter == bits, local, reduce_itemsize)
                local = np.where(scatter == bits, local / parts(group), local)
        for bits in _distinct(total):
            add("all-reduce", bits, total == bits, local, reduce_itemsize)
    summed = mask((f <= PARTIAL) & (t >= 0)) & ~_scattered(steps, pairs)
    for bits in _distinct(summed):
        local = np.where(summed == bits, local / parts(bits), local)

    moved = (f >= 0) & (t >= 0) & (f != t)
    gathered = (f >= 0) & (t == WHOLE)
    gather, whole, joint, swaps = mask(gathered), *_tangled(f, t, moved, gathered)
    early = np.where((gather == 0) & ~whole, mask((f == WHOLE) & (t >= 0)), 0)
    for bits in _distinct(early):
        local = np.where(early == bits, local / parts(bits), local)
    everything = np.where(whole, mask(np.broadcast_to(f >= 0, (*pairs, count))), gather)
    for bits in _distinct(swaps):
        add("collective-permute", bits | 1 << (count - 1), (swaps == bits) & ~whole, local, itemsize)
    for bits in _distinct(everything):
        parted = [np.where(everything == bits, bits & mask(f == dim), 0) for dim in reversed(range(len(sizes)))]
        if emitted_gather(collectives, members(bits)) is Emitted.STAGED:
            parted = [np.where(everything == bits, group, 0) for group in reversed(groups(bits, Emitted.STAGED))]
        for part in parted:  # one gather for each dim, the last dim first, unless pinned axis by axis
            for group in _distinct(part):
                summed_up = emitted_gather(collectives, members(group)) is Emitted.SUM
                kind = "all-reduce" if summed_up else "all-gather"
                local = np.where(part == group, local * parts(group), local)
                add(kind, group, part == group, local, itemsize)
    for bits in _distinct(np.where(joint & ~whole, mask(moved), 0)):
        add("all-to-all", bits, joint & ~whole & (mask(moved) == bits), local, itemsize)
    for axis in range(count):
        alone = moved[..., axis] & ~whole & ~joint
        if alone.any():
            add("all-to-all", 1 << axis, alone, local, itemsize)
    return steps


def _scattered(steps: list[Step], pairs: tuple[int, int]) -> NDArray[np.int64]:
    """Axes (as bits) that reduce-scatters have already split."""
    done = np.zeros(pairs, dtype=np.int64)
    for step in steps:
        if step.kind == "reduce-scatter":
            done |= np.where(step.size > 0, sum(1 << a for a in step.axes), 0)
    return done


def _distinct(bits: NDArray[np.int64]) -> list[int]:
    return [b for b in np.flatnonzero(np.bincount(bits.ravel())).tolist() if b]


def _tangled(
    f: States, t: States, moved: NDArray[np.bool_], gathered: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
    """Pairs that gather everything, pairs whose moves are one, and axes (as bits) that need a permute."""
    pairs, count = moved.shape[:2], moved.shape[2]
    shares = np.zeros(pairs, dtype=bool)
    together = np.ones(pairs, dtype=bool)
    swaps = np.zeros(pairs, dtype=np.int64)
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
                changes = moved[..., a] | gathered[..., a] | ((f[..., a] == WHOLE) & (t[..., a] >= 0))
                near = stays & changes & ((f[..., a] == f[..., b]) | (t[..., a] == t[..., b]))
                swaps |= near.astype(np.int64) << a
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
