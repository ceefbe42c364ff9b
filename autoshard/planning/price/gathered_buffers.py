"""Buffers of collectives, and the results that a step gathers at its end."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES, TILE_ROWS
from autoshard.graph import Op, OpGraph
from autoshard.planning.price.device_memory import LiveBuffer, collective_buffers, unsummed_bytes
from autoshard.planning.price.reshard_times import reshard_overlap, reshard_time
from autoshard.planning.price.sparse_core_rows import OffloadedGather
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.space.overlap import SUMS
from autoshard.planning.xla.table_layouts import table_copies


def gathered_results(
    model: Model, choices: NDArray[np.int64], local_of: Callable[[int], Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Yield the results that are gathered at the end of the step, and their bytes on a device then.

    An example are whole weights with split state, whose updates are computed in shards.

    - `local_of`: dims of a tensor's shard.
    """
    inputs = dict(model.structure.ties)
    for reshard in model.reshards:
        tensor = inputs.get(reshard.tensor, -1) if reshard.op < 0 else -1
        steps = reshard_time(model, reshard, choices).steps if tensor >= 0 else ()
        if any(kind == "all-gather" for kind, *_ in steps):
            itemsize = model.graph.tensors[tensor].itemsize
            yield reshard.tensor, model.padding.shard_bytes(tensor, local_of(tensor), itemsize)


def copied_into_place(
    model: Model, gathered: Mapping[int, int], local_of: Callable[[int], Sequence[int]]
) -> Iterator[LiveBuffer]:
    """Yield the copies that TPU compilers make where results are gathered: of donated arguments, and of the results.

    A loop that reads a donated argument reads a copy of it, since the gathered value gets the argument's place. A value
    that is gathered in another layout gets its place later, and the argument is not copied. A loop that updates a stack
    gets the stack's shard before the layers run. If these read a narrow copy, the first copy is then narrowed as they
    begin. Each gathered value is copied into its place. Until then it lies in main memory if it exceeds on-chip memory,
    or on chips of several cores. Evidence: docs/compiler_behaviour.md, "Results that are gathered".

    - `gathered`: bytes of each gathered result (`gathered_results`).
    - `local_of`: dims of a tensor's shard.
    """
    graph, inputs = model.graph, dict(model.structure.ties)
    arguments = zip(graph.arguments, model.program.arguments, strict=True)
    donated = {tensor for tensor, argument in arguments if argument.donated}
    chip = model.mesh.topology.chip
    room = 0 if chip.cores_per_chip > 1 else chip.vmem_bytes
    carried = {carry.init for loop in graph.loops for carry in loop.carries}
    narrowed = {
        tensor: (start, width / graph.tensors[tensor].itemsize)
        for (tensor, start, _), width in model.liveness.widths.items()
        if tensor in donated & carried and width < graph.tensors[tensor].itemsize
    }
    for result, size in gathered.items():
        maker, tensor = graph.maker(result), inputs[result]
        if maker is not None and size > room:
            yield LiveBuffer(maker.id, len(graph.ops), size, "temporaries", result)
        loops = [graph.loops[op.loop] for op in graph.users[tensor] if op.loop >= 0]
        if tensor not in donated or not loops or not _keeps_layout(local_of(result), local_of(tensor)):
            continue
        if tensor not in narrowed:
            yield LiveBuffer(0, max(loop.stop for loop in loops), size, "temporaries", tensor)
            continue
        start, share = narrowed[tensor]
        yield LiveBuffer(0, start, size, "temporaries", tensor)
        # Stacks are narrowed one after the other, each into the copy that it replaces.
        yield LiveBuffer(start, start + 1, round((1.0 - share) * size), "temporaries", tensor)


def _keeps_layout(shard: Sequence[int], whole: Sequence[int]) -> bool:
    """Return True if a value is gathered in the layout of its shards: in one dim, whose shards fill tiles."""
    dims = [dim for dim, (part, size) in enumerate(zip(shard, whole, strict=True)) if part != size]
    tile = (LANES, TILE_ROWS)[len(whole) - 1 - dims[0]] if dims and dims[0] >= len(whole) - 2 else 1
    return len(dims) == 1 and shard[dims[0]] % tile == 0


