"""How long a collective takes, and which mesh axes its bytes travel on.

Sizes are bytes on one device: the gathered result of an all-gather, the unreduced input of a reduce-scatter,
the local array of an all-reduce, all-to-all or collective-permute.

Time of one collective = launch + sum over kinds of links, slowest outside, of max(latency, bandwidth).

- Ring of n (an axis that wraps): a device receives one shard per direction in each of floor(n/2) steps, so
  all-gather of V takes `V * floor(n/2) / n / W` with one-way bandwidth W: `V / W_both` for even n
  (jax-ml/scaling-book, sharding.md). Line of n: the end receives n - 1 shards over one link: `V * (n-1)/n / W`.
- Several torus axes of one group work at once on a part of the data each: their rates add up.
- All-to-all is bound by the middle cut: `B * floor(n/2) * ceil(n/2) / n / W`, half of it in a ring; on several
  axes the worst one binds (dimension-ordered routing). On a twisted torus all axes carry the same (`_twist`).
- Between islands of GPUs one NCCL collective runs on both kinds of links at once: the slower one binds
  (jax-ml/scaling-book, gpus.md). Where a chip's collectives were measured (`_measured`), one inside an island takes
  what was measured, and one between islands that or what the network cards take, whichever is longer.
- Between slices every chip talks to its counterparts through its share of the network; the part inside a slice runs
  on a size reduced by the group outside of it: the gather starts with the slow links, where data is small.
- All-reduce is a reduce-scatter and an all-gather.
- Between threads of one process (CPU) a collective is a meeting of all its threads, which take turns on the cores
  that they share, and then copies (`_COPIES`) through main memory, which they share as well.
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
"""Times that XLA's in-process collectives read and write the size, as `experiments/fidelity/calibrate_cpu.py` measures
each on data that no cache holds, to halves: an all-reduce sums a share on every device and then spreads it, an
all-to-all cuts its operand into one array for each device and joins them again."""


GroupRates = tuple[NDArray[np.float64], list[tuple[NDArray[np.float64], NDArray[np.float64]]]]
"""By group: seconds before anything moves, and for each kind of links the least seconds and those per byte."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    """One kind of link inside one group: least seconds, and seconds per byte of the whole group's size."""

    latency: float
    per_byte: float


