"""Memory of rows that sparse cores gather: padded to registers, and shared with no other value.

Evidence: docs/compiler_behaviour.md, "Rows that sparse cores gather".
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Chip, tile_padding
from autoshard.graph import Op, OpClass, OpGraph
from autoshard.planning.price.device_memory import LiveBuffer
from autoshard.planning.space.decision_model import Model
from autoshard.planning.xla.table_layouts import local_dims, table_copies


OFFLOADING = frozenset({"v5p", "v6e"})
"""Chips whose compiler, libtpu 0.0.52, has sparse cores gather rows by default."""
NEAR_SHARE = 0.25
"""Share of on-chip memory below which v6e gathers from a table there, by the other core.

Compiled alone, tables of 16 to 30 of 128 MiB were read there, and tables of 32 to 64 MiB by sparse cores. Counted are
the bytes in the layout that is read: 64 columns of bfloat16 count twice.
"""


class OffloadedGather(NamedTuple):
    """A gather that sparse cores execute."""

    tensors: frozenset[int]
    """Tensors that lie in main memory for it."""
    copied: int
    """Bytes of the copy of the table that it reads, with rows in order, each along the lanes; 0 without a copy."""

    def reads_copy(self, each: LiveBuffer) -> bool:
        """Return True if a buffer at this gather is the copy of the table."""
        return self.copied > 0 and each.stop == each.start + 1 and each.size == self.copied


def sparse_cores_gather(chip: Chip, table_bytes: float) -> bool:
    """Return True if sparse cores gather the rows of a table of some bytes, which they read in main memory."""
    if chip.name not in OFFLOADING:
        return False
    return chip.cores_per_chip > chip.devices_per_chip or table_bytes >= NEAR_SHARE * chip.vmem_bytes


def offloaded_gathers(
    model: Model, choices: NDArray[np.int64], local_of: Callable[[int], Sequence[int]]
) -> Mapping[int, OffloadedGather]:
    """Return the gathers that sparse cores execute, by op.

    They read a gathered copy of a split table, and not the table itself. Scatters read masked rows there too.

    - `local_of`: dims of a tensor's shard.
    """
    graph, chip = model.graph, model.mesh.topology.chip
    if chip.name not in OFFLOADING:
        return {}
    found: dict[int, OffloadedGather] = {}
    scattered = _gathered_rows(graph)
    for number, node in model.op_node.items():
        op, state = graph.ops[number], model.nodes[node].states[[int(choices[node])]]
        copies = table_copies(graph, op, state, model.axis_sizes, model.mesh.topology) if op.kind == "gather" else None
        if copies is not None and sparse_cores_gather(chip, float(copies.table[0])):
            read = [int(each[0]) for each in local_dims(graph, op, 0, state, model.axis_sizes)]
            whole = read == list(local_of(op.operands[0]))
            masked = {t for user in graph.users[op.results[0]] for t in user.results if t in scattered}
            tensors = frozenset((*op.results, *op.operands[: int(whole)], *masked))
            found[number] = OffloadedGather(tensors, round(float(copies.copied[0])))
    return found


def with_gathered_rows(
    graph: OpGraph,
    buffers: Sequence[LiveBuffer],
    local_of: Callable[[int], Sequence[int]],
    offloaded: Collection[int],
) -> Iterator[LiveBuffer]:
    """Yield the buffers of a program whose rows sparse cores gather, and the padding of these rows.

    The rows are those that a scatter adds up, as a gather found them or as one elementwise op made them of it. Others
    are those that only matmuls read. Rows lie one after the other, each along the lanes. The padding at the scatter
    itself is that of its copies. Elementwise ops write their results over an operand, but none over the result of a
    sparse core.

    - `local_of`: dims of a tensor's shard.
    - `offloaded`: gathers that sparse cores execute.
    """
    rows = {**_multiplied_rows(graph), **_gathered_rows(graph)}
    for each in buffers:
        if each.tensor not in rows:
            yield each
            continue
        maker, reads = graph.maker(each.tensor), each.stop < len(graph.ops)
        apart = maker is not None and maker.id in offloaded
        apart &= reads and graph.ops[each.stop].op_class is OpClass.POINTWISE
        record, local = graph.tensors[each.tensor], local_of(each.tensor)
        ratio = tile_padding(np.asarray([local], dtype=np.float64), record.itemsize, in_order=True)
        padded = round(math.prod(local) * record.itemsize * float(ratio[0]))
        stop, scatter = each.stop + apart, rows[each.tensor]
        yield each._replace(stop=min(stop, scatter), size=padded)
        if stop > scatter:
            yield each._replace(start=scatter, stop=stop)


def _gathered_rows(graph: OpGraph) -> Mapping[int, int]:
    """Return the scatter that reads each tensor of gathered rows, directly or after one elementwise op, by tensor."""
    rows: dict[int, int] = {}
    for op in graph.ops:
        if op.kind != "scatter":
            continue
        updates = op.operands[2]
        maker = graph.maker(updates)
        sources = maker.operands if maker is not None and maker.op_class is OpClass.POINTWISE else (updates,)
        found = [t for t in sources if (source := graph.maker(t)) is not None and source.kind == "gather"]
        if found:
            rows |= dict.fromkeys((*found, updates), op.id)
    return rows


def _multiplied_rows(graph: OpGraph) -> dict[int, int]:
    """Return the gathered rows that only matmuls read, each with the number of ops, as no scatter reads them."""
    gathered = (op.results[0] for op in graph.ops if op.kind == "gather")
    rows = (t for t in gathered if graph.users[t] and all(user.kind == "dot_general" for user in graph.users[t]))
    return dict.fromkeys(rows, len(graph.ops))


def sorted_indices(graph: OpGraph, local_of: Callable[[int], Sequence[int]]) -> Iterator[LiveBuffer]:
    """Yield the indices that scatters of gathered rows sort, and their order.

    All scatters by the same indices share them, from the first to the last. They are sorted once the rows are there,
    and lie behind these. Evidence: docs/compiler_behaviour.md, "Rows that sparse cores gather".

    - `local_of`: dims of a tensor's shard.
    """
    scatters = sorted(set(_gathered_rows(graph).values()))
    if len(scatters) < 2:
        return
    formulas, users = _formulas(graph), defaultdict[int, list[Op]](list)
    for op in (graph.ops[scatter] for scatter in scatters):
        users[formulas.get(op.operands[1], ~op.operands[1])].append(op)
    for ops in users.values():
        if len(ops) > 1:
            indices = ops[0].operands[1]
            size = math.prod(local_of(indices)) * graph.tensors[indices].itemsize
            held = LiveBuffer(ops[0].id, ops[-1].id + 1, size, "temporaries", indices)
            yield from (held, held)


def _formulas(graph: OpGraph) -> dict[int, int]:
    """Map the results of ops to numbers, which are equal for equal ops of equal operands.

    Compilers compute such values once. Attributes of ops are not compared.
    """
    numbers: dict[int, int] = {}
    known: dict[tuple[object, ...], int] = {}
    for op in graph.ops:
        operands = [numbers.get(operand, ~operand) for operand in op.operands]
        for position, result in enumerate(op.results):
            numbers[result] = known.setdefault((op.kind, position, *operands), len(known))
    return numbers