def held_by_collectives(
    model: Model, choices: NDArray[np.int64], offloaded: Mapping[int, OffloadedGather]
) -> Iterator[LiveBuffer]:
    """Yield the buffers of collectives: on GPUs of all, on TPUs of those that gather tables off the chip.

    - `offloaded`: gathers that sparse cores execute, by op.
    """
    apart = model.mesh.topology.traits.separate_collective_buffers

    def has_buffer(reshard: Reshard) -> bool:
        """Return True for all reshards on GPUs, and on TPUs for those of tables that gathers read."""
        return apart or reshard.op >= 0 and model.graph.ops[reshard.op].kind == "gather"

    steps = [reshard_time(model, each, choices).steps if has_buffer(each) else () for each in model.reshards]
    # TPU compilers gather a table onto the chip if it fits there.
    least = 0 if apart else model.residency.room
    for held in (LiveBuffer(*each) for each in collective_buffers(model, choices, steps)):
        gather = offloaded.get(held.start)
        # Sparse cores read a copy with rows in order, once the gathered table is freed.
        if held.size > least if gather is None else not gather.copied:
            yield held


def exchanged_views(
    model: Model, choices: NDArray[np.int64], local_of: Callable[[int], Sequence[int]]
) -> Iterator[LiveBuffer]:
    """Yield the views of arguments that a reshape makes for a loop, where a collective makes them tensors of their own.

    An example is a batch in microbatches: split by rows at the entry, and by the rows of each microbatch in the loop.

    - `local_of`: dims of a tensor's shard.
    """
    graph = model.graph
    stored = {tensor for tensor, _, _ in model.liveness.buffers}
    for reshard in model.reshards:
        if reshard.op < 0 or graph.ops[reshard.op].kind != "reshape" or reshard.tensor not in graph.arguments:
            continue
        view = graph.ops[reshard.op].results[0]
        loops = [graph.loops[op.loop] for op in graph.ops if op.loop >= 0 and view in op.operands]
        if view in stored or not loops or not reshard_time(model, reshard, choices).steps:
            continue
        size = model.padding.shard_bytes(view, local_of(view), graph.tensors[view].itemsize)
        yield LiveBuffer(reshard.op, max(loop.stop for loop in loops), size, "temporaries", view)


def partial_scatters(model: Model, choices: NDArray[np.int64]) -> Iterator[LiveBuffer]:
    """Yield the partial results of scatters that a reduce-scatter sums right after, besides gradients of state.

    The scatter adds rows up into a whole table. One that has a copy with padded rows (`table_copies`) is left out.
    Evidence: docs/compiler_behaviour.md, "Scatters before their sum".
    """
    for reshard in model.reshards:
        op = model.graph.ops[reshard.op] if reshard.op >= 0 else None
        if op is None or op.kind != "scatter" or model.nodes[reshard.source].kind != "op":
            continue
        if reshard_overlap(model, reshard, choices) in SUMS:
            continue
        state = model.nodes[reshard.source].states[[int(choices[reshard.source])]]
        copies = table_copies(model.graph, op, state, model.axis_sizes, model.mesh.topology)
        padded = copies is not None and copies.copied.any()
        if not padded and any(kind == "reduce-scatter" for kind, *_ in reshard_time(model, reshard, choices).steps):
            size = unsummed_bytes(model, reshard, choices)
            yield LiveBuffer(reshard.op, reshard.op + 1, size, "temporaries", reshard.tensor)


def with_whole_sums(model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer]) -> list[LiveBuffer]:
    """Return the buffers in which scatters' results that are summed whole and then split are whole.

    Kernels that read the shard slice the sum themselves, so no shard is stored. Evidence: docs/compiler_behaviour.md,
    "Scatters before their sum".
    """
    whole: dict[int, int] = {}
    for reshard in model.reshards:
        op = model.graph.ops[reshard.op] if reshard.op >= 0 else None
        if op is None or op.kind != "scatter" or op.loop >= 0 or model.nodes[reshard.source].kind != "op":
            continue
        if any(kind == "all-reduce" for kind, *_ in reshard_time(model, reshard, choices).steps):
            whole[reshard.tensor] = unsummed_bytes(model, reshard, choices)
    return [each._replace(size=max(each.size, whole.get(each.tensor, 0))) for each in buffers]


