"""What each segment of a torch module takes under a plan of its step: forward, backward, and once a step.

Every second of the plan's price is given to one op, and by it to a segment and a part of the step. Of a cluster of
elementwise ops it is given by the bytes of what these make. Ops with no segment of their own (casts of parameters, the
optimizer) have that of what uses them or of what they use.
"""

import dataclasses
import enum
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Op, OpClass, OpGraph
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.reshard_times import relayout_seconds, reshard_overlap, reshard_steps
from autoshard.planning.space.decision_model import EXPOSED, Model, Node, link_names
from autoshard.planning.space.overlap import lanes
from autoshard.planning.stages.stage_cut import SegmentCosts
from autoshard.program import WEIGHTS, Role, segment_of


class Part(enum.IntEnum):
    """A part of a step."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    """What is done once, whatever the number of microbatches: gradients are summed over devices, and used."""


Place = tuple[Part, int]
"""A part of the step, and a segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentPrices:
    """What segments take, and how much of it is communication that nothing hides; of K segments."""

    costs: SegmentCosts
    exposed_s: NDArray[np.float64]
    """Exposed communication in seconds [3, K]: forward, backward, update."""
    handed_bytes: NDArray[np.float64]
    """Bytes of one device that go from segments up to k to later ones, of one microbatch [K - 1]."""
    kinds: dict[str, NDArray[np.float64]]
    """The parts of the fixed bytes by kind, each [K]."""


def segment_prices(
    model: Model, choices: NDArray[np.int64], may_cut: Sequence[bool], axis: str, microbatches: int
) -> SegmentPrices:
    """Of a step of one microbatch whose segments are `may_cut`; stages stand along `axis` of the mesh.

    Nothing of the step may be split over that axis. A parameter that several segments use keeps them in one stage.
    """
    count = len(may_cut)
    places = _SegmentPlaces(model.graph, model.program.training, count)
    seconds, exposed = np.zeros((3, count)), np.zeros((3, count))
    for place, spent, waits in _spent(model, choices, places):
        part, segment = place
        seconds[part, segment] += spent
        exposed[part, segment] += spent if waits else 0.0
    sizes = _Sizes(model, choices)
    owners, tied = _owners(model, places)
    kinds = _fixed(model, sizes, owners, count, microbatches)
    handed = _handed(model, places, sizes, count)
    hand = (
        model.collectives.time("collective-permute", (axis,), handed)
        if dict(model.mesh.axes).get(axis, 1) > 1
        else np.zeros(count - 1)
    )
    free = np.array(may_cut, dtype=bool)
    uses = _uses(model, places)
    for first, last in (*tied, *((use[0], use[-1]) for use, goes in uses if not goes)):
        free[first + 1 : last + 1] = False
    costs = SegmentCosts(
        forward_s=seconds[Part.FORWARD],
        backward_s=seconds[Part.BACKWARD],
        update_s=seconds[Part.UPDATE],
        hand_over_s=np.where(handed > 0, np.asarray(hand, dtype=np.float64), 0.0),
        fixed_bytes=sum(kinds.values(), np.zeros(count)),
        working_bytes=_working(model, places, sizes, count),
        kept_bytes=_kept(model, places, sizes, count),
        may_cut=free,
        trains=model.program.training,
        forbidden=_forbidden([use for use, _ in uses], count),
    )
    return SegmentPrices(costs, exposed, handed, kinds)


