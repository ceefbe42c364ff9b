"""Memory beyond the program's tensors: collective buffers, results that replace no argument, and memory pressure."""

import bisect
import dataclasses
import functools
import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Topology
from autoshard.graph import SOFTMAX_ROW, Liveness, OpClass, OpGraph, Structure
from autoshard.planning.price.combined_collectives import JOINED
from autoshard.planning.space.decision_model import RESERVED, SCOPED, Model, Reshard
from autoshard.planning.xla.axis_assignments import local_elements
from autoshard.planning.xla.table_layouts import LARGEST_SLICE, turned_updates


_FILE = pathlib.Path(__file__).with_name("headroom.json")

FORWARD = 1.0 / 3.0
"""Share of a training step's compute in its forward pass: each matmul has two more in the backward pass."""


NEGLIGIBLE_DEVIATIONS = 5.0
"""Standard deviations below a limit from which on the chance to exceed the limit counts as zero."""

READS_CONSTANTS, GROUPED = frozenset({"v6e"}), 5
"""Chips with such kernels (see `softmax_operands`), and the least dims of scores of grouped heads."""

ADDRESSES = 1 << 14
"""Bytes of a table of addresses for each kernel on TPUs.

Kernels with several results and copies to on-chip memory have such tables, and the compiler places every temporary at a
multiple of 16 KiB. Compiled programs had 0.5 to 2 tables for each kernel.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Headroom:
    """Measured behaviour of a compiler near full memory, and the error of predicted peaks."""

    recompute_from: float | None
    """Share of the memory above which the compiler recomputes; None if it does not."""
    unhidden: float
    """Share of the hidden communication that becomes exposed then."""
    error_mean: float
    """Mean of compiled minus predicted peaks, as a share of the memory, over programs that need much of it."""
    error_deviation: float
    """Standard deviation of compiled minus predicted peaks, as a share of the memory."""
    source: str
    """Origin of the figures, in words."""

    def excess(self, predicted: float, limit: float) -> float:
        """Return the expected share of the memory by which the need exceeds `limit`, for a predicted share.

        The need is normally distributed, so this is the mean of the positive part of need minus limit.
        """
        above = (predicted + self.error_mean - limit) / self.error_deviation
        if above <= -NEGLIGIBLE_DEVIATIONS:
            return 0.0
        density = math.exp(-0.5 * above * above) / math.sqrt(2.0 * math.pi)
        return max(0.0, self.error_deviation * (density + above * self.chance(predicted, limit)))

    def chance(self, predicted: float, limit: float) -> float:
        """Return the probability that the need exceeds `limit`, for a predicted share of the memory; need and limit are
        shares of it.
        """
        above = (predicted + self.error_mean - limit) / self.error_deviation
        return 0.5 * math.erfc(-above / math.sqrt(2.0)) if above > -NEGLIGIBLE_DEVIATIONS else 0.0


@functools.cache
def load_headroom(compiler: str) -> Headroom:
    """Load the constants of the compiler for `TPU` or `GPU` from the file in this folder; cached.

    `experiments/fidelity/headroom.py` measured them.
    """
    return Headroom(**json.loads(_FILE.read_text())[compiler])


def _headroom(model: Model) -> Headroom | None:
    """Return the constants of the compiler of a model's devices; None for CPUs, whose memory has no such limit.

    Nothing recomputes values where no compiler sees the whole step.
    """
    traits = model.mesh.topology.traits
    if not traits.compiles_without_devices:
        return None
    headroom = load_headroom("TPU" if traits.compiles_ahead else "GPU")
    return dataclasses.replace(headroom, recompute_from=None) if model.eager else headroom


def tight_seconds(model: Model, peak_bytes: int, compute_s: float, hidden_s: float) -> float:
    """Return the expected seconds that nearly full memory adds to a step.

    The result is never negative, and 0 for CPUs. The peak is compared with the usable memory of the chip, not with the
    memory limit. At most a forward pass of recomputation is added, and the share `unhidden` of hidden communication.
    Frameworks that run op by op run out of memory instead. Then the step has to be run with recomputation: this is its
    expected price.

    - `peak_bytes`: predicted peak of one device.
    - `compute_s`, `hidden_s`: seconds of compute and of hidden communication in the step.
    """
    headroom, share = _headroom(model), peak_bytes / model.mesh.topology.usable_bytes
    if headroom is None:
        return 0.0
    begins = headroom.recompute_from
    if begins is None:
        return FORWARD * compute_s * headroom.chance(share, 1.0)
    # Recomputation grows linearly from nothing at `begins` to the whole forward pass at full memory.
    again = (headroom.excess(share, begins) - headroom.excess(share, 1.0)) / (1.0 - begins)
    return FORWARD * compute_s * min(1.0, max(0.0, again)) + headroom.unhidden * hidden_s * headroom.chance(
        share, begins
    )


def lower_memory_targets(model: Model) -> tuple[int, ...]:
    """Return two peaks in bytes of one device, the larger first.

    The compiler recomputes, or memory runs out, at the first with even odds, and at the second in 2 % of cases. Empty
    for CPUs.
    """
    headroom = _headroom(model)
    if headroom is None:
        return ()
    even = (1.0 if headroom.recompute_from is None else headroom.recompute_from) - headroom.error_mean
    # Two standard deviations below even odds the need exceeds the limit in 2 % of cases.
    usable = model.mesh.topology.usable_bytes
    return tuple(int((even - far * headroom.error_deviation) * usable) for far in (0.0, 2.0))


_Steps = Iterable[tuple[str, tuple[str, ...], float, float]]
"""Collectives of one reshard: kind, mesh axes, bytes and seconds of each."""
_Group = tuple[str, tuple[str, ...], int]
"""Kind, mesh axes and block of collectives that the compiler may combine."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffered:
    """Buffer of one collective, live on a device during [start, stop) in op ids."""

    start: int
    stop: int
    size: int
    """Bytes of the buffer on one device."""
    tensor: int
    """Tensor that the collective gathers or sums."""
    result: int
    """Bytes of the collective's result on one device, which the compiler adds up as it combines collectives."""


