"""Where what memory holds is not the value as the program types it.

A matmul's kernel goes on with the elementwise ops that follow it one by one, and stores what the last of them
makes: attention scores that are widened and masked are stored wide, logits that are only widened are not. And a stack
of layers is converted once, before the loop that takes a slice of it and narrows that (both seen in every decoder that
was compiled for TPUs, v4 to v6e, libtpu 0.0.51), and copied for a loop within a loop.
"""

from collections.abc import Collection, Iterable, Mapping

from autoshard.graph.memory.operand_rounding import INSERTED
from autoshard.graph.records import Op, OpClass, OpGraph, is_batched


Buffer = tuple[int, int, int]
"""(tensor, start, stop)"""

_MATMULS = frozenset({"dot_general", "convolution"})
_VIEWS = frozenset({"reshape", "transpose", "broadcast_in_dim", "sharding_constraint"})
_PLACED = frozenset({"reshape", "transpose", "slice"})


def stored(
    graph: OpGraph,
    buffers: Iterable[Buffer],
    wide: Mapping[int, int],
    updated: Collection[int] = (),
    narrows_stacks: bool = True,
) -> tuple[tuple[Buffer, ...], Mapping[Buffer, int]]:
    """Buffers of copied stacks, and the bytes of an element of every buffer whose dtype is not its tensor's.

    `wide`: what `widened` gives. `updated`: arguments that are written over, whose stacks loops within loops copy.
    Without `narrows_stacks` a slice is narrowed where it is taken, and the stack has no narrow copy: the GPU compiler's
    way (all decoders that were compiled for h100:8, jaxlib 0.10.2).
    """
    widths: dict[Buffer, int] = {}
    for buffer in buffers:
        if buffer[0] in wide:
            widths[buffer] = wide[buffer[0]]
    narrow = _filled_narrow(graph, narrows_stacks)
    widths |= {buffer: narrow[buffer[0]] for buffer in buffers if buffer[0] in narrow}
    copied, between = _converted(graph)
    widths |= {buffer: between[buffer[0]] for buffer in buffers if buffer[0] in between}
    copied = copied if narrows_stacks else {}
    for buffer, width in _copied(graph, updated).items():
        copied[buffer] = copied.get(buffer, 0) + width
    widths |= copied
    return tuple(sorted(copied)), widths


def _itemsize(graph: OpGraph, tensor: int) -> int:
    record = graph.tensors[tensor]
    return record.itemsize


def widened(graph: OpGraph) -> dict[int, int]:
    """Results of matmuls that are stored as a wider value that follows from them: bytes of an element."""
    users: dict[int, list[Op]] = {}
    for op in graph.ops:
        for tensor in set(op.operands):
            users.setdefault(tensor, []).append(op)
    kept = {*graph.results, *(t for loop in graph.loops for c in loop.carries for t in (c.init, c.update))}
    found = {}
    for op in graph.ops:
        if op.kind not in _MATMULS:
            continue
        last, computed = op.results[0], False
        while last not in kept and len(users.get(last, ())) == 1:
            (user,) = users[last]
            if user.op_class is not OpClass.POINTWISE or user.loop != op.loop:
                break
            last, computed = user.results[0], computed or user.kind != "convert"
        if computed and _itemsize(graph, last) > _itemsize(graph, op.results[0]):
            found[op.results[0]] = _itemsize(graph, last)
    return found


def _copied(graph: OpGraph, updated: Collection[int]) -> dict[Buffer, int]:
    """Stacks that a loop within a loop (layers of each microbatch) takes apart, and that are then written over.

    The compiler cannot tell that the outer loop leaves them alone, and gives it copies of its own (seen in training
    steps of a Llama, Gemma 2 and ViT in microbatches, v5p and v6e, libtpu 0.0.51).
    """
    found = {}
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER or op.operands[0] not in updated:
            continue
        outer = _outermost(graph, op.loop)
        if outer != op.loop:
            loop = graph.loops[outer]
            found[op.operands[0], loop.start, loop.stop] = _itemsize(graph, op.operands[0])
    return found