class _SegmentPlaces:
    """The part of the step and the segment of every op and of what makes every tensor."""

    def __init__(self, graph: OpGraph, trains: bool, count: int) -> None:
        self.graph, self.last = graph, count - 1
        self.lifted: set[int] = set()
        self.of: list[Place | None] = [self._named(op) if trains else self._forward(op) for op in graph.ops]
        self.maker: dict[int, Place] = {}
        self.users: dict[int, list[int]] = defaultdict(list)
        for op in graph.ops:
            for tensor in op.operands:
                self.users[tensor].append(op.id)
        self._loops()
        self._downwards()
        self._upwards()
        self._downwards(final=True)

    def _named(self, op: Op) -> Place | None:
        segment = segment_of(op.name)
        back = "transpose(" in op.name or "rematted" in op.name
        if segment is None:
            return None
        return (Part.BACKWARD if back else Part.FORWARD), min(segment, self.last)

    def _forward(self, op: Op) -> Place | None:
        segment = segment_of(op.name)
        return None if segment is None else (Part.FORWARD, min(segment, self.last))

    def _loops(self) -> None:
        """What a loop gives is made where most of its ops are."""
        for loop in self.graph.loops:
            inside = [self.of[op.id] for op in self.graph.ops[loop.start : loop.stop]]
            placed = [place for place in inside if place is not None]
            if placed:
                most = max(set(placed), key=lambda place: (placed.count(place), -place[1]))
                for carry in loop.carries:
                    self.maker[carry.result] = self.maker[carry.body] = most
                    if loop.start < len(self.graph.ops):
                        self.users[carry.init].append(loop.start)

    def _downwards(self, final: bool = False) -> None:
        """What uses gradients, and has no segment, is the update; in the end everything that is left is."""
        for op in self.graph.ops:
            found = self.of[op.id]
            if found is None and op.op_class is not OpClass.FREE:
                made = sorted((self.graph.tensors[t].bytes, self.maker[t]) for t in op.operands if t in self.maker)
                late = [each for each in made if each[1][0] is not Part.FORWARD]
                if made and "jvp(" in op.name:  # a loss beside the module, or the gradient of a cast
                    back = "transpose(" in op.name
                    found = (Part.BACKWARD if back else Part.FORWARD), made[-1][1][1]
                    self.of[op.id] = found
                elif late or final:
                    # The largest operand is of its own segment; a norm over all gradients scales those of every one.
                    found = Part.UPDATE, (late or made)[-1][1][1] if made else 0
                    self.of[op.id] = found
            if found is not None and op.op_class is not OpClass.FREE:
                for tensor in op.results:
                    self.maker[tensor] = found

    def _upwards(self) -> None:
        """What is made of arguments alone belongs to what uses it first."""
        for op in reversed(self.graph.ops):
            if self.of[op.id] is None and op.op_class is not OpClass.FREE:
                using = [place for t in op.results for user in self.users[t] if (place := self.of[user])]
                if using:
                    self.of[op.id] = min(using)
                    self.lifted.add(op.id)
                    for tensor in op.results:
                        self.maker[tensor] = min(using)

    def place(self, op: int) -> Place:
        """Where the time of an op goes."""
        return self.of[op] or (Part.UPDATE, 0)

    def summed_once(self) -> set[int]:
        """Ops of the backward pass whose results only the update uses: their sums over devices wait for all of it."""
        found: set[int] = set()
        for op in reversed(self.graph.ops):
            place = self.of[op.id]
            if place is None or place[0] is not Part.BACKWARD:
                continue
            using = [user for t in op.results for user in self.users[t]]
            if using and all(user in found or self.place(user)[0] is Part.UPDATE for user in using):
                found.add(op.id)
        return found


class _Sizes:
    """Bytes of one device of tensors."""

    def __init__(self, model: Model, choices: NDArray[np.int64]) -> None:
        self.model, self.choices, self.axes = model, choices, dict(model.mesh.axes)

    def of(self, tensor: int, itemsize: int | None = None) -> float:
        record = self.model.graph.tensors[tensor]
        local = tensor_spec(self.model, self.choices, tensor).local_shape(record.shape, self.axes)
        return float(math.prod(local) * (record.itemsize if itemsize is None else itemsize))


