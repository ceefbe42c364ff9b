"""Fusion and liveness: which values reach memory, which are recomputed inside fusions, and each value's lifetime.

Heavy ops write their results and read their operands. Pointwise values stay inside the fusion of their consumer. They
are stored if recomputing them for several consumers would read more bytes than storing them.

On TPUs, matmuls without batch dims also fuse the pointwise ops that lead to their operands (`StoreDecision`). The
stored form of attention scores there depends on the spec (`Softmax`).

Evidence: docs/compiler_behaviour.md, "Elementwise ops inside matmul kernels".
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autoshard.graph.extraction.opaque_rules import IN, OUT
from autoshard.graph.memory.buffer_dtypes import stored_buffers, widened_values
from autoshard.graph.memory.epilogue_fusion import fuse_epilogues, fuse_gpu_epilogues, latest_makers, post_dominators
from autoshard.graph.memory.host_transfers import copied_stacks, hosted, in_transit
from autoshard.graph.memory.lifetimes import buffers_of, outlast
from autoshard.graph.memory.loop_buffers import matmuls_of_stages, selected_slices, sliced_loop_inputs
from autoshard.graph.memory.materialization import (
    CHEAP_INTO_MATMUL,
    StoreDecision,
    ends_fusion,
    fuse_siblings,
    fused_operand_ratios,
)
from autoshard.graph.memory.softmax import Softmax
from autoshard.graph.memory.stack_layouts import (
    ExtraTraffic,
    RelaidStack,
    copied_slices,
    relaid_stacks,
    tile_row_copies,
    transposed_stack_copies,
)
from autoshard.graph.records import Fusion, Op, OpClass, OpGraph, is_batched


_PASSING = frozenset({"sharding_constraint", IN, OUT})
"""Ops that define how a value is split, and that move no data themselves."""
_FUSED_MOVES = frozenset({"slice", "concatenate", "pad", "reverse"})
TILED = 2
"""Number of minor dims of a tensor that are laid out in register tiles."""
_MANY = 8
"""Largest number of fusion ends that are tracked for one value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """Live range of each value that reaches memory, in op ids, half open."""

    fusions: tuple[Fusion, ...]
    materialised: frozenset[int]
    buffers: tuple[tuple[int, int, int], ...]
    """Live ranges (tensor, start, stop); a loop's carried value has one buffer, named by the tensor inside the body."""
    widths: Mapping[tuple[int, int, int], int] = dataclasses.field(default_factory=dict)
    """Bytes per element of the buffers that store their tensor in another dtype (see `stored_buffers`)."""
    reserved: frozenset[int] = frozenset()
    """Tensors of results whose memory is allocated before the program starts, although `buffers` begin later."""
    hosted: frozenset[int] = frozenset()
    """Tensors in the host's memory; `buffers` contains none of them."""
    softmaxes: tuple[Softmax, ...] = ()
    """Softmaxes whose buffers and traffic depend on the spec; `buffers` contains none of their tensors."""
    extra_traffic: tuple[ExtraTraffic, ...] = ()
    """Transfers of whole tensors outside all fusions.

    These are copies of initial values that a loop must not overwrite, copies of results into donated arguments, and
    copies of stacks into another layout.
    """
    stores: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Maps the result of a matmul or convolution to the value that its kernel stores instead."""
    relaid: tuple[RelaidStack, ...] = ()
    """Stacks that loops store in another layout."""
    fused_operand_ratios: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Maps an operand that matmul kernels compute themselves to the ratio of bytes read for it to its own bytes."""

    def itemsize(self, graph: OpGraph, buffer: tuple[int, int, int]) -> int:
        """Return the bytes of one element of a buffer."""
        record = graph.tensors[buffer[0]]
        return self.widths.get(buffer) or record.itemsize


