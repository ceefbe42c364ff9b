"""Stacks of layers that loops slice or fill: their layouts, and the copies that change a layout or select a slice."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autoshard.graph.flops import is_sum
from autoshard.graph.memory.host_transfers import TO_DEVICE
from autoshard.graph.records import Loop, Op, OpClass, OpGraph, is_batched


_UNMOVED = frozenset({"convert", "reshape", "broadcast_in_dim", "sharding_constraint", "squeeze", "expand_dims"})
"""Ops that leave the order of elements unchanged."""
_SMALL = 1 << 20
"""Stacks below this number of bytes are ignored."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExtraTraffic:
    """Reads or writes of a whole tensor outside all fusions, once in every execution of a block."""

    tensor: int
    """Id of the tensor."""
    block: int
    """Id of the loop that is the block; -1 outside of all loops."""
    count: int
    """Times that the tensor's bytes go through memory; a copy reads and writes them, which counts as two."""
    by_rows: bool = False
    """True for `count` copies row by row, each row as long as the lanes of a register."""


def transposed_stack_copies(graph: OpGraph) -> tuple[ExtraTraffic, ...]:
    """Return the copies caused by transposed layouts of stacks that loops fill; for targets with tiled layouts only.

    A stack below `_SMALL` bytes has none. The first value to copy counts as one read and one write, each other value
    twice that, and the stack itself as one pass more.
    """
    passes = []
    for loop in graph.loops:
        for carry in loop.carries:
            if (
                not loop.branches
                and graph.tensors[carry.result].bytes >= _SMALL
                and _is_transposed(graph, carry.update)
            ):
                copies = sorted(_combined_values(graph, carry.result))
                passes += [ExtraTraffic(carry.result, loop.parent, 1)] if copies else []
                # A copy of the stack itself, the first of the copies, is one read and one write. Any other value must
                # first be written, which doubles the passes.
                passes += [ExtraTraffic(tensor, loop.parent, 2 if n == 0 else 4) for n, tensor in enumerate(copies)]
    return tuple(passes)


def _is_transposed(graph: OpGraph, update: int) -> bool:
    """Return True if a loop inserts a matmul's result into a stack after one transpose that changes its minor dim.

    `update` is the stack after the insertion. After a second transpose the result is False.
    """
    op = graph.maker(update)
    if op is None or op.kind != "dynamic_update_slice":
        return False
    tensor, turns = op.operands[1], False
    while (op := graph.maker(tensor)) is not None and op.op_class is not OpClass.HEAVY:
        if op.kind == "transpose":
            turns = not turns and minor_moves(graph, op)
        elif op.kind not in _UNMOVED:
            return False
        tensor = op.operands[0]
    return op is not None and op.kind == "dot_general" and turns


def minor_moves(graph: OpGraph, op: Op) -> bool:
    """Return True if a transpose changes the minor (last) dim, dims of size 1 not counted."""
    assert op.rule is not None
    sides = (op.rule.operands[0], op.rule.results[0])
    tensors = (op.operands[0], op.results[0])
    last = []
    for factors, tensor in zip(sides, tensors, strict=True):
        wide = [each for each, size in zip(factors, graph.tensors[tensor].shape, strict=True) if size > 1]
        last.append(wide[-1] if wide else ())
    return last[0] != last[1]


def exchanges_outer(op: Op) -> bool:
    """Return True if a transpose only swaps the first two of three or more dims: the layers of a stack and the next
    dim.
    """
    assert op.rule is not None
    source, turned = op.rule.operands[0], op.rule.results[0]
    return len(source) > 2 and turned == (source[1], source[0], *source[2:])


def _combined_values(graph: OpGraph, stack: int) -> Iterator[int]:
    """Yield the values of a stack's shape, computed from it alone, that an op combines with another value of equal
    shape.

    The stack itself may be one. Numbers that are repeated do not count as another value.
    """
    own, todo = {stack}, [stack]
    while todo:
        tensor = todo.pop()
        meets = False
        for op in graph.users[tensor]:
            if op.kind == "transpose" and exchanges_outer(op):  # only a layout: the stack stays stored layer by layer
                own.add(op.results[0])
                todo.append(op.results[0])
            if op.op_class is not OpClass.POINTWISE or not op.results:
                continue
            shape = graph.tensors[tensor].shape
            others = [
                t for t in op.operands if t not in own and graph.tensors[t].shape == shape and _is_value(graph, t)
            ]
            if others:
                meets = True
            elif graph.tensors[op.results[0]].shape == shape and op.results[0] not in own:
                own.add(op.results[0])
                todo.append(op.results[0])
        if meets:
            yield tensor


def _is_value(graph: OpGraph, tensor: int) -> bool:
    """Return True if a tensor is neither a repeated single number nor generated."""
    op = graph.maker(tensor)
    while op is not None and op.kind in _UNMOVED and op.operands:
        tensor = op.operands[0]
        op = graph.maker(tensor)
    return graph.tensors[tensor].elements > 1 and (op is None or op.op_class is not OpClass.FREE)


