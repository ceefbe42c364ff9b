"""Prices of each segment of a torch module under a plan of its step: forward, backward, and once a step.

Every second of the plan's price is assigned to one op, and through the op to a segment and a part of the step. The time
of a cluster of elementwise ops is divided among its ops in proportion to the bytes that they write. Ops without a
segment of their own, such as casts of parameters and the optimizer, get the segment of their users or operands.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import HOST
from autoshard.graph import Op, OpClass, OpGraph
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.step_ledger import Ledger
from autoshard.planning.space.decision_model import Model, Node, Reshard
from autoshard.planning.stages.stage_cut import SegmentCosts
from autoshard.program import WEIGHTS, Part, Role, segment_of


Place = tuple[Part, int]
"""A part of the step and a segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentPrices:
    """Prices of K segments, with their exposed communication."""

    costs: SegmentCosts
    """Seconds and bytes of the segments, as the search for a cut needs them."""
    exposed_s: NDArray[np.float64]
    """Exposed communication in seconds [3, K]: forward, backward, update."""
    handed_bytes: NDArray[np.float64]
    """Bytes that one device sends from segments up to k to later ones, for one microbatch [K - 1]."""
    kinds: dict[str, NDArray[np.float64]]
    """Parts of the fixed bytes by kind, each [K]: parameters, gradients, optimizer_state and batch."""


def segment_prices(
    ledger: Ledger, may_cut: Sequence[bool], axis: str, microbatches: int, anywhere: bool = False
) -> SegmentPrices:
    """Price the segments of a step of one microbatch.

    - `ledger`: work of the step under its plan. No tensor may be split over `axis`.
    - `may_cut`: True for each segment that may begin a stage, K in all.
    - `axis`: mesh axis along which the stages are laid out.
    - `microbatches`: number of microbatches whose batch arguments a device stores.
    - `anywhere`: True if the runtime hands any value to any stage, as that of JAX steps does.

    A parameter used by several segments, and a value that stages cannot hand on, forces these segments into one stage.
    Seconds of hand-overs are 0 if `axis` has one device.
    """
    model, count = ledger.model, len(may_cut)
    places = _SegmentPlaces(model.graph, model.program.training, count)
    seconds, exposed, weights = np.zeros((3, count)), np.zeros((3, count)), np.zeros(count)
    once = places.summed_once()
    for place, spent, op in _spent(ledger, places, once):
        part, segment = place
        seconds[part, segment] += spent
        exposed[part, segment] += spent if op is None else 0.0
        weights[segment] += spent if op in once and part is Part.BACKWARD else 0.0
    sizes = _Sizes(model, ledger.choices)
    owners, tied = _owners(model, places)
    kinds = _fixed(model, sizes, owners, count, microbatches)
    handed = _handed(model, places, sizes, count)
    hand_over_s = (
        model.collectives.time("collective-permute", (axis,), handed)
        if dict(model.mesh.axes).get(axis, 1) > 1
        else np.zeros(count - 1)
    )
    cuttable = np.array(may_cut, dtype=bool)
    uses = [] if anywhere else _uses(model, places)
    for first, last in (*tied, *((use[0], use[-1]) for use, goes in uses if not goes)):
        cuttable[first + 1 : last + 1] = False
    costs = SegmentCosts(
        forward_s=seconds[Part.FORWARD],
        backward_s=seconds[Part.BACKWARD],
        update_s=seconds[Part.UPDATE],
        hand_over_s=np.where(handed > 0, np.asarray(hand_over_s, dtype=np.float64), 0.0),
        fixed_bytes=sum(kinds.values(), np.zeros(count)),
        working_bytes=_working(model, places, sizes, count),
        kept_bytes=_kept(model, places, sizes, count),
        may_cut=cuttable,
        trains=model.program.training,
        weights_s=weights,
        forbidden=_forbidden([use for use, _ in uses], count),
    )
    return SegmentPrices(costs, exposed, handed, kinds)


