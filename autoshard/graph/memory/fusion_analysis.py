"""Record of the fusion analysis, and its first stage: which ops are kernels, and where each value leads.

The stages run in this order, and each needs the results of those before it:

1. `begin_analysis`: users across ops that move no data, kernels, and the ops at which fusions end.
2. `store_values` (`materialization.py`): values that are stored, and the fusions that store them.
3. `fuse_epilogues` or `fuse_gpu_epilogues` (`epilogue_fusion.py`): values that kernels store instead of others.
4. `buffers_of` (`lifetimes.py`): live ranges of stored values.
5. `analyse` (`liveness.py`): buffers in another dtype or layout, and traffic outside of fusions.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autoshard.graph.extraction.opaque_rules import IN, OUT
from autoshard.graph.extraction.rolls import ROTATE
from autoshard.graph.flops import is_sum
from autoshard.graph.memory.buffer_dtypes import widened_values
from autoshard.graph.memory.host_transfers import TO_DEVICE
from autoshard.graph.memory.stack_layouts import sliced_loop_inputs
from autoshard.graph.records import Op, OpClass, OpGraph, is_batched


CHEAP_INTO_MATMUL = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})
"""Casts and layout ops that a matmul's kernel applies on load."""
SMALL = 8
"""Factor by which a value must be smaller to be ignored.

An operand with so many times fewer elements than a sum's input does not decide which kernel computes the sum. Bytes
that are so many times smaller than a value do not decide if the value is stored.
"""
TILED = 2
"""Number of minor dims of a tensor that are laid out in register tiles."""
_WRITERS = frozenset({"reduce", "case", "if", "dynamic_update_slice", TO_DEVICE})
"""Kinds of ops whose results are always stored."""
_PASSING = frozenset({"sharding_constraint", IN, OUT})
"""Ops that define how a value is split, and that move no data themselves."""
_FUSED_MOVES = frozenset({"slice", "concatenate", "pad", "reverse"})
"""Heavy ops that move data and that fuse like pointwise ops."""
MANY = 8
"""Largest number of fusion ends that are tracked for one value."""


@dataclasses.dataclass(frozen=True, slots=True)
class FusionRules:
    """Rules by which a compiler fuses ops and stores values; the defaults are those of CPUs."""

    fused_matmuls: bool = False
    """True if a matmul's kernel computes the pointwise values that it reads, as TPU compilers do."""
    narrows_stacks: bool = True
    """True if a stack whose slices a loop narrows is converted before the loop, with both copies live."""
    gpu_kernels: bool = False
    """True for the rules of XLA's GPU compiler.

    A value that several kernels read is stored only if that moves fewer bytes. The last cast in a chain from a computed
    value is stored for the matmul that reads it. A rounded tanh is stored (`is_rounded_tanh`). Gathers are parts of the
    kernels that read their rows, and some kernels compute operands themselves (`_computed_inside`). Matmuls fuse their
    epilogues (`fuse_gpu_epilogues`), and some run late. Elementwise kernels overwrite operands that they read last.
    Constants that start a loop are written before it. `copied_slices` and `relaid_stacks` add copies.
    """
    alone: bool = False
    """True for a step on one device, whose gradients no collective sums."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """One kernel: its root op, the values that it writes, and the values in memory that it reads."""

    root: int
    """Id of the op that computes its last value."""
    writes: tuple[int, ...]
    """Tensors that the kernel stores."""
    reads: tuple[int, ...]
    """Tensors read from memory; a slice of a stored stack stands for the slice's bytes, not the stack's."""
    moved: tuple[int, ...]
    """Values whose bytes are written: `writes`, or the slice that is put into a stack in place."""
    is_fused_sibling: bool = False
    """True if the kernel of an earlier fusion also does this fusion's work, so that no kernel is launched for it."""
    matmul: int = -1
    """Id of the matmul or convolution of a TPU whose kernel does this fusion's work; -1 for none."""

    @property
    def kernel(self) -> int:
        """Id of the op in whose kernel the fusion runs."""
        return self.root if self.matmul < 0 else self.matmul