_SUBLANES = 8
"""Rows of a register tile on TPUs."""
_SMALL_TILES = (2, 4)
"""Sizes below eight of a second-minor dim for which the compiler uses smaller tiles that the dim fills."""


def tile_row_copies(graph: OpGraph) -> tuple[ExtraTraffic, ...]:
    """Return the row-by-row copies that move a stack's layers out of tiles or back into tiles; for TPUs only.

    A copy belongs to a transpose of layers and next dim outside of loops, of a stack of three dims and at least
    `_SMALL` bytes. Either an argument is transposed, or a stack that a loop filled is on its way to results.
    """
    arguments, results = set(graph.arguments), set(graph.results)
    carried = {carry.result for loop in graph.loops if not loop.branches for carry in loop.carries}
    passes = []
    for op in graph.ops:
        if op.kind != "transpose" or op.loop >= 0 or not exchanges_outer(op):
            continue
        source, turned = graph.tensors[op.operands[0]], graph.tensors[op.results[0]]
        if source.bytes < _SMALL or len(source.shape) != 3:
            continue
        if source.id in arguments and _fills_tiles(source.shape[1]):
            passes.append(ExtraTraffic(source.id, -1, 1, by_rows=True))
        elif source.id in carried and _fills_tiles(turned.shape[1]):
            made = sorted(set(_followed(graph, turned.id)) & results)
            passes += [ExtraTraffic(tensor, -1, 1, by_rows=True) for tensor in made]
    return tuple(passes)


def _fills_tiles(layers: int) -> bool:
    """Return True if `layers` rows fill tiles without padding: a multiple of 8, or 2 or 4."""
    return layers % _SUBLANES == 0 or layers in _SMALL_TILES


def _followed(graph: OpGraph, tensor: int) -> Iterator[int]:
    """Yield a tensor, and the tensors of its shape that elementwise ops compute from it, directly or through others."""
    seen, todo = {tensor}, [tensor]
    while todo:
        current = todo.pop()
        yield current
        for op in graph.users[current]:
            if op.op_class is not OpClass.POINTWISE:
                continue
            for result in op.results:
                if result not in seen and graph.tensors[result].shape == graph.tensors[tensor].shape:
                    seen.add(result)
                    todo.append(result)


SHAPING = frozenset({"reshape", "transpose", "sharding_constraint"})
"""Ops that leave every element unchanged."""


