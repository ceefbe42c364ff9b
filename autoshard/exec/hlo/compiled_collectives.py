"""Collectives that XLA emitted, read from optimised HLO: their mesh axes, and their bytes on the wire."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import cast

from autoshard.cost import KINDS, Collectives, Kind, Mesh, Topology, make_mesh
from autoshard.exec.hlo.hlo_text import Computation, HloModule, Instruction, parse_hlo
from autoshard.exec.hlo.trip_counts import trip_count
from autoshard.graph import RAGGED
from autoshard.planning import Plan


OTHER = "other"
"""Key of traffic between groups that no set of mesh axes forms."""

OPCODES: dict[str, Kind] = {**{kind: kind for kind in KINDS}, "ragged-all-to-all": "all-to-all"}
"""Opcode of optimised HLO -> the kind of collective that prices it."""

_TRANSFERS: dict[str, Kind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
}
"""Type of a megascale transfer between slices -> its kind; other types count as collective-permute."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective of the compiled program, with all its executions in one step."""

    kind: Kind
    """Kind of collective that prices it."""
    axes: tuple[str, ...]
    """Mesh axes that its groups span, wholly or in part, in mesh order; `("other",)` if groups are no grids of axes."""
    wire: dict[str, float]
    """Bytes that one device sends in one step, by mesh axis; on average over devices for a permute."""
    size_bytes: int
    """Bytes of one execution, as `cost.Collectives` counts them: gathered result, unreduced input, or local array."""
    count: int
    """Executions in one step: the product of the trips of all enclosing loops."""
    in_loop: bool
    """True inside a loop's body."""
    asynchronous: bool
    """True if other ops may run between its start and its end."""
    network: bool
    """True for a transfer between slices (TPU: send and recv through the host)."""
    name: str
    """Name of the HLO instruction."""
    source: str
    """Name of the source's op that caused it."""
    group: int = 0
    """Number of devices in one group."""
    arrays: int = 1
    """Number of arrays in one execution, since the compiler combines small collectives."""
    trips_known: bool = True
    """False if the text does not give the trip count of an enclosing loop, which counts as one."""
    line: str = ""
    """`file:line` of the source, if the text has it."""
    members: tuple[int, ...] = ()
    """Devices of the first of the largest groups, as numbers in the topology; empty for permutes and transfers."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Pairs of devices of a collective-permute, as numbers in the topology; the first device sends to the second."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step, over all axes."""
        return sum(self.wire.values())


def plan_mesh(plan: Plan) -> Mesh:
    """Return the plan's mesh on its topology, with the plan's device order."""
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    return mesh if mesh.device_order == plan.device_order else dataclasses.replace(mesh, device_order=plan.device_order)


def read_collectives(text: str | HloModule, mesh: Mesh) -> list[CompiledCollective]:
    """Return every collective of a compiled program, in the order of execution.

    `text` is optimised HLO of a program compiled for `mesh` (partition number = position in the mesh, as JAX assigns
    them).

    - Executions in loops are multiplied by the loops' trips.
    - Only the branch of a conditional with the most traffic counts.
    - A start/done pair counts once, and so do TPU's asynchronous collective fusions.
    - TPU's all-reduce-scatter counts as a reduce-scatter.
    - A collective-permute counts by the share of devices that send.
    """
    module = parse_hlo(text) if isinstance(text, str) else text
    return Walk(module, mesh).computation(module.computations[module.entry], _Place())


def wire_by_axis(found: Iterable[CompiledCollective]) -> dict[str, int]:
    """Return the rounded bytes that one device sends in one step, by mesh axis in alphabetical order.

    Traffic of no mesh axis is under `OTHER`.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    for collective in found:
        for axis, size in collective.wire.items():
            totals[axis] += size
    return {axis: round(size) for axis, size in sorted(totals.items())}


def count_by_kind(found: Iterable[CompiledCollective]) -> dict[str, int]:
    """Return the executions in one step, by kind in alphabetical order; a combined collective counts once for each
    array.
    """
    counts: dict[str, int] = collections.defaultdict(int)
    for collective in found:
        counts[collective.kind] += collective.count * collective.arrays
    return dict(sorted(counts.items()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Context of an instruction: its executions in one step, its enclosing loops, and a named op near it."""

    count: int = 1
    """Executions in one step."""
    in_loop: bool = False
    """True inside a loop's body."""
    asynchronous: bool = False
    """True inside an asynchronous op."""
    known: bool = True
    """False if the trip count of an enclosing loop is unknown."""
    near: Instruction | None = None
    """The enclosing named op, for collectives without a name of their own."""


