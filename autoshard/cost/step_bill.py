"""Work of one step of a plan on one device, op shape by op shape, so that it can be priced again with other figures.

A prediction is one number. An observed step can only teach figures if the work in it is known. A bill stores that work
without the program: sizes of matmuls, bytes through memory, collectives with their bytes and mesh axes. `Bill.seconds`
is the plan's prediction under any calibration.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.calibration import Calibration
from autoshard.cost.collectives import KINDS, Collectives, Kind, links
from autoshard.cost.compute import Compute, smooth_max
from autoshard.cost.device_mesh import Mesh, make_mesh
from autoshard.cost.topology import Topology


Properties = tuple[tuple[str, Any], ...]
"""Pairs (name, value), sorted, with tuples in place of lists."""

WHOLLY = "wholly"
"""Entry of `Charge.hides`: the whole collective overlaps with compute, for any figures."""
PIPELINED = "pipelined_overlap"
"""Entry of `Charge.hides`: the figure that hides only the transfer of a collective's bytes."""
IN_FLIGHT = "collectives in flight"
"""Engine of all links of a block in a program that has one collective in flight at a time."""
COVERING = 0.6
"""Share of a block's compute that can overlap with communication in a program with one collective in flight at a time.

A GPU's compiler begins each collective by an estimate, and leaves it more compute than it takes. Fitted to the
schedules of 45 loop bodies for H100s; docs/compiler_behaviour.md, "Collectives in flight".
"""
LEVEL_BETWEEN = "level between slices"
"""Entry of `Charge.hides`: `network_overlap` hides the bytes that a collective in levels sends between slices."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Charge:
    """Work of one shape in one block."""

    op: str
    """A name in `WORK`, or a kind of collective."""
    properties: Properties
    """Properties that the price depends on and that are no amounts: dtype, head sizes, mesh axes."""
    amounts: tuple[float, ...]
    """Amounts of one execution on one device, in the order that its price in `WORK` expects; bytes of a collective."""
    block: int
    """Number of the loop whose body contains the work; -1 outside of loops."""
    count: float
    """Number of executions in one step."""
    hides: tuple[str, ...] = ()
    """Figures that hide a collective; the largest is the share that overlaps with compute. None expose all of it."""

    def seconds(self, compute: Compute) -> float:
        """Return the seconds of one execution of work; raise `KeyError` for a collective, which has no such price."""
        return float(WORK[self.op].price(compute, *self.amounts, **dict(self.properties)))


Price = Callable[..., NDArray[np.float64]]


def _dot(
    compute: Compute, m: Any, n: Any, k: Any, batch: Any, size: Any, fused: Any = 0.0, *, dtype: str
) -> NDArray[np.float64]:
    """Price matmuls by `Compute.dot_seconds`; `size` and `fused` are its `size_bytes` and `fused_bytes`."""
    return compute.dot_seconds(m, n, k, batch, dtype, size, fused)


def _op(compute: Compute, flops: Any, size: Any, used: Any, *, dtype: str) -> NDArray[np.float64]:
    """Price fusions by `Compute.op_seconds`; `used` is the share of the large-matmul efficiency that they reach."""
    return compute.op_seconds(flops, size, dtype, used * compute.calibration.matmul_efficiency)


def _again(compute: Compute, flops: Any, used: Any, *, dtype: str) -> NDArray[np.float64]:
    """Price further passes of the matrix unit by `Compute.extra_pass_seconds`; `used` is as in `_op`."""
    return compute.extra_pass_seconds(flops, dtype, used * compute.calibration.matmul_efficiency)


def _attention(compute: Compute, scores: Any, size: Any, **properties: Any) -> NDArray[np.float64]:
    """Price attention kernels by `Compute.attention_seconds`."""
    return compute.attention_seconds(scores, **properties, size_bytes=size)


def _sort(compute: Compute, elements: Any, size: Any, *, length: int, arrays: int) -> NDArray[np.float64]:
    """Price sorts by `Compute.sort_seconds`."""
    return compute.sort_seconds(elements, length, arrays, size)


def _launch(compute: Compute, ops: Any) -> NDArray[np.float64]:
    """Price the launches of `ops` kernels, each with `Calibration.op_overhead_s`."""
    return ops * compute.calibration.op_overhead_s


@dataclasses.dataclass(frozen=True, slots=True)
class WorkKind:
    """A kind of work: its price, and the names of its amounts."""

    price: Price
    """Function of `Compute`, amounts and properties that returns the seconds of one execution."""
    amounts: tuple[str, ...]
    """Names of the amounts, in the order that `price` expects; those in `TRAFFIC` are bytes."""


WORK: dict[str, WorkKind] = {
    "dot": WorkKind(_dot, ("m", "n", "k", "batch", "size", "fused")),
    "op": WorkKind(_op, ("flops", "size", "used")),
    "again": WorkKind(_again, ("flops", "used")),
    "attention": WorkKind(_attention, ("scores", "size")),
    "steps": WorkKind(Compute.step_seconds, ("steps",)),
    "stage": WorkKind(Compute.stage_seconds, ("rows", "length", "products", "size")),
    "sort": WorkKind(_sort, ("elements", "size")),
    "launch": WorkKind(_launch, ("ops",)),
    "stream": WorkKind(Compute.memory_seconds, ("size",)),
    "relayout": WorkKind(Compute.relayout_seconds, ("size",)),
    "host": WorkKind(Compute.host_seconds, ("size",)),
}
"""Kinds of work by name, the `op` of their charges."""

TRAFFIC = frozenset({"size", "fused"})
"""Names of the amounts that are bytes of memory traffic."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """All charges of one step, sorted, with equal charges merged."""

    topology: str
    """Name of the topology of the step."""
    mesh: tuple[tuple[str, int], ...]
    """Pairs (axis, size), major first."""
    charges: tuple[Charge, ...]
    one_in_flight: bool = False
    """True if the step has one collective in flight at a time (`Model.one_in_flight`)."""

    @classmethod
    def of(cls, mesh: Mesh, charges: Iterable[Charge], one_in_flight: bool = False) -> "Bill":
        """Return the bill of charges over a mesh; charges that differ in their counts alone become one."""
        counts: dict[Charge, float] = collections.defaultdict(float)
        for charge in charges:
            counts[dataclasses.replace(charge, count=0.0)] += charge.count
        merged = (dataclasses.replace(charge, count=count) for charge, count in counts.items())
        return cls(mesh.topology.name, tuple(mesh.axes.items()), tuple(sorted(merged)), one_in_flight)

    def parts(self, calibration: Calibration) -> "Parts":
        """Price the charges with a calibration and sum them by lane and kind.

        The hidden part of a collective adds to the lanes of its links, and the exposed part to `Parts.waits`.
        """
        mesh, link_of = _mesh(self.topology, self.mesh)
        compute, prices = Compute(mesh.topology, calibration), Collectives(mesh, calibration)
        lanes: dict[tuple[int, str], float] = collections.defaultdict(float)
        waits: dict[str, float] = collections.defaultdict(float)
        spent: dict[str, float] = collections.defaultdict(float)
        sent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for batch in _batches(self.charges):
            if batch.op in WORK:
                seconds = WORK[batch.op].price(compute, *batch.amounts, **batch.properties) @ batch.counts
                lanes[batch.block, HOST if batch.op == "host" else "compute"] += float(seconds)
                spent[batch.op] += float(seconds)
                continue
            axes = tuple(batch.properties["axes"])
            full, least = (prices.time(batch.op, axes, size) for size in (batch.amounts[0], 0.0))  # type: ignore[arg-type]
            seconds = float(full @ batch.counts)
            shares = hiding_shares(prices, batch.hides, batch.op, axes)  # type: ignore[arg-type]
            hidden = float(hidden_seconds(shares, full, least) @ batch.counts)
            for lane in {link_of[axis] for axis in axes if axis in link_of} if hidden else ():
                lanes[batch.block, lane] += hidden
            waits[batch.op] += seconds - hidden
            spent[batch.op] += seconds
            totals = sent[traffic_class(batch.op, mesh.kinds(axes) == {"network"})]
            totals[0] += seconds
            totals[1] += seconds - hidden
        traffic = {name: (a, b) for name, (a, b) in sent.items()}
        return Parts(dict(lanes), dict(waits), dict(spent), traffic, self.one_in_flight)

    def seconds(self, calibration: Calibration) -> float:
        """Return the predicted step time in seconds, `Parts.step_s`."""
        return self.parts(calibration).step_s

    def to_json(self) -> dict[str, Any]:
        """Return the bill as JSON values; `from_json` reads them."""
        rows = [[c.op, dict(c.properties), list(c.amounts), c.block, c.count, list(c.hides)] for c in self.charges]
        flight = {"one_in_flight": True} if self.one_in_flight else {}
        return {"topology": self.topology, "mesh": dict(self.mesh), "charges": rows} | flight

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Bill":
        """Parse the values of `to_json`. Raises: KeyError, TypeError, ValueError or AttributeError for others."""
        charges = [
            Charge(op, _frozen(properties), tuple(amounts), block, count, tuple(hides))
            for op, properties, amounts, block, count, hides in value["charges"]
        ]
        if unknown := {charge.op for charge in charges} - {*WORK, *KINDS}:
            raise ValueError(f"unknown work {sorted(unknown)}")
        flight = bool(value.get("one_in_flight", False))
        return cls(value["topology"], tuple(value["mesh"].items()), tuple(charges), flight)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one step on one device, summed by lane and kind."""

    lanes: dict[tuple[int, str], float]
    """Seconds of the lanes that overlap, by block: compute, host memory and links."""
    waits: dict[str, float]
    """Seconds of exposed communication, by kind."""
    spent: dict[str, float]
    """Seconds of all work and all collectives, by kind, hidden or not."""
    traffic: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Seconds of communication by `traffic_class`: all of it, and its exposed part."""
    one_in_flight: bool = False
    """True if the step has one collective in flight at a time."""

    @property
    def sent_s(self) -> float:
        """Seconds of all communication, hidden or not."""
        return sum(seconds for kind, seconds in self.spent.items() if kind not in WORK)

    @property
    def step_s(self) -> float:
        """Predicted step time: exposed communication, plus the blocks' lanes, which overlap (`overlapped_seconds`)."""
        return sum(self.waits.values()) + float(overlapped_seconds(self.lanes, self.one_in_flight))