def analyse(
    graph: OpGraph,
    kept: Collection[int] = (),
    updates: Mapping[int, int] | None = None,
    fused_matmuls: bool = False,
    softmaxes: tuple[Softmax, ...] = (),
    narrows_stacks: bool = True,
    gpu_kernels: bool = False,
) -> Liveness:
    """Return the fusions, and the lifetime of every value that reaches memory.

    - `kept`: arguments that are not donated, live throughout.
    - `updates`: for donated state, maps each argument tensor to the result tensor that overwrites it.
    - `fused_matmuls`: True if a matmul's kernel computes the pointwise values that it reads, as TPU compilers do.
    - `softmaxes`: the result of `find_softmaxes`; passed on to the liveness.
    - `narrows_stacks`: True if a stack whose slices a loop narrows is converted before the loop, with both copies live.
    - `gpu_kernels`: True for the rules of XLA's GPU compiler, as listed below.

    With `gpu_kernels` a value that several kernels read is stored only if that moves fewer bytes. Matmuls fuse their
    epilogues (`fuse_gpu_epilogues`). Elementwise kernels overwrite operands that they read last. Constants that start a
    loop are written before it. `copied_slices` and `relaid_stacks` add copies.
    """
    free = {t for op in graph.ops if op.op_class is OpClass.FREE for t in op.results}
    consumers: list[list[int]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        for tensor in set(op.operands):
            consumers[tensor].append(op.id)
    wide = widened_values(graph)
    sizes = [t.elements * wide[t.id] if t.id in wide else t.bytes for t in graph.tensors]
    apart = sliced_loop_inputs(graph)
    pinned = {*graph.results, *apart}
    inner = _plain_matmuls(graph) if fused_matmuls else frozenset()
    for loop in graph.loops:
        for carry in loop.carries:
            pinned.update((carry.init, carry.update))
    passing = {op.id for op in graph.ops if op.kind in _PASSING and not _takes_stored(graph, op)}
    for op_id in sorted(passing, reverse=True):
        source, result = graph.ops[op_id].operands[0], graph.ops[op_id].results[0]
        consumers[source].extend(consumers[result])
        if result in pinned:
            pinned.add(source)
    for op in reversed(graph.ops):
        if _widens(graph, op):  # readers of the wide value may read the narrow one instead
            consumers[op.operands[0]].extend(consumers[op.results[0]])
    kernels = {op.id for op in graph.ops if _is_kernel(graph, op, fused_matmuls)} | _copied_into_stacks(graph) - passing
    ends = _ends_of(graph, consumers, pinned, kernels)
    meets = (
        post_dominators(graph, consumers, {op.id for op in graph.ops if ends_fusion(op, pinned, kernels)})
        if fused_matmuls
        else {}
    )
    deciding = StoreDecision(
        graph, consumers, pinned, sizes, kernels, inner, fused_matmuls, latest_makers(graph), gpu_kernels
    )
    reach: dict[int, frozenset[int]] = {}
    bases: dict[int, frozenset[int]] = {}
    materialised: set[int] = set()
    for tensor in graph.tensors:
        if tensor.producer < 0:
            materialised.add(tensor.id)
            reach[tensor.id] = frozenset((tensor.id,))
    fusions = []
    overwritten: list[tuple[int, int]] = []
    for op in graph.ops:
        if op.op_class is OpClass.FREE:
            for tensor in op.results:
                reach[tensor] = frozenset()
            continue
        if op.kind == "dynamic_slice" and op.op_class is OpClass.LAYER:
            whole = reach.get(op.operands[0], frozenset())
            bases[op.results[0]] = frozenset().union(*(bases.get(t, (t,)) for t in whole))  # a slice of a slice
            reach[op.results[0]] = frozenset(op.results)
            continue
        if op.id in passing:
            reach[op.results[0]] = reach.get(op.operands[0], frozenset())
            continue
        in_place = op.kind == "dynamic_update_slice" and _is_overwritten(
            graph, op, materialised, consumers, kept, updates or {}
        )
        if in_place:
            overwritten.append((op.operands[0], op.results[0]))
        sources = op.operands[1:2] if in_place else op.operands
        reads = frozenset().union(*(reach.get(t, frozenset()) for t in sources))
        writes = []
        for tensor in op.results:
            if tensor not in meets and deciding.is_stored(op, tensor, ends[tensor], reads):
                materialised.add(tensor)
                reach[tensor] = frozenset((tensor,))
                writes.append(tensor)
            elif op.kind == "slice" and reads == frozenset(op.operands):
                bases[tensor] = frozenset().union(*(bases.get(t, (t,)) for t in reads))
                reach[tensor] = frozenset((tensor,))
            else:
                reach[tensor] = reads
        if writes:
            moved = op.operands[1:2] if in_place else tuple(writes)
            fusions.append(Fusion(op.id, tuple(writes), tuple(sorted(reads)), moved))
    stores: Mapping[int, int] = {}
    if fused_matmuls or gpu_kernels:
        done = (
            fuse_epilogues(graph, fusions, inner, pinned, bases)
            if fused_matmuls
            else fuse_gpu_epilogues(graph, fusions, consumers, pinned)
        )
        fusions, stores = done.fusions, done.stores
        materialised -= stores.keys()
    away = hosted(graph)
    buffers, copied, reserved = buffers_of(
        graph, fusions, materialised, free, reach, bases, kept, updates or {}, overwritten, stores, gpu_kernels
    )
    away_or_apart = away.union(*(softmax.tensors for softmax in softmaxes))
    buffers = (*buffers, *in_transit(graph, reach, away), *copied_stacks(graph, away))
    buffers = tuple(buffer for buffer in buffers if buffer[0] not in away_or_apart)
    if fused_matmuls:
        buffers += tuple(
            (t, graph.tensors[t].producer, outlast(graph, t, last) + 1)
            for t, last in selected_slices(graph, apart).items()
        )
    more, widths = stored_buffers(graph, buffers, wide, (updates or {}) if fused_matmuls else (), narrows_stacks)
    buffers = tuple(sorted((*buffers, *more)))
    passes = [ExtraTraffic(tensor, loop, 2) for tensor, loop in copied]
    relaid: tuple[RelaidStack, ...] = ()
    if gpu_kernels:
        slices = tuple(copied_slices(graph, consumers))
        buffers = tuple(sorted((*buffers, *slices)))
        passes += (ExtraTraffic(tensor, graph.tensors[tensor].loop, 2) for tensor, _, _ in slices)
        relaid = tuple(relaid_stacks(graph, consumers))
        for stack in relaid:
            buffers = tuple(sorted((*buffers, (stack.source, stack.loop.start, stack.loop.stop))))
            passes += (ExtraTraffic(t, stack.loop.parent, 2) for t in (stack.source, stack.result) if t >= 0)
        passes += (
            ExtraTraffic(carry.body, loop.parent, 1)
            for loop in graph.loops
            for carry in loop.carries
            if carry.init in free
            and not loop.branches
            and carry.body in materialised
            and graph.tensors[carry.body].shape
        )
    if fused_matmuls:
        passes += (*transposed_stack_copies(graph), *tile_row_copies(graph))
    if fused_matmuls:
        fusions = fuse_siblings(graph, fusions)
    computed = fused_operand_ratios(graph, inner, reach, sizes)
    return Liveness(
        tuple(fusions),
        frozenset(materialised),
        buffers,
        widths,
        reserved,
        away,
        softmaxes,
        tuple(passes),
        stores,
        relaid,
        computed,
    )


def _is_overwritten(
    graph: OpGraph,
    op: Op,
    materialised: set[int],
    consumers: Sequence[list[int]],
    kept: Collection[int],
    updates: Mapping[int, int],
) -> bool:
    """Return True if an update is written in place: its operand belongs to the same loop and has no later use.

    A layer sliced from a stack, or a value inside a fusion, is not overwritten: the updated value is written to new
    memory.
    """
    value = op.operands[0]
    if value not in materialised or graph.tensors[value].loop != op.loop or value in graph.results:
        return False
    if any(user > op.id for user in consumers[value]):
        return False
    return value not in graph.arguments or (value in updates and value not in kept)


def _widens(graph: OpGraph, op: Op) -> bool:
    """Return True for a convert to a wider dtype in the block in which its operand is computed."""
    if op.kind != "convert" or op.op_class is not OpClass.POINTWISE:
        return False
    source, result = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
    return source.loop == op.loop and source.bytes < result.bytes


def _takes_stored(graph: OpGraph, op: Op) -> bool:
    """Return True for a constraint on an argument or on a slice of a stack.

    Its gathered result needs memory in addition to the stored value.
    """
    if op.kind != "sharding_constraint":
        return False
    tensor = op.operands[0]
    while graph.tensors[tensor].producer >= 0:
        made = graph.ops[graph.tensors[tensor].producer]
        if made.op_class is OpClass.LAYER:
            return True
        if made.kind not in CHEAP_INTO_MATMUL:
            return False
        tensor = made.operands[0]
    return tensor in graph.arguments


def _copied_into_stacks(graph: OpGraph) -> set[int]:
    """Return the constraints whose results a loop writes into a stack; these are collectives' results, which are
    copied.
    """
    constraints = set()
    for op in graph.ops:
        if op.kind != "dynamic_update_slice":
            continue
        tensor = op.operands[1]
        while (producer := graph.tensors[tensor].producer) >= 0:
            maker = graph.ops[producer]
            if maker.kind == "sharding_constraint":
                constraints.add(maker.id)
            if len(maker.operands) != 1 or maker.op_class is OpClass.HEAVY:
                break
            tensor = maker.operands[0]
    return constraints


def _is_kernel(graph: OpGraph, op: Op, tiled: bool) -> bool:
    """Return True for an op that compilers emit as a separate kernel.

    With `tiled` layouts, as on TPUs, such ops include pads with places between elements, and slices that step through a
    tiled dim.
    """
    if op.op_class is not OpClass.HEAVY or op.kind not in _FUSED_MOVES:
        return op.op_class is OpClass.HEAVY
    rank = len(graph.tensors[op.results[0]].shape)
    return tiled and any(op.kind == "pad" or dim >= rank - TILED for dim in op.strided)


def _ends_of(
    graph: OpGraph, consumers: Sequence[list[int]], pinned: set[int], kernels: Collection[int]
) -> list[frozenset[int] | None]:
    """Return for every tensor the fusion-ending ops that its consumers lead to; None for more than `_MANY`."""
    ends_by_tensor: list[frozenset[int] | None] = [frozenset()] * len(graph.tensors)
    for op in reversed(graph.ops):
        for tensor in op.results:
            ends: frozenset[int] | None = frozenset()
            for user in consumers[tensor]:
                other = graph.ops[user]
                apart = other.loop != op.loop or ends_fusion(other, pinned, kernels)
                after = [frozenset((user,))] if apart else [ends_by_tensor[t] for t in other.results]
                ends = None if ends is None or None in after else ends.union(*(e for e in after if e is not None))
                if ends is None or len(ends) > _MANY:
                    ends = None
                    break
            ends_by_tensor[tensor] = ends
    return ends_by_tensor


def _plain_matmuls(graph: OpGraph) -> frozenset[int]:
    """Return convolutions, dots without batch dims, and matmuls of pipeline stages; `Softmax` covers attention."""
    matmuls = (op for op in graph.ops if op.kind in ("dot_general", "convolution") and op.rule is not None)
    return matmuls_of_stages(graph).union(op.id for op in matmuls if not is_batched(op))
