"""Liveness of a program: its fusions, and the buffers and traffic of every value that reaches memory."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from autoshard.graph.memory.buffer_dtypes import stored_buffers, widened_tables
from autoshard.graph.memory.epilogue_fusion import fuse_epilogues, fuse_gpu_epilogues, fuse_siblings
from autoshard.graph.memory.fusion_analysis import Fusion, FusionAnalysis, FusionRules, begin_analysis
from autoshard.graph.memory.host_transfers import copied_stacks, hosted, in_transit
from autoshard.graph.memory.lifetimes import buffers_of, early_ends
from autoshard.graph.memory.materialization import fused_operand_ratios, store_values
from autoshard.graph.memory.row_layouts import relaid_values
from autoshard.graph.memory.softmax import Softmax
from autoshard.graph.memory.stack_layouts import (
    ExtraTraffic,
    RelaidStack,
    copied_slices,
    relaid_stacks,
    selected_slices,
    tile_row_copies,
    transposed_stack_copies,
)
from autoshard.graph.records import Op, OpClass, OpGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """Fusions of a program, and the live range of each value that reaches memory."""

    fusions: tuple[Fusion, ...]
    """Kernels in program order."""
    materialised: frozenset[int]
    """Tensors that reach memory."""
    buffers: tuple[tuple[int, int, int], ...]
    """Live ranges (tensor, start, stop) in op ids, half open, sorted.

    A loop's carried value has one buffer, named by the tensor inside the body.
    """
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
    relaid_rows: tuple[tuple[int, int, int], ...] = ()
    """Live ranges of the values that exist only where their outermost dim is long (see `relaid_values`)."""
    fused_operand_ratios: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Maps an operand that kernels compute themselves to the ratio of bytes read for it to its own bytes."""

    early_ends: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Maps values that some chips' compilers write over as a matmul runs to this matmul (see `early_ends`)."""
    fetches: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Maps rows that a gather does not store to the number of kernels that fetch them; no fusion reads them."""

    def itemsize(self, graph: OpGraph, buffer: tuple[int, int, int]) -> int:
        """Return the bytes of one element of a buffer (a triple of `buffers`) in its stored dtype."""
        record = graph.tensors[buffer[0]]
        return self.widths.get(buffer) or record.itemsize


def analyse(
    graph: OpGraph,
    kept: Collection[int] = (),
    updates: Mapping[int, int] | None = None,
    rules: FusionRules | None = None,
    softmaxes: tuple[Softmax, ...] = (),
) -> Liveness:
    """Return the fusions, and the lifetime of every value that reaches memory.

    - `kept`: arguments that are not donated, live throughout.
    - `updates`: for donated state, maps each argument tensor to the result tensor that overwrites it; None for no
      state.
    - `rules`: rules of the compiler; None for those of CPUs.
    - `softmaxes`: the result of `find_softmaxes`. Their tensors get no buffers here, and they become
      `Liveness.softmaxes`.
    """
    rules = rules or FusionRules()
    scores = frozenset[int]().union(*(softmax.tensors for softmax in softmaxes))
    analysis = store_values(graph, begin_analysis(graph, kept, updates or {}, rules, scores))
    if rules.fused_matmuls:
        analysis = fuse_epilogues(graph, analysis)
    elif rules.gpu_kernels:
        analysis = fuse_gpu_epilogues(graph, analysis)
    away = hosted(graph)
    buffers, copied, reserved = buffers_of(graph, analysis)
    ends = early_ends(graph, analysis, buffers) if rules.fused_matmuls else {}
    buffers = (*buffers, *in_transit(graph, analysis.reach, away), *copied_stacks(graph, away))
    buffers = tuple(buffer for buffer in buffers if buffer[0] not in away | scores)
    if rules.fused_matmuls:
        buffers += tuple(
            (t, graph.tensors[t].producer, graph.needed_until(t, last) + 1)
            for t, last in selected_slices(graph, analysis.loop_inputs).items()
        )
    overwritten = analysis.updates if rules.fused_matmuls else ()
    more, widths = stored_buffers(graph, buffers, analysis.wide, overwritten, rules.narrows_stacks)
    buffers += more
    traffic = [ExtraTraffic(tensor, loop, 2) for tensor, loop in copied]
    relaid: tuple[RelaidStack, ...] = ()
    if rules.gpu_kernels:
        slices = tuple(copied_slices(graph, analysis.consumers))
        relaid = tuple(relaid_stacks(graph, analysis.consumers))
        buffers += (*slices, *((stack.source, stack.loop.start, stack.loop.stop) for stack in relaid))
        traffic += (ExtraTraffic(tensor, graph.tensors[tensor].loop, 2) for tensor, _, _ in slices)
        traffic += _gpu_traffic(graph, analysis, relaid)
    if rules.fused_matmuls:
        traffic += (*transposed_stack_copies(graph), *tile_row_copies(graph))
        wide = tuple(widened_tables(graph, analysis.materialised))
        buffers += wide
        traffic += (ExtraTraffic(tensor, graph.tensors[tensor].loop, 1) for tensor, _, _ in wide)
    fetches = _fetches(graph, analysis)
    fusions = [dataclasses.replace(f, reads=tuple(t for t in f.reads if t not in fetches)) for f in analysis.fusions]
    return Liveness(
        tuple(_kernels(graph, fusions, rules)),
        analysis.materialised,
        tuple(sorted(buffers)),
        widths,
        reserved,
        away,
        softmaxes,
        tuple(traffic),
        analysis.stores,
        relaid,
        tuple(sorted({*relaid_values(graph, analysis)})) if rules.fused_matmuls else (),
        fused_operand_ratios(graph, analysis, fetches),
        ends,
        fetches,
    )


def _fetches(graph: OpGraph, analysis: FusionAnalysis) -> dict[int, int]:
    """Return `Liveness.fetches`."""
    rows = {graph.ops[gather].results[0] for gather in analysis.fused_gathers} - analysis.materialised
    reads = [tensor for fusion in analysis.fusions for tensor in fusion.reads]
    return {tensor: reads.count(tensor) for tensor in sorted(rows)}


def _gpu_traffic(graph: OpGraph, analysis: FusionAnalysis, relaid: Collection[RelaidStack]) -> Iterator[ExtraTraffic]:
    """Yield the copies of stacks into other layouts and back, and the writes of constants that start a loop."""
    for stack in relaid:
        yield from (ExtraTraffic(t, stack.loop.parent, 2) for t in (stack.source, stack.result) if t >= 0)
    for loop in graph.loops:
        for carry in () if loop.branches else loop.carries:
            stored = carry.init in graph.generated and carry.body in analysis.materialised
            if stored and graph.tensors[carry.body].shape:
                yield ExtraTraffic(carry.body, loop.parent, 1)


def _kernels(graph: OpGraph, fusions: Sequence[Fusion], rules: FusionRules) -> Sequence[Fusion]:
    """Return the fusions after siblings share kernels: all on TPUs, on GPUs those that write results of the step.

    XLA's GPU compiler computes an AdamW update of a parameter and its two moments in one kernel (embedding tables on
    eight H100s). It leaves the elementwise ops of a recurrence in kernels of their own.
    """
    if rules.fused_matmuls:
        return fuse_siblings(graph, fusions)
    return fuse_siblings(graph, fusions, frozenset(graph.results)) if rules.gpu_kernels else fusions


def defer_weight_gradients(graph: OpGraph, liveness: Liveness) -> Liveness:
    """Return the liveness with the weight gradients that some compilers schedule after the backward loop.

    The matmuls are those outside of loops whose result is first needed after a later loop. Their inputs stay live until
    the last outermost loop before that use is done. Fusions do not change. Evidence: docs/compiler_behaviour.md,
    "Deferred weight gradients".
    """
    outer_loops = [loop for loop in graph.loops if loop.parent < 0]
    needed = _needed(graph)
    homes = {carry.result: carry.body for loop in outer_loops for carry in loop.carries}
    """Tensors inside of loops that name the buffers of what outermost loops compute."""
    late: dict[int, int] = {}
    for fusion in liveness.fusions:
        op = graph.ops[fusion.root]
        if op.kind != "dot_general" or op.loop >= 0:
            continue
        use = needed[op.results[0]]
        after = max((loop.stop for loop in outer_loops if op.id < loop.start and loop.stop <= use), default=0)
        for tensor in fusion.reads if after else ():
            home = homes.get(tensor, tensor)
            late[home] = max(late.get(home, 0), after)
    return _extended(liveness, late)


def _extended(liveness: Liveness, until: Mapping[int, int]) -> Liveness:
    """Return the liveness with the buffers of the tensors of `until` live until these ops at least."""
    widths = dict(liveness.widths)
    buffers = []
    for buffer in liveness.buffers:
        tensor, start, stop = buffer
        longer = (tensor, start, max(stop, until.get(tensor, 0)))
        if buffer != longer and buffer in widths:
            widths[longer] = widths.pop(buffer)
        buffers.append(longer)
    return dataclasses.replace(liveness, buffers=tuple(sorted(buffers)), widths=widths)


_HIDES_SUM = 5
"""Convolutions that XLA's GPU scheduler runs during one collective: its latency of 5,000 over 1,000 for a call.