def _spent(model: Model, choices: NDArray[np.int64], places: _SegmentPlaces) -> Iterator[tuple[Place, float, bool]]:
    """Seconds of one step by place, and whether they are communication."""
    once = places.summed_once()

    def summed(op: int) -> Place:
        part, segment = places.place(op)
        return (Part.UPDATE if op in once else part), segment

    for number, node in enumerate(model.nodes):
        for (_, what), seconds in node.time.items():
            spent = float(seconds[int(choices[number])])
            if spent <= 0 or what not in ("compute", EXPOSED[1]):
                continue
            if node.kind == "op":
                waits = what == EXPOSED[1]
                yield (summed(node.ref) if waits else places.place(node.ref)), spent, waits
            else:
                for place, share in _shares(model, node, places):
                    yield place, spent * share, what == EXPOSED[1]
    link_of = link_names(model.mesh)
    for reshard in model.reshards:
        made = places.maker.get(reshard.tensor, (Part.UPDATE, 0))
        place = places.place(reshard.op) if reshard.op >= 0 else made
        if place[0] is Part.UPDATE:
            place = Part.UPDATE, made[1]
        producer = model.graph.tensors[reshard.tensor].producer
        if producer in once:
            place = Part.UPDATE, made[1]
        if again := relayout_seconds(model, reshard, choices):
            yield place, again, False
        overlap = reshard_overlap(model, reshard, choices)
        for kind, axes, size, seconds in reshard_steps(model, reshard, choices):
            shares = lanes(model.collectives, link_of, overlap, kind, axes, size, reshard.block)
            waits = shares.get(EXPOSED, 0.0) * seconds * reshard.trips
            if waits:
                yield place, waits, True


def _shares(model: Model, node: Node, places: _SegmentPlaces) -> list[tuple[Place, float]]:
    """Where the time of a cluster goes: by the bytes of what its ops make, of what reaches memory if anything does."""
    tensors = model.structure.clusters[node.ref].tensors if node.kind == "cluster" else (node.ref,)
    weights: dict[Place, float] = defaultdict(float)
    written = [tensor for tensor in tensors if tensor in model.liveness.materialised] or tensors
    for tensor in written:
        if tensor in places.maker:
            record = model.graph.tensors[tensor]
            weights[places.maker[tensor]] += record.bytes * model.graph.trips(record.loop)
    if not weights:  # of an argument: read where it is used
        users = [places.place(user) for tensor in tensors for user in places.users[tensor]]
        weights[min(users, default=(Part.UPDATE, 0))] = 1.0
    whole = sum(weights.values()) or 1.0
    return [(place, weight / whole) for place, weight in sorted(weights.items())]


def _owners(model: Model, places: _SegmentPlaces) -> tuple[list[int], list[tuple[int, int]]]:
    """The segment that holds each argument, and the (first, last) segments that share a parameter."""
    owners, tied = [], []
    for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
        found = _using(places, tensor, Part.FORWARD)
        for user in places.users[tensor]:
            if user in places.lifted:  # a cast, made once for all that use it
                found |= {s for cast in model.graph.ops[user].results for s in _using(places, cast, Part.FORWARD)}
        segments = sorted(found)
        if not segments:
            segments = sorted(_using(places, tensor, Part.UPDATE) or _using(places, tensor, Part.BACKWARD))
        owners.append(segments[0] if segments else 0)
        if argument.role in WEIGHTS and len(segments) > 1:
            tied.append((segments[0], segments[-1]))
    return owners, tied


def _using(places: _SegmentPlaces, tensor: int, part: Part) -> set[int]:
    return {place[1] for user in places.users[tensor] if (place := places.place(user))[0] is part}


def _fixed(
    model: Model, sizes: _Sizes, owners: Sequence[int], count: int, microbatches: int
) -> dict[str, NDArray[np.float64]]:
    kinds = {kind: np.zeros(count) for kind in ("parameters", "gradients", "optimizer_state", "batch")}
    named = {Role.PARAMETER: "parameters", Role.OPTIMIZER_STATE: "optimizer_state", Role.BATCH: "batch"}
    for argument, tensor, owner in zip(model.program.arguments, model.graph.arguments, owners, strict=True):
        if tensor in model.liveness.hosted:
            continue
        size = sizes.of(tensor)
        kinds[named.get(argument.role, "parameters")][owner] += size * (
            microbatches if argument.role is Role.BATCH else 1
        )
        if argument.role is Role.PARAMETER and model.program.training:
            kinds["gradients"][owner] += size
    return kinds


def _handed(model: Model, places: _SegmentPlaces, sizes: _Sizes, count: int) -> NDArray[np.float64]:
    """Bytes of what forward work up to segment k makes and later forward work uses, for each k but the last."""
    handed = np.zeros(count - 1)
    for tensor, users in places.users.items():
        made = places.maker.get(tensor)
        if made is None or made[0] is not Part.FORWARD:
            continue
        later = [p[1] for user in users if (p := places.of[user]) and p[0] is Part.FORWARD and p[1] > made[1]]
        if later:
            handed[made[1] : max(later)] += sizes.of(tensor)
    return handed