class Walk:
    """Walk over the computations of a module that collects its collectives; `mesh` is the one that it was compiled
    for.
    """

    def __init__(self, module: HloModule, mesh: Mesh) -> None:
        self.module = module
        self.mesh = mesh
        self.prices = Collectives(mesh)
        self.sizes = tuple(mesh.axes.values())
        self.positions = _first_slice(mesh)
        """Mesh position of each partition number."""
        self.groups: dict[str, tuple[tuple[str, ...], int, tuple[int, ...]]] = {}
        """Cache of `group`: text of replica groups -> its result."""

    def computation(self, computation: Computation, place: _Place) -> list[CompiledCollective]:
        """Return the collectives of a computation and of the computations that it calls, in the order of
        instructions.
        """
        collectives: list[CompiledCollective] = []
        for instruction in computation.instructions:
            collectives += self.instruction(computation, instruction, place)
        return collectives

    def instruction(self, owner: Computation, op: Instruction, place: _Place) -> list[CompiledCollective]:
        """Return the collectives of one instruction, including those of computations that it calls; empty for other
        ops.

        - `owner`: computation of the instruction.
        - `op`: the instruction.
        - `place`: context, which loops multiply by their trips and asynchronous ops mark.

        A conditional counts its branch with most bytes on the wire. An asynchronous fusion's later parts and `-done`
        ops count nothing.
        """
        base, started = (op.opcode[:-6], True) if op.opcode.endswith("-start") else (op.opcode, False)
        if base in OPCODES:
            if "chain_id=" in op.attributes and not _starts(owner):
                return []  # later parts of an asynchronous fusion repeat the collective of its start
            asynchronous = place.asynchronous or started or _starts(owner)
            context = dataclasses.replace(place, asynchronous=asynchronous, near=place.near or _named(owner, op))
            return self.collective(op, OPCODES[base], started, context)
        if op.opcode == "send":
            return self.transfer(owner, op, place)
        if op.opcode == "while":
            trips = trip_count(self.module, op)
            count = place.count * (1 if trips is None else trips)
            inside = dataclasses.replace(place, count=count, in_loop=True, known=place.known and trips is not None)
            return self.called(op, "body", inside)
        if op.opcode == "conditional":
            branches = [self.called_by_name(name, place) for name in op.called]
            return max(branches, key=lambda branch: sum(c.wire_bytes for c in branch), default=[])
        if op.opcode == "async-start":
            return self.called(op, "calls", dataclasses.replace(place, asynchronous=True))
        if op.opcode == "fusion":
            collectives = self.called(op, "calls", dataclasses.replace(place, near=place.near or _named(owner, op)))
            return [self.scattered(c) if _scatters(op) else c for c in collectives]
        if op.opcode == "call":
            return self.called(op, "to_apply", place)
        if op.opcode == "custom-call":  # calls the computations of the sparse cores (tpu7x)
            keys = [key for key in ("calls", "called_computations") if op.attribute(key)]
            return [c for key in keys for name in _names(op, key) for c in self.called_by_name(name, place)]
        return []

    def called(self, op: Instruction, key: str, place: _Place) -> list[CompiledCollective]:
        """Return the collectives of the computation that the attribute `key` of `op` names; empty without such an
        attribute.
        """
        return self.called_by_name((op.attribute(key) or "").lstrip("%"), place)

    def called_by_name(self, name: str, place: _Place) -> list[CompiledCollective]:
        """Return the collectives of the computation with that name; none if it does not exist."""
        inside = self.module.computations.get(name)
        return self.computation(inside, place) if inside is not None else []

    def collective(self, op: Instruction, kind: Kind, started: bool, place: _Place) -> list[CompiledCollective]:
        """Return the record of a collective instruction, in a list; empty for a group of one device.

        - `started`: True for a `-start` op, whose result also holds its operands.
        - `kind`: kind that prices it; a ragged all-to-all counts with its real share.
        """
        shapes = op.shapes
        if kind == "collective-permute":
            # A start's result is (operand, result, context ...), and one permute may send several arrays.
            arrays = shapes[: len(op.operands)] if started else shapes
            return self.permute(op, sum(shape.bytes for shape in arrays), place)
        if started and kind != "all-reduce":
            shapes = shapes[len(op.operands) : 2 * len(op.operands)]
        axes, group, members = self.group(op)
        if group <= 1:
            return []
        size = sum(shape.bytes for shape in shapes) * (group if kind == "reduce-scatter" else 1)
        if op.opcode.startswith("ragged-all-to-all"):
            size = round(size * _real_share(op))
        record = self.record(op, kind, axes, group, size, 1.0, place)
        return [dataclasses.replace(record, members=members)]

    def record(
        self, op: Instruction, kind: Kind, axes: tuple[str, ...], group: int, size: int, share: float, place: _Place
    ) -> CompiledCollective:
        """Return the record of one collective instruction.

        - `group`: devices in one group.
        - `size`: bytes of one execution (`CompiledCollective.size_bytes`).
        - `share`: share of the devices that send.
        """
        named = op if op.op_name or place.near is None else place.near
        return CompiledCollective(
            kind=kind,
            axes=axes,
            wire={axis: b * share * place.count for axis, b in self.wire(kind, axes, group, size).items()},
            size_bytes=size,
            count=place.count,
            in_loop=place.in_loop,
            asynchronous=place.asynchronous,
            network=False,
            name=op.name,
            source=named.op_name,
            line=self.module.lines.get(named.frame, ""),
            group=group,
            arrays=1 if kind == "all-to-all" else max(1, len(op.operands)),
            trips_known=place.known,
        )

    def wire(self, kind: Kind, axes: tuple[str, ...], group: int, size: int) -> dict[str, float]:
        """Return the bytes that one device sends in one execution of `size` bytes, by mesh axis.

        A group that fills its axes is priced by `cost.Collectives`. Otherwise the first of `axes` gets a ring's bytes:
        the share (group - 1) / group of `size`. An all-reduce sends twice that, and a permute all bytes.
        """
        if OTHER not in axes and math.prod(self.mesh.axes[axis] for axis in axes) == group:
            return {axis: float(b) for axis, b in self.prices.wire_bytes(kind, axes, size).items()}
        # A ring passes each device the shares of all others, an all-reduce twice: first reduced, then gathered.
        factor = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1.0}.get(kind, (group - 1) / group)
        return {axes[0]: size * factor}

    def scattered(self, collective: CompiledCollective) -> CompiledCollective:
        """Return TPU's fused all-reduce and slice as the reduce-scatter that it runs, which sends half the bytes.

        Collectives of other kinds are returned unchanged.
        """
        if collective.kind != "all-reduce":
            return collective
        # An all-reduce sends the bytes of a reduce-scatter and of a gather, which are equal.
        wire = {axis: size / 2 for axis, size in collective.wire.items()}
        return dataclasses.replace(collective, kind=cast(Kind, "reduce-scatter"), wire=wire)

    def permute(self, op: Instruction, size: int, place: _Place) -> list[CompiledCollective]:
        """Return the record of a collective-permute of `size` bytes, in a list; empty if every device sends to itself.

        Its axes are those along which some pair differs, and its group is the product of their sizes.
        """
        text = op.attribute("source_target_pairs") or ""
        pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]
        moving = [(self.place_of(a), self.place_of(b)) for a, b in pairs if a != b]
        if not moving:
            return []
        differing = [
            i for i in range(len(self.sizes)) if any(self.coords(a)[i] != self.coords(b)[i] for a, b in moving)
        ]
        axes = tuple(self.mesh.names[i] for i in differing)
        group = math.prod(self.sizes[i] for i in differing)
        record = self.record(op, "collective-permute", axes, group, size, len(moving) / len(self.positions), place)
        order = self.mesh.device_order
        return [dataclasses.replace(record, pairs=tuple((order[a], order[b]) for a, b in moving))]

    def transfer(self, owner: Computation, op: Instruction, place: _Place) -> list[CompiledCollective]:
        """Return the record of a transfer between slices, a host's `send` that names a collective, in a list.

        Empty for any other `send`. The axes are those that span slices, and it is asynchronous.
        """
        if "is_host_transfer=true" not in op.attributes or "megascale" not in op.attributes:
            return []
        wanted = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.attributes)
        members = re.search(r'_xla_megascale_target="\{([\d,]+)\}', op.attributes)
        kind = _TRANSFERS.get(wanted[1] if wanted else "", "collective-permute")
        slices = self.mesh.topology.slices
        group = len(members[1].split(",")) if members else slices
        size = op.shapes[0].bytes * (group if kind == "all-gather" else 1)
        axes = _axes_between_slices(self.mesh)
        place = dataclasses.replace(place, asynchronous=True, near=place.near or _named(owner, op))
        share = 1.0
        if kind == "collective-permute":
            pairs = len(re.findall(r"->", op.attributes))
            # Every pair has one sender; the average is over all devices.
            share = min(1.0, pairs / len(self.mesh.device_order)) if pairs else 1.0
        record = self.record(op, kind, axes, group, size, share, place)
        return [dataclasses.replace(record, network=True)]

    # Groups of devices as mesh axes

    def place_of(self, partition: int) -> int:
        """Return the mesh position of a partition number, which counts within the first slice if there are several.

        A number beyond that slice is returned unchanged.
        """
        return self.positions[partition] if partition < len(self.positions) else partition

    def coords(self, position: int) -> tuple[int, ...]:
        """Return the coordinates of a mesh position in row-major order, one for each axis."""
        result: list[int] = []
        for size in reversed(self.sizes):
            position, digit = divmod(position, size)
            result.insert(0, digit)
        return tuple(result)

    def group(self, op: Instruction) -> tuple[tuple[str, ...], int, tuple[int, ...]]:
        """Return the mesh axes that a collective's groups span, the size of one group, and the devices of the first.

        The size is that of the largest group, and the devices are numbers in the topology. Without `replica_groups` all
        devices form one group.
        """
        attribute = re.search(
            r"replica_groups=(mesh\[.*?\](?:, device_ids=\(.*?\))? \{.*?\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|"
            r"\{\{.*?\}\}|\{\})",
            op.attributes,
        )
        text = attribute[1] if attribute else "{}"
        if text not in self.groups:
            groups = parse_groups(text, len(self.positions))
            first = max(groups, key=len, default=[])
            members = tuple(self.mesh.device_order[self.place_of(member)] for member in first)
            self.groups[text] = (*self.axes_of(groups), members)
        return self.groups[text]

    def axes_of(self, groups: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], int]:
        """Return the mesh axes that groups of partition numbers span, wholly or in part, and the size of the largest
        group.

        The axes are `(OTHER,)` if groups differ or are no grids over axes, and empty for groups of one.
        """
        size = max((len(group) for group in groups), default=1)
        if size == 1:
            return (), 1
        spans = []
        for group in groups:
            coords = [self.coords(self.place_of(member)) for member in group]
            spans.append([len({c[i] for c in coords}) for i in range(len(self.sizes))])
        span = spans[0]
        if any(other != span for other in spans) or math.prod(span) != size:
            return (OTHER,), size
        return tuple(self.mesh.names[i] for i, width in enumerate(span) if width > 1), size