class Collectives:
    """Prices collectives on one mesh with one calibration (by default the shipped one of its chip)."""

    def __init__(self, mesh: Mesh, calibration: Calibration | None = None) -> None:
        self.mesh = mesh
        self.calibration = calibration or load_calibration(mesh.topology.chip)
        self._levels: dict[tuple[str, tuple[str, ...]], tuple[_Level, ...]] = {}
        self._tables: dict[Kind, GroupRates] = {}
        self._curves: dict[tuple[str, tuple[str, ...]], NDArray[np.float64]] = {}
        self.measured = self.calibration.measured and is_measured(mesh.topology.chip.name)

    @property
    def can_overlap(self) -> bool:
        """Whether collectives can run beside compute."""
        return self.mesh.topology.traits.overlaps

    def time(self, kind: Kind, axes: tuple[str, ...], size_bytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds of one collective over the group that `axes` span; an array in, an array of that shape out.

        Raises: UserError for an unknown kind or axis.
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

    def time_of_groups(
        self, kind: Kind, groups: NDArray[np.int32], size_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """The same for many groups at once: `groups` has the mesh axes of each as bits (the first axis is 1)."""
        if self.measured:
            return at_sizes(self.curves_of_groups(kind)[groups], np.asarray(size_bytes, dtype=np.float64))
        launch, rates = self.rates_of_groups(kind)
        seconds = launch[groups]
        for latency, per_byte in rates:
            seconds += np.maximum(latency[groups], size_bytes * per_byte[groups])
        return seconds * self.phases(kind)

    def rates_of_groups(self, kind: Kind) -> GroupRates:
        """What `time_of_groups` reckons with, for every set of mesh axes as bits."""
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
        """[sets of mesh axes as bits, points] seconds at `2 ** POWERS` bytes, where collectives were measured.

        No curves at all, [sets, 0], for other chips; a set that spans one device takes no time.
        """
        spanned = self._spanned(kind)
        if not self.measured:
            return np.zeros((len(spanned), 0))
        # What takes no time is a number that no sum of seconds can tell from none, since curves have logarithms.
        nothing = np.full(POINTS, np.finfo(np.float64).tiny)
        return np.stack([self._curve(kind, group) if group else nothing for group in spanned])

    def _spanned(self, kind: Kind) -> list[tuple[str, ...]]:
        """By set of mesh axes as bits: its axes larger than 1."""
        names = self.mesh.names
        every = [tuple(n for a, n in enumerate(names) if bits >> a & 1) for bits in range(1 << len(names))]
        return [self._group(kind, axes) for axes in every]

    def _curve(self, kind: Kind, group: tuple[str, ...]) -> NDArray[np.float64]:
        """[points] seconds of a measured chip's collective; `link_efficiency` is a share of what was measured."""
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
        """Seconds before anything moves; the devices of a `cpu:N` arrive one after the other."""
        launch = self.calibration.collective_launch_s
        if self.mesh.topology.traits.in_turn:
            launch += self.calibration.hop_s * math.prod(self.mesh.axes[axis] for axis in group)
        return launch

    def phases(self, kind: Kind) -> int:
        """Times that a collective goes over its group."""
        return 2 if kind == "all-reduce" and self.mesh.topology.traits.sums_in_two_phases else 1

    def _levels_of(self, kind: Kind, group: tuple[str, ...]) -> tuple["_Level", ...]:
        ring = kind in ("reduce-scatter", "all-reduce") and self.mesh.topology.traits.sums_in_two_phases
        base = "all-gather" if ring else kind
        if (base, group) not in self._levels:
            self._levels[base, group] = self._price(base, group)
        return self._levels[base, group]

    def wire_bytes(self, kind: Kind, axes: tuple[str, ...], size_bytes: ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Bytes that one device puts on the wire, by mesh axis; the shares add up to the whole exactly.

        The whole is `V (n-1)/n` (twice for all-reduce, `V` for collective-permute) for a group of n. It is attributed
        as a hierarchical algorithm would send it: the last mesh axis first, with the full size, then each
        earlier axis with the size divided by the axes after it.
        """
        size = np.asarray(size_bytes, dtype=np.float64)
        group = self._group(kind, axes)
        sizes = self.mesh.axes
        n = math.prod(sizes[axis] for axis in group)
        if n == 1:
            return {}
        factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
        whole = size * factor
        shares: dict[str, NDArray[np.float64]] = {}
        inner = 1
        rest = whole
        for axis in reversed(group):
            if axis == group[0]:
                shares[axis] = rest
                break
            share = (sizes[axis] - 1) / (sizes[axis] * inner) * n / (n - 1)
            shares[axis] = whole * share
            rest = rest - shares[axis]
            inner *= sizes[axis]
        return {axis: shares[axis] for axis in group}

    def link_bytes(self, kind: Kind, axes: tuple[str, ...], size_bytes: float) -> dict[str, float]:
        """Bytes that pass a link of each physical axis in one direction, by the axis's name, as `time` reckons: of the
        links that are alike the busiest one.

        The axes of a torus divide what is gathered so that all of them are done at once. Nothing passes a link where
        devices share one memory.
        """
        group = self._group(kind, axes)
        base = "all-gather" if kind in ("reduce-scatter", "all-reduce") else kind
        found: dict[str, float] = {}
        for link, mine, inner in self._by_link(group):
            share = size_bytes * (1.0 / inner if base == "all-gather" else 1.0) * self.phases(kind)
            cuts = _cuts(mine) if base == "all-to-all" and link == "torus" else {}
            whole = _SHAPES[base](mine, link)[1]
            if link != "memory":
                found |= {segment.axis: share * cuts.get(segment.axis, whole) for segment in mine}
        return found

    def _by_link(self, group: tuple[str, ...]) -> list[tuple[str, list[Segment], int]]:
        """Kinds of links that a group spans, outermost first: their segments, and how many devices are within."""
        segments = _joined([segment for axis in group for segment in self.mesh.segments(axis)])
        if self.mesh.topology.twisted:
            torus = {axis.name: axis.size for axis in self.mesh.topology.physical_axes if axis.kind == "torus"}
            segments = in_group(segments, torus)
        inner = math.prod(segment.size for segment in segments)
        found = []
        for link in _LEVELS:
            mine = [segment for segment in segments if segment.kind == link]
            if mine:
                inner //= math.prod(segment.size for segment in mine)
                found.append((link, mine, inner))
        return found

    def partial_to_split_kind(self, axes: tuple[str, ...]) -> Kind:
        """What the backend's compiler emits for a partial result that must end split over `axes`.

        An all-reduce (of the full size) stands for all-reduce and a local slice. CPU never emits reduce-scatter. TPU
        does in some form between slices, and inside a slice unless the group is all of a slice of several hosts;
        what spans slices and chips of a slice becomes an all-reduce in levels (weight gradients compiled for every
        generation with libtpu 0.0.51: 8 of v5e:2x4 are scattered, 8 of v5p:2x2x2 and 16 of v5e:4x4 are not).
        """
        group = self._group("reduce-scatter", axes)
        topology = self.mesh.topology
        if topology.traits.scatters is not Scatters.BY_GROUP:
            return "reduce-scatter" if topology.traits.scatters is Scatters.ALWAYS else "all-reduce"
        between = {segment.kind == "network" for axis in group for segment in self.mesh.segments(axis)}
        if len(between) > 1:
            return "all-reduce"
        n = math.prod(self.mesh.axes[axis] for axis in group)
        whole = between == {False} and n * topology.slices == topology.num_devices
        return "all-reduce" if whole and topology.num_hosts > topology.slices else "reduce-scatter"

    def gather_kind(self, axes: tuple[str, ...]) -> Kind:
        """What the backend's compiler emits for an all-gather over `axes`.

        On 3-D tori an all-reduce of the gathered size for a group of all devices larger than
        `Calibration.gather_max_group` (v5p:4x4x4 does, v5e:8x8 and v6e:8x8 do not; libtpu 0.0.51).
        """
        topology = self.mesh.topology
        n = math.prod(self.mesh.axes[axis] for axis in self._group("all-gather", axes))
        torus = topology.traits.torus and len(topology.shape) > 2
        whole = torus and n == self.mesh.num_devices and n > self.calibration.gather_max_group
        return "all-reduce" if whole else "all-gather"

    def widen_dtype(self, dtype: str) -> str:
        """The dtype in which the backend reduces, see `Backend.sum_dtype`."""
        narrow = dtype.lower() in ("bf16", "bfloat16", "f16", "float16")
        return self.mesh.topology.traits.sum_dtype if narrow and self.mesh.topology.traits.sum_dtype else dtype

    def _group(self, kind: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Axes of the group larger than 1, in mesh order."""
        if kind not in KINDS:
            raise UserError(f"unknown collective {kind!r}; known are {', '.join(KINDS)}")
        unknown = [axis for axis in axes if axis not in self.mesh.names]
        if unknown:
            raise UserError(f"mesh axis {unknown[0]!r} does not exist; the mesh has {', '.join(self.mesh.names)}")
        return tuple(name for name, size in self.mesh.axes.items() if name in axes and size > 1)

    def _price(self, kind: str, group: tuple[str, ...]) -> tuple[_Level, ...]:
        torus = {axis.name: axis.size for axis in self.mesh.topology.physical_axes if axis.kind == "torus"}
        twisted = self.mesh.topology.twisted
        levels = []
        for link, mine, inner in self._by_link(group):
            # A gather moves 1/inner of the result on this level; the other kinds move everything there.
            share = 1.0 / inner if kind == "all-gather" else 1.0
            step, rate = self._link(link)
            if link == "memory":
                latency, per_byte = 0.0, _COPIES[kind]
            elif twisted and link == "torus" and kind == "all-to-all" and is_whole(mine, torus):
                hops, longest = mean_hops(tuple(torus[segment.axis] for segment in mine))
                latency, per_byte = float(longest), max(hops) / 2.0
            else:
                latency, per_byte = _SHAPES[kind](mine, link)
            levels.append(_Level(latency * step, per_byte * share / rate))
        if self.mesh.topology.traits.one_ring and len(levels) > 1:
            return (_Level(sum(each.latency for each in levels), max(each.per_byte for each in levels)),)
        return tuple(levels)

    def _link(self, link: str) -> tuple[float, float]:
        """Least seconds of one step, and one-way bytes per second of one device."""
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
    """Links that reach every peer at once: one step, everything but one's own shard through one port."""
    n = math.prod(segment.size for segment in segments)
    return 1.0, (n - 1) / n


def _joined(segments: list[Segment]) -> list[Segment]:
    """The same devices in fewer segments: adjacent digits of one physical axis become one."""
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
    """Hops from the farthest peer, along every torus segment in turn."""
    return float(sum((s.size // 2 if s.wrap else s.size - 1) * s.stride for s in segments))


def _gather(segments: list[Segment], link: str) -> tuple[float, float]:
    """Steps, and one-way link times per byte of the result, of an all-gather."""
    if link != "torus":
        return _direct(segments)
    n = math.prod(segment.size for segment in segments)
    # Digits of one physical axis share its links, so only the faster one counts; different axes add up.
    rates: dict[str, float] = {}
    for s in segments:
        rates[s.axis] = max(rates.get(s.axis, 0.0), (2.0 if s.wrap else 1.0) / s.stride)
    even_ring = any(s.wrap and s.size % 2 == 0 for s in segments)
    return _steps(segments), (1.0 if even_ring else (n - 1) / n) / sum(rates.values())


def _exchange(segments: list[Segment], link: str) -> tuple[float, float]:
    """Steps, and one-way link times per byte of the local array, of an all-to-all."""
    if link != "torus":
        return _direct(segments)
    return _steps(segments), max(_cuts(segments).values())


def _cuts(segments: list[Segment]) -> dict[str, float]:
    """One-way bytes over the middle of each physical axis for each byte of the local array that is exchanged."""
    cuts: dict[str, float] = {}
    for s in segments:
        cut = (s.size // 2) * (s.size - s.size // 2) / s.size * s.stride / (2.0 if s.wrap else 1.0)
        cuts[s.axis] = cuts.get(s.axis, 0.0) + cut
    return cuts


def _permute(segments: list[Segment], link: str) -> tuple[float, float]:
    """Steps, and one-way link times per byte, of a shift by one place; a line sends its last part all the way back."""
    if link != "torus":
        return 1.0, 1.0
    steps = max((1 if s.wrap else s.size - 1) * s.stride for s in segments)
    return steps, max(float(s.stride) for s in segments)


_SHAPES = {"all-gather": _gather, "all-to-all": _exchange, "collective-permute": _permute}


def links(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Groups of mesh axes that share physical links, in mesh order; traffic within a group adds up.

    Axes of size 1 use no links and are left out.
    """
    groups: list[tuple[set[str], list[str]]] = []
    for name, segments in zip(mesh.names, mesh.layout, strict=True):
        used = {s.axis if s.kind == "torus" else s.kind for s in segments}
        if not used:
            continue
        joined = [group for group in groups if group[0] & used]
        groups = [group for group in groups if not group[0] & used]
        physical = used.union(*(group[0] for group in joined))
        groups.append((physical, [axis for group in joined for axis in group[1]] + [name]))
    ordered = (tuple(sorted(group[1], key=mesh.names.index)) for group in groups)
    return tuple(sorted(ordered, key=lambda group: mesh.names.index(group[0])))