def with_moved_slices(
    model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer], local_of: Callable[[int], Sequence[int]]
) -> list[LiveBuffer]:
    """Return the buffers in which the slices that collectives move are stored apart from the value that they slice.

    If only the slice reads this value, its buffer ends there. Otherwise slices are parts of the value, whose buffer
    stands for both. Evidence: docs/compiler_behaviour.md, "Slices that collectives move".

    - `local_of`: dims of a tensor's shard.
    """
    graph, moved = model.graph, dict[int, tuple[int, int]]()
    for reshard in model.reshards:
        op = graph.ops[reshard.op] if reshard.op >= 0 else None
        ends = model.nodes[reshard.source].kind, model.nodes[reshard.target].kind
        if op is None or op.kind != "slice" or op.loop >= 0 or ends != ("op", "cluster"):
            continue
        if reshard_time(model, reshard, choices).steps and (source := _sliced_alone(graph, op)) >= 0:
            moved[source] = op.id, reshard.path.itemsize // reshard.combined
    apart: list[LiveBuffer] = []
    for each in buffers:
        op_id, itemsize = moved.get(each.tensor, (each.stop, 0))
        if each.start <= op_id < each.stop - 1:
            result = graph.ops[op_id].results[0]
            size = model.padding.shard_bytes(result, local_of(result), itemsize)
            apart.append(each._replace(stop=op_id + 1))
            apart.append(each._replace(start=op_id, size=size, tensor=result))
        else:
            apart.append(each)
    return apart


def _sliced_alone(graph: OpGraph, op: Op) -> int:
    """Return the value that a slice alone reads, or its cast; -1 if it has other readers."""
    tensor = op.operands[0]
    while len(graph.users[tensor]) == 1:
        maker = graph.maker(tensor)
        if maker is None or maker.kind != "convert":
            return tensor
        tensor = maker.operands[0]
    return -1


def waiting_gradients(
    model: Model, choices: NDArray[np.int64], clock_of: Callable[[], NDArray[np.float64]]
) -> Iterator[LiveBuffer]:
    """Yield the gradients outside of loops that wait whole for a sum.

    TPU compilers run sums that leave a shard late: as if links added one gradient after the other while later kernels
    run. A gradient that stays whole waits for its update. Its matmul cannot compute the update, as the sum comes first.
    Evidence: docs/compiler_behaviour.md, "Gradients that wait for their sum".

    - `clock_of`: returns the seconds of a step before each op, [ops + 1].
    """
    graph, stores, free, clock = model.graph, model.liveness.stores, 0.0, None
    updated = {tensor: fusion.root for fusion in model.liveness.fusions for tensor in fusion.writes}
    # Other updates have buffers that begin at the matmul, and stand for its result.
    apart = model.liveness.reserved.union(updated).difference(
        tensor for tensor, *_ in model.liveness.buffers if tensor not in model.liveness.reserved
    )
    for reshard in sorted(model.reshards, key=lambda each: each.op):
        if reshard.op < 0 or model.nodes[reshard.source].kind != "op" or graph.ops[reshard.op].loop >= 0:
            continue
        if reshard_overlap(model, reshard, choices) not in SUMS:
            continue
        steps = reshard_time(model, reshard, choices).steps
        matmul = graph.ops[reshard.op].kind in ("dot_general", "convolution")
        stored = stores.get(reshard.tensor, -1)
        if matmul and stored in apart and any(kind == "all-reduce" for kind, *_ in steps):
            size = unsummed_bytes(model, reshard, choices)
            yield LiveBuffer(reshard.op, updated[stored], size, "gradients", reshard.tensor)
            continue
        seconds = sum(seconds for kind, _, _, seconds in steps if kind == "reduce-scatter")
        if seconds > 0.0:
            clock = clock_of() if clock is None else clock
            free = max(free, clock[reshard.op + 1]) + seconds
            stop = min(int(np.searchsorted(clock, free)), len(graph.ops))
            yield LiveBuffer(reshard.op, stop, unsummed_bytes(model, reshard, choices), "gradients", reshard.tensor)
