"""Prices of heavy ops by kind: seconds, temporary memory and collectives of one execution in every strategy.

`OP_MODELS` lists the kinds that differ from the default `OpModel()`.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES
from autoshard.graph import IN, OUT, FactorKind, Op, OpGraph, is_sum, rounds_rows
from autoshard.planning.space.call_models import CALL_MODELS, call_kind
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_work import OpModel, OpWork, Side, matrix_seconds, no_memory, sides, streamed_seconds
from autoshard.planning.xla.array_layouts import SORTS, cumulative_copies, scratch_itemsize
from autoshard.planning.xla.axis_assignments import WHOLE, Seconds, local_elements, relabel
from autoshard.planning.xla.image_layouts import shifted_images, shifted_span
from autoshard.planning.xla.table_layouts import Copies, slices_inner, table_copies


_ROOM = 0.75
"""Share of on-chip memory within which a table is brought there: on v5e 96 of 128 MiB was, and 104 was not.

So are results of scatters on chips with SparseCores: on v6e 80 MiB were there, and 104 were not.
"""
FOLDED_OPS = frozenset(
    {"slice", "concatenate", "pad", "reverse", "broadcast_in_dim", "reshape", "dynamic_update_slice", IN, OUT}
)
"""Ops that compilers fold into adjacent fusions, and updates; the fusion's memory traffic covers theirs."""


def _gathered(op: Op) -> tuple[Side, Side]:
    """Return the indices as read, and the results: `_row_bytes` counts the rows of the table."""
    operands, results = sides(op)
    return operands[1:], results


def _scattered(op: Op) -> tuple[Side, Side]:
    """Return the indices and updates as read, and the results, which are filled before rows are added."""
    operands, results = sides(op)
    return operands[len(results) :], results


def _gathered_bytes(work: OpWork, size: Seconds) -> Seconds:
    """Return the bytes of a gather, given those of its indices and results, [states].

    TPU compilers write rows of a table that has its rows in order in registers, padded if they are narrower.
    """
    copies = table_copies(work.graph, work.op, work.states, work.axes, work.compute.topology)
    size = size + _row_bytes(work, work.op.operands[0], work.op.results[0], copies) + _turned_bytes(work)
    if copies is None:
        return size + _padding_bytes(work)
    return size + np.where(copies.in_order, _padding_bytes(work), 0.0) + copies.traffic + _masked_bytes(work)


def _masked_bytes(work: OpWork) -> Seconds:
    """Return the bytes of the kernels that clear rows of other shards before rows are summed on TPUs, [states].

    The rows are written in float32 if they are rounded after the sum. A copy brings them into the layout of the sum,
    and a select clears those whose index another shard has. Every other value that these kernels read and write is on
    the chip if it fits, and all are if two fit. Seen on v5e in rows of 60 to 768 MiB.
    """
    graph, op, rule = work.graph, work.op, work.op.rule
    assert rule is not None
    table, found = ({f for dim in side for f in dim} for side in (rule.operands[0], rule.results[0]))
    record = graph.tensors[op.results[0]]
    written = record.itemsize if not rounds_rows(graph, op) else 4
    local = local_elements(factor_states(work.states, rule.results[0]), record.shape, work.axes)
    near, room = local * written, work.residency.room
    size = np.where(near <= room / 2, 0.0, np.where(near <= room, 2.0, 4.0)) * near
    split = np.isin(work.states, list(table - found)).any(axis=1)
    return np.where(split, size + local * (written - record.itemsize), 0.0)


