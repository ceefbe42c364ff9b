"""Prices of collectives, and the mesh axes that carry their bytes.

Sizes are bytes on one device. The size is the gathered result of an all-gather, or the unreduced input of a
reduce-scatter. For an all-reduce, all-to-all or collective-permute it is the local array.

Time of one collective = launch + sum over kinds of links, slowest outside, of max(latency, bandwidth).

- Ring of n (an axis that wraps): a device receives one shard per direction in each of floor(n/2) steps. An all-gather
  of V therefore takes `V * floor(n/2) / n / W` with one-way bandwidth W: `V / W_both` for even n (jax-ml/scaling-book,
  sharding.md). Line of n: the end receives n - 1 shards over one link: `V * (n-1)/n / W`.
- Several torus axes of one group each move a part of the data at the same time: their rates add up.
- All-to-all is bound by the middle cut: `B * floor(n/2) * ceil(n/2) / n / W`, half of it in a ring. On several axes the
  worst axis binds (dimension-ordered routing). On a twisted torus all axes carry the same (`torus.mean_hops`).
- Between islands of GPUs one NCCL collective uses both kinds of links at once: the slower kind binds
  (jax-ml/scaling-book, gpus.md). For measured chips (`gpu_measurements`), a collective inside an island takes the
  measured time. A collective between islands takes that or the time of the network cards, whichever is longer.
- Between slices every chip communicates with its counterparts through its share of the network. A gather starts with
  the slow links, where data is small. The part inside a slice therefore runs on a size divided by the group outside of
  it.
- All-reduce is a reduce-scatter and an all-gather.
- Between threads of one process (CPU) a collective first waits for all its threads, which take turns on the cores that
  they share. Then it copies (`_COPIES`) through main memory, which they share as well.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost.axis_layout import Segment
from autoshard.cost.backend import Scatters
from autoshard.cost.calibration import Calibration, load_calibration
from autoshard.cost.device_mesh import Mesh
from autoshard.cost.gpu_measurements import (
    POINTS,
    POWERS,
    IslandNetwork,
    at_sizes,
    between_seconds,
    is_measured,
    island_curve,
    network_constants,
)
from autoshard.cost.torus import in_group, is_whole, mean_hops
from autoshard.errors import UserError


Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]

KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_LEVELS = ("network", "torus", "switch", "die", "memory")
"""Kinds of links, outermost first."""

_COPIES: dict[str, float] = {
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "collective-permute": 1.5,
    "all-to-all": 4.0,
    "all-reduce": 1.5,
}
"""Times that XLA's in-process collectives read and write the size, to halves.

`experiments/fidelity/calibrate_cpu.py` measures each on data that no cache holds. An all-reduce sums a share on every
device and then spreads it. An all-to-all cuts its operand into one array for each device and joins the arrays again.
"""

SUMMED_GATHER = 8 * 2**20
"""Largest gathered bytes for which TPU compilers emit an all-reduce in place of a gather over a torus of two dims."""

GroupRates = tuple[NDArray[np.float64], list[tuple[NDArray[np.float64], NDArray[np.float64]]]]
"""Launch seconds by group, and for each kind of link the least seconds and the seconds per byte by group."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """One kind of link inside one group."""

    latency: float
    """Least seconds of one phase on these links."""
    per_byte: float
    """Seconds per byte of the collective's size, as this module defines it."""


