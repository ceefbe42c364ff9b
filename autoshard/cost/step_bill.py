"""What one step of a plan does on one device, op shape by op shape, so that it can be priced again with other figures.

A prediction is one number; what was seen of the step can only teach figures if it is known what the step was made of.
A bill keeps that without the program: sizes of matmuls, bytes through memory, collectives with their bytes and mesh
axes. `Bill.seconds` is what the plan predicts, for any calibration.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.calibration import Calibration
from autoshard.cost.collectives import KINDS, Collectives, links
from autoshard.cost.compute import Compute
from autoshard.cost.device_mesh import Mesh, make_mesh
from autoshard.cost.topology import Topology


Said = tuple[tuple[str, Any], ...]

WHOLLY = "wholly"
"""In `Charge.hides`: all of a collective runs beside compute, whatever the figures say."""
PIPELINED = "pipelined_overlap"
"""In `Charge.hides`: the figure that hides only what the bytes of a collective take."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Charge:
    """Work of one shape in one block; a block is the body of a loop, -1 what is outside of all."""

    op: str
    """A name in `WORK`, or a kind of collective."""
    said: Said
    """Whatever else the price depends on and is not an amount: dtype, head sizes, mesh axes."""
    amounts: tuple[float, ...]
    """Amounts of one execution on one device, in the order that `WORK` gives; a collective has its bytes alone."""
    block: int
    count: float
    """How often it is executed in one step."""
    hides: tuple[str, ...] = ()
    """For a collective, figures of which the largest is the share that runs beside compute; where there are none, all
    of it is waited for."""


Price = Callable[..., NDArray[np.float64]]


def _dot(
    compute: Compute, m: Any, n: Any, k: Any, batch: Any, size: Any, fused: Any = 0.0, *, dtype: str
) -> NDArray[np.float64]:
    return compute.dot_seconds(m, n, k, batch, dtype, size, fused)


def _op(compute: Compute, flops: Any, size: Any, used: Any, *, dtype: str) -> NDArray[np.float64]:
    return compute.op_seconds(flops, size, dtype, used * compute.calibration.matmul_efficiency)


def _again(compute: Compute, flops: Any, used: Any, *, dtype: str) -> NDArray[np.float64]:
    return compute.again_seconds(flops, dtype, used * compute.calibration.matmul_efficiency)


def _attention(compute: Compute, scores: Any, size: Any, **said: Any) -> NDArray[np.float64]:
    return compute.attention_seconds(scores, **said, size_bytes=size)


def _sort(compute: Compute, elements: Any, size: Any, *, length: int, arrays: int) -> NDArray[np.float64]:
    return compute.sort_seconds(elements, length, arrays, size)


def _launch(compute: Compute, ops: Any) -> NDArray[np.float64]:
    return ops * compute.calibration.op_overhead_s


