"""Fourth stage of the fusion analysis: lifetimes of stored values, and the values that share one buffer."""

from collections import Counter
from collections.abc import Mapping

from autoshard.graph.memory.fusion_analysis import Fusion, FusionAnalysis
from autoshard.graph.records import Op, OpClass, OpGraph, is_batched


Buffers = tuple[tuple[int, int, int], ...]
"""Live ranges (tensor, start, stop) in op ids, `stop` excluded."""


def buffers_of(graph: OpGraph, analysis: FusionAnalysis) -> tuple[Buffers, tuple[tuple[int, int], ...], frozenset[int]]:
    """Return the buffers of stored values, the (tensor, loop) pairs of copies, and `Liveness.reserved`.

    A pair is a whole tensor that is copied once in each execution of the block `loop` (-1 outside of loops). Values
    that share a buffer have one entry, under the name of their home. Arguments begin at 0; results and arguments that
    are not donated end after the last op.
    """
    updates, materialised, reach = analysis.updates, analysis.materialised, analysis.reach
    end = len(graph.ops)
    start = {t.id: (t.producer if t.producer >= 0 else 0) for t in graph.tensors}
    for source, tensor in analysis.stores.items():
        start[tensor] = graph.tensors[source].producer  # it is written while the matmul runs
    if analysis.rules.gpu_kernels:
        start |= _shared_fills(graph)
        start |= {tensor: min(start[tensor], first) for tensor, first in _early_fills(graph).items()}
    last = dict.fromkeys(materialised, -1)
    for fusion in analysis.fusions:
        for read in fusion.reads:
            for tensor in analysis.stored_sources(read):
                last[tensor] = max(last[tensor], graph.needed_until(tensor, fusion.root))
    if analysis.rules.gpu_kernels:
        _run_leaves_late(graph, analysis, last)
    for tensor in graph.results:
        for read in reach.get(tensor, ()):
            for source in analysis.stored_sources(read):
                last[source] = end
        if tensor in last:
            last[tensor] = end
    last |= dict.fromkeys(analysis.kept, end)
    _delay_updates(graph, analysis, start, last)
    inplace = analysis.rules.gpu_kernels or analysis.rules.fused_matmuls
    over = _written_over(graph, analysis, last) if inplace else frozenset()
    home, copied = _share_carried(graph, analysis, start, last)
    buffers, arguments = [], set(graph.arguments)
    for tensor in sorted(materialised):
        if home.get(tensor, tensor) != tensor:
            continue
        stop = last[tensor] + (tensor not in over) if last[tensor] < end else end + 1
        if tensor in arguments:
            written = updates.get(tensor, tensor)
            place = home.get(written, written)
            if written in materialised and place == written and last[tensor] == start[written]:
                stop = start[written]
            elif place != written and start[place] <= last[tensor] < end:
                # A loop computes the result while the argument is still read, so the result is copied into the argument
                # at the end.
                stop = end + 1
                copied.append((written, -1))
            buffers.append((tensor, 0, max(1, stop)))
        elif stop > start[tensor]:
            buffers.append((tensor, start[tensor], stop))
    # A result that overwrites no argument has memory of its own before the program starts.
    reserved = set(graph.results) - set(updates.values()) - arguments
    return tuple(buffers), tuple(copied), frozenset(home.get(tensor, tensor) for tensor in reserved)