class Collectives:
    """Prices of collectives on one mesh with one calibration (by default `load_calibration` of its chip)."""

    def __init__(self, mesh: Mesh, calibration: Calibration | None = None) -> None:
        self.mesh = mesh
        self.calibration = calibration or load_calibration(mesh.topology.chip)
        self._levels: dict[tuple[str, tuple[str, ...]], tuple[_Level, ...]] = {}
        self._tables: dict[Kind, GroupRates] = {}
        self._curves: dict[tuple[str, tuple[str, ...]], NDArray[np.float64]] = {}
        self.measured = self.calibration.measured and is_measured(mesh.topology.chip.name)

    @property
    def can_overlap(self) -> bool:
        """True if collectives can overlap with compute."""
        return self.mesh.topology.traits.overlaps

    def time(self, kind: Kind, axes: tuple[str, ...], size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds of one collective over the group that `axes` span, for each of `size_bytes`.

        The order of the axes does not matter, and a group of one device takes no time. Raises: UserError for an unknown
        kind or axis.
        """
        size = np.asarray(size_bytes, dtype=np.float64)
        group = self._group(kind, axes)
        if not group:
            return np.zeros_like(size)
        if self.measured:
            return at_sizes(self._curve(kind, group), size)
        seconds = np.full_like(size, self._launch(group))
        for level in self._levels_of(kind, group):
            seconds += np.maximum(level.latency, size * level.per_byte)
        return seconds * self.phases(kind)

    def network_share(self, kind: Kind, axes: tuple[str, ...]) -> float:
        """Return the share, 0 to 1, of the seconds per byte of a collective that its bytes between slices take."""
        group = self._group(kind, axes)
        if not any(segment.kind == "network" for axis in group for segment in self.mesh.segments(axis)):
            return 0.0
        outermost, *others = (level.per_byte for level in self._levels_of(kind, group))
        return outermost / (outermost + sum(others))

    def time_of_groups(
        self, kind: Kind, groups: NDArray[np.int32], size_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the seconds of one collective over each of many groups, as `time` does for one.

        - `groups`: mesh axes of each group as bits (the first axis is 1).
        - `size_bytes`: size of each group's collective.
        """
        if self.measured:
            return at_sizes(self.curves_of_groups(kind)[groups], np.asarray(size_bytes, dtype=np.float64))
        launch, rates = self.rates_of_groups(kind)
        seconds = launch[groups]
        for latency, per_byte in rates:
            seconds += np.maximum(latency[groups], size_bytes * per_byte[groups])
        return seconds * self.phases(kind)

    def rates_of_groups(self, kind: Kind) -> GroupRates:
        """Return the launch seconds and rates that `time_of_groups` prices with, for every set of mesh axes as bits.

        They are those of one pass over the group, see `phases`. Chips with measured collectives use `curves_of_groups`.
        """
        if kind not in self._tables:
            spanned = self._spanned(kind)
            levels = [self._levels_of(kind, group) if group else () for group in spanned]
            launch = np.array([self._launch(group) if group else 0.0 for group in spanned])
            depth = max(len(each) for each in levels)
            padded = [(*each, *[_Level(0.0, 0.0)] * (depth - len(each))) for each in levels]
            rates = [
                (np.array([each[k].latency for each in padded]), np.array([each[k].per_byte for each in padded]))
                for k in range(depth)
            ]
            self._tables[kind] = (launch, rates)
        return self._tables[kind]

    def curves_of_groups(self, kind: Kind) -> NDArray[np.float64]:
        """Return the measured seconds at `2 ** POWERS` bytes, [sets of mesh axes as bits, points].

        Chips without measured collectives have no points, [sets, 0]. A set that spans one device takes the least
        positive time.
        """
        spanned = self._spanned(kind)
        if not self.measured:
            return np.zeros((len(spanned), 0))
        # Curves need logarithms, so "no time" is a positive number that is too small to change any sum of seconds.
        nothing = np.full(POINTS, np.finfo(np.float64).tiny)
        return np.stack([self._curve(kind, group) if group else nothing for group in spanned])

    def _spanned(self, kind: Kind) -> list[tuple[str, ...]]:
        """Return the axes larger than 1 of every set of mesh axes, [sets as bits]."""
        names = self.mesh.names
        every = [tuple(n for a, n in enumerate(names) if bits >> a & 1) for bits in range(1 << len(names))]
        return [self._group(kind, axes) for axes in every]

    def _curve(self, kind: Kind, group: tuple[str, ...]) -> NDArray[np.float64]:
        """Return the seconds of a measured chip's collective, [points]; `link_efficiency` scales the measured rate."""
        if (kind, group) not in self._curves:
            segments = [segment for axis in group for segment in self.mesh.segments(axis)]
            islands = math.prod(segment.size for segment in segments if segment.kind == "network")
            inside = math.prod(segment.size for segment in segments if segment.kind != "network")
            sizes, figures, chip = 2.0**POWERS, self.calibration, self.mesh.topology.chip
            seconds = np.zeros(POINTS)
            if inside > 1:
                seconds = at_sizes(island_curve(chip.name, kind, inside), sizes / figures.link_efficiency)
            if islands > 1:
                card = self._link("network")[1]
                network = IslandNetwork(network_constants(chip.name), card, figures.network_latency_s)
                seconds = np.maximum(seconds, between_seconds(kind, islands, inside, sizes, network))
            self._curves[kind, group] = np.maximum.accumulate(seconds)
        return self._curves[kind, group]

    def _launch(self, group: tuple[str, ...]) -> float:
        """Return the seconds before anything moves; the devices of a `cpu:N` arrive one after the other."""
        launch = self.calibration.collective_launch_s
        if self.mesh.topology.traits.in_turn:
            launch += self.calibration.hop_s * math.prod(self.mesh.axes[axis] for axis in group)
        return launch

    def phases(self, kind: Kind) -> int:
        """Return the times that a collective passes over its group: 2 for an all-reduce in two phases, else 1."""
        return 2 if kind == "all-reduce" and self.mesh.topology.traits.sums_in_two_phases else 1

    def _levels_of(self, kind: Kind, group: tuple[str, ...]) -> tuple["_Level", ...]:
        """Return the latency and rate of each kind of link for one phase of a collective.

        A reduce-scatter, and both phases of an all-reduce in two phases, cost as an all-gather.
        """
        ring = kind in ("reduce-scatter", "all-reduce") and self.mesh.topology.traits.sums_in_two_phases
        base = "all-gather" if ring else kind
        if (base, group) not in self._levels:
            self._levels[base, group] = self._price(base, group)
        return self._levels[base, group]

    def wire_bytes(self, kind: Kind, axes: tuple[str, ...], size_bytes: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Return the bytes that one device sends, by mesh axis larger than 1; the shares add up to the total exactly.

        The total is `V (n-1)/n` (twice for all-reduce, `V` for collective-permute) for a group of n. A hierarchical
        algorithm defines the shares: the last mesh axis sends first, with the full size. Each earlier axis sends the
        size divided by the axes after it. A group of one device sends nothing: the result is empty.
        """
        size = np.asarray(size_bytes, dtype=np.float64)
        group = self._group(kind, axes)
        sizes = self.mesh.axes
        n = math.prod(sizes[axis] for axis in group)
        if n == 1:
            return {}
        factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
        total = size * factor
        shares: dict[str, NDArray[np.float64]] = {}
        inner = 1
        rest = total
        for axis in reversed(group):
            if axis == group[0]:
                shares[axis] = rest
                break
            share = (sizes[axis] - 1) / (sizes[axis] * inner) * n / (n - 1)
            shares[axis] = total * share
            rest = rest - shares[axis]
            inner *= sizes[axis]
        return {axis: shares[axis] for axis in group}

    def link_bytes(self, kind: Kind, axes: tuple[str, ...], size_bytes: float) -> dict[str, float]:
        """Return the bytes that cross a link of each physical axis in one direction, by the axis's name.

        The bytes are those of the busiest of equal links, as `time` prices them. The axes of a torus divide a gather so
        that all of them finish at once. Devices that share one memory use no link.
        """
        group = self._group(kind, axes)
        base = "all-gather" if kind in ("reduce-scatter", "all-reduce") else kind
        crossing: dict[str, float] = {}
        for link, segments, inner in self._by_link(group):
            share = size_bytes * (1.0 / inner if base == "all-gather" else 1.0) * self.phases(kind)
            cuts = _cuts(segments) if base == "all-to-all" and link == "torus" else {}
            per_byte = _SHAPES[base](segments, link)[1]
            if link != "memory":
                crossing |= {segment.axis: share * cuts.get(segment.axis, per_byte) for segment in segments}
        return crossing

    def _by_link(self, group: tuple[str, ...]) -> list[tuple[str, list[Segment], int]]:
        """Return (kind of link, its segments, devices of the group on inner kinds) of a group, outermost kind first."""
        segments = _joined([segment for axis in group for segment in self.mesh.segments(axis)])
        if self.mesh.topology.twisted:
            torus = {axis.name: axis.size for axis in self.mesh.topology.physical_axes if axis.kind == "torus"}
            segments = in_group(segments, torus)
        inner = math.prod(segment.size for segment in segments)
        levels = []
        for link in _LEVELS:
            mine = [segment for segment in segments if segment.kind == link]
            if mine:
                inner //= math.prod(segment.size for segment in mine)
                levels.append((link, mine, inner))
        return levels

    def partial_to_split_kind(self, axes: tuple[str, ...]) -> Kind:
        """Return the collective that the compiler emits for a partial sum that must end split over `axes`.

        An all-reduce (of the full size) stands for all-reduce and a local slice. CPU never emits reduce-scatter, and
        GPU always does. TPU emits it between slices, and inside a slice unless the group is all of a slice of several
        hosts. A group that spans slices and chips of a slice becomes an all-reduce in levels.

        Evidence: docs/compiler_behaviour.md, "Reduce-scatter of a weight gradient".
        """
        group = self._group("reduce-scatter", axes)
        topology = self.mesh.topology
        if topology.traits.scatters is not Scatters.BY_GROUP:
            return "reduce-scatter" if topology.traits.scatters is Scatters.ALWAYS else "all-reduce"
        between = {segment.kind == "network" for axis in group for segment in self.mesh.segments(axis)}
        if len(between) > 1:
            return "all-reduce"
        n = math.prod(self.mesh.axes[axis] for axis in group)
        is_whole_slice = between == {False} and n * topology.slices == topology.num_devices
        return "all-reduce" if is_whole_slice and topology.num_hosts > topology.slices else "reduce-scatter"

    def summed_gathers(self, axes: tuple[str, ...]) -> float:
        """Return the largest gathered bytes for which the compiler emits an all-reduce and no gather over `axes`.

        Only groups of all devices of a torus above `Calibration.gather_max_group` have any.

        Evidence: docs/compiler_behaviour.md, "Gathers over a whole slice".
        """
        topology = self.mesh.topology
        n = math.prod(self.mesh.axes[axis] for axis in self._group("all-gather", axes))
        if not topology.traits.torus or n != self.mesh.num_devices or n <= self.calibration.gather_max_group:
            return 0.0
        return math.inf if len(topology.shape) > 2 else SUMMED_GATHER

    def widen_dtype(self, dtype: str) -> str:
        """Return the dtype in which the backend reduces: `Backend.sum_dtype` for 16-bit floats, else `dtype` itself."""
        narrow = dtype.lower() in ("bf16", "bfloat16", "f16", "float16")
        return self.mesh.topology.traits.sum_dtype if narrow and self.mesh.topology.traits.sum_dtype else dtype

    def _group(self, kind: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of the group larger than 1, in mesh order. Raises: UserError for an unknown kind or axis."""
        if kind not in KINDS:
            raise UserError(f"unknown collective {kind!r}; known are {', '.join(KINDS)}")
        unknown = [axis for axis in axes if axis not in self.mesh.names]
        if unknown:
            raise UserError(f"mesh axis {unknown[0]!r} does not exist; the mesh has {', '.join(self.mesh.names)}")
        return tuple(name for name, size in self.mesh.axes.items() if name in axes and size > 1)

    def _price(self, kind: str, group: tuple[str, ...]) -> tuple[_Level, ...]:
        """Return the latency, and seconds per byte of the whole size, of a collective on each kind of link of a group.

        With `Backend.one_ring` all kinds become one: latencies add up, and the slowest rate binds.
        """
        torus = {axis.name: axis.size for axis in self.mesh.topology.physical_axes if axis.kind == "torus"}
        twisted = self.mesh.topology.twisted
        levels = []
        for link, segments, inner in self._by_link(group):
            # A gather moves 1/inner of the result on this level; the other kinds move everything there.
            share = 1.0 / inner if kind == "all-gather" else 1.0
            step, rate = self._link(link)
            if link == "memory":
                latency, per_byte = 0.0, _COPIES[kind]
            elif twisted and link == "torus" and kind == "all-to-all" and is_whole(segments, torus):
                hops, longest = mean_hops(tuple(torus[segment.axis] for segment in segments))
                latency, per_byte = float(longest), max(hops) / 2.0
            else:
                latency, per_byte = _SHAPES[kind](segments, link)
            levels.append(_Level(latency * step, per_byte * share / rate))
        if self.mesh.topology.traits.one_ring and len(levels) > 1:
            return (_Level(sum(each.latency for each in levels), max(each.per_byte for each in levels)),)
        return tuple(levels)

    def _link(self, link: str) -> tuple[float, float]:
        """Return the least seconds of one step on a kind of link, and the one-way bytes per second of one device.

        For `memory` the rate is that of a device's part of the traffic through main memory.
        """
        topology, figures = self.mesh.topology, self.calibration
        chip, per_chip = topology.chip, topology.devices_per_chip
        if link == "network":
            rate = chip.network_bytes_per_s_per_chip * figures.network_efficiency / per_chip
            return figures.network_latency_s, rate / (1.0 + figures.network_contention * (topology.slices - 1))
        if link == "memory":
            rate = topology.memory_bytes_per_s * figures.memory_efficiency
            return figures.hop_s, rate / figures.shared_memory_traffic
        if link == "die":
            return figures.hop_s, chip.die_link_oneway_bytes_per_s * figures.link_efficiency
        return figures.hop_s, chip.link_oneway_bytes_per_s * figures.link_efficiency / per_chip


def _direct(segments: list[Segment]) -> tuple[float, float]:
    """Return steps and link times per byte of links that reach every peer at once.

    There is one step, and everything but the device's own shard passes through one port.
    """
    n = math.prod(segment.size for segment in segments)
    return 1.0, (n - 1) / n


def _joined(segments: list[Segment]) -> list[Segment]:
    """Merge adjacent digits of one physical axis, so that fewer segments describe the same devices.

    A merged segment is a ring if its major digit is one. The result is sorted by axis, then from far to near.
    """
    result: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.axis, -s.stride)):
        major = result[-1] if result else None
        if major is not None and major.axis == segment.axis and major.stride == segment.stride * segment.size:
            size = major.size * segment.size
            result[-1] = dataclasses.replace(major, size=size, stride=segment.stride)
        else:
            result.append(segment)
    return result


