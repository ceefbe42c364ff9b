"""Layouts of tables on TPUs: the copies that gathers and scatters of rows make of tables, rows and updated parameters.

A table may have several dims of rows, such as the features of stacked embedding tables, and of columns. The compiler
(libtpu 0.0.52) reads and updates it with its rows in order, one after the other. Or it leaves the table in its compact
layout, where a dim of rows is along the lanes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES, Topology, tile_padding
from autoshard.graph import Op, OpClass, OpGraph, rounds_rows
from autoshard.planning.xla.axis_assignments import WHOLE, Seconds, States, local_elements, relabel
from autoshard.planning.xla.image_layouts import convolved


MAX_UNPADDED_COLUMNS = 32
"""Largest number of columns of a table that a gather reads in its compact layout: 32 was observed, 64 was not."""
_LARGEST_COPY = 0.05
"""Share of a device's memory up to which a scatter has a copy of which half or more is padding.

Compiled alone for v5e of 16 GiB, a table of 812 MiB of padded rows has one, and one of 832 MiB has none. On v6e the
limit is between 1,536 and 1,792 MiB, on v5p between 4 and 5 GiB.
"""
_BINARY = 2**30 / 1e9
"""Bytes of a GiB for each byte of a GB; the memory of TPUs is sold in GB and has as many GiB."""
_SUBLANES = 8
"""Columns of the compact layout that one tile holds."""
_LOOPED = 5.0
"""Passes over a gradient whose features a scatter has joined: 2 of a reshape, and 3 of a loop.

The loop moves one feature and column at a time through on-chip memory. Compiled for v5e: 7 tables of 1,048,576 rows of
16 columns, AdamW; 9 and 12 of 16 columns; 10 to 15 of 4 columns in bfloat16. A reshape alone moves columns in words of
4 bytes that do not fill a tile: 7 to 15 tables of 4 columns in float32.
"""
LARGEST_SLICE = 2**20
"""Most elements of slices that one kernel adds up, in bfloat16 and float32; slices of twice as many a loop adds up.

A chip whose kernels have twice the on-chip memory adds up slices of twice as many elements (`SCOPED`)."""
_WORD = 4
"""Bytes of a word, of which a row of lanes consists."""


class Table(NamedTuple):
    """Dims of the table of one gather or scatter."""

    tensor: int
    rows: int
    """Number of leading dims, which indices or batches select."""


class Copies(NamedTuple):
    """Copies of one gather or scatter in other layouts, in every state."""

    in_order: NDArray[np.bool_]
    """True where the rows of the table lie one after the other, each along the lanes, [states]."""
    table: Seconds
    """Bytes of the table in the layout in which the op reads or updates it, [states]."""
    copied: Seconds
    """Bytes of the table if that layout is a copy's, else 0, [states]."""
    traffic: Seconds
    """Bytes that the copies move beyond those of operands and results, without those of `copied`, [states]."""
    held: tuple[tuple[int, int, Seconds], ...]
    """Bytes of each copy, [states], with the half-open range of ops during which it lives."""


class Update(NamedTuple):
    """Optimizer's update that elementwise ops compute from the result of a scatter."""

    read: int
    """First of its ops, which reads the gradient."""
    first: int
    """First of its ops that writes a result of the program."""
    last: int
    results: int
    """Number of results of the program, such as a parameter and its momentum."""
    forms: int
    """Number of ops that read the gradient itself; each reads a form of its own."""
    scaled: int
    """Number of these ops that read no other tensor; they write their form apart, in the scatter's own shape."""
    stored: int
    """First of its ops that writes a result of the program once all have read the gradient, which is stored until then.
    """

    @property
    def follows(self) -> bool:
        """True if states are updated by one op that reads the gradient: it then has the gradient's layout."""
        return self.results > 1 and self.forms == 1

    def span(self) -> tuple[int, int]:
        """Return the half-open range of ops from the first written result until all are written.

        One fusion writes all results, so that none of them overwrites what the fusion reads.
        """
        return min(self.first + 1, self.last), self.last + 2