@dataclasses.dataclass(frozen=True, slots=True)
class FusionAnalysis:
    """Facts about the values and kernels of one graph, collected stage by stage."""

    rules: FusionRules
    """The compiler's rules of fusion."""
    kept: frozenset[int]
    """Arguments that are not donated, live throughout."""
    updates: Mapping[int, int]
    """Maps each argument of donated state to the result that overwrites it."""
    loop_inputs: frozenset[int]
    """Result of `sliced_loop_inputs`."""
    wide: Mapping[int, int]
    """Result of `widened_values`."""
    sizes: Sequence[int]
    """Bytes of every value in its stored dtype."""
    consumers: Sequence[Sequence[int]]
    """Ids of the ops that read each value, also through ops that move no data or only widen it."""
    passing: frozenset[int]
    """Ops whose result is their operand in memory: constraints and ends of regions."""
    pinned: frozenset[int]
    """Values that are stored in any case."""
    matmuls: frozenset[int]
    """Matmuls whose kernels compute the pointwise ops before and after them."""
    kernels: frozenset[int]
    """Ops that are separate kernels."""
    inside: Mapping[int, frozenset[int]]
    """Result of `_computed_inside`."""
    fused_gathers: frozenset[int]
    """Gathers whose rows the kernels that read them may fetch; they read their table as separate kernels do."""
    scores: frozenset[int] = frozenset()
    """Tensors of softmaxes between matmuls."""
    ends: Sequence[frozenset[int] | None] = ()
    """For each tensor the fusion-ending ops that its consumers lead to; None for more than `MANY`."""
    joins: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Maps each value with several users that one kernel computes to the op where their paths join."""
    reach: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    """Maps each tensor to the stored tensors from which it is computed."""
    bases: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    """Maps each slice to the stored tensors of which it is a part."""
    materialised: frozenset[int] = frozenset()
    """Tensors that reach memory."""
    fusions: Sequence[Fusion] = ()
    """Kernels in program order."""
    overwritten: Sequence[tuple[int, int]] = ()
    """The (value, value that overwrites it) pairs."""
    stores: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Maps the unstored result of a matmul or convolution to the value that its kernel stores instead."""

    def ends_fusion(self, op: Op) -> bool:
        """Return True for an op that ends its fusion: its result is stored in any case.

        Such an op is a writer, a kernel of its own, or computes a pinned value.
        """
        apart = op.id in self.kernels and op.id not in self.fused_gathers
        return op.kind in _WRITERS or apart or not self.pinned.isdisjoint(op.results)

    def reads_apart(self, op: Op, tensor: int) -> bool:
        """Return True if an op is a separate kernel that reads the value `tensor` from memory."""
        return op.id in self.kernels and tensor not in self.inside.get(op.id, ())

    def stored_sources(self, read: int) -> Collection[int]:
        """Return the stored values that a fusion reads: the stacks of which `read` is a slice, or `read` itself."""
        return self.bases.get(read, (read,))


def begin_analysis(
    graph: OpGraph,
    kept: Collection[int],
    updates: Mapping[int, int],
    rules: FusionRules,
    scores: frozenset[int] = frozenset(),
) -> FusionAnalysis:
    """Return the facts that no decision about stored values changes.

    - `kept`: arguments that are not donated.
    - `updates`: result by argument that it overwrites.
    - `rules`: the compiler's rules of fusion.
    - `scores`: tensors of softmaxes between matmuls.
    """
    # GPU matmuls fuse no epilogue that widens their result.
    wide, loop_inputs = {} if rules.gpu_kernels else widened_values(graph), sliced_loop_inputs(graph)
    sizes = [t.elements * wide[t.id] if t.id in wide else t.bytes for t in graph.tensors]
    consumers = [[op.id for op in users] for users in graph.users]
    pinned = {*graph.returned, *loop_inputs}
    passing = {op.id for op in graph.ops if op.kind in _PASSING and not _takes_stored(graph, op)}
    for op_id in sorted(passing, reverse=True):
        source, result = graph.ops[op_id].operands[0], graph.ops[op_id].results[0]
        consumers[source].extend(consumers[result])
        if result in pinned:
            pinned.add(source)
    for op in reversed(graph.ops):
        if _widens(graph, op):  # readers of the wide value may read the narrow one instead
            consumers[op.operands[0]].extend(consumers[op.results[0]])
    fused = rules.fused_matmuls
    kernels = {op.id for op in graph.ops if _is_kernel(graph, op, fused)} | _copied_into_stacks(graph) - passing
    analysis = FusionAnalysis(
        rules,
        frozenset(kept),
        updates,
        loop_inputs,
        wide,
        sizes,
        consumers,
        frozenset(passing),
        frozenset(pinned),
        _plain_matmuls(graph) | _matmuls_of_stacks(graph, scores) if fused else frozenset(),
        frozenset(kernels),
        _computed_inside(graph, passing) if rules.gpu_kernels else {},
        _fused_gathers(graph, consumers) if rules.gpu_kernels else frozenset(),
        scores,
    )
    joins = _joins(graph, consumers, {op.id for op in graph.ops if analysis.ends_fusion(op)}) if fused else {}
    return dataclasses.replace(analysis, ends=_ends_of(graph, analysis), joins=joins)