def _run_leaves_late(graph: OpGraph, analysis: FusionAnalysis, last: dict[int, int]) -> None:
    """Extend in `last` the lives of operands of matmuls that the GPU compiler's scheduler puts off.

    Two matmuls outside of loops share an operand, as the gradients of a layer's input and weight do. The one whose
    result is needed later runs when it is needed, or after all kernels that read results of the others. On one device
    only matmuls that the compiler rewrites (`_is_rewritten`) have a late place in the order. Results of the others
    lead to further matmuls; the gradients of tables, which only updates need, do not come first. Kernels that read the
    gradient of a convolution's input count too, as the head's gradient of autoencoders on h100 shows.

    Evidence: docs/compiler_behaviour.md, "Storage by the GPU compiler".
    """
    end = len(graph.ops)
    needed: dict[int, int] = {}
    sharing: dict[int, list[Fusion]] = {}
    for fusion in analysis.fusions:
        op = graph.ops[fusion.root]
        for tensor in fusion.reads:
            needed.setdefault(tensor, fusion.root)
            if op.kind in ("dot_general", "convolution") and op.loop < 0:
                sharing.setdefault(tensor, []).append(fusion)
    leads = _leads_to_matmuls(graph)
    put_off: dict[int, tuple[Fusion, int]] = {}
    final = -1
    """Last op that reads a result for which another matmul was put off, or the gradient of a convolution's input."""
    for matmuls in sharing.values():
        ready = {each.root: min((needed.get(t, end) for t in each.writes), default=end) for each in matmuls}
        first = min(matmuls, key=lambda each: ready[each.root])
        read_until = max((last.get(t, -1) for t in first.writes if t in leads), default=-1)
        if graph.ops[first.root].kind == "convolution" and len(matmuls) > 1 and read_until < end:
            final = max(final, read_until)
        for late in matmuls:
            op, waits = graph.ops[late.root], late.root < read_until < ready[late.root]
            if waits and op.kind == "dot_general" and (not analysis.rules.alone or _is_rewritten(op)):
                put_off[late.root] = late, ready[late.root]
                final = max(final, read_until)
    for late, needed_at in put_off.values():
        for tensor in late.reads:
            for source in analysis.stored_sources(tensor):
                last[source] = max(last[source], min(final, needed_at))


def _is_rewritten(op: Op) -> bool:
    """Return True if the GPU compiler replaces a matmul: one with batch dims or several contracted dims."""
    if op.rule is None:
        return False
    left, right = ({factor for dim in dims for factor in dim} for dims in op.rule.operands[:2])
    contracted = (left & right) - {factor for dim in op.rule.results[0] for factor in dim}
    return is_batched(op) or len(contracted) > 1


def _leads_to_matmuls(graph: OpGraph) -> set[int]:
    """Return the tensors from which matmuls or convolutions are computed, directly or through other ops."""
    leads = set[int]()
    for op in reversed(graph.ops):
        if op.kind in ("dot_general", "convolution") or not leads.isdisjoint(op.results):
            leads.update(op.operands)
    return leads


def _is_flattened(graph: OpGraph, tensor: int) -> bool:
    """Return True for the result of a matmul with several dims of rows, whose kernel on GPUs has one instead."""
    op = graph.maker(tensor)
    if op is None or op.kind != "dot_general" or op.rule is None:
        return False
    left, right, out = ({factor for dim in dims for factor in dim} for dims in (*op.rule.operands, op.rule.results[0]))
    return len(left & out - right) > 1 or len(right & out - left) > 1


def _shared_fills(graph: OpGraph) -> dict[int, int]:
    """Map the result of the last of several scatters into one generated value to the first of them.

    XLA's GPU compiler makes the value, such as zeros, once for all scatters of one shape. Each but the last adds its
    rows to a copy, so that the value is live from the first to the last. Seen in segment sums of several layers.
    """
    first: dict[object, int] = {}
    last: dict[object, int] = {}
    for op in graph.ops:
        if op.kind == "scatter" and len(op.results) == 1 and op.operands[0] in graph.generated:
            record = graph.tensors[op.results[0]]
            key = (record.shape, record.dtype, op.loop)
            first.setdefault(key, op.id)
            last[key] = op.results[0]
    return {result: first[key] for key, result in last.items()}


def _early_fills(graph: OpGraph) -> dict[int, int]:
    """Map the results of scatters into generated values, in the backward pass, to the op from which they are live.

    XLA's GPU compiler writes the zeros of gradients of gathers before the backward pass begins, as nothing comes before
    them. The pass begins where a returned scalar, the loss, is computed, or after a loop. Seen in the resizes of two
    autoencoders on h100, whose largest zeros are written in the forward pass. Gradients of tables, which only updates
    need, were seen to get their zeros at the scatter.
    """
    losses = [graph.tensors[t].producer for t in graph.results if not graph.tensors[t].shape]
    begins = min((producer for producer in losses if producer >= 0), default=len(graph.ops))
    ends = [loop.stop for loop in graph.loops if loop.parent < 0]
    early, leads = {}, set[int]()
    for op in reversed(graph.ops):
        goes_on = not leads.isdisjoint(op.results)
        if goes_on or op.op_class is OpClass.HEAVY:
            leads.update(op.operands)
        filled = op.kind == "scatter" and op.loop < 0 and op.operands[0] in graph.generated
        if filled and goes_on and begins < op.id:
            first = max([begins, *(end for end in ends if end <= op.id)])
            early |= dict.fromkeys(op.results, first)
    return early