class _SegmentPlaces:
    """The part of the step and the segment of every op, and of the producer of every tensor.

    `of` has the place of each op, None for free ops without a name of a segment. `maker` has the place of each tensor's
    producer. `users` has the ops that use each tensor, a loop's first op for its initial values. `lifted` has ops whose
    operands are arguments alone.
    """

    def __init__(self, graph: OpGraph, trains: bool, count: int) -> None:
        """Place the ops of a graph in `count` segments; without `trains` all named ops are forward work."""
        self.graph, self.last = graph, count - 1
        self.lifted: set[int] = set()
        self.of: list[Place | None] = [self._named(op) if trains else self._forward(op) for op in graph.ops]
        self.maker: dict[int, Place] = {}
        self.arguments = set(graph.arguments)
        self.homes = self._homes()
        self.users = [[op.id for op in users] for users in graph.users]
        self._loops()
        self._downwards()
        self._upwards()
        self._downwards(final=True)

    def _named(self, op: Op) -> Place | None:
        """Return the place that an op's name gives in a training step; None if it names no segment.

        Transposed and recomputed ops belong to the backward pass. Numbers beyond the last segment stand for the last.
        """
        segment = segment_of(op.name)
        back = "transpose(" in op.name or "rematted" in op.name
        if segment is None:
            return None
        return (Part.BACKWARD if back else Part.FORWARD), min(segment, self.last)

    def _forward(self, op: Op) -> Place | None:
        """Return the place that an op's name gives in a forward pass; None if it names no segment.

        Numbers beyond the last segment stand for the last.
        """
        segment = segment_of(op.name)
        return None if segment is None else (Part.FORWARD, min(segment, self.last))

    def _homes(self) -> dict[int, Place]:
        """Return the first place in a named segment that uses each argument, by tensor."""
        homes: dict[int, Place] = {}
        for op in self.graph.ops:
            if (place := self.of[op.id]) is not None:
                for tensor in self.arguments.intersection(op.operands):
                    homes[tensor] = min(place, homes.get(tensor, place))
        return homes

    def _loops(self) -> None:
        """Assign the results of each loop to the place of most of its placed ops, on a tie to the earliest segment."""
        for loop in self.graph.loops:
            inside = [self.of[op.id] for op in self.graph.ops[loop.start : loop.stop]]
            placed = [place for place in inside if place is not None]
            if placed:
                main_place = max(set(placed), key=lambda place: (placed.count(place), -place[1]))
                for carry in loop.carries:
                    self.maker[carry.result] = self.maker[carry.body] = main_place
                    if loop.start < len(self.graph.ops):
                        self.users[carry.init].append(loop.start)

    def _downwards(self, final: bool = False) -> None:
        """Assign ops without a segment to the segment of their largest operand, in program order.

        Ops that use gradients belong to the update. With `final`, all ops that are left belong to it.
        """
        for op in self.graph.ops:
            place = self.of[op.id]
            if place is None and op.op_class is not OpClass.FREE:
                # A term of the loss that penalises a parameter belongs where the parameter is used.
                known = self.homes | self.maker if "jvp(" in op.name else self.maker
                operands = sorted((self.graph.tensors[t].bytes, known[t]) for t in op.operands if t in known)
                gradients = [each for each in operands if each[1][0] is not Part.FORWARD]
                if operands and "jvp(" in op.name:  # a loss outside the module, or a gradient of a cast
                    is_backward = "transpose(" in op.name
                    place = (Part.BACKWARD if is_backward else Part.FORWARD), operands[-1][1][1]
                    self.of[op.id] = place
                    self.homes |= {t: place for t in op.operands if t in self.arguments and t not in self.homes}
                elif gradients or final:
                    # The largest operand names the segment, since a norm over all gradients is an operand in every
                    # segment.
                    place = Part.UPDATE, (gradients or operands)[-1][1][1] if operands else 0
                    self.of[op.id] = place
            if place is not None and op.op_class is not OpClass.FREE:
                for tensor in op.results:
                    self.maker[tensor] = place

    def _upwards(self) -> None:
        """Assign ops still without a place to the first place that uses their results, in reverse program order.

        These compute values from arguments alone. They are recorded in `lifted`.
        """
        for op in reversed(self.graph.ops):
            if self.of[op.id] is None and op.op_class is not OpClass.FREE:
                using = [place for t in op.results for user in self.users[t] if (place := self.of[user])]
                if using:
                    self.of[op.id] = min(using)
                    self.lifted.add(op.id)
                    for tensor in op.results:
                        self.maker[tensor] = min(using)

    def place(self, op: int) -> Place:
        """Return the place to which the time of an op is assigned; the update of segment 0 for an op without one."""
        return self.of[op] or (Part.UPDATE, 0)

    def summed_once(self) -> set[int]:
        """Return the ids of the ops of the backward pass whose results, through others of them, only the update uses.

        Their sums over devices run once, after all microbatches.
        """
        ops: set[int] = set()
        for op in reversed(self.graph.ops):
            place = self.of[op.id]
            if place is None or place[0] is not Part.BACKWARD:
                continue
            using = [user for t in op.results for user in self.users[t]]
            if using and all(user in ops or self.place(user)[0] is Part.UPDATE for user in using):
                ops.add(op.id)
        return ops