def _uses(model: Model, places: _SegmentPlaces) -> list[tuple[tuple[int, ...], bool]]:
    """The segment that makes a value of the forward pass and those after it that use it; whether it may be handed on.

    What runs the stages hands on values that have gradients, and the batch goes to the first stage alone. A value has
    a gradient if parameters are in it.
    """
    graph = model.graph
    arguments = dict(zip(graph.arguments, model.program.arguments, strict=True))
    derived = {tensor for tensor, argument in arguments.items() if argument.role is Role.PARAMETER}
    found: dict[tuple[tuple[int, ...], bool], None] = {}
    for loop in graph.loops:
        derived |= {t for carry in loop.carries for t in (carry.body, carry.result)}
    for op in graph.ops:
        place = places.of[op.id]
        if any(tensor in derived for tensor in op.operands):
            derived |= set(op.results)
        if place is None or place[0] is not Part.FORWARD:
            continue
        for tensor in op.results:
            later = _later(places, tensor, place[1])
            if later and graph.tensors[tensor].shape:
                found[(place[1], *later), tensor in derived] = None
    for tensor, argument in arguments.items():
        if argument.role is Role.BATCH and not argument.name.startswith(_TARGETS):
            later = _later(places, tensor, 0)
            if later:
                found[(0, *later), False] = None
    return list(found)


_TARGETS = ("batch.targets", "batch.labels")
"""How the arguments begin that only the loss takes, which the last stage has of its own."""


def _later(places: _SegmentPlaces, tensor: int, after: int) -> list[int]:
    """Segments after one whose forward work uses a value."""
    return sorted(segment for segment in _using(places, tensor, Part.FORWARD) if segment > after)


def _forbidden(uses: Sequence[tuple[int, ...]], count: int) -> NDArray[np.bool_]:
    """Runs i to j - 1 that a value would have to go past, made before i and used from j on [K, K + 1].

    torch.distributed.pipelining hands values on to the next stage: it takes gradients back from one stage alone, and
    sends nothing from one chunk to another one of the same stage.
    """
    begins, ends = np.arange(count)[:, None], np.arange(count + 1)[None, :]
    found = np.zeros((count, count + 1), dtype=bool)
    for use in uses:
        found |= (use[0] < begins) & (begins < ends) & (ends <= use[-1])
    return found


def _working(model: Model, places: _SegmentPlaces, sizes: _Sizes, count: int) -> NDArray[np.float64]:
    """Bytes of all that the largest op of each segment takes and gives."""
    working = np.zeros(count)
    for op in model.graph.ops:
        place = places.of[op.id]
        if place is not None and place[0] is not Part.UPDATE and op.op_class is OpClass.HEAVY:
            size = sum(sizes.of(tensor) for tensor in {*op.operands, *op.results})
            working[place[1]] = max(working[place[1]], size)
    return working


def _kept(model: Model, places: _SegmentPlaces, sizes: _Sizes, count: int) -> NDArray[np.float64]:
    """Bytes that segments i to j - 1 keep between the passes [K, K + 1]: each value once, however many use it."""
    kept = np.zeros((count, count + 1))
    backward = [op.id for op in model.graph.ops if (p := places.of[op.id]) and p[0] is Part.BACKWARD]
    if not backward:
        return kept
    between = min(backward)
    arguments = set(model.graph.arguments)
    groups: dict[tuple[int, ...], float] = defaultdict(float)
    for tensor, start, stop in model.liveness.buffers:
        if not start < between < stop or tensor in arguments:
            continue
        using = _using(places, tensor, Part.BACKWARD)
        made = places.maker.get(tensor)
        segments = using or ({made[1]} if made else set())
        if segments:
            itemsize = model.liveness.itemsize(model.graph, (tensor, start, stop))
            groups[tuple(sorted(segments))] += sizes.of(tensor, itemsize)
    for segments, size in groups.items():
        sums = np.concatenate([[0], np.cumsum(np.isin(np.arange(count), segments))])
        kept += size * (sums[None, :] > sums[:-1, None])
    return kept