Source: `kHighLatency` and `kMediumCost` in `xla/service/gpu/gpu_latency_hiding_scheduler.cc`.
"""


def defer_filter_gradients(graph: OpGraph, liveness: Liveness) -> Liveness:
    """Return the liveness with the gradients of filters where the GPU scheduler uses them to hide sums over devices.

    Gradients through a batch normalisation need sums over the batch, which devices add up while other work runs. The
    scheduler goes from the last op back, and the gradients of filters are free to move, as only updates need them.
    The last sums get `_HIDES_SUM` of them each, and operands stay live until then. In steps of
    three and six convolutions on h100 all but the first layer's ran last.
    """
    reads = {fusion.root: fusion.reads for fusion in liveness.fusions}
    last = _last_convolutions(graph)
    free = [op.id for op in graph.ops if op.kind == "convolution" and op.loop < 0 and not last.get(op.results[0])]
    sums = [op.id for op in graph.ops if op.id in reads and _sums_batch(graph, op) and last.get(op.results[0])]
    live: dict[int, int] = {}
    for number, convolution in enumerate(reversed(free)):
        place = number // _HIDES_SUM
        if place < len(sums) and sums[-1 - place] > convolution:
            live |= dict.fromkeys(reads[convolution], sums[-1 - place] + 1)
    return _extended(liveness, live)


def _last_convolutions(graph: OpGraph) -> dict[int, int]:
    """Map each value that a convolution needs, directly or through other ops, to the last such convolution."""
    last: dict[int, int] = {}
    for op in reversed(graph.ops):
        after = max((last.get(t, 0) for t in op.results), default=0)
        if op.kind == "convolution":
            after = max(after, op.id)
        for tensor in op.operands if after else ():
            last[tensor] = max(last.get(tensor, 0), after)
    return last


def _sums_batch(graph: OpGraph, op: Op) -> bool:
    """Return True for a sum outside of loops over the first dim of its operand, the batch, and others."""
    if op.kind != "reduce" or op.rule is None or op.loop >= 0 or graph.tensors[op.operands[0]].shape[0] == 1:
        return False
    first, *others = op.rule.operands[0]
    left = {factor for dim in op.rule.results[0] for factor in dim}
    return left.isdisjoint(first) and any(left.isdisjoint(dim) for dim in others)


def _needed(graph: OpGraph) -> dict[int, int]:
    """Map each tensor to the id of the first op that needs it; to the number of ops if none does.

    Elementwise ops and views outside of loops do not count, since compilers defer them too; their own first need does.
    An initial value is needed where its loop starts.
    """
    needed = dict.fromkeys(range(len(graph.tensors)), len(graph.ops))
    for loop in graph.loops:
        for carry in loop.carries:
            needed[carry.init] = min(needed[carry.init], loop.start)
    for op in reversed(graph.ops):
        waits = op.op_class in (OpClass.POINTWISE, OpClass.VIEW) and op.loop < 0
        first = min((needed[t] for t in op.results), default=op.id) if waits else op.id
        for tensor in op.operands:
            needed[tensor] = min(needed[tensor], first)
    return needed