def table_of(graph: OpGraph, op: Op, topology: Topology) -> Table | None:
    """Return the table whose whole rows a gather reads or a scatter updates; None for other ops and off TPUs.

    Columns are the trailing dims that are in the rows and not in the indices.
    """
    if not topology.traits.tiled or op.rule is None or op.kind not in ("gather", "scatter"):
        return None
    table, (dims, indices) = op.operands[0], op.rule.operands[:2]
    rows = op.rule.results[0] if op.kind == "gather" else op.rule.operands[2]
    own = {factor for dim in rows for factor in dim} - {factor for dim in indices for factor in dim}
    is_column = [bool(dim) and own.issuperset(dim) for dim in dims]
    count = is_column.index(True) if True in is_column else 0
    if not count or not all(is_column[count:]):
        return None
    updates = graph.tensors[op.results[0] if op.kind == "gather" else op.operands[2]]
    found = math.prod(size for f, size in enumerate(op.rule.sizes) if any(f in dim for dim in indices) and _in(f, rows))
    # Windows of several rows are no rows of a table.
    columns = math.prod(graph.tensors[table].shape[count:])
    return Table(table, count) if updates.elements == found * columns else None


def slices_inner(graph: OpGraph, op: Op) -> bool:
    """Return True for a gather or scatter of slices along a dim that follows others which its slices contain whole."""
    if op.kind not in ("gather", "scatter") or op.rule is None:
        return False
    table, (dims, indices) = graph.tensors[op.operands[0]], op.rule.operands[:2]
    slices = op.rule.results[0] if op.kind == "gather" else op.rule.operands[2]
    copied = {factor for dim in slices for factor in dim} - {factor for dim in indices for factor in dim}
    whole = [copied.issuperset(dim) for dim, size in zip(dims, table.shape, strict=True) if size > 1 and dim]
    return False in whole[1:] and whole[0]


def turned_updates(graph: OpGraph, op: Op, states: States, axes: Sequence[int], largest: int) -> Seconds:
    """Return the bytes of the copy of a scatter's updates, which a convolution wrote, [states]; 0 for other ops.

    An example is the gradient of a resize of images. The scatter adds up slices in another order of dims than that of
    the image. A loop adds up larger slices than `largest`, and reads them as they are.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    - `largest`: most elements of slices that one kernel adds up.
    """
    maker = graph.maker(op.operands[2]) if op.kind == "scatter" and slices_inner(graph, op) else None
    if maker is None or maker.kind != "convolution" or op.rule is None:
        return np.zeros(len(states))
    dims = local_dims(graph, op, 2, states, axes)
    indices = {factor for dim in op.rule.operands[1] for factor in dim}
    size = math.prod(dims, start=np.ones(len(states)))
    along = [each for each, dim in zip(dims, op.rule.operands[2], strict=True) if indices & set(dim)]
    kernel = size <= largest * math.prod(along, start=np.ones(len(states)))
    itemsize, image = graph.tensors[op.operands[2]].itemsize, convolved(graph, maker).get(op.operands[2])
    padding = 1.0 if image is None else image.padding(np.stack(dims, axis=1).astype(np.float64), itemsize)
    return np.where(kernel, size * itemsize * padding, 0.0)


def _in(factor: int, dims: Sequence[tuple[int, ...]]) -> bool:
    """Return True if a factor is in one of some dims."""
    return any(factor in dim for dim in dims)


