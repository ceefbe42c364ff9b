"""Buffers whose stored dtype differs from the tensor's dtype in the program.

A matmul's kernel also computes the elementwise ops that follow it one by one, and stores the last result. Attention
scores that are widened and masked are thus stored wide; logits that are only widened are stored narrow. A stack of
layers is converted once, before the loop that slices and narrows it. A nested loop gets a copy of its stack.

Evidence: docs/compiler_behaviour.md, "Stored dtype of matmul results", "Narrow copies of stacks".
"""

from collections.abc import Collection, Iterator, Mapping

from autoshard.graph.memory.operand_rounding import INSERTED
from autoshard.graph.records import OpClass, OpGraph, is_batched


Buffer = tuple[int, int, int]
"""The (tensor, start, stop) of a live range, in op ids, `stop` excluded."""

_MATMULS = frozenset({"dot_general", "convolution"})
_VIEWS = frozenset({"reshape", "transpose", "broadcast_in_dim", "sharding_constraint"})
"""Ops that copy no values, through which a stored dtype is traced."""
_PLACED = frozenset({"reshape", "transpose", "slice"})
"""Ops that lay out a stack before a loop."""


def stored_buffers(
    graph: OpGraph,
    buffers: Collection[Buffer],
    wide: Mapping[int, int],
    updated: Collection[int] = (),
    narrows_stacks: bool = True,
) -> tuple[tuple[Buffer, ...], Mapping[Buffer, int]]:
    """Return extra buffers for copied stacks, sorted, and bytes per element of every buffer whose dtype is not its
    tensor's.

    - `buffers`: live ranges of stored tensors.
    - `wide`: the result of `widened_values`.
    - `updated`: arguments that are overwritten; nested loops copy their stacks.
    - `narrows_stacks`: True if a stack is narrowed before the loop, which adds a narrow copy. GPU compilers narrow each
      slice in the loop instead.

    The map has the extra buffers too. Evidence: docs/compiler_behaviour.md, "Narrow copies of stacks".
    """
    widths: dict[Buffer, int] = {}
    for buffer in buffers:
        if buffer[0] in wide:
            widths[buffer] = wide[buffer[0]]
    narrow = _filled_narrow(graph, narrows_stacks)
    widths |= {buffer: narrow[buffer[0]] for buffer in buffers if buffer[0] in narrow}
    copied, between = _converted(graph)
    widths |= {buffer: between[buffer[0]] for buffer in buffers if buffer[0] in between}
    copied, narrowed = (copied, between) if narrows_stacks else ({}, {})
    for buffer, width in _copied(graph, updated, narrowed).items():
        copied[buffer] = copied.get(buffer, 0) + width
    widths |= copied
    return tuple(sorted(copied)), widths


def _itemsize(graph: OpGraph, tensor: int) -> int:
    """Return the bytes of one element of a tensor."""
    record = graph.tensors[tensor]
    return record.itemsize


def widened_values(graph: OpGraph) -> dict[int, int]:
    """Map results of matmuls that are stored as a wider value computed from them to that value's bytes per element.

    The wider value ends a chain of pointwise ops in the same block, each the only user of the one before. At least one
    is no convert.
    """
    widths = {}
    for op in graph.ops:
        if op.kind not in _MATMULS:
            continue
        last, computed = op.results[0], False
        while last not in graph.returned and len(graph.users[last]) == 1:
            (user,) = graph.users[last]
            if user.op_class is not OpClass.POINTWISE or user.loop != op.loop:
                break
            last, computed = user.results[0], computed or user.kind != "convert"
        if computed and _itemsize(graph, last) > _itemsize(graph, op.results[0]):
            widths[op.results[0]] = _itemsize(graph, last)
    return widths


def widened_tables(graph: OpGraph, materialised: Collection[int]) -> Iterator[Buffer]:
    """Yield wide copies of stored values from which gathers fetch numbers after a cast.

    A copy is made by the kernel that makes the value, and is live until the last gather; other ops read the value. An
    example are logits in bfloat16 if the loss casts them and picks the labels' logits (v5e, libtpu 0.0.51).
    """
    for op in graph.ops:
        if op.kind != "convert" or op.operands[0] not in materialised or op.results[0] in materialised:
            continue
        source, result = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
        gathers = [
            user.id for user in graph.users[result.id] if user.kind == "gather" and user.operands[0] == result.id
        ]
        if gathers and result.bytes > source.bytes and source.producer >= 0 and source.loop == result.loop:
            yield result.id, source.producer, graph.needed_until(result.id, max(gathers)) + 1


def _copied(graph: OpGraph, updated: Collection[int], narrowed: Collection[int]) -> dict[Buffer, int]:
    """Return copies of updated stacks that a nested loop slices, such as the layers of each microbatch, with bytes per
    element. A copy is live during the outermost loop.

    The compiler cannot prove that the outer loop leaves these stacks unchanged. Slices of which every reader takes the
    narrow value (in `narrowed`) need no copy: loops read the narrow copy of their stack. Evidence:
    docs/compiler_behaviour.md, "Stacks copied for nested loops".
    """
    copies = {}
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER or op.operands[0] not in updated:
            continue
        part = op.results[0]
        if part in narrowed and _stored_width(graph, part, False) < _itemsize(graph, part):
            continue
        outer = _outermost(graph, op.loop)
        if outer != op.loop:
            loop = graph.loops[outer]
            copies[op.operands[0], loop.start, loop.stop] = _itemsize(graph, op.operands[0])
    return copies


