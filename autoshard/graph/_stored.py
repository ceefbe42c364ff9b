"""Where what memory holds is not the value as the program types it.

A matmul's kernel goes on with the elementwise ops that follow it one by one, and stores what the last of them
makes: attention scores that are widened and masked are stored wide, logits that are only widened are not. And a stack
of layers is converted once, before the loop that takes a slice of it and narrows that (both seen in every decoder that
was compiled for TPUs, v4 to v6e, libtpu 0.0.51), and copied for a loop within a loop.
"""

from collections.abc import Collection, Iterable, Mapping

from autoshard.graph._narrowed import INSERTED
from autoshard.graph._records import Op, OpClass, OpGraph


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
    narrow = _filled_narrow(graph)
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


def _filled_narrow(graph: OpGraph) -> dict[int, int]:
    """Carried stacks of values that are widened before they are put in, and narrowed wherever the whole is taken: bytes
    of an element, by the tensor inside the loop's body."""
    makers = {tensor: op for op in graph.ops for tensor in op.results}
    users: dict[int, list[Op]] = {}
    for op in graph.ops:
        for tensor in set(op.operands):
            users.setdefault(tensor, []).append(op)
    found = {}
    for loop in graph.loops:
        for carry in loop.carries:
            inside = users.get(carry.body, [])
            if len(inside) != 1 or inside[0].kind != "dynamic_update_slice" or inside[0].op_class is not OpClass.LAYER:
                continue
            maker = makers.get(inside[0].operands[1])
            while maker is not None and maker.kind in _VIEWS and maker.loop == inside[0].loop:
                maker = makers.get(maker.operands[0])
            if maker is None or maker.kind != "convert":
                continue
            width = _itemsize(graph, maker.operands[0])
            wide = width < _itemsize(graph, carry.body) and carry.result not in graph.results
            if wide and _narrows(graph, users, carry.result, width):
                found[carry.body] = width
    return found


def _narrows(graph: OpGraph, users: Mapping[int, list[Op]], tensor: int, width: int) -> bool:
    """Whether all that takes a tensor, or a view of it, makes elements of so many bytes of it."""
    taken = users.get(tensor, [])
    for op in taken:
        if op.kind in _VIEWS and op.results[0] not in graph.results:
            if not _narrows(graph, users, op.results[0], width):
                return False
        elif op.kind != "convert" or _itemsize(graph, op.results[0]) > width:
            return False
    return bool(taken)


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