def table_copies(graph: OpGraph, op: Op, states: States, axes: Sequence[int], topology: Topology) -> Copies | None:
    """Return the bytes of the copies of an op's table in every state; None for an op without a table.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    table = table_of(graph, op, topology)
    if table is None:
        return None
    # Rows are rounded after they are read.
    maker = graph.maker(table.tensor) if rounds_rows(graph, op) else None
    record = graph.tensors[table.tensor if maker is None else maker.operands[0]]
    dims = local_dims(graph, op, 0, states, axes)
    columns = dims[table.rows :]
    shards = np.stack([math.prod(dims[: table.rows]), *columns], axis=1).astype(np.float64)
    own = shards.prod(axis=1) * record.itemsize
    ratio = tile_padding(shards, record.itemsize, in_order=True)
    # A shard whose rows in order need no more than the compact layout is stored like this.
    compact = tile_padding(shards, record.itemsize)
    relaid = ratio > compact * (1 + 1e-9)
    read = ratio * MAX_UNPADDED_COLUMNS < LANES
    if op.kind == "gather":
        padded = np.where(relaid & read, own * ratio, 0.0)
        held = [(op.id, op.id + 1, padded)]
        traffic = np.where(padded > 0, own, 0.0)
    else:
        relaid &= (ratio < 2) | (own * ratio <= _limit(topology)) | (len(columns) > 1)
        padded = np.where(relaid, own * ratio, 0.0)
        rows = np.where(relaid, _row_padding(graph, op, states, axes, columns[-1]), 0.0)
        held = [(op.id, op.id + 1, padded), (op.id, op.id + 1, rows)]
        traffic = 2.0 * rows
        update = update_of(graph, op.results[0])
        if update is not None:
            features = math.prod(dims[: table.rows - 1], start=np.ones(len(states)))
            lone = (features == 1) & (update.follows | (read & (table.rows > 1)))
            word = record.itemsize == _WORD
            held_apart, moved = _updated(update, features, shards[:, 1:].prod(axis=1), own, padded, lone, word)
            begin, end = update.span()
            held.extend((begin, end, each) for each, early in held_apart if not early)
            # The gradient of one table is a buffer of its own until the last op reads it; the fusion holds it on.
            early = [each for each, early in held_apart if early]
            held.extend((update.read, end, np.where(features > 1, each, 0.0)) for each in early)
            held.extend((update.stored, end, np.where(features > 1, 0.0, each)) for each in early)
            traffic += moved
            # The padded rows that a gather reads are those that the update reads again.
            gathers = _gathers_before(graph, update, record.shape)
            held.extend((each + 1, begin, np.where(lone & read, padded, 0.0)) for each in gathers[:1])
    in_order = (padded > 0) | (ratio <= compact * (1 + 1e-9))
    table_bytes = own * np.where(in_order, ratio, compact)
    return Copies(in_order, table_bytes, padded, traffic, tuple(each for each in held if each[2].any()))


def _gathers_before(graph: OpGraph, update: Update, shape: tuple[int, ...]) -> list[int]:
    """Return the ids of the gathers of rows from a table of this shape that an update reads, in order."""
    return [
        op.id
        for op in graph.ops[: update.read]
        if op.kind == "gather"
        and graph.tensors[op.operands[0]].shape == shape
        and any(update.read <= user.id <= update.last for user in graph.users[op.operands[0]])
    ]


def _limit(topology: Topology) -> float:
    """Return the bytes of the largest padded copy of which half or more is padding."""
    return _LARGEST_COPY * _BINARY * topology.chip.hbm_bytes / topology.devices_per_chip


def _row_padding(graph: OpGraph, op: Op, states: States, axes: Sequence[int], columns: Seconds) -> Seconds:
    """Return the bytes that padding adds to a scatter's rows, [states].

    Rows that the program computes are written padded. Rows that are an argument, or a view or transposition of another
    value, are copied, so their own bytes are added too. A product of which nothing is summed is computed in the order
    of its transposition, so that it is written padded at once.

    - `columns`: local size of the last dim of a row.
    """
    record = graph.tensors[op.operands[2]]
    elements = math.prod(local_dims(graph, op, 2, states, axes), start=np.ones(len(states)))
    maker = graph.maker(op.operands[2])
    moved = maker is None or maker.op_class is OpClass.VIEW or maker.kind == "transpose"
    copied = 0.0 if moved and not _is_product(graph, op.operands[2]) else elements
    filled = elements / np.maximum(columns, 1.0) * (np.ceil(columns / LANES) * LANES)
    return np.where(columns % LANES > 0, (filled - copied) * record.itemsize, 0.0)


def _is_product(graph: OpGraph, tensor: int) -> bool:
    """Return True if a value is the transposition of an outer product that only this transposition reads.

    An example are the gradients of rows that a mixture weighs and adds up (v5e, v6e and v5p).
    """
    maker = graph.maker(tensor)
    if maker is None or maker.kind != "transpose":
        return False
    product = graph.maker(maker.operands[0])
    if product is None or product.kind != "dot_general" or product.rule is None:
        return False
    kept = {factor for dim in product.rule.results[0] for factor in dim}
    return len(graph.users[product.results[0]]) == 1 and all(
        factor in kept for dims in product.rule.operands[:2] for dim in dims for factor in dim
    )


def _updated(
    update: Update,
    features: Seconds,
    columns: Seconds,
    own: Seconds,
    padded: Seconds,
    lone: NDArray[np.bool_],
    word: bool,
) -> tuple[list[tuple[Seconds, bool]], Seconds]:
    """Return the bytes of each copy of gradients and updated parameters of a scatter, and their traffic, [states].

    With each copy stands if it is written where the gradient is read, rather than where the update begins.

    The optimizer's update has the layout of the scatter, and its results are copied to that of the program. Three cases
    were compiled for v5e (SGD, momentum and AdamW on 1 to 17 tables of 4 to 128 columns).

    1. One table in padded rows, whose update `follows` the gradient: the parameter and each state have copies in padded
       rows before and after the update. So has one table of a stack that is gathered in padded rows. The parameter of a
       matrix does not: its gradient is copied instead.
    2. Several tables in padded rows: the results have their features inside of the columns.
    3. Several tables in compact form: the scatter joins their rows. Unless features fill tiles, a reshape and a loop
       separate them, and the results have copies as in 2.

    The results take the place of the gradients, unless a loop writes these.

    Columns that fill one row of tiles need no copies in 2 and 3, since the orders of both layouts are the same. Nor do
    fewer columns, if features fill tiles too, or are at most 4.

    - `features`: local size of all dims of rows but the last.
    - `columns`: local number of columns.
    - `own`, `padded`: bytes of the shard and of its copy with padded rows.
    - `lone`: states of case 1, if the rows are padded.
    - `word`: True for elements of 4 bytes.
    """
    joined = features > 1
    unaligned = features % _SUBLANES > 0
    narrow = padded == 0
    same = (columns == _SUBLANES) | ((columns < _SUBLANES) & (~unaligned | (features <= 4)))
    apart = joined & ~same & (columns % LANES > 0) & (~narrow | unaligned)
    reshaped = narrow & (columns < _SUBLANES) & word
    # Results have as many features as fill the rows of a tile.
    rows = np.clip(2.0 ** np.ceil(np.log2(features)), 1, _SUBLANES)
    filled = own * np.ceil(features / rows) * rows / features
    forms, results = np.where(joined, update.forms, 1), update.results
    scaled = np.where(joined, update.scaled, 0)
    overwritten = (update.first == update.last) & ~apart & (scaled == 0)
    looped = unaligned & narrow & ~reshaped
    in_place = np.where(looped, 0, np.minimum(forms, results))
    # Copies of a lone table are written and read, before the update and after it.
    alone = lone & ~narrow
    count = np.where(apart, forms + results - in_place, forms - overwritten)
    count = np.where(alone, results + 1, count)
    relaid, held = apart | alone, list[tuple[Seconds, bool]]()
    for number in range(int(count.max())):
        held.append((np.where(relaid & (count > number), np.where(alone, padded, filled), 0.0), False))
        held.append((np.where(~relaid & (count > number), own, 0.0), True))
    # The last form is read while the form that follows from it is written.
    before = np.maximum(own - np.maximum(results - forms, 0) * filled, 0.0)
    held.append((np.where(apart & reshaped & ~alone, before, 0.0), False))
    # Scaled gradients are written and read, brought into place, and results are read and written once more.
    placed = np.where(looped, _LOOPED, np.where(unaligned, 2.0, 0.0))
    traffic = 2.0 * scaled * own
    traffic += np.where(apart, placed * forms * own + 2.0 * results * filled, 0.0)
    return held, np.where(alone, 4.0 * results * padded, traffic)


def update_of(graph: OpGraph, gradient: int) -> Update | None:
    """Return the update whose elementwise ops read a gradient; None if no result of the program follows from it."""
    shape, results = graph.tensors[gradient].shape, set(graph.results)
    known, readers, scaling, written = {gradient}, set[int](), set[int](), list[int]()
    waiting = [gradient]
    while waiting:
        tensor = waiting.pop()
        for user in graph.users[tensor]:
            view = user.op_class is OpClass.VIEW and user.kind in _SAME_ELEMENTS
            if user.op_class is not OpClass.POINTWISE and not view:
                continue
            out = user.results[0]
            if graph.tensors[out].elements != graph.tensors[gradient].elements:
                continue
            if tensor == gradient and not view:
                readers.add(user.id)
                if all(each == gradient or each in graph.generated for each in user.operands):
                    scaling.add(user.id)
            if out in results and graph.tensors[out].shape == shape:
                written.append(user.id)
            if out not in known:
                known.add(out)
                waiting.append(out)
    if not written:
        return None
    read_last = max(readers, default=0)
    return Update(
        min(readers, default=min(written)),
        min(written),
        max(written),
        len(set(written)),
        max(1, len(readers)),
        len(scaling),
        min((op for op in written if op >= read_last), default=max(written)),
    )


_SAME_ELEMENTS = frozenset({"reshape", "convert", "sharding_constraint"})
"""Views that have all elements of their operand."""


def local_dims(graph: OpGraph, op: Op, operand: int, states: States, axes: Sequence[int]) -> list[Seconds]:
    """Return the dims of an operand's shard in every state of the op, one array [states] for each dim.

    - `operand`: position of the operand.
    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    assert op.rule is not None
    shape, dims = graph.tensors[op.operands[operand]].shape, op.rule.operands[operand]
    parts = []
    for size, factors in zip(shape, dims, strict=True):
        mapping = [0 if f in factors else WHOLE for f in range(len(op.rule.sizes))]
        parts.append(local_elements(relabel(states, mapping), (size,), axes))
    return parts