class _Sizes:
    """Sizes of tensors in bytes of one device."""

    def __init__(self, model: Model, choices: NDArray[np.int64]) -> None:
        """Store the model and the choices whose specs count."""
        self.model, self.choices, self.axes = model, choices, dict(model.mesh.axes)

    def of(self, tensor: int, itemsize: int | None = None) -> float:
        """Return the bytes of a tensor's shard without padding of tiles, with another item size in bytes if given."""
        record = self.model.graph.tensors[tensor]
        local = tensor_spec(self.model, self.choices, tensor).local_shape(record.shape, self.axes)
        return float(math.prod(local) * (record.itemsize if itemsize is None else itemsize))


def _spent(ledger: Ledger, places: _SegmentPlaces, once: set[int]) -> Iterator[tuple[Place, float, int | None]]:
    """Yield (place, seconds, op) of all work in one step; `op` is an id, -1 for a cluster, None for exposed traffic.

    Hidden communication and host traffic are left out. `once` is the result of `summed_once`.
    """
    model = ledger.model
    for row in ledger.rows:
        where, waits = row.where, bool(row.axes)
        spent = row.exposed_s if waits else row.step_s
        if spent <= 0 or row.kind == HOST:
            continue
        if isinstance(where, Reshard):
            yield _reshard_place(model, where, places, once), spent, None if waits else -1
        elif where.kind == "op":
            part, segment = places.place(where.ref)
            # Sums that run once belong to the update.
            yield (Part.UPDATE if waits and where.ref in once else part, segment), spent, None if waits else where.ref
        else:
            for place, share in _shares(model, where, places):
                yield place, spent * share, -1


def _reshard_place(model: Model, reshard: Reshard, places: _SegmentPlaces, once: set[int]) -> Place:
    """Return the place of a reshard: that of its op, or the update for sums that run once and for ops of the update.

    `once` is the result of `summed_once`.
    """
    producer_place = places.maker.get(reshard.tensor, (Part.UPDATE, 0))
    place = places.place(reshard.op) if reshard.op >= 0 else producer_place
    if place[0] is Part.UPDATE or model.graph.tensors[reshard.tensor].producer in once:
        return Part.UPDATE, producer_place[1]
    return place