def collective_buffers(
    model: Model, choices: NDArray[np.int64], steps: Sequence[_Steps]
) -> list[tuple[int, int, int, str, int]]:
    """Return (first op, end, bytes, kind, tensor) of the buffers that collectives occupy on one device.

    `steps` has the collectives of every reshard, in the order of `model.reshards`. Gathered and exchanged operands of
    heavy ops have kind `gathered`, partial results of heavy ops before their sum `temporaries`. Both are extended where
    the compiler combines collectives.
    """
    gathers: dict[_Group, list[_Buffered]] = defaultdict(list)
    sums: dict[_Group, list[_Buffered]] = defaultdict(list)
    users = _users(model)
    for number, reshard in enumerate(model.reshards):
        kinds = {kind: axes for kind, axes, *_ in steps[number]}
        kind = next((kind for kind in ("all-gather", "all-to-all") if kind in kinds), None)
        if kind is not None and (held := _gathered(model, reshard, choices, users)) is not None:
            # Exchanges are not combined, so each is a group of its own.
            gathers[kind, kinds[kind], reshard.block if kind == "all-gather" else -2 - number].append(held)
        kind = next((kind for kind in ("reduce-scatter", "all-reduce") if kind in kinds), None)
        if kind is not None and model.nodes[reshard.source].kind == "op":
            sums[kind, kinds[kind], reshard.block].append(_unsummed(model, reshard, choices))
    return [
        (held.start, held.stop, held.size, kind, held.tensor)
        for kind, groups in (("gathered", gathers), ("temporaries", sums))
        for held in _joined(groups, first=groups is gathers)
    ]


def _users(model: Model) -> dict[tuple[int, int, int], list[int]]:
    """Return the heavy ops that consume a tensor, by use (`Op.use`)."""
    consumers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for edge in model.structure.edges:
        if edge.op >= 0 and edge.operand >= 0 and model.graph.ops[edge.op].op_class is OpClass.HEAVY:
            consumers[model.graph.ops[edge.op].use(edge.operand)].append(edge.op)
    return consumers


def _gathered(
    model: Model, reshard: Reshard, choices: NDArray[np.int64], users: Mapping[tuple[int, int, int], list[int]]
) -> _Buffered | None:
    """Return the buffer of a gathered or exchanged operand of a heavy op, or of a copy for several ops.

    It lasts from the first to the last user, or for the whole outermost loop that does not change the tensor. None if
    the target is a cluster, or a copy node that has a memory term of its own.
    """
    node, graph = model.nodes[reshard.target], model.graph
    if node.kind == "cluster" or node.memory and node.kind == "copy":
        return None
    block = graph.ops[reshard.op].loop
    first = graph.ops[reshard.op]
    shared = node.kind == "copy"
    consumers = users[first.use(first.operands.index(reshard.tensor))] if shared else [reshard.op]
    start, stop = min(consumers), max(consumers) + 1
    home, loop = graph.tensors[reshard.tensor].loop, block
    while loop not in (home, -1):  # gathered once, before the loops that do not change the tensor
        start, stop = graph.loops[loop].start, graph.loops[loop].stop
        loop = graph.loops[loop].parent
    column = int(reshard.columns[int(choices[reshard.target])])
    size = _bytes(model, reshard, reshard.path.target[[column]])
    return _Buffered(start, stop, size, reshard.tensor, size)


