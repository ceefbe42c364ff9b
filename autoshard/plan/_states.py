"""Where each mesh axis goes: the alternatives of a decision, and what it takes to get from one to another.

A state says for every mesh axis which dim it splits: an int array [number of states, number of axes] whose values
are a dim (or factor) index, `WHOLE` for an axis that splits nothing, or `PARTIAL` for an axis over which values
still have to be summed.
"""

import dataclasses
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
        if sizes[dim] % parts and (even or parts > sizes[dim] or -(-sizes[dim] // parts) * parts > MAX_PADDING * sizes[dim]):
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
    table = np.array([*mapping, PARTIAL, WHOLE], dtype=np.int64)
    return table[states]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One collective of a transition, for all pairs of states at once."""

    kind: Kind
    axes: tuple[int, ...]
    size: NDArray[np.float64]
    """[from, to] bytes as `Collectives.time` counts them; 0 where the pair does not need it."""


def transition(
    source: States,
    target: States,
    sizes: Sequence[int],
    itemsize: int,
    reduce_itemsize: int,
    collectives: Collectives,
) -> list[Step]:
    """Collectives that bring a tensor from each source state to each target state.

    In the order in which they move the fewest bytes, which is what XLA's partitioner does for these cases:
    slices (free), sums that end split, sums that end whole, moves between dims, gathers. Where the backend has
    no reduce-scatter, sums are one all-reduce of the unsliced tensor.
    """
    axis_sizes = list(collectives.mesh.axes.values())
    names = list(collectives.mesh.axes)
    local = local_elements(source, sizes, axis_sizes)[:, None] * np.ones((1, len(target)))
    f, t = source[:, None, :], target[None, :, :]
    weights = 1 << np.arange(len(axis_sizes), dtype=np.int64)

    def mask(condition: NDArray[np.bool_]) -> NDArray[np.int64]:
        return condition.astype(np.int64) @ weights

    scatter = mask((f == PARTIAL) & (t >= 0))
    total = mask((f == PARTIAL) & (t < 0))
    sliced = mask((f == WHOLE) & (t >= 0))
    gather = mask((f >= 0) & (t == WHOLE))
    steps: list[Step] = []

    def members(bits: int) -> tuple[int, ...]:
        return tuple(a for a in range(len(axis_sizes)) if bits >> a & 1)

    def parts(bits: int) -> int:
        return math.prod(axis_sizes[a] for a in members(bits))

    def add(kind: Kind, bits: int, where: NDArray[np.bool_], elements: NDArray[np.float64], item: int) -> None:
        steps.append(Step(kind, members(bits), np.where(where, elements * item, 0.0)))

    def distinct(bits: NDArray[np.int64]) -> list[int]:
        return [int(b) for b in np.unique(bits) if b]

    falls_back = {
        b: collectives.partial_to_split_kind(tuple(names[a] for a in members(b))) == "all-reduce"
        for b in distinct(scatter)
    }
    late = np.zeros_like(scatter)
    for bits, summed in falls_back.items():
        if summed:
            late = np.where(scatter == bits, bits, late)
    for bits in distinct(np.where(late > 0, late | total, 0)):
        add("all-reduce", bits, (late > 0) & ((late | total) == bits), local, reduce_itemsize)
    for bits in distinct(late):
        local = np.where(late == bits, local / parts(bits), local)
    for bits in distinct(sliced):
        local = np.where(sliced == bits, local / parts(bits), local)
    real = np.where(late > 0, 0, scatter)
    for bits in distinct(real):
        add("reduce-scatter", bits, real == bits, local, reduce_itemsize)
        local = np.where(real == bits, local / parts(bits), local)
    only = np.where(late > 0, 0, total)
    for bits in distinct(only):
        add("all-reduce", bits, only == bits, local, reduce_itemsize)
    for axis in range(len(axis_sizes)):
        moved = (f[..., axis] >= 0) & (t[..., axis] >= 0) & (f[..., axis] != t[..., axis])
        if moved.any():
            add("all-to-all", 1 << axis, moved, local, itemsize)
    for bits in distinct(gather):
        local = np.where(gather == bits, local * parts(bits), local)
        add("all-gather", bits, gather == bits, local, itemsize)
    return steps


def decompose(
    states: States, dims: Sequence[Sequence[int]], factors: Sequence[int], axes: Sequence[int]
) -> tuple[States, States]:
    """States over dims as states over the factors that make up each dim (major first).

    Axes fill the factors of a dim from the major one on; an axis fits a factor only if it divides what is left
    of it, and a later factor takes axes only once the earlier ones are split to single elements. An axis that does
    not fit is dropped. Gives the states over factors, and the given states without the dropped axes.
    """
    result = np.full_like(states, WHOLE)
    result[states == PARTIAL] = PARTIAL
    kept = states.copy()
    for dim, parts in enumerate(dims):
        if len(parts) == 1:
            result[states == dim] = parts[0]
            continue
        for row in np.flatnonzero((states == dim).any(axis=1)):
            left = [factors[p] for p in parts]
            position = 0
            for axis in np.flatnonzero(states[row] == dim):
                while position < len(parts) - 1 and left[position] == 1:
                    position += 1
                if not parts or left[position] % axes[axis]:
                    kept[row, axis] = WHOLE
                    continue
                left[position] //= axes[axis]
                result[row, axis] = parts[position]
    return result, kept