def _shares(model: Model, node: Node, places: _SegmentPlaces) -> list[tuple[Place, float]]:
    """Return the places of a cluster's or copy's time, with their shares, which sum to one.

    The shares follow the bytes that its ops materialise, or all bytes that they compute if none is materialised.
    An argument has its first user's place.
    """
    tensors = model.structure.clusters[node.ref].tensors if node.kind == "cluster" else (node.ref,)
    weights: dict[Place, float] = defaultdict(float)
    materialised = [tensor for tensor in tensors if tensor in model.liveness.materialised] or tensors
    for tensor in materialised:
        if tensor in places.maker:
            record = model.graph.tensors[tensor]
            weights[places.maker[tensor]] += record.bytes * model.graph.trips(record.loop)
    if not weights:  # an argument is read where it is used
        users = [places.place(user) for tensor in tensors for user in places.users[tensor]]
        weights[min(users, default=(Part.UPDATE, 0))] = 1.0
    total = sum(weights.values()) or 1.0
    return [(place, weight / total) for place, weight in sorted(weights.items())]


def _owners(model: Model, places: _SegmentPlaces) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the segment that stores each argument, and the (first, last) segments that share a parameter.

    An argument is stored by the first segment whose forward work uses it, directly or through a cast. Without one it is
    the first that uses it in the update, else in the backward pass, else segment 0.
    """
    owners, tied = [], []
    for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
        using = _using(places, tensor, Part.FORWARD)
        for user in places.users[tensor]:
            if user in places.lifted:  # a cast, computed once for all its users
                using |= {s for cast in model.graph.ops[user].results for s in _using(places, cast, Part.FORWARD)}
        segments = sorted(using)
        if not segments:
            segments = sorted(_using(places, tensor, Part.UPDATE) or _using(places, tensor, Part.BACKWARD))
        owners.append(segments[0] if segments else 0)
        if argument.role in WEIGHTS and len(segments) > 1:
            tied.append((segments[0], segments[-1]))
    return owners, tied


def _using(places: _SegmentPlaces, tensor: int, part: Part) -> set[int]:
    """Return the segments whose ops in one part of the step use a tensor."""
    return {place[1] for user in places.users[tensor] if (place := places.place(user))[0] is part}


def _fixed(
    model: Model, sizes: _Sizes, owners: Sequence[int], count: int, microbatches: int
) -> dict[str, NDArray[np.float64]]:
    """Return the bytes that each segment stores for the whole step, by kind, each [K].

    Batch arguments are stored for all microbatches. Arguments in the hosts' memory are left out.
    A trained parameter's gradient has the parameter's bytes; buffers count as parameters.

    - `owners`: segment that stores each argument.
    - `count`: number K of segments.
    - `microbatches`: number of microbatches in a step.
    """
    names = ("parameters", "frozen_parameters", "gradients", "optimizer_state", "batch")
    kinds = {kind: np.zeros(count) for kind in names}
    kind_of = {Role.FROZEN: "frozen_parameters", Role.OPTIMIZER_STATE: "optimizer_state", Role.BATCH: "batch"}
    for argument, tensor, owner in zip(model.program.arguments, model.graph.arguments, owners, strict=True):
        if tensor in model.liveness.hosted:
            continue
        size = sizes.of(tensor)
        kinds[kind_of.get(argument.role, "parameters")][owner] += size * (
            microbatches if argument.role is Role.BATCH else 1
        )
        if argument.role is Role.PARAMETER and model.program.training:
            kinds["gradients"][owner] += size
    return kinds


def _handed(model: Model, places: _SegmentPlaces, sizes: _Sizes, count: int) -> NDArray[np.float64]:
    """Return the bytes that forward work up to segment k computes and later forward work uses [K - 1].

    `count` is the number K of segments. Arguments do not count.
    """
    handed = np.zeros(count - 1)
    for tensor, users in enumerate(places.users):
        producer_place = places.maker.get(tensor)
        if producer_place is None or producer_place[0] is not Part.FORWARD:
            continue
        later = [p[1] for user in users if (p := places.of[user]) and p[0] is Part.FORWARD and p[1] > producer_place[1]]
        if later:
            handed[producer_place[1] : max(later)] += sizes.of(tensor)
    return handed


def _uses(model: Model, places: _SegmentPlaces) -> list[tuple[tuple[int, ...], bool]]:
    """Return the segments of each value of the forward pass, its producer first, with True if stages may hand the value
    on.

    The pipeline runtime hands on values that have gradients, and gives the batch to the first stage alone. A value has
    a gradient if it depends on trained parameters, or comes from a loop. Each item is (segments ascending, True if
    handed on). Values that one segment alone uses, scalars, and arguments for the loss alone are left out.
    """
    graph = model.graph
    arguments = dict(zip(graph.arguments, model.program.arguments, strict=True))
    derived = {tensor for tensor, argument in arguments.items() if argument.role is Role.PARAMETER}
    uses: dict[tuple[tuple[int, ...], bool], None] = {}
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
                uses[(place[1], *later), tensor in derived] = None
    for tensor, argument in arguments.items():
        if argument.role is Role.BATCH and not argument.name.startswith(_TARGETS):
            later = _later(places, tensor, 0)
            if later:
                uses[(0, *later), False] = None
    return list(uses)


_TARGETS = ("batch.targets", "batch.labels")
"""Beginnings of the arguments that only the loss uses; the last stage receives these arguments itself."""


def _later(places: _SegmentPlaces, tensor: int, after: int) -> list[int]:
    """Return the segments after a given one whose forward work uses a value."""
    return sorted(segment for segment in _using(places, tensor, Part.FORWARD) if segment > after)


def _forbidden(uses: Sequence[tuple[int, ...]], count: int) -> NDArray[np.bool_]:
    """Return True for runs of segments i to j - 1 that a value would have to bypass [K, K + 1].

    A value bypasses a run if it is computed before i and used from j on. torch.distributed.pipelining hands values on
    to the next stage only. It accepts gradients from one stage alone, and sends nothing between two chunks of one
    stage.
    """
    begins, ends = np.arange(count)[:, None], np.arange(count + 1)[None, :]
    bypassed = np.zeros((count, count + 1), dtype=bool)
    for use in uses:
        bypassed |= (use[0] < begins) & (begins < ends) & (ends <= use[-1])
    return bypassed


def _working(model: Model, places: _SegmentPlaces, sizes: _Sizes, count: int) -> NDArray[np.float64]:
    """Return the bytes of all operands and results of the largest heavy op in each segment [K].

    Ops of the update do not count. A segment without heavy ops has 0.
    """
    working = np.zeros(count)
    for op in model.graph.ops:
        place = places.of[op.id]
        if place is not None and place[0] is not Part.UPDATE and op.op_class is OpClass.HEAVY:
            size = sum(sizes.of(tensor) for tensor in {*op.operands, *op.results})
            working[place[1]] = max(working[place[1]], size)
    return working


def _kept(model: Model, places: _SegmentPlaces, sizes: _Sizes, count: int) -> NDArray[np.float64]:
    """Return the bytes that segments i to j - 1 save between the passes [K, K + 1].

    Each value counts once for all its users. A value belongs to the segments whose backward work uses it, else to its
    producer's. All are 0 without a backward pass.
    """
    saved_bytes = np.zeros((count, count + 1))
    backward = [op.id for op in model.graph.ops if (p := places.of[op.id]) and p[0] is Part.BACKWARD]
    if not backward:
        return saved_bytes
    between = min(backward)
    arguments = set(model.graph.arguments)
    groups: dict[tuple[int, ...], float] = defaultdict(float)
    for tensor, start, stop in model.liveness.buffers:
        if not start < between < stop or tensor in arguments:
            continue
        using = _using(places, tensor, Part.BACKWARD)
        producer_place = places.maker.get(tensor)
        segments = using or ({producer_place[1]} if producer_place else set())
        if segments:
            itemsize = model.liveness.itemsize(model.graph, (tensor, start, stop))
            groups[tuple(sorted(segments))] += sizes.of(tensor, itemsize)
    for segments, size in groups.items():
        sums = np.concatenate([[0], np.cumsum(np.isin(np.arange(count), segments))])
        saved_bytes += size * (sums[None, :] > sums[:-1, None])
    return saved_bytes