def _filled_narrow(graph: OpGraph, sliced: bool) -> dict[int, int]:
    """Map the body tensors of carried stacks that are stored narrower than their values to bytes per element.

    These are stacks whose values are widened before insertion, and narrowed wherever the whole stack is read. With
    `sliced`, values that every reader of the stack or of its slices narrows also count: the TPU compiler inserts these
    narrowed.

    Evidence: docs/compiler_behaviour.md, "Saved stacks stored narrow".
    """
    widths = {}
    for loop in graph.loops:
        for carry in loop.carries:
            inside = graph.users[carry.body]
            if len(inside) != 1 or inside[0].kind != "dynamic_update_slice" or inside[0].op_class is not OpClass.LAYER:
                continue
            own = _itemsize(graph, carry.body)
            width = _stored_width(graph, carry.result, sliced)
            if not sliced:
                maker = graph.maker(inside[0].operands[1])
                while maker is not None and maker.kind in _VIEWS and maker.loop == inside[0].loop:
                    maker = graph.maker(maker.operands[0])
                widened = maker is not None and maker.kind == "convert"
                source = _itemsize(graph, maker.operands[0]) if maker is not None and widened else own
                width = source if width <= source else own
            if width < own:
                widths[carry.body] = width
    return widths


def _stored_width(graph: OpGraph, tensor: int, sliced: bool) -> int:
    """Return the bytes per element of the widest convert of a tensor or of its views.

    If other ops read the tensor, if nothing does, or if it is returned, its own bytes per element are returned. With
    `sliced` slices of layers count as views, and converts that batched matmuls read count as other ops.
    """
    own, width = _itemsize(graph, tensor), 0
    if tensor in graph.returned:
        return own
    for op in graph.users[tensor]:
        if op.kind in _VIEWS or (sliced and op.kind == "dynamic_slice" and op.op_class is OpClass.LAYER):
            width = max(width, _stored_width(graph, op.results[0], sliced))
        # Matmuls with a batch dim for the heads, as in a recurrence, read float32 slices.
        elif op.kind == "convert" and not (sliced and _feeds_batched(graph, op.results[0])):
            width = max(width, _itemsize(graph, op.results[0]))
        else:
            return own
    return width or own


def _feeds_batched(graph: OpGraph, tensor: int) -> bool:
    """Return True if a matmul with batch dims reads a tensor or a view of it."""
    return any(
        is_batched(op) or (op.kind in _VIEWS and _feeds_batched(graph, op.results[0])) for op in graph.users[tensor]
    )


def _outermost(graph: OpGraph, loop: int) -> int:
    """Return the outermost loop around a loop; the loop unchanged if no other is around it."""
    while graph.loops[loop].parent >= 0:
        loop = graph.loops[loop].parent
    return loop


def _laid_out(graph: OpGraph, tensor: int) -> int:
    """Return the tensor from which a value outside of loops is made by layout ops and slices; a value in a loop
    unchanged.

    Layers that are stacked along another dim than the first are transposed before a loop. Layers of pipeline stages are
    split and put next to each other.
    """
    while (maker := graph.maker(tensor)) is not None and maker.kind in _PLACED and maker.loop < 0:
        tensor = maker.operands[0]
    return tensor


def _converted(graph: OpGraph) -> tuple[dict[Buffer, int], dict[int, int]]:
    """Return the narrow copies of argument stacks that loops narrow slice by slice, and the values between stack and
    convert.

    Both results map to bytes per element. A copy is live from the first to the last of these outermost loops. The
    values between are slices of such stacks, and selections among slices. Converts that the compiler inserts do not
    count: it rounds slice by slice (decoders in float32, v4 and v5e).
    """
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    between: dict[int, int] = {}
    for op in graph.ops:
        if op.kind != "convert" or op.loop < 0 or op.number == INSERTED:
            continue
        width = _itemsize(graph, op.results[0])
        if width >= _itemsize(graph, op.operands[0]):
            continue
        stacks, passed = _sliced(graph, op.operands[0])
        if not stacks or any(_laid_out(graph, stack) not in graph.arguments for stack in stacks):
            continue
        between |= dict.fromkeys(passed, width)
        outer = _outermost(graph, op.loop)
        start, stop = graph.loops[outer].start, graph.loops[outer].stop
        for stack in stacks:
            before = spans.get((stack, width), (start, stop))
            spans[(stack, width)] = (min(before[0], start), max(before[1], stop))
    return {(stack, start, stop): width for (stack, width), (start, stop) in spans.items()}, between


def _sliced(graph: OpGraph, tensor: int) -> tuple[set[int], set[int]]:
    """Return the stacks of whose layers a value in a loop is a slice or a selection, and the values between.

    Both sets are empty if the value is anything else.
    """
    stacks, passed, left = set[int](), set[int](), [(tensor, False)]
    while left:
        value, is_slice = left.pop()
        maker = graph.maker(value)
        if maker is None or maker.loop < 0:
            if not is_slice:
                return set(), set()
            stacks.add(value)
            continue
        passed.add(value)
        if maker.kind == "select":
            left += ((each, is_slice) for each in maker.operands[1:])
        elif maker.kind == "dynamic_slice" and maker.op_class in (OpClass.LAYER, OpClass.POINTWISE):
            left.append((maker.operands[0], is_slice or maker.op_class is OpClass.LAYER))
        elif maker.kind in _VIEWS:
            left.append((maker.operands[0], is_slice))
        else:
            return set(), set()
    return stacks, passed