def _filled_narrow(graph: OpGraph, sliced: bool) -> dict[int, int]:
    """Bytes of an element of carried stacks that are narrower than their values, by the tensor in the loop's body.

    Values that are widened before they are put in, and narrowed wherever the whole stack is taken. With `sliced` also
    values that are narrowed wherever the stack or a slice of it is taken: the TPU compiler puts them in narrowed, as
    the float32 inputs of layers that are saved for matmuls alone (v5e and v5p, libtpu 0.0.51).
    """
    makers = {tensor: op for op in graph.ops for tensor in op.results}
    users: dict[int, list[Op]] = {}
    for op in graph.ops:
        for tensor in set(op.operands):
            users.setdefault(tensor, []).append(op)
    kept = {*graph.results, *(t for loop in graph.loops for c in loop.carries for t in (c.init, c.update))}
    found = {}
    for loop in graph.loops:
        for carry in loop.carries:
            inside = users.get(carry.body, [])
            if len(inside) != 1 or inside[0].kind != "dynamic_update_slice" or inside[0].op_class is not OpClass.LAYER:
                continue
            own = _itemsize(graph, carry.body)
            width = _width_taken(graph, users, kept, carry.result, sliced)
            if not sliced:
                maker = makers.get(inside[0].operands[1])
                while maker is not None and maker.kind in _VIEWS and maker.loop == inside[0].loop:
                    maker = makers.get(maker.operands[0])
                widened = maker is not None and maker.kind == "convert"
                source = _itemsize(graph, maker.operands[0]) if maker is not None and widened else own
                width = source if width <= source else own
            if width < own:
                found[carry.body] = width
    return found


def _width_taken(
    graph: OpGraph, users: Mapping[int, list[Op]], kept: Collection[int], tensor: int, sliced: bool
) -> int:
    """Bytes of an element of the widest value that converts make of a tensor, or of views of it; its own if others
    take it."""
    own, width = _itemsize(graph, tensor), 0
    if tensor in kept:
        return own
    for op in users.get(tensor, ()):
        if op.kind in _VIEWS or (sliced and op.kind == "dynamic_slice" and op.op_class is OpClass.LAYER):
            width = max(width, _width_taken(graph, users, kept, op.results[0], sliced))
        # Matmuls of every head, as a recurrence has them, take float32 slices.
        elif op.kind == "convert" and not (sliced and _feeds_batched(users, op.results[0])):
            width = max(width, _itemsize(graph, op.results[0]))
        else:
            return own
    return width or own


def _feeds_batched(users: Mapping[int, list[Op]], tensor: int) -> bool:
    """Return True if a matmul with batch dims takes a tensor, or a view of it."""
    return any(
        is_batched(op) or (op.kind in _VIEWS and _feeds_batched(users, op.results[0])) for op in users.get(tensor, ())
    )


def _outermost(graph: OpGraph, loop: int) -> int:
    while graph.loops[loop].parent >= 0:
        loop = graph.loops[loop].parent
    return loop


def _laid_out(makers: Mapping[int, Op], tensor: int) -> int:
    """What a value outside of loops is another layout or a part of: where layers are stacked along another dim than the
    first, they are transposed before a loop; where they stand in stages, they are parted and set side by side."""
    maker = makers.get(tensor)
    while maker is not None and maker.kind in _PLACED and maker.loop < 0:
        tensor = maker.operands[0]
        maker = makers.get(tensor)
    return tensor


def _converted(graph: OpGraph) -> tuple[dict[Buffer, int], dict[int, int]]:
    """A stack that loops narrow slice by slice: its narrow copy, from the first of these loops to the last. And what
    lies between: values that are slices of such stacks, or chosen among them, by their bytes of an element.

    What the compiler itself rounds it rounds slice by slice (decoders in float32, v4 and v5e).
    """
    makers = {tensor: op for op in graph.ops for tensor in op.results}
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    between: dict[int, int] = {}
    for op in graph.ops:
        if op.kind != "convert" or op.loop < 0 or op.number == INSERTED:
            continue
        width = _itemsize(graph, op.results[0])
        if width >= _itemsize(graph, op.operands[0]):
            continue
        stacks, passed = _sliced(makers, op.operands[0])
        if not stacks or any(_laid_out(makers, stack) not in graph.arguments for stack in stacks):
            continue
        between |= dict.fromkeys(passed, width)
        outer = _outermost(graph, op.loop)
        start, stop = graph.loops[outer].start, graph.loops[outer].stop
        for stack in stacks:
            before = spans.get((stack, width), (start, stop))
            spans[(stack, width)] = (min(before[0], start), max(before[1], stop))
    return {(stack, start, stop): width for (stack, width), (start, stop) in spans.items()}, between


def _sliced(makers: Mapping[int, Op], tensor: int) -> tuple[set[int], set[int]]:
    """The stacks whose slices a value in a loop is, or is chosen among, and what lies between; none if it is not."""
    stacks, passed, left = set[int](), set[int](), [(tensor, False)]
    while left:
        value, is_slice = left.pop()
        maker = makers.get(value)
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