def _written_over(graph: OpGraph, analysis: FusionAnalysis, last: Mapping[int, int]) -> frozenset[int]:
    """Return the values that the elementwise kernel which reads them last overwrites with its result.

    Value and result must have one shape, dtype and block. A kernel overwrites one value at most, and no argument. A
    kernel that also sums its result, or reads sums of the value that it computes first, overwrites nothing. On GPUs the
    shapes differ if a matmul's rows have several dims (`_is_flattened`).
    """
    summands: dict[int, frozenset[int]] = {}
    """Maps each sum to the values that are read to compute it, directly or as sums."""
    for fusion in analysis.fusions:
        if graph.ops[fusion.root].kind == "reduce":
            read = frozenset(fusion.reads).union(*(summands.get(t, ()) for t in fusion.reads))
            summands |= dict.fromkeys(fusion.writes, read)
    summed = frozenset().union(*summands.values())
    overwritten = set()
    for fusion in analysis.fusions:
        if graph.ops[fusion.root].op_class is not OpClass.POINTWISE or len(fusion.writes) != 1:
            continue
        if fusion.writes[0] in summed:
            continue
        written = graph.tensors[fusion.writes[0]]
        for tensor in fusion.reads:
            read = graph.tensors[tensor]
            alike = read.shape == written.shape and read.dtype == written.dtype and read.loop == written.loop
            if analysis.rules.gpu_kernels and _is_flattened(graph, tensor):
                continue
            if any(tensor in summands.get(each, ()) for each in fusion.reads):
                continue
            if alike and read.producer >= 0 and tensor not in analysis.bases and last.get(tensor) == fusion.root:
                overwritten.add(tensor)
                break
    return frozenset(overwritten)


def early_ends(graph: OpGraph, analysis: FusionAnalysis, buffers: Buffers) -> dict[int, int]:
    """Map the values that a matmul's kernel may write over to the matmul.

    The kernel computes elementwise ops of its result, such as the gradient of an activation, and writes it over a value
    that these read last. The value must be the only one that another matmul's kernel wrote. Kernels of convolutions
    often write activations as well, and are left out. Evidence: docs/compiler_behaviour.md, "Matmuls that write over
    what they read".
    """
    ranges = {tensor: (start, stop) for tensor, start, stop in buffers}
    made = {t: start for t, (start, _) in ranges.items() if graph.tensors[t].producer >= 0}
    alone = Counter(made.values())
    sources = {stored: source for source, stored in analysis.stores.items()}
    roots: dict[int, set[int]] = {}
    for fusion in analysis.fusions:
        for tensor in fusion.reads:
            roots.setdefault(tensor, set()).add(fusion.root)
    found: dict[int, int] = {}
    for fusion in analysis.fusions:
        written = fusion.writes[0] if len(fusion.writes) == 1 else -1
        if written not in sources or written not in made:
            continue
        result, matmul = graph.tensors[written], graph.tensors[sources[written]].producer
        if graph.ops[matmul].kind != "dot_general":
            continue
        for tensor in fusion.reads:
            read = graph.tensors[tensor]
            alike = read.shape == result.shape and read.dtype == result.dtype and read.loop == result.loop
            source = graph.maker(sources.get(tensor, tensor))
            alike &= source is not None and source.kind == "dot_general"
            last = alike and tensor in made and ranges[tensor][1] == fusion.root
            if last and alone[made[tensor]] == 1 and max(roots[tensor] - {fusion.root}, default=-1) < matmul:
                found[tensor] = matmul
    return found