def copied_slices(graph: OpGraph, consumers: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, start, stop) of every slice of a layer that a kernel reads whole; GPU compilers copy such slices.

    `consumers` lists the ops that read each tensor. A copy is live from the slice to its last reader. Slices that are
    fetched from the host are left out.
    """
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER:
            continue
        users, last, copied = list(consumers[op.results[0]]), op.id, False
        while users:
            user = graph.ops[users.pop()]
            last = max(last, graph.needed_until(op.results[0], user.id))
            copied |= takes_whole(user)
            if user.kind in SHAPING:
                users += consumers[user.results[0]]
            elif user.kind == TO_DEVICE:
                copied = False
                break
        if copied:
            yield op.results[0], op.id, last + 1


def takes_whole(op: Op) -> bool:
    """Return True if an op is a kernel into which no slice is fused: a matmul, a convolution or a custom call."""
    if op.kind == "dot_general":
        return op.rule is not None and not is_sum(op.rule)
    return op.kind == "convolution" or op.opaque is not None


@dataclasses.dataclass(frozen=True, slots=True)
class RelaidStack:
    """A stack that is copied into another layout before a loop."""

    source: int
    """Tensor of the stack that the loop slices."""
    loop: Loop
    """Loop that slices the stack."""
    result: int
    """Stack of updated slices that the loop computes; -1 for none."""
    better: tuple[int, ...]
    """Shape of a stack that needs no copy: the loop's dim first, then the dot's batch dims, then the others."""


def relaid_stacks(graph: OpGraph, consumers: Sequence[Sequence[int]]) -> Iterator[RelaidStack]:
    """Yield the stacks that are copied because a dot's batch dims do not lead, each once.

    `consumers` lists the ops that read each tensor.
    """
    results = {carry.update: carry.result for loop in graph.loops for carry in loop.carries}
    seen = set()
    for op in graph.ops:
        if not is_batched(op) or not takes_whole(op) or op.loop < 0:
            continue
        for tensor, factors in zip(op.operands, op.rule.operands[:2] if op.rule else (), strict=False):
            batch = _batch_dims(op, tensor, factors, graph)
            chain = list(_chain(graph, tensor))
            if batch == set(range(len(batch))) or not chain or chain[-1].op_class is not OpClass.LAYER:
                continue
            source = chain[-1]
            if source.id in seen:
                continue
            seen.add(source.id)
            shape = [size for size in graph.tensors[tensor].shape if size > 1]
            order = [*sorted(batch), *(dim for dim in range(len(shape)) if dim not in batch)]
            better = (graph.tensors[source.operands[0]].shape[0], *(shape[dim] for dim in order))
            result = _stack_of(graph, consumers, chain, results)
            yield RelaidStack(source.operands[0], graph.loops[source.loop], result, better)


def _batch_dims(op: Op, tensor: int, factors: Sequence[Sequence[int]], graph: OpGraph) -> set[int]:
    """Return the dims of the operand `tensor` that the other operand and the result have too.

    `factors` are the factors of its dims. Dims of size 1 are neither returned nor counted in the numbers.
    """
    assert op.rule is not None
    left, right, out = ({f for dim in dims for f in dim} for dims in (*op.rule.operands[:2], op.rule.results[0]))
    wide = [dim for dim, size in zip(factors, graph.tensors[tensor].shape, strict=True) if size > 1]
    return {place for place, dim in enumerate(wide) if left & right & out & set(dim)}


def _chain(graph: OpGraph, tensor: int) -> Iterator[Op]:
    """Yield the ops that lead to an operand, backwards up to a slice of a stack.

    They are reshapes that only add or drop dims of size 1, and updates of a part; the last op may be of any kind.
    Nothing is yielded for an argument.
    """
    while (op := graph.maker(tensor)) is not None:
        yield op
        shapes = [[size for size in graph.tensors[t].shape if size > 1] for t in (*op.operands[:1], tensor)]
        if (
            op.op_class is OpClass.LAYER
            or op.kind not in ("reshape", "dynamic_update_slice")
            or shapes[0] != shapes[-1]
        ):
            return
        tensor = op.operands[0]


def _stack_of(
    graph: OpGraph, consumers: Sequence[Sequence[int]], chain: Sequence[Op], results: Mapping[int, int]
) -> int:
    """Return the stack into which a loop inserts an updated slice, as its tensor after the loop; -1 for none.

    - `consumers`: the ops that read each tensor.
    - `chain`: ops of `_chain`, whose updates are followed.
    - `results`: maps a carried value's update to its tensor after the loop.
    """
    todo = [tensor for op in chain if op.kind == "dynamic_update_slice" for tensor in op.results]
    while todo:
        for user in (graph.ops[number] for number in consumers[todo.pop()]):
            if user.kind == "dynamic_update_slice" and user.op_class is OpClass.LAYER:
                return results.get(user.results[0], -1)
            if user.kind in SHAPING or user.kind == "broadcast_in_dim":
                todo += user.results
    return -1


_LAID_OUT = frozenset({"reshape", "transpose", "slice", "sharding_constraint"})
"""Ops that change the layout of a stack or of a slice."""
_PASSED_ON = _LAID_OUT | {"convert", "dynamic_slice"}


def sliced_loop_inputs(graph: OpGraph) -> frozenset[int]:
    """Return the values, computed outside of the loops that slice them layer by layer, from which such stacks are laid
    out.

    Arguments and generated values are left out.
    """
    loop_inputs = set()
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER:
            continue
        tensor = op.operands[0]
        while (maker := graph.maker(tensor)) is not None and maker.kind in _LAID_OUT and maker.loop != op.loop:
            tensor = maker.operands[0]
        if maker is not None and maker.loop != op.loop and maker.op_class is not OpClass.FREE:
            loop_inputs.add(tensor)
    return frozenset(loop_inputs)


def selected_slices(graph: OpGraph, apart: frozenset[int]) -> dict[int, int]:
    """Map each value that a loop selects among slices of stacks and that several matmuls read to the last of these
    matmuls.

    The values in `apart`, which are stored in any case, are left out.
    """
    last_matmuls: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == "select" and op.loop >= 0 and all(_is_slice(graph, value) for value in op.operands[1:]):
            matmuls = _matmuls(graph, op.results[0])
            if len(matmuls) > 1 and op.results[0] not in apart:
                last_matmuls[op.results[0]] = max(matmuls)
    return last_matmuls


def _is_slice(graph: OpGraph, tensor: int) -> bool:
    """Return True if a tensor is one layer of a stack, possibly after layout ops and slices."""
    maker = graph.maker(tensor)
    while maker is not None and maker.kind in _LAID_OUT:
        maker = graph.maker(maker.operands[0])
    return maker is not None and maker.kind == "dynamic_slice" and maker.op_class is OpClass.LAYER


def _matmuls(graph: OpGraph, tensor: int) -> set[int]:
    """Return the ids of matmuls that consume a tensor, directly or after layout ops, casts and slices."""
    matmuls = set()
    for user in graph.users[tensor]:
        if user.kind == "dot_general":
            matmuls.add(user.id)
        elif user.kind in _PASSED_ON:
            matmuls |= _matmuls(graph, user.results[0])
    return matmuls