HOST = "host memory"
"""Lane of host memory traffic, which overlaps with compute as a link of its own does."""


def covering_share(one_in_flight: bool) -> float:
    """Return the share of a block's compute that can overlap with its links."""
    return COVERING if one_in_flight else 1.0


def engine_seconds(lanes: Mapping[tuple[int, str], Any], one_in_flight: bool) -> dict[tuple[int, str], Any]:
    """Return the seconds, single or arrays, of each (block, engine) from those of each (block, lane).

    Each lane is an engine of its own. If one collective is in flight at a time, that of the links is `IN_FLIGHT`, and
    compute counts with `covering_share`.
    """
    if not one_in_flight:
        return dict(lanes)
    engines: dict[tuple[int, str], Any] = {}
    for (block, lane), seconds in lanes.items():
        engine = lane if lane in ("compute", HOST) else IN_FLIGHT
        share = COVERING if lane == "compute" else 1.0
        engines[block, engine] = engines.get((block, engine), 0.0) + share * seconds
    return engines


def overlapped_seconds(lanes: Mapping[tuple[int, str], Any], one_in_flight: bool) -> NDArray[np.float64]:
    """Return the seconds of all blocks, whose engines overlap as `smooth_max`, plus compute that cannot overlap.

    - `lanes`: seconds, single or arrays, of each (block, lane).
    """
    blocks: dict[int, list[Any]] = collections.defaultdict(list)
    for (block, _), seconds in engine_seconds(lanes, one_in_flight).items():
        blocks[block].append(seconds)
    serial = 1.0 - covering_share(one_in_flight)
    total = sum(serial * seconds for (_, lane), seconds in lanes.items() if lane == "compute") if serial else 0.0
    return np.asarray(total + sum(smooth_max(*blocks[block]) for block in sorted(blocks)))