def _names(op: Instruction, key: str) -> list[str]:
    """Return the names of computations in the attribute `key`; empty without it."""
    return re.findall(r"[\w.\-]+", op.attribute(key) or "")


def _named(owner: Computation, op: Instruction) -> Instruction | None:
    """Return the instruction itself if the source names it, else the nearest named user or producer of its value.

    Searches up to 3 steps away in `owner`, through no parameters and tuples; None if there is none.
    """
    frontier, seen = [op], {op.name}
    # The op itself and three steps: a name farther away belongs to other work.
    for _ in range(4):
        for near in frontier:
            if near.op_name:
                return near
        following = [user for near in frontier for user in owner.users.get(near.name, ())]
        following += [owner.by_name[name] for near in frontier for name in near.operands if name in owner.by_name]
        frontier = [near for near in following if near.name not in seen and near.opcode not in ("parameter", "tuple")]
        seen |= {near.name for near in frontier}
    return None


def _real_share(op: Instruction) -> float:
    """Return the share of a ragged all-to-all's capacity that is sent; 1 for ops that autoshard did not emit."""
    share = re.search(rf"{RAGGED}(?:_back)?_([0-9.e-]+)/", op.op_name)
    return float(share[1]) if share else 1.0


def _starts(computation: Computation) -> bool:
    """Return True if a fused computation starts one of TPU's asynchronous collective fusions."""
    return any('custom_call_target="AsyncCollectiveStart"' in i.attributes for i in computation.instructions)