def _turned_bytes(work: OpWork) -> Seconds:
    """Return the traffic of the copies around a gather along an inner dim on TPUs, [states]; 0 for other gathers.

    An example is the resize of images in a batch. The kernel takes the indexed dim outermost, and gives its result so.
    A copy before it and one after it change the layouts. They write and read the table and the result once more, on the
    chip if these fit there. Seen in resizes along two dims on v5e, of tensors of 8 to 512 MiB.
    """
    if not work.compute.topology.traits.tiled or not slices_inner(work.graph, work.op):
        return work.zeros
    graph, op, rule, size = work.graph, work.op, work.op.rule, work.zeros
    room, ratio = work.residency.room, work.residency.ratio or 1.0
    assert rule is not None
    for tensor, dims in ((op.operands[0], rule.operands[0]), (op.results[0], rule.results[0])):
        record = graph.tensors[tensor]
        local = local_elements(factor_states(work.states, dims), record.shape, work.axes) * record.itemsize
        size = size + 2.0 * np.where(local <= room, local / ratio, local)
    return size


def _scattered_bytes(work: OpWork, size: Seconds) -> Seconds:
    """Return the bytes of a scatter, given those of its indices, updates and results, [states].

    Rows are read and written, as XLA's `HloCostAnalysis` counts. TPU compilers sort the indices, and read the updates
    row by row in that order, unless they update the table in its compact layout.
    """
    op, updates = work.op, work.op.operands[-1]
    copies = table_copies(work.graph, op, work.states, work.axes, work.compute.topology)
    rows = 2.0 * _row_bytes(work, op.results[0], updates, copies)
    if work.compute.topology.traits.tiled and op.rule is not None:
        record = work.graph.tensors[updates]
        local = local_elements(factor_states(work.states, op.rule.operands[-1]), record.shape, work.axes)
        row, register = _local_row(work, op.rule.operands[-1]) * record.itemsize, float(LANES * record.itemsize)
        bursts, registers = (np.ceil(row / least) * least for least in (work.compute.burst_bytes, register))
        # The padding of rows to registers is part of the traffic of copies.
        sorts = True if copies is None else copies.in_order
        apart = np.where(sorts, np.maximum(bursts - registers, 0.0), 0.0)
        rows = rows + local * record.itemsize * apart / np.maximum(row, 1.0)
    return size + rows + (work.zeros if copies is None else copies.traffic)


def _padding_bytes(work: OpWork) -> Seconds:
    """Return the bytes that padding to registers adds to the rows that a gather writes, [states]; 0 off TPUs."""
    graph, op = work.graph, work.op
    if op.rule is None or not work.compute.topology.traits.tiled:
        return work.zeros
    record = graph.tensors[op.results[0]]
    local = local_elements(factor_states(work.states, op.rule.results[0]), record.shape, work.axes) * record.itemsize
    row, register = _local_row(work, op.rule.results[0]) * record.itemsize, float(LANES * record.itemsize)
    return np.where(
        row > record.itemsize, local * (np.ceil(row / register) * register / np.maximum(row, 1.0) - 1.0), 0.0
    )


def _local_row(work: OpWork, dims: tuple[tuple[int, ...], ...]) -> Seconds:
    """Return the local elements of one row that a gather or scatter reads, [states].

    - `dims`: factors of the dims of the tensor with a place for each row. Factors that indices have too select rows,
      such as the features of stacked tables.
    """
    op, states = work.op, work.states
    assert op.rule is not None
    table, indices, found = ({f for dim in side for f in dim} for side in (*op.rule.operands[:2], dims))
    copied = (table & found) - indices
    sizes = [size if f in copied else 1 for f, size in enumerate(op.rule.sizes)]
    return local_elements(np.where(np.isin(states, list(copied)), states, WHOLE), sizes, work.axes)