def traffic_class(kind: str, between_slices: bool) -> str:
    """Return the class of collectives that one figure hides.

    It is `network` between slices, else `gathers`, `sums` or `others`.
    """
    if between_slices:
        return "network"
    return {"all-gather": "gathers", "all-reduce": "sums", "reduce-scatter": "sums"}.get(kind, "others")


LEAST_TRAFFIC = 0.1
"""Share of all communication below which a class determines no figure."""


def hidden_shares(traffic: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the hidden share, 0 to 1, of each class of communication with at least `LEAST_TRAFFIC` of all of it.

    - `traffic`: seconds and exposed seconds by class, as in `Parts.traffic`.
    """
    total = sum(sent for sent, _ in traffic.values())
    return {
        name: min(1.0, max(0.0, 1.0 - waited / sent))
        for name, (sent, waited) in sorted(traffic.items())
        if sent > 0.0 and sent >= LEAST_TRAFFIC * total
    }


def hiding_shares(
    prices: Collectives, hides: Collection[str], kind: Kind, axes: tuple[str, ...]
) -> tuple[float, float]:
    """Return the hidden shares of a collective (`Charge.hides`): of all of it, and of the transfer of its bytes.

    A collective that is pipelined into a matmul is a loop of permutes, each with its launch and its hop. Only the
    transfer of bytes beyond these can be hidden. A collective in levels hides its sends and receives between slices.
    """
    figures = prices.calibration
    fixed = (PIPELINED, LEVEL_BETWEEN)
    whole = (1.0 if figure == WHOLLY else getattr(figures, figure) for figure in hides if figure not in fixed)
    pipelined = figures.pipelined_overlap if PIPELINED in hides else 0.0
    between = figures.network_overlap * prices.network_share(kind, axes) if LEVEL_BETWEEN in hides else 0.0
    return max(whole, default=0.0), max(pipelined, between)


def hidden_seconds(shares: tuple[Any, Any], seconds: Any, least: Any) -> NDArray[np.float64]:
    """Return the seconds of collectives that overlap with compute, by their `hiding_shares`.

    - `seconds`: seconds of each collective.
    - `least`: seconds of the collective without bytes.
    """
    whole, pipelined = shares
    return np.maximum(whole * seconds, pipelined * (seconds - least))


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Charges that are priced in one call."""

    op: str
    properties: dict[str, Any]
    block: int
    hides: tuple[str, ...]
    amounts: tuple[NDArray[np.float64], ...]
    """Each amount of all charges, [charges]."""
    counts: NDArray[np.float64]
    """Executions of each charge, [charges]."""


@functools.lru_cache(maxsize=64)
def _mesh(topology: str, sizes: tuple[tuple[str, int], ...]) -> tuple[Mesh, dict[str, str]]:
    """Return the mesh, and for each axis larger than 1 a name of its links; axes that share links share the name."""
    mesh = make_mesh(Topology.parse(topology), dict(sizes))
    return mesh, {axis: "+".join(group) for group in links(mesh) for axis in group}


@functools.lru_cache(maxsize=1024)
def _batches(charges: tuple[Charge, ...]) -> tuple[_Batch, ...]:
    """Group charges that differ only in amounts and counts, so that one call prices each group."""
    groups: dict[tuple[Any, ...], list[Charge]] = collections.defaultdict(list)
    for charge in charges:
        groups[charge.op, charge.properties, charge.block, charge.hides].append(charge)
    return tuple(
        _Batch(op, dict(properties), block, hides, tuple(np.array([c.amounts for c in group], dtype=np.float64).T),
               np.array([c.count for c in group], dtype=np.float64))
        for (op, properties, block, hides), group in groups.items()
    )  # fmt: skip


def _frozen(properties: Mapping[str, Any]) -> Properties:
    """Return the properties of a charge as it stores them: sorted, with lists as tuples."""
    return tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in properties.items()))