def _computed_inside(graph: OpGraph, passing: Collection[int]) -> dict[int, frozenset[int]]:
    """Map the kernels that compute operands themselves to these operands, on GPUs.

    Gathers compute their indices, and scatters their indices and updates. Dots that are sums (`is_sum`) become a
    product and a reduction, which fetch gathered rows. An operand and the values of which it is only a wider form
    count. Seen in the fusions of XLA's GPU compiler for segment sums and for experts by capacity.
    """
    inside: dict[int, frozenset[int]] = {}
    for op in graph.ops:
        operands: Sequence[int] = ()
        if op.kind == "gather":
            operands = op.operands[1:]
        elif op.kind == "scatter":
            operands = op.operands[len(op.results) :]
        is_dot = op.kind == "dot_general" and op.rule is not None and is_sum(op.rule)
        values = set[int]()
        for tensor in op.operands if is_dot else operands:
            wider, maker = {tensor}, graph.maker(tensor)
            while maker is not None and (maker.id in passing or _widens(graph, maker)):
                wider.add(maker.operands[0])
                maker = graph.maker(maker.operands[0])
            if not is_dot or (maker is not None and maker.kind == "gather"):
                values |= wider
        if values:
            inside[op.id] = frozenset(values)
    return inside


def _fused_gathers(graph: OpGraph, consumers: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the gathers that all ops of their own block read, which is where kernels may fetch the rows."""
    return frozenset(
        op.id
        for op in graph.ops
        if op.kind == "gather"
        and op.rule is not None
        and all(graph.ops[user].loop == op.loop for user in consumers[op.results[0]])
    )


def _widens(graph: OpGraph, op: Op) -> bool:
    """Return True for a pointwise convert to a wider dtype in the block in which its operand is computed."""
    if op.kind != "convert" or op.op_class is not OpClass.POINTWISE:
        return False
    source, result = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
    return source.loop == op.loop and source.bytes < result.bytes


def _takes_stored(graph: OpGraph, op: Op) -> bool:
    """Return True for a constraint on an argument or on a slice of a stack, also through casts and layout ops.

    Its gathered result needs memory in addition to the stored value.
    """
    if op.kind != "sharding_constraint":
        return False
    tensor = op.operands[0]
    while (made := graph.maker(tensor)) is not None:
        if made.op_class is OpClass.LAYER:
            return True
        if made.kind not in CHEAP_INTO_MATMUL:
            return False
        tensor = made.operands[0]
    return tensor in graph.arguments


def _copied_into_stacks(graph: OpGraph) -> set[int]:
    """Return the constraints whose results a loop writes into a stack, directly or through ops of one operand.

    These are collectives' results, which are copied.
    """
    constraints = set()
    for op in graph.ops:
        if op.kind != "dynamic_update_slice":
            continue
        tensor = op.operands[1]
        while (maker := graph.maker(tensor)) is not None:
            if maker.kind == "sharding_constraint":
                constraints.add(maker.id)
            if len(maker.operands) != 1 or maker.op_class is OpClass.HEAVY:
                break
            tensor = maker.operands[0]
    return constraints


def _is_kernel(graph: OpGraph, op: Op, tiled: bool) -> bool:
    """Return True for an op that compilers emit as a separate kernel: heavy ops, but not slices, concatenations, pads,
    reverses.

    With `tiled` layouts, as on TPUs, such ops include pads with places between elements, and slices that step through a
    tiled dim. They do not include scatters that are comparisons (`_is_comparison`).
    """
    if tiled and _is_comparison(graph, op):
        return False
    if op.op_class is not OpClass.HEAVY or op.kind not in _FUSED_MOVES:
        return op.op_class is OpClass.HEAVY
    rank = len(graph.tensors[op.results[0]].shape)
    return tiled and any(op.kind == "pad" or dim >= rank - TILED for dim in op.strided)


def _is_comparison(graph: OpGraph, op: Op) -> bool:
    """Return True for a scatter of one number into each row of a generated value.

    An example is the gradient of a cross entropy with integer labels. TPU compilers compare the places of a row with
    its index instead, inside the kernels that read the result. This was seen with 1,000 to 32,000 classes on v5e.
    """
    if op.kind != "scatter" or op.rule is None or op.operands[0] not in graph.generated:
        return False
    rows = {factor for dim in op.rule.operands[1] for factor in dim}
    summed = set(rows).difference(factor for dim in op.rule.results[0] for factor in dim)
    places = [dim for dim in op.rule.results[0] if not rows.issuperset(dim)]
    return len(places) == 1 and all(op.rule.sizes[factor] == 1 for factor in summed)


def _ends_of(graph: OpGraph, analysis: FusionAnalysis) -> list[frozenset[int] | None]:
    """Return `FusionAnalysis.ends`: for each tensor the ops that end the fusions it is computed in, or None beyond
    `MANY`.
    """
    ends_by_tensor: list[frozenset[int] | None] = [frozenset()] * len(graph.tensors)
    for op in reversed(graph.ops):
        for tensor in op.results:
            ends: frozenset[int] | None = frozenset()
            for user in analysis.consumers[tensor]:
                other = graph.ops[user]
                apart = other.loop != op.loop or analysis.ends_fusion(other) or analysis.reads_apart(other, tensor)
                after = [frozenset((user,))] if apart else [ends_by_tensor[t] for t in other.results]
                ends = None if ends is None or None in after else ends.union(*(e for e in after if e is not None))
                if ends is None or len(ends) > MANY:
                    ends = None
                    break
            ends_by_tensor[tensor] = ends
    return ends_by_tensor


def _joins(graph: OpGraph, consumers: Sequence[Sequence[int]], apart: Collection[int]) -> dict[int, int]:
    """Map each value with several users to its immediate post-dominator: the pointwise op where all paths from it join.

    All users up to that op are parts of one kernel, which computes the value once. Paths stay in one block, and lead
    over pointwise ops only. `apart` are ops that end a kernel; no path leads through them.
    """
    after = [-1] * len(graph.ops)
    """Next op to which all paths from each op lead; -1 for none, [ops]."""
    joins: dict[int, int] = {}

    def first_common_op(users: Sequence[int], loop: int) -> int:
        """Return the first pointwise op of the block `loop` that is common to all paths from `users`; -1 if there is
        none.
        """
        at = -1
        for number, user in enumerate(sorted(set(users))):
            other = graph.ops[user]
            if other.loop != loop or other.op_class is not OpClass.POINTWISE or user in apart:
                return -1
            if not number:
                at = user
                continue
            mine, theirs = at, user
            while mine != theirs:  # ids follow program order, so the smaller one moves on
                if mine < theirs:
                    mine = after[mine]
                else:
                    theirs = after[theirs]
                if mine < 0 or theirs < 0:
                    return -1
            at = mine
        return at

    for op in reversed(graph.ops):
        users = [user for tensor in op.results for user in consumers[tensor]]
        if not users or op.id in apart:
            continue
        after[op.id] = first_common_op(users, op.loop)
        if len(op.results) == 1 and len(set(users)) > 1 and after[op.id] >= 0:
            joins[op.results[0]] = after[op.id]
    return joins


def _plain_matmuls(graph: OpGraph) -> frozenset[int]:
    """Return ids of convolutions, dots without batch dims, and matmuls of pipeline stages; `Softmax` covers
    attention.
    """
    matmuls = (op for op in graph.ops if op.kind in ("dot_general", "convolution") and op.rule is not None)
    return matmuls_of_stages(graph).union(op.id for op in matmuls if not is_batched(op))


def _matmuls_of_stacks(graph: OpGraph, scores: frozenset[int]) -> frozenset[int]:
    """Return ids of dots that multiply two stacks of matrices, such as those of experts.

    Their one batch dim is the first of each side, and both operands have dims of their own. Dots of `scores`, the
    values of softmaxes, do not count. TPU compilers treat such a dot as one without batch dims. The activation of
    experts, its gradient and the updates of their weights were seen in its kernel.
    """
    matmuls = set()
    for op in graph.ops:
        if op.kind != "dot_general" or op.rule is None or not scores.isdisjoint((*op.operands, *op.results)):
            continue
        left, right, out = (
            {f for dim in dims for f in dim if op.rule.sizes[f] > 1} for dims in (*op.rule.operands, op.rule.results[0])
        )
        batch = left & right & out
        leading = all(set(dims[0]) == batch for dims in (*op.rule.operands, op.rule.results[0]) if dims)
        if len(batch) == 1 and leading and left - right and right - left:
            matmuls.add(op.id)
    return frozenset(matmuls)


def matmuls_of_stages(graph: OpGraph) -> frozenset[int]:
    """Return ids of the matmuls in pipeline loops whose one batch dim, their first, is the dim of stages.

    A pipeline loop is one that rotates a stack of the stages' results by one place, in either direction.
    """
    stages: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == ROTATE and op.loop >= 0:
            size = graph.tensors[op.operands[0]].shape[0]
            if op.shift in (1, size - 1):
                stages[op.loop] = size
    matmuls = set()
    for op in graph.ops if stages else ():
        if op.kind != "dot_general" or op.rule is None:
            continue
        loop = op.loop
        while loop >= 0 and loop not in stages:
            loop = graph.loops[loop].parent
        sides = (*op.rule.operands, op.rule.results[0])
        shared = set.intersection(*({f for dim in dims for f in dim} for dims in sides))
        if loop >= 0 and len(shared) == 1 and all(dims[0] == tuple(shared) for dims in sides):
            if op.rule.sizes[shared.pop()] == stages[loop]:
                matmuls.add(op.id)
    return frozenset(matmuls)