def _row_bytes(work: OpWork, table: int, rows: int, copies: Copies | None) -> Seconds:
    """Return the bytes of one pass over rows of a table, each in whole bursts of main memory, [states].

    A table on the chip has no bursts, and its bytes count as `Residency.streamed` says. TPU compilers bring a table
    there if it fits (`_ROOM`), and if it is fewer bytes than the bursts of its rows. A table with a copy has the layout
    of the copy there. The result of a scatter is there if it fits. Seen on v5e for experts by capacity, segment sums
    and embedding tables of 8 to 240 MiB. If several cores are one device, tables stay in main memory, which alone the
    cores share: 8 and 32 MiB on v5p, 32 MiB on v4. The result is 0 for an op without a rule.

    - `table`: tensor that contains the rows.
    - `rows`: operand or result of a gather or scatter with one place for each row that is read or written.
    - `copies`: copies of the table in other layouts; None for an op that has none. The result includes writing the
      copy of the table itself.
    """
    graph, op, states, axes = work.graph, work.op, work.states, work.axes
    if op.rule is None:
        return work.zeros
    dims = dict(zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True))
    record, held = graph.tensors[rows], graph.tensors[table]
    row = _local_row(work, dims[rows]) * record.itemsize
    local = local_elements(factor_states(states, dims[rows]), record.shape, axes) * record.itemsize
    whole = local_elements(factor_states(states, dims[table]), held.shape, axes) * held.itemsize
    residency, burst = work.residency, work.compute.burst_bytes
    far = local * np.ceil(row / burst) * burst / np.maximum(row, 1.0)
    copied = work.zeros if copies is None else copies.copied
    chip = work.compute.topology.chip
    if chip.cores_per_chip > chip.devices_per_chip:
        return far + copied
    near = residency.streamed(table, whole) / np.maximum(whole, 1.0)
    stays = near < 1.0
    if residency.ratio:
        register = LANES * record.itemsize
        padded = np.ceil(row / register) * register / np.maximum(row, 1.0)
        laid_out = whole * padded if copies is None else copies.table
        made = op.kind == "scatter" and chip.sparse_core_collectives == "none"
        fits = laid_out <= (residency.room if made else _ROOM * chip.vmem_bytes)
        brought = fits & (far >= laid_out) if op.kind == "gather" else fits
        near = np.where(brought, laid_out / np.maximum(whole, 1.0) / residency.ratio, near)
        stays = fits & (brought | stays)
        copied = np.where(stays, copied / residency.ratio, copied)
    return np.where(stays, local * near, far) + copied


def _table_memory(work: OpWork) -> list[tuple[int, int, Seconds]]:
    """Return the bytes of the copies of a gather's or scatter's table and rows, with the ops during which they live."""
    copies = table_copies(work.graph, work.op, work.states, work.axes, work.compute.topology)
    return [] if copies is None else list(copies.held)


def _sort_seconds(work: OpWork, size: Seconds) -> Seconds:
    """Return the seconds of a sort along one dim, [states]; `size` has the bytes of its memory traffic."""
    graph, op = work.graph, work.op
    first = graph.tensors[op.operands[0]]
    elements: Seconds | int = first.elements
    if op.rule is not None:
        elements = local_elements(factor_states(work.states, op.rule.operands[0]), first.shape, work.axes)
    arrays = sum(graph.tensors[t].shape == first.shape for t in op.operands)
    return work.compute.sort_seconds(elements, _sorted_length(graph, op), arrays, size)


def _sorted_length(graph: OpGraph, op: Op) -> int:
    """Return the size of the sorted dim: the largest that is not parallel, else the last."""
    kinds = () if op.rule is None else zip(op.rule.sizes, op.rule.kinds, strict=True)
    sizes = [size for size, kind in kinds if kind is not FactorKind.PARALLEL]
    return max(sizes, default=graph.tensors[op.operands[0]].shape[-1])


def _cumulative_seconds(work: OpWork, size: Seconds) -> Seconds:
    """Return the seconds of a cumulative op or pool, bound by memory traffic, [states].

    Each copy is read and written, and is summed in two steps: three times the traffic `size` for each.
    """
    copies = cumulative_copies(work.graph, work.op, work.backend)
    return streamed_seconds(work, size * (3 * copies if copies else 1))