def _unsummed(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> _Buffered:
    """Return the buffer of a heavy op's partial result before its sum, live at the op alone."""
    column = int(reshard.columns[int(choices[reshard.target])])
    size, result = unsummed_bytes(model, reshard, choices), _bytes(model, reshard, reshard.path.target[[column]])
    return _Buffered(reshard.op, reshard.op + 1, size, reshard.tensor, result)


def unsummed_bytes(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> int:
    """Return the bytes of a reshard's tensor on one device before a sum."""
    row = int(reshard.rows[int(choices[reshard.source])])
    return _bytes(model, reshard, reshard.path.source[[row]])


def _bytes(model: Model, reshard: Reshard, state: NDArray[np.int64]) -> int:
    """Return the bytes of a tensor on one device in one state of the reshard's factors, [1, axes]; fractions are
    rounded.
    """
    elements = local_elements(state, reshard.path.factors, model.axis_sizes)
    return round(float(elements[0]) * (reshard.path.itemsize // reshard.combined))


def _joined(groups: Mapping[_Group, list[_Buffered]], first: bool) -> Iterator[_Buffered]:
    """Yield the buffers after collectives are combined.

    Collectives of one group are combined in order of their starts, as long as their results together have at most
    `JOINED` bytes. With `first`, all buffers of a combined collective are live from its first start, else up to its
    last stop.
    """
    for members in groups.values():
        together: list[_Buffered] = []
        for held in (*sorted(members, key=lambda each: each.start), None):
            if together and (held is None or sum(each.result for each in together) + held.result > JOINED):
                start, stop = min(each.start for each in together), max(each.stop for each in together)
                for each in together:
                    ends = {"start": start} if first else {"stop": stop}
                    yield dataclasses.replace(each, **ends)
                together = []
            if held is not None:
                together.append(held)


NEGLIGIBLE_SHARE = 1e-4
"""Share of all reserved memory below which a buffer keeps its own place, since it changes no peak."""


class LiveBuffer(NamedTuple):
    """Bytes that are live on every device during [start, stop), in op ids."""

    start: int
    stop: int
    size: int
    kind: str
    """Kind of memory: `parameters`, `optimizer_state`, `batch`, `gradients`, `activations`, `gathered` or
    `temporaries`.
    """
    tensor: int
    """Tensor whose bytes these are, or that the buffer is used to compute; -1 if unknown."""


def gathered_copies(model: Model, choices: NDArray[np.int64], steps: Mapping[int, _Steps]) -> Iterator[LiveBuffer]:
    """Yield the gathered tensors that several heavy ops share, of copy nodes without a memory term of their own.

    `steps` has the collectives of the reshards to such nodes, by number. Evidence: docs/compiler_behaviour.md,
    "Gathered weights of unrolled layers".
    """
    users = _users(model)
    for number, collectives in steps.items():
        if any(kind == "all-gather" for kind, *_ in collectives):
            held = _gathered(model, model.reshards[number], choices, users)
            if held is not None:
                yield LiveBuffer(held.start, held.stop, held.size, "gathered", held.tensor)


def softmax_operands(
    model: Model, choices: NDArray[np.int64], local_of: Callable[[int], Sequence[int]]
) -> Iterator[LiveBuffer]:
    """Yield the arrays that a kernel for a whole softmax reads besides scores of grouped heads, on some chips.

    These are the mask and every constant, each as large as the scores. Evidence: docs/compiler_behaviour.md, "Softmax
    between matmuls".

    - `local_of`: dims of a tensor's shard.
    """
    graph, clusters = model.graph, model.structure.cluster_of
    if model.mesh.topology.chip.name not in READS_CONSTANTS:
        return
    for softmax in model.liveness.softmaxes:
        local, scores = local_of(softmax.scores), graph.tensors[softmax.scores]
        row = math.prod(local[dim] for dim in softmax.rows)
        split = any(local[dim] != scores.shape[dim] for dim in softmax.rows)
        if softmax.narrow or split or 1 in local or len(local) < GROUPED or row <= SOFTMAX_ROW:
            continue
        for op in graph.ops:
            if op.kind != "exponential" or clusters[op.results[0]] != softmax.cluster:
                continue
            waiting, seen = list(op.operands), set[int]()
            while waiting:
                tensor = waiting.pop()
                maker = graph.maker(tensor)
                if tensor in seen or graph.tensors[tensor].elements != scores.elements:
                    continue
                seen.add(tensor)
                if tensor in graph.generated:
                    size = model.padding.shard_bytes(softmax.scores, local, graph.tensors[tensor].itemsize)
                    yield LiveBuffer(op.id, op.id + 1, size, "temporaries", -1)
                elif maker is not None and maker.op_class is OpClass.POINTWISE:
                    waiting += maker.operands


def copied_updates(model: Model, choices: NDArray[np.int64]) -> Iterator[LiveBuffer]:
    """Yield the copies of updates that a convolution wrote for a scatter, while both are there."""
    largest = LARGEST_SLICE * SCOPED.get(model.mesh.topology.chip.name, RESERVED) // RESERVED
    for number, node in model.op_node.items():
        op, state = model.graph.ops[number], model.nodes[node].states[[int(choices[node])]]
        copied = turned_updates(model.graph, op, state, model.axis_sizes, largest)
        if copied[0]:
            yield LiveBuffer(number - 1, number, int(np.rint(copied[0])), "temporaries", op.operands[2])


def reserve(
    graph: OpGraph, buffers: Sequence[LiveBuffer], results: Collection[int], apart: bool = False
) -> list[LiveBuffer]:
    """Return a program's buffers with its `results` (tensors) allocated from the start of the step.

    With `apart`, nothing else lies in the memory of a result. Evidence: docs/compiler_behaviour.md, "Results that
    replace no argument".

    Otherwise a buffer may be placed in the memory of a result that is not yet written. It then counts its own bytes,
    and the result counts the rest of its bytes for that time. An elementwise op may write its result over an operand of
    the same size.

    The largest buffers are placed first, each in the smallest result that has room. Buffers that live before or after
    the step, or are negligible, keep their own places. Buffers without bytes or time are dropped.
    """
    end = len(graph.ops)
    homes = sorted(
        (each for each in buffers if each.tensor in results and each.stop > end and each.start > 0 and each.size),
        key=lambda each: (each.size, each.start),
    )
    if apart:
        known = set(homes)
        others = [each for each in buffers if each not in known and each.size and each.start < each.stop]
        return [*others, *(home._replace(start=0) for home in homes)]
    places = [(home.size, home.start) for home in homes]
    least = NEGLIGIBLE_SHARE * sum(home.size for home in homes)
    tenants: list[list[LiveBuffer]] = [[] for _ in homes]
    placed: list[LiveBuffer] = []
    for each in sorted(buffers, key=lambda each: (-each.size, each.start, each.stop)):
        # Best fit: the smallest result that has room for the buffer, largest buffers first.
        number = len(homes)
        if 0 < each.start < each.stop <= end and each.size > least:
            number = bisect.bisect_left(places, (each.size, each.stop - 1))
        while number < len(homes):
            home = homes[number]
            if home.start < each.stop - 1:
                number = bisect.bisect_left(places, (home.size, each.stop - 1), number)
                continue
            over = each.size == home.size and graph.ops[home.start].op_class is OpClass.POINTWISE
            stop = min(each.stop, home.start)
            fits = each.stop <= home.start + over and each.start < stop
            if fits and all(each.stop <= other.start or other.stop <= each.start for other in tenants[number]):
                each = each._replace(stop=stop)
                tenants[number].append(each)
                break
            number += 1
        placed.append(each)
    for home, inside in zip(homes, tenants, strict=True):
        at = 0
        for tenant in sorted(inside):
            placed.append(home._replace(start=at, stop=tenant.start))
            placed.append(home._replace(start=tenant.start, stop=tenant.stop, size=home.size - tenant.size))
            at = tenant.stop
        placed.append(home._replace(start=at, stop=home.start))
    return [each for each in placed if each.size and each.start < each.stop]


def fixed_bytes(graph: OpGraph, structure: Structure, liveness: Liveness, topology: Topology) -> int:
    """Return the bytes that no choice changes: buffers without a cluster, and tables of addresses where memory has
    tiles.
    """
    fixed = sum(graph.tensors[t].bytes for t, _, _ in liveness.buffers if structure.cluster_of[t] < 0)
    if not topology.traits.tiled:
        return fixed
    wide = (f for f in liveness.fusions if any(graph.tensors[t].elements > 1 for t in f.writes))
    kernels = {fusion.kernel for fusion in wide}
    return fixed + ADDRESSES * len(kernels.union(structure.heavy))