def _delay_updates(graph: OpGraph, analysis: FusionAnalysis, start: dict[int, int], last: dict[int, int]) -> None:
    """Move the start of updated state without other readers to the last read of the old state, in place in `start` and
    `last`.

    State that is stored narrower than it is updated needs this. The parameter depends on wide moments, which are never
    stored, and so on the old moments. Compilers write parameter and moments in one kernel, over the old ones. Evidence:
    docs/compiler_behaviour.md, "Update of narrow state".
    """
    states = set(analysis.updates.values())

    def is_update(fusion: Fusion) -> bool:
        """Return True if a fusion is pointwise, outside of loops, and writes updated state alone."""
        op = graph.ops[fusion.root]
        return op.op_class is OpClass.POINTWISE and op.loop < 0 and states.issuperset(fusion.writes)

    writers: dict[int, Fusion] = {}
    readers: dict[int, list[Fusion]] = {}
    for fusion in analysis.fusions:
        writers |= dict.fromkeys(fusion.writes, fusion)
        for each in fusion.reads:
            for tensor in analysis.stored_sources(each):
                readers.setdefault(tensor, []).append(fusion)
    for tensor, written in analysis.updates.items():
        fusion = writers.get(written)
        if fusion is None or tensor in analysis.kept or written in readers or fusion.writes != (written,):
            continue
        later = [reader for reader in readers.get(tensor, ()) if reader.root > start[written]]
        if not later or not all(map(is_update, (fusion, *later))):
            continue
        start[written] = last[tensor]
        for each in fusion.reads:
            for source in analysis.stored_sources(each):
                last[source] = max(last[source], start[written])


def _share_carried(
    graph: OpGraph, analysis: FusionAnalysis, start: dict[int, int], last: dict[int, int]
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Merge the buffers of carried values and of values written in place; extend the lifetime of each shared buffer.

    `start` and `last` (first and last op by tensor) change in place. The first result maps a tensor to the outermost
    carried value, or the first overwritten value, whose buffer it shares. The second lists (carried tensor, loop around
    the copying loop) of the arguments that loops copy.

    A loop copies its initial value in three cases: the value is generated, is needed later, or starts another carried
    value too. It also copies an argument, unless the loop computes the donated argument's update.
    """
    read = dict(last)
    owner: dict[int, int] = {}
    copied: list[tuple[int, int]] = []

    def find(tensor: int) -> int:
        """Return the home of a tensor in the union-find; a tensor that is new becomes its own."""
        while owner.setdefault(tensor, tensor) != tensor:
            tensor = owner[tensor]
        return tensor

    loop_of = {c.body: loop.id for loop in graph.loops for c in loop.carries}
    used: set[int] = set()
    arguments = set(graph.arguments)
    for loop in graph.loops:
        for carry in loop.carries:
            start[carry.body], start[carry.result] = loop.start, loop.stop
            last[carry.body] = max(last.get(carry.body, -1), loop.stop)
            shared = [carry.result]
            if carry.update not in used and loop_of.get(carry.update) != loop.id:
                shared.append(carry.update)
            again = carry.init in used or read.get(carry.init, -1) >= loop.start
            if carry.init in arguments:
                over = not again and analysis.updates.get(carry.init) == carry.result
                last[carry.init] = max(last.get(carry.init, -1), loop.start - over)
                if not over:
                    copied.append((carry.body, loop.parent))
            elif not again and carry.init not in graph.generated:
                shared.append(carry.init)
            used.update((carry.init, carry.update))
            for tensor in shared:
                mine, other = find(carry.body), find(tensor)
                if mine == other or loop_of.get(other) == loop_of.get(mine):
                    continue  # two values of one loop never share
                # Outer loops come first, so a buffer that already has a carried value's name keeps the outer name.
                owner[mine if other in loop_of else other] = other if other in loop_of else mine
    for value, written in analysis.overwritten:
        mine, other = find(value), find(written)
        if value in arguments:
            last[value] = max(last[value], start[written] - 1)
        elif mine != other and (other not in loop_of or loop_of[other] != loop_of.get(mine)):
            owner[mine if other in loop_of else other] = other if other in loop_of else mine
    for tensor in owner:
        home = find(tensor)
        start[home] = min(start[home], start[tensor])
        last[home] = max(last.get(home, -1), last.get(tensor, -1))
    return {tensor: find(tensor) for tensor in owner}, copied