def _scratch_memory(work: OpWork) -> NDArray[np.int64]:
    """Return the bytes that a sort's or cumulative op's copies occupy, [states]; 0 on backends that sort in place."""
    graph, op = work.graph, work.op
    scratch = scratch_itemsize(graph, op, work.backend)
    if not scratch:
        return no_memory(work)
    states = work.states if op.rule is None else factor_states(work.states, op.rule.operands[0])
    return (local_elements(states, graph.tensors[op.operands[0]].shape, work.axes) * scratch).astype(np.int64)


_DIRECT = 256
"""Longest dim that a TPU transforms by one matrix.

Longer multiples of 128 take two matrices, and other lengths one.
"""
_FLOAT32 = 6
"""Number of bfloat16 products in one float32 product."""


def _fft_seconds(work: OpWork, size: Seconds) -> Seconds:
    """Return the seconds of an fft, [states]; a TPU multiplies by matrices, one dim after the other.

    Other backends, and an fft without a rule, are bound by the memory traffic of `size` bytes.

    Real and imaginary parts are multiplied separately. A complex product takes three real products, a product with real
    input two. Each stage reads and writes all elements, and two stages have layout changes around them.

    Evidence: docs/compiler_behaviour.md, "FFT as matmuls".
    """
    graph, op, compute = work.graph, work.op, work.compute
    if op.rule is None or not compute.topology.traits.rounds_operands:
        return streamed_seconds(work, size)
    ends = ((op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0]))
    record, dims = max(((graph.tensors[t], dims) for t, dims in ends), key=lambda side: side[0].itemsize)
    local = local_elements(factor_states(work.states, dims), record.shape, work.axes)
    real = not graph.tensors[op.operands[0]].dtype.startswith("complex")
    kinds = zip(op.rule.sizes, op.rule.kinds, strict=True)
    total = compute.op_seconds(work.zeros, 0.0)
    for length in (n for n, kind in kinds if kind is FactorKind.NEED_REPLICATION and n > 1):
        one_matrix = length <= _DIRECT or length % LANES
        if not one_matrix:
            total = total + compute.memory_seconds(2.0 * size)
        for stage in (length,) if one_matrix else (LANES, length // LANES):
            products = 2 if real else 3
            size_moved = 2.0 * local * record.itemsize
            total = total + compute.stage_seconds(local / stage, stage, _FLOAT32 * products, size_moved)
            real = False
    return total


def _dot_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of a dot, [states].

    A dot that is a sum is bound by the traffic of `size` bytes, unless the backend packs blocks. Higher precision adds
    passes.

    - `size`: bytes of memory traffic.
    - `fused`: further bytes that fused operands read.
    """
    op, compute, further = work.op, work.compute, work.further_passes
    assert op.rule is not None
    m, n, k, batch = _matmul_sizes(work)
    if is_sum(op.rule) and not compute.topology.traits.packs_blocks:
        return streamed_seconds(work, size + fused)
    once = compute.dot_seconds(m, n, k, batch, work.dtype, size, fused)
    if not further:
        return once
    flops = 2.0 * m * n * k * batch * further
    return once + compute.extra_pass_seconds(flops, work.dtype, compute.matmul_efficiency(m, n, k, batch))


def _matmul_sizes(work: OpWork) -> tuple[Seconds, ...]:
    """Return the local sizes m (left only), n (right only), k (contracted) and batch of a dot, each [states]."""
    rule, states, axes = work.op.rule, work.states, work.axes
    assert rule is not None
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    groups = (left - right, right - left, (left & right) - out, left & right & out)
    sizes = []
    for group in groups:
        masked = [size if f in group else 1 for f, size in enumerate(rule.sizes)]
        mapping = [f if f in group else WHOLE for f in range(len(rule.sizes))]
        sizes.append(local_elements(relabel(states, mapping), masked, axes))
    return tuple(sizes)


def _convolution_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of a convolution on the busiest device, [states].

    - `size`: bytes of memory traffic.
    - `fused`: further bytes that fused operands read.
    """
    share, steps = work.sloped_share(), work.op.steps * work.share()
    seconds = matrix_seconds(work, size + fused, share, steps, _convolution_efficiency(work))
    return seconds + work.compute.memory_seconds(_shifted(work)[1])


def _shifted(work: OpWork) -> tuple[Seconds, Seconds]:
    """Return the bytes of shifted images that a convolution reads, and of the passes over them, [states]."""
    return shifted_images(work.graph, work.op, work.padding.images, work.states, work.axes)


def _shifted_memory(work: OpWork) -> list[tuple[int, int, Seconds]]:
    """Return the bytes of shifted images, with the ops during which they live."""
    held = _shifted(work)[0]
    return [(*shifted_span(work.graph, work.op), held)] if held.any() else []


def _convolution_efficiency(work: OpWork) -> Seconds | None:
    """Return the share of the matrix unit's peak that a local convolution reaches, computed as one matmul, [states].

    Each window is a row of the matmul's left side. The window's elements are contracted together with the features; in
    the gradient of a kernel they are its results. None for grouped convolutions, which have no such form.
    """
    rule = work.op.rule
    assert rule is not None
    m, n, k, batch = _matmul_sizes(work)
    if (batch > 1).any():
        return None
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    window, results, apart = (
        math.prod(rule.sizes[f] for f in group)
        for group in (right - left - out, out - left - right, left - right - out)
    )
    return work.compute.matmul_efficiency(m * results / apart, n / window, k * window)


OP_MODELS: Mapping[str, OpModel] = {
    "gather": OpModel(_gathered, _gathered_bytes, copies=_table_memory),
    "scatter": OpModel(_scattered, _scattered_bytes, copies=_table_memory),
    **dict.fromkeys(SORTS, OpModel(streamed=_sort_seconds, memory=_scratch_memory)),
    "reduce_window": OpModel(streamed=_cumulative_seconds, memory=_scratch_memory),
    "fft": OpModel(streamed=_fft_seconds),
    "dot_general": OpModel(busy=_dot_seconds),
    "convolution": OpModel(busy=_convolution_seconds, copies=_shifted_memory),
    **CALL_MODELS,
}
"""Models by kind of op, and by kind of custom call."""
_OTHER = OpModel()
"""Model of all other ops."""


def model_of(op: Op) -> OpModel:
    """Return the model of an op by its `call_kind`; the default model for kinds that `OP_MODELS` lacks."""
    return OP_MODELS.get(call_kind(op), _OTHER)


def heavy_seconds(work: OpWork) -> Seconds:
    """Return the roofline seconds of one execution, [states]: local matrix work against local memory traffic.

    Ops that compilers fold into fusions (`FOLDED_OPS`) take none. Gathers whose rows are not stored take what the
    kernels that fetch the rows read. An op without FLOPs or without a rule is priced by `OpModel.streamed`. Scalars
    have no traffic.
    """
    graph, op, residency, model = work.graph, work.op, work.residency, model_of(work.op)
    if op.kind in FOLDED_OPS:
        return work.zeros
    fetches = residency.fetches.get(op.results[0], 0) if op.results else 0
    read, written = model.sides(op)
    size, fused = work.zeros, work.zeros
    for number, (tensor, dims) in enumerate((*read, *(() if fetches else written))):
        record = graph.tensors[tensor]
        if not record.shape:
            continue
        local, ratio = np.full(len(work.states), float(record.elements)), 1.0
        if dims:
            states = factor_states(work.states, dims)
            local = local_elements(states, record.shape, work.axes)
            ratio = work.padding.ratio(tensor, states, work.axes)
        traffic = local * ratio * record.itemsize
        if number < len(read):
            size = size + residency.streamed(tensor, traffic)
            fused = fused + residency.fused_operand_bytes(tensor, traffic)
        else:
            size = size + residency.stored_bytes(tensor, traffic)
    size = model.traffic(work, size)
    if fetches:
        return work.compute.memory_seconds(size * fetches)
    return model.busy(work, size, fused) if op.flops and op.rule is not None else model.streamed(work, size + fused)