def _scatters(fusion: Instruction) -> bool:
    """Return True for TPU's fusion of an all-reduce and a slice."""
    return "AllReduceScatter" in fusion.attributes or "calls=%all-reduce-scatter" in fusion.attributes


def _first_slice(mesh: Mesh) -> tuple[int, ...]:
    """Return the mesh positions in the first slice, in order: the compiler numbers partitions within one slice.

    All positions are returned for one slice, and for topologies without a torus.
    """
    if mesh.topology.slices == 1 or not mesh.topology.traits.torus:
        return tuple(range(len(mesh.device_order)))
    return tuple(p for p, device in enumerate(mesh.device_order) if mesh.topology.coords(device)[0] == 0)


def _axes_between_slices(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that span several slices; `(OTHER,)` if none does."""
    axes = tuple(
        name
        for name, segments in zip(mesh.names, mesh.layout, strict=True)
        if any(segment.kind == "network" for segment in segments)
    )
    return axes or (OTHER,)


def parse_groups(text: str, devices: int) -> list[list[int]]:
    """Parse replica groups in any of XLA's three syntaxes; an empty list means one group of all devices.

    - `{{0,1},{2,3}}`: explicit groups.
    - `[2,4]<=[4,2]T(1,0)`: iota over the dims after `<=`, transposed, reshaped to groups by members.
    - `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: groups along the named axes (`'b':(1)2` is a part of one).
    """
    if text.startswith("mesh["):
        return _mesh_groups(text, devices)
    if text.startswith("["):
        iota = re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text)
        if iota:
            shape = [int(size) for size in iota[1].split(",")]
            order = _iota(iota[2])
            members = shape[-1]
            return [order[i : i + members] for i in range(0, len(order), members)]
    explicit = [[int(m) for m in group.split(",") if m.strip()] for group in re.findall(r"\{([\d, ]+)\}", text)]
    return explicit or [list(range(devices))]


def _iota(text: str) -> list[int]:
    """Expand an iota list: `[2,4]T(1,0)` -> 0, 4, 1, 5, ...; empty for other text."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return []
    dims = [int(size) for size in match[1].split(",")]
    order = [int(p) for p in match[2].split(",")] if match[2] else list(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    result = [0]
    for dim in order:
        result = [value + step * strides[dim] for value in result for step in range(dims[dim])]
    return result


def _mesh_groups(text: str, devices: int) -> list[list[int]]:
    """Parse replica groups along named axes of a mesh (`parse_groups`); other text gives one group of all devices."""
    match = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*)\}", text)
    if match is None:
        return [list(range(devices))]
    sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])]
    order = list(range(math.prod(size for _, size in sizes)))
    if match[2]:
        order = _iota(match[2]) if match[2].startswith("[") else [int(d) for d in re.findall(r"\d+", match[2])]
    wanted = {
        name: (int(before), int(size)) if size else None
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[3])
    }
    # Split every axis into (before, chosen, after), so that a part of an axis is an axis of its own.
    digits: list[tuple[int, bool]] = []
    for name, size in sizes:
        part = wanted.get(name, (1, 1))
        before, chosen = (1, size) if part is None else part
        digits += [(before, False), (chosen, True), (size // before // chosen, False)]
    strides = [math.prod(size for size, _ in digits[i + 1 :]) for i in range(len(digits))]
    starts, offsets = [0], [0]
    for (size, chosen), stride in zip(digits, strides, strict=True):
        grown = offsets if chosen else starts
        grown[:] = [value + step * stride for value in grown for step in range(size)]
    return [[order[start + offset] for offset in offsets] for start in starts]
