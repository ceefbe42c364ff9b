"""Places at which compilers run the sums over devices: at the op, at the end of a trip, after the loop, or joined."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.graph import OpGraph, Structure
from autoshard.planning.price.combined_collectives import PartTables, only_sums
from autoshard.planning.space.decision_model import Path, Reshard
from autoshard.planning.space.op_strategies import result_states
from autoshard.planning.space.overlap import Overlap
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, States, distinct, relabel
from autoshard.planning.xla.rewritten_sums import ADDED, added_sums
from autoshard.planning.xla.sums_after_loops import sums_after_loops


class SumPlaces:
    """Division of reshards into parts by the place of their sums."""

    def __init__(self, graph: OpGraph, structure: Structure, collectives: Collectives, tables: PartTables) -> None:
        """Find the sums that leave a loop or join others, if the compiler moves any; `tables` has the seconds of
        parts.
        """
        self.graph, self.structure, self.tables, self.axes = graph, structure, tables, collectives.mesh.sizes
        self.traits = collectives.mesh.topology.traits
        self.after = sums_after_loops(graph, structure) if self.traits.sums_after_loops else {}
        # The sum of a scatter is never staged over several axes, that of a matmul may be.
        alike = ADDED if not self.traits.stages or sum(size > 1 for size in self.axes) < 2 else ADDED[:1]
        self.joined = added_sums(graph, structure, alike) if self.traits.adds_before_sums else {}

    def parts(self, each: Reshard) -> Iterator[Reshard]:
        """Yield a reshard in parts, each with the mask of the pairs of states at which its sums run in one place.

        A sum that the compiler moves overlaps with nothing: after a loop, and at the end of a trip, no matmul is left.
        A sum that joins the sum of another op runs in no part. Other reshards are yielded as they are.
        """
        path = each.path
        if each.op < 0 or path.collected or not (path.source <= PARTIAL).any():
            yield each
            return
        rest = np.ones((len(path.source), len(path.target)), dtype=bool)
        if each.op in self.joined:
            rest &= ~only_sums(path)
        for moved, block in self._moved(each):
            runs = moved & rest
            if runs.any():
                rest &= ~runs
                yield dataclasses.replace(
                    each, block=block, trips=self.graph.trips(block), overlap=Overlap.NONE, forbidden=None, narrow=None,
                    costs=self.tables.at_pairs(self.tables.seconds(path, Overlap.NONE, block), runs), runs=runs,
                )  # fmt: skip
        yield each if rest.all() else dataclasses.replace(each, costs=self.tables.at_pairs(each.costs, rest), runs=rest)

    def apart(
        self, ops: tuple[int, int], ends: Sequence[tuple[int, States]], shared: Callable[[Path], Path]
    ) -> Iterator[Reshard]:
        """Yield the sum of an op's result where it does not join that of another, priced as a whole sum; if any.

        It joins, and costs nothing, if both strategies leave equal states.

        - `ops`: the two ops.
        - `ends`: node and strategies of each.
        - `shared`: returns the first path that equals another, whose tables repeated layers share.
        """
        op = self.graph.ops[ops[0]]
        record = self.graph.tensors[op.results[0]]
        results = [result_states(self.graph.ops[each], states, 0) for each, (_, states) in zip(ops, ends, strict=True)]
        (own, rows), (other, columns) = ((states[first], at) for states in results for first, at in [distinct(states)])
        # One of the results may be transposed, so their dims are compared by the factors of their common cluster.
        own_dims, other_dims = (
            relabel(np.maximum(each, PARTIAL), self.structure.dims_of[self.graph.ops[op].results[0]])
            for each, op in zip((own, other), ops, strict=True)
        )
        widened = self.tables.prices.collectives.widen_dtype(record.dtype) != record.dtype
        sizes = record.itemsize, 4 if widened else record.itemsize
        path = shared(Path(record.shape, own, own, record.shape, own, np.full_like(other, WHOLE), *sizes))
        nodes = ends[0][0], ends[1][0]
        trips = self.graph.trips(op.loop)
        each = Reshard(*nodes, record.id, op.id, op.loop, trips, Overlap.NONE, rows, columns, {}, None, path)
        alike = (own_dims[:, None, :] == other_dims[None, :, :]).all(axis=2)
        runs: NDArray[np.bool_] = ~alike & np.any(own <= PARTIAL, axis=1, keepdims=True)
        costs = self.tables.at_pairs(self.tables.seconds(path, Overlap.NONE, op.loop), runs)
        if costs:
            yield dataclasses.replace(each, costs=costs, runs=runs)

    def _moved(self, each: Reshard) -> Iterator[tuple[NDArray[np.bool_], int]]:
        """Yield masks of a reshard's pairs of states whose sums the compiler moves, with the block of these sums.

        A sum leaves a loop if it is whole and nothing else is resharded with it (`sums_after_loops`).
        """
        path = each.path
        source, target = path.source[:, None, :], path.target[None, :, :]
        summed = source <= PARTIAL
        if each.block >= 0 and each.block == max(
            (self.after.get(t, -1) for t in self.graph.ops[each.op].results), default=-1
        ):
            alone = summed.any(axis=2) & (np.where(summed, WHOLE, source) == target).all(axis=2)
            passed = (path.source_dims == path.passed_dims).all(axis=1)
            yield alone & passed[:, None], self.graph.loops[each.block].parent