WORK: dict[str, Price] = {
    "dot": _dot,
    "op": _op,
    "again": _again,
    "attention": _attention,
    "steps": Compute.step_seconds,
    "sort": _sort,
    "launch": _launch,
    "stream": Compute.memory_seconds,
    "relayout": Compute.relayout_seconds,
    "host": Compute.host_seconds,
}
"""How each kind of work is priced: (compute, *amounts, **said) -> seconds of one execution."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """All charges of one step, sorted, equal ones together."""

    topology: str
    mesh: tuple[tuple[str, int], ...]
    charges: tuple[Charge, ...]

    @classmethod
    def of(cls, mesh: Mesh, charges: Iterable[Charge]) -> "Bill":
        """A bill of charges over a mesh; those that differ in their counts alone become one."""
        counts: dict[Charge, float] = collections.defaultdict(float)
        for charge in charges:
            counts[dataclasses.replace(charge, count=0.0)] += charge.count
        merged = (dataclasses.replace(charge, count=count) for charge, count in counts.items())
        return cls(mesh.topology.name, tuple(mesh.axes.items()), tuple(sorted(merged)))

    def parts(self, calibration: Calibration) -> "Parts":
        """The step's times with these figures."""
        mesh, link_of = _mesh(self.topology, self.mesh)
        compute, prices = Compute(mesh.topology, calibration), Collectives(mesh, calibration)
        lanes: dict[tuple[int, str], float] = collections.defaultdict(float)
        waits: dict[str, float] = collections.defaultdict(float)
        spent: dict[str, float] = collections.defaultdict(float)
        sent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for batch in _batches(self.charges):
            if batch.op in WORK:
                seconds = WORK[batch.op](compute, *batch.amounts, **batch.said) @ batch.counts
                lanes[batch.block, "host" if batch.op == "host" else "compute"] += float(seconds)
                spent[batch.op] += float(seconds)
                continue
            axes = tuple(batch.said["axes"])
            each, least = (prices.time(batch.op, axes, size) for size in (batch.amounts[0], 0.0))  # type: ignore[arg-type]
            seconds = float(each @ batch.counts)
            hidden = float(hidden_seconds(hiding_shares(calibration, batch.hides), each, least) @ batch.counts)
            for lane in {link_of[axis] for axis in axes if axis in link_of} if hidden else ():
                lanes[batch.block, lane] += hidden
            waits[batch.op] += seconds - hidden
            spent[batch.op] += seconds
            mine = sent[traffic_class(batch.op, mesh.kinds(axes) == {"network"})]
            mine[0] += seconds
            mine[1] += seconds - hidden
        return Parts(dict(lanes), dict(waits), dict(spent), {name: (a, b) for name, (a, b) in sent.items()})

    def seconds(self, calibration: Calibration) -> float:
        """Predicted step time."""
        return self.parts(calibration).step_s

    def to_json(self) -> dict[str, Any]:
        """The bill as JSON can hold it; `from_json` reads it."""
        rows = [[c.op, dict(c.said), list(c.amounts), c.block, c.count, list(c.hides)] for c in self.charges]
        return {"topology": self.topology, "mesh": dict(self.mesh), "charges": rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Bill":
        """What `to_json` gave. Raises: KeyError, TypeError or ValueError for anything else."""
        charges = [
            Charge(op, _frozen(said), tuple(amounts), block, count, tuple(hides))
            for op, said, amounts, block, count, hides in value["charges"]
        ]
        if unknown := {charge.op for charge in charges} - {*WORK, *KINDS}:
            raise ValueError(f"unknown work {sorted(unknown)}")
        return cls(value["topology"], tuple(value["mesh"].items()), tuple(charges))


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one step on one device."""

    lanes: dict[tuple[int, str], float]
    """What runs side by side, by block: compute, host memory and links."""
    waits: dict[str, float]
    """Communication that compute waits for, by kind."""
    spent: dict[str, float]
    """All work and all collectives, by kind, hidden or not."""
    traffic: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Communication by `traffic_class`: all of it, and what compute waits for."""

    @property
    def sent_s(self) -> float:
        """All communication, hidden or not."""
        return sum(seconds for kind, seconds in self.spent.items() if kind not in WORK)

    @property
    def step_s(self) -> float:
        """Predicted step time."""
        longest: dict[int, float] = collections.defaultdict(float)
        for (block, _), seconds in self.lanes.items():
            longest[block] = max(longest[block], seconds)
        return sum(self.waits.values()) + sum(longest.values())


def traffic_class(kind: str, between_slices: bool) -> str:
    """What collectives are called that one figure hides: `network` between slices; else `gathers`, `sums`, `others`."""
    if between_slices:
        return "network"
    return {"all-gather": "gathers", "all-reduce": "sums", "reduce-scatter": "sums"}.get(kind, "others")


LEAST_TRAFFIC = 0.1
"""Share of all communication below which a class tells nothing."""


def hidden_shares(traffic: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Share of each class of communication that compute does not wait for, of those that matter."""
    whole = sum(sent for sent, _ in traffic.values())
    return {
        name: min(1.0, max(0.0, 1.0 - waited / sent))
        for name, (sent, waited) in sorted(traffic.items())
        if sent > 0.0 and sent >= LEAST_TRAFFIC * whole
    }


def hiding_shares(calibration: Calibration, hides: Collection[str]) -> tuple[float, float]:
    """Shares of a collective that run beside compute, see `Charge.hides`: of all of it, and of what its bytes take.

    A collective that is pipelined into a matmul is a loop of permutes, of which each is launched and has its hop to
    go: what can be hidden is what its bytes take beyond that.
    """
    whole = (1.0 if figure == WHOLLY else getattr(calibration, figure) for figure in hides if figure != PIPELINED)
    return max(whole, default=0.0), calibration.pipelined_overlap if PIPELINED in hides else 0.0


def hidden_seconds(shares: tuple[Any, Any], seconds: Any, least: Any) -> NDArray[np.float64]:
    """What of the seconds of collectives runs beside compute, by `hiding_shares`; they take `least` with no bytes."""
    whole, pipelined = shares
    return np.maximum(whole * seconds, pipelined * (seconds - least))


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Charges that are priced in one call."""

    op: str
    said: dict[str, Any]
    block: int
    hides: tuple[str, ...]
    amounts: tuple[NDArray[np.float64], ...]
    counts: NDArray[np.float64]


@functools.lru_cache(maxsize=64)
def _mesh(topology: str, sizes: tuple[tuple[str, int], ...]) -> tuple[Mesh, dict[str, str]]:
    """The mesh, and for each axis a name of the links that it uses."""
    mesh = make_mesh(Topology.parse(topology), dict(sizes))
    return mesh, {axis: "+".join(group) for group in links(mesh) for axis in group}


@functools.lru_cache(maxsize=1024)
def _batches(charges: tuple[Charge, ...]) -> tuple[_Batch, ...]:
    groups: dict[tuple[Any, ...], list[Charge]] = collections.defaultdict(list)
    for charge in charges:
        groups[charge.op, charge.said, charge.block, charge.hides].append(charge)
    return tuple(
        _Batch(op, dict(said), block, hides, tuple(np.array([c.amounts for c in mine], dtype=np.float64).T),
               np.array([c.count for c in mine], dtype=np.float64))
        for (op, said, block, hides), mine in groups.items()
    )  # fmt: skip


def _frozen(said: Mapping[str, Any]) -> Said:
    """As a charge keeps it: sorted, lists as tuples."""
    return tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in said.items()))
