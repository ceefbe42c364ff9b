"""Assignment of physical axes, whole or split, to the axes of a mesh.

A mesh axis is a list of segments, major first. A segment is a digit of one physical axis: `size` steps of `stride`. On
`v5e:16x16`, `data=32,model=8` becomes data = x(16) + y(2, stride 8), model = y(8, stride 1). The major digit of y still
closes to a ring (through 8 hops), and the minor digit is a line.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from autoshard.cost.topology import PhysicalAxis
from autoshard.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A digit of a physical axis: `size` devices, `stride` apart, in a ring if `wrap`.

    `stride` is also the number of groups that share each link. The devices between two neighbours of a group form
    groups of their own, which communicate at the same time.
    """

    axis: str
    """Name of the physical axis."""
    kind: str
    """Kind of its links, see `PhysicalAxis`."""
    size: int
    """Number of devices along the segment."""
    stride: int
    """Hops along the physical axis between two neighbours of the segment."""
    wrap: bool
    """True if the segment closes to a ring."""


_Counts = tuple[int, ...]
"""Devices of one mesh axis along each physical axis; their product is the size of the mesh axis."""


def _takes(size: int, left: Sequence[int]) -> Iterator[_Counts]:
    """Yield every way to write `size` as a product of one divisor of each number in `left`; none if there is no way."""
    if not left:
        if size == 1:
            yield ()
        return
    others = math.prod(left[1:])
    for count in _divisors(math.gcd(size, left[0])):
        if others % (size // count) == 0:
            for rest in _takes(size // count, left[1:]):
                yield (count, *rest)


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _assignments(
    sizes: Sequence[int], left: tuple[int, ...], pieces: float = math.inf
) -> Iterator[tuple[_Counts, ...]]:
    """Yield every way to give each mesh axis its devices along each physical axis.

    - `sizes`: sizes of the mesh axes.
    - `left`: devices of each physical axis that are not assigned yet.
    - `pieces`: most segments (counts above 1) of all mesh axes together.
    """
    if not sizes:
        yield ()
        return
    for counts in _takes(sizes[0], left):
        used = sum(count > 1 for count in counts)
        if used + len(sizes) - 1 > pieces:
            continue
        remaining = tuple(length // count for length, count in zip(left, counts, strict=True))
        for rest in _assignments(sizes[1:], remaining, pieces - used):
            yield (counts, *rest)


def _assignments_of(
    sizes: tuple[int, ...], lengths: tuple[int, ...], fixed: _Counts | None
) -> Iterator[tuple[_Counts, ...]]:
    """Yield the assignments of whole physical axes, in the order of `_assignments`.

    `fixed` has the devices of each mesh axis along the first physical axis; None for any.
    """
    if fixed is None:
        yield from _assignments(sizes, lengths)
        return
    within = [size // count for size, count in zip(sizes, fixed, strict=True)]
    for assignment in _assignments(within, lengths[1:]):
        yield tuple((count, *counts) for count, counts in zip(fixed, assignment, strict=True))


def least_cuts(sizes: Sequence[int], physical: Sequence[PhysicalAxis], most: int) -> int | None:
    """Return the fewest cuts of physical axes for mesh axes of these sizes; None if more than `most` are needed.

    Cuts are the segments beyond one for each physical axis longer than 1.
    """
    lengths = tuple(axis.size for axis in physical)
    whole = sum(length > 1 for length in lengths)
    for cuts in range(most + 1):
        if next(_assignments(sizes, lengths, whole + cuts), None) is not None:
            return cuts
    return None


# Sort key of a segment within a mesh axis, by kind of link; a torus segment uses its stride. Network segments stand
# outermost.
_PLACE = {"network": math.inf, "die": 0, "switch": 0, "memory": 0}


def _segments(assignment: Sequence[_Counts], physical: Sequence[PhysicalAxis]) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of every mesh axis; earlier mesh axes get the major digits of a split physical axis."""
    strides = [axis.size for axis in physical]
    result = []
    for counts in assignment:
        digits = []
        for position, (count, axis) in enumerate(zip(counts, physical, strict=True)):
            outermost = strides[position] == axis.size
            strides[position] //= count
            if count > 1:
                wrap = axis.wrap and outermost
                digits.append(Segment(axis.name, axis.kind, count, strides[position], wrap))
        # Far steps stand first, so that most neighbours along the mesh axis are near. Devices of a chip stay innermost.
        result.append(
            tuple(sorted(digits, key=lambda s: s.stride if s.kind == "torus" else _PLACE[s.kind], reverse=True))
        )
    return tuple(result)


# Rough rates of each kind of link, relative to one direction of one torus link. They only rank layouts.
_SPEED = {"network": 1e-3, "torus": 1.0, "die": 6.0, "switch": 10.0, "memory": 1.0}


def _speed(segments: tuple[Segment, ...]) -> float:
    """Return the rough all-gather rate of a mesh axis, in one-way torus links.

    The slowest kind of link binds, and the rates of torus segments add up. An axis without segments has infinity.
    """
    torus = sum((2.0 if s.wrap else 1.0) / s.stride for s in segments if s.kind == "torus")
    others = [_SPEED[s.kind] for s in segments if s.kind != "torus"]
    return min([torus, *others] if torus else others, default=math.inf)


def _rank(segments: tuple[tuple[Segment, ...], ...], assignment: Sequence[_Counts], physical: Sequence[PhysicalAxis]):
    """Return the sort key of a layout; the smallest is the best.

    The key prefers slow links on the first mesh axes, then whole physical axes, then fast last mesh axes.
    """
    last = len(segments) - 1
    early_die = sum((last - i) for i, mine in enumerate(segments) for s in mine if s.kind == "die")
    speeds = tuple(-_speed(mine) for mine in reversed(segments))
    # The last entry only breaks ties: earlier mesh axes prefer earlier physical axes.
    order = tuple(tuple(-count for count in counts) for counts in assignment)
    return (*_first_ranks(assignment, physical), early_die, speeds, order)


def _first_ranks(assignment: Sequence[_Counts], physical: Sequence[PhysicalAxis]) -> tuple[float, int]:
    """Return the first two entries of `_rank`: the weight of slow links on late mesh axes, and the cuts.

    They need no segments and therefore prune assignments early.
    """
    network = [p for p, axis in enumerate(physical) if axis.kind == "network"]
    late_network = sum(i * math.log(counts[p]) for i, counts in enumerate(assignment) for p in network)
    pieces = [sum(count > 1 for count in counts) for counts in zip(*assignment, strict=True)]
    return round(late_network, 9), sum(max(0, count - 1) for count in pieces)


def choose_layout(
    sizes: Mapping[str, int], physical: Sequence[PhysicalAxis], network: Mapping[str, int] | None = None
) -> dict[str, tuple[Segment, ...]]:
    """Return the segments of every mesh axis, major first.

    Slices go to the first mesh axes, and the devices of a chip to the last one. After that, physical axes stay whole
    where possible, and the last mesh axes get the fastest rings. Among equal layouts earlier mesh axes
    get earlier physical axes. An axis of size 1 has no segments.

    - `sizes`: size of each mesh axis, major first.
    - `physical`: the physical axes, major first.
    - `network`: number of slices (or islands) that each mesh axis spans, 1 if absent; None to choose it.

    At most 200 000 assignments are compared. Raises: UserError if the sizes or `network` do not fit on the physical
    axes.
    """
    fixed = None
    if network is not None:
        fixed = tuple(network.get(name, 1) for name in sizes)
        outer = physical[0]
        unknown = sorted(network.keys() - sizes.keys())
        if unknown or outer.kind != "network" or math.prod(fixed) != outer.size:
            have = f"{outer.size} {outer.name}s" if outer.kind == "network" else "one machine"
            asked = " x ".join(f"{name}={count}" for name, count in network.items())
            raise UserError(
                f"the network shape {asked} cannot be laid on {have}; it must name mesh axes and multiply to it"
            )
        for name, count in zip(sizes, fixed, strict=True):
            if sizes[name] % count:
                raise UserError(
                    f"mesh axis {name}={sizes[name]} cannot span {count} {outer.name}s: {count} does not divide it"
                )
    best = None
    lengths = tuple(axis.size for axis in physical)
    # The cap bounds the time for meshes with many axes and sizes with many divisors.
    for assignment in itertools.islice(_assignments_of(tuple(sizes.values()), lengths, fixed), 200_000):
        # The first entries of the rank already lose, so the segments need not be built.
        if best is not None and _first_ranks(assignment, physical) > best[0][:2]:
            continue
        segments = _segments(assignment, physical)
        rank = _rank(segments, assignment, physical)
        if best is None or rank < best[0]:
            best = (rank, segments)
    if best is None:
        asked = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise UserError(f"the mesh {asked} cannot be laid on physical axes {' x '.join(map(str, lengths))}")
    return dict(zip(sizes, best[1], strict=True))