def _steps(segments: list[Segment]) -> float:
    """Return the hops over physical links from the farthest peer, along every torus segment in turn."""
    return float(sum((s.size // 2 if s.wrap else s.size - 1) * s.stride for s in segments))


def _gather(segments: list[Segment], link: str) -> tuple[float, float]:
    """Return the steps of an all-gather, and its one-way link times per byte of the result."""
    if link != "torus":
        return _direct(segments)
    n = math.prod(segment.size for segment in segments)
    # Digits of one physical axis share its links, so only the faster digit counts. The rates of different axes add up.
    rates: dict[str, float] = {}
    for s in segments:
        rates[s.axis] = max(rates.get(s.axis, 0.0), (2.0 if s.wrap else 1.0) / s.stride)
    # An even ring takes n/2 steps, in which both directions together have time for n shards, not n - 1.
    even_ring = any(s.wrap and s.size % 2 == 0 for s in segments)
    return _steps(segments), (1.0 if even_ring else (n - 1) / n) / sum(rates.values())


def _exchange(segments: list[Segment], link: str) -> tuple[float, float]:
    """Return the steps of an all-to-all, and its one-way link times per byte of the local array."""
    if link != "torus":
        return _direct(segments)
    return _steps(segments), max(_cuts(segments).values())


def _cuts(segments: list[Segment]) -> dict[str, float]:
    """Return the one-way bytes over the middle of each physical axis, per byte of the exchanged local array."""
    cuts: dict[str, float] = {}
    for s in segments:
        # Each of the n/2 devices on one side sends its share to the n/2 on the other; a ring has two cuts.
        cut = (s.size // 2) * (s.size - s.size // 2) / s.size * s.stride / (2.0 if s.wrap else 1.0)
        cuts[s.axis] = cuts.get(s.axis, 0.0) + cut
    return cuts


def _permute(segments: list[Segment], link: str) -> tuple[float, float]:
    """Return the steps of a shift by one place, and its one-way link times per byte of the local array.

    On a line, the last device sends its part all the way back.
    """
    if link != "torus":
        return 1.0, 1.0
    steps = max((1 if s.wrap else s.size - 1) * s.stride for s in segments)
    return steps, max(float(s.stride) for s in segments)


_SHAPES = {"all-gather": _gather, "all-to-all": _exchange, "collective-permute": _permute}
"""Kind of collective -> the function of segments and link that returns its steps and link times per byte."""


def links(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Return the groups of mesh axes that share physical links, in mesh order; traffic within a group adds up.

    Axes of size 1 use no links and are omitted. If one collective is in flight at a time, over any links, all other
    axes are one group.
    """
    one_at_a_time = mesh.topology.traits.one_in_flight
    groups: list[tuple[set[str], list[str]]] = []
    for name, segments in zip(mesh.names, mesh.layout, strict=True):
        used = {"any" if one_at_a_time else s.axis if s.kind == "torus" else s.kind for s in segments}
        if not used:
            continue
        joined = [group for group in groups if group[0] & used]
        groups = [group for group in groups if not group[0] & used]
        physical = used.union(*(group[0] for group in joined))
        groups.append((physical, [axis for group in joined for axis in group[1]] + [name]))
    ordered = (tuple(sorted(group[1], key=mesh.names.index)) for group in groups)
    return tuple(sorted(ordered, key=lambda group: mesh.names.index(group[0])))
