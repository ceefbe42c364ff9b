"""What becomes of a program when only specs of arguments are given, as choices of the alternatives that are priced.

XLA propagates them (Shardy's own passes do it here); DTensor goes forward from op to op. Either way that decides how
values are held. An op is then computed as costs least between them, which is what both do.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard import mlir
from autoshard.graph import Op, OpClass
from autoshard.planning.forms.export_forms import Rest
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.space.op_strategies import result_states
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.planning.xla.spatial_splits import split_in_space


Given = Mapping[str, Spec | None]
"""Specs of arguments by name; None leaves one open."""


@dataclasses.dataclass(frozen=True)
class Propagation:
    """Completes specs of arguments to choices on one model."""

    model: Model
    rest: Rest
    """`XLA`, `DTENSOR` or `NAMES`."""
    results: Mapping[str, Spec] = dataclasses.field(default_factory=dict)
    """Specs of results that are given too; a result that replaces an argument has that one's in any case."""

    def choices(self, given: Given, inner: Iterable[tuple[int, mlir.Dims]] = ()) -> NDArray[np.int64]:
        """The alternative of every node; `inner` are specs of values inside of the program, by tensor."""
        chosen = np.full(len(self.model.nodes), -1, dtype=np.int64)
        self._give(chosen, given)
        if self.rest is Rest.DTENSOR:
            self._go_forward(chosen)
        elif self.rest is Rest.NAMES:
            self._hear_names(chosen, inner)
        else:
            self._hear_xla(chosen, given)
        for node in range(len(chosen)):
            if chosen[node] < 0 and self.model.nodes[node].kind == "cluster":
                chosen[node] = 0
        for node in self.copies:
            chosen[node] = self._cheapest(node, chosen, into=True, out=False)
        for op_id, node in self.model.op_node.items():
            if chosen[node] < 0:
                chosen[node] = self._cheapest(node, chosen, allowed=self._runs_alone(op_id))
        for node in self.copies:
            chosen[node] = self._cheapest(node, chosen)
        return chosen

    # What is given

    def _give(self, chosen: NDArray[np.int64], given: Given) -> None:
        model = self.model
        for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
            spec, cluster = given.get(argument.name), model.structure.cluster_of[tensor]
            if spec is not None and cluster >= 0:
                node = model.cluster_node[cluster]
                words = len(model.structure.dims_of[tensor]) - len(spec.dims)  # that a typed PRNG key is made of
                chosen[node] = self._nearest(node, [(tensor, (*spec.dims, *((),) * words))])

    def _nearest(self, node: int, wanted: Sequence[tuple[int, mlir.Dims]]) -> int:
        """The state of a cluster that most elements of its tensors agree with, given the axes of their dims."""
        model = self.model
        states = model.nodes[node].states
        score = np.zeros(len(states))
        for tensor, dims in wanted:
            target = np.full(states.shape[1], WHOLE)
            for factor, axes in zip(model.structure.dims_of[tensor], dims, strict=True):
                for axis in axes:
                    if factor >= 0 and axis in model.axis_names:
                        target[model.axis_names.index(axis)] = factor
            score += (states == target).sum(axis=1) * float(model.graph.tensors[tensor].elements)
        return int(score.argmax())

    # XLA

    def _hear_xla(self, chosen: NDArray[np.int64], given: Given) -> None:
        """How Shardy's propagation has every value held."""
        model, program = self.model, self.model.program
        arguments = [given.get(a.name) for a in program.arguments]
        results = [
            arguments[r.argument] if r.argument is not None else self.results.get(r.name) for r in program.results
        ]
        specs = mlir.propagated_specs(self.inlined, model.mesh.axes, arguments, results)
        for cluster in model.structure.clusters:
            node = model.cluster_node[cluster.id]
            if chosen[node] < 0:
                held = [(tensor, model.graph.tensors[tensor]) for tensor in cluster.tensors]
                wanted = [
                    (tensor, specs[record.value] or ((),) * len(record.shape))
                    for tensor, record in held
                    if record.value in specs
                ]
                if wanted:
                    chosen[node] = self._nearest(node, wanted)
        self._fill(chosen)  # the rest is of ops that Shardy's passes replace by others

    def _fill(self, chosen: NDArray[np.int64]) -> None:
        """What is still open is split as what makes it leaves it."""
        ahead = chosen.copy()
        self._go_forward(ahead)
        nodes = list(self.model.cluster_node)
        chosen[nodes] = ahead[nodes]

    # Names

    def _hear_names(self, chosen: NDArray[np.int64], inner: Iterable[tuple[int, mlir.Dims]]) -> None:
        """Every value is held as is said of it."""
        model = self.model
        wanted: dict[int, list[tuple[int, mlir.Dims]]] = defaultdict(list)
        for tensor, dims in inner:
            wanted[model.structure.cluster_of[tensor]].append((tensor, dims))
        for cluster, said in wanted.items():
            if cluster >= 0 and chosen[model.cluster_node[cluster]] < 0:
                chosen[model.cluster_node[cluster]] = self._nearest(model.cluster_node[cluster], said)
        self._fill(chosen)

    @functools.cached_property
    def inlined(self) -> bytes:
        """The module of the program, calls inlined."""
        return mlir.to_bytes(mlir.inline_calls(mlir.parse_module(self.model.program.module)))

    # DTensor

    def _go_forward(self, chosen: NDArray[np.int64]) -> None:
        """From op to op: each takes the way that moves its operands least, and leaves its results split like that.

        Of ways that cost the same the first, which splits least. Sums are done where the result is held whole.
        """
        model = self.model
        copies = self.copies_of
        for op in model.graph.ops:
            node = model.op_node.get(op.id)
            if node is not None:
                for tensor in op.operands:
                    cluster = model.structure.cluster_of[tensor]
                    if cluster >= 0 and chosen[model.cluster_node[cluster]] < 0:
                        chosen[model.cluster_node[cluster]] = 0
                    copy = copies.get((tensor, op.loop))
                    if copy is not None:
                        chosen[copy] = self._cheapest(copy, chosen, into=True, out=False)
                allowed = self._runs_alone(op.id)
                chosen[node] = self._cheapest(node, chosen, into=True, out=False, work=False, allowed=allowed)
            for number, tensor in enumerate(op.results):
                cluster = model.structure.cluster_of[tensor]
                if cluster >= 0 and chosen[model.cluster_node[cluster]] < 0:
                    left = self._left(op, node, number, chosen)
                    if left is not None:
                        chosen[model.cluster_node[cluster]] = self._nearest(model.cluster_node[cluster], [left])

    def _left(self, op: Op, node: int | None, result: int, chosen: NDArray[np.int64]) -> tuple[int, mlir.Dims] | None:
        """How an op leaves a result; None if nothing is known of what it takes."""
        model, tensor = self.model, op.results[result]
        rank = len(model.graph.tensors[tensor].shape)
        if node is not None:
            state = result_states(op, model.nodes[node].states[int(chosen[node])][None, :], result)[0]
            return tensor, tuple(tuple(self._names(np.flatnonzero(state == dim))) for dim in range(rank))
        if op.rule is None:
            return None
        best: tuple[int, mlir.Dims] | None = None
        most = -1
        for operand, taken in enumerate(op.operands):
            cluster = model.structure.cluster_of[taken]
            if cluster < 0 or chosen[model.cluster_node[cluster]] < 0:
                continue
            state = model.nodes[model.cluster_node[cluster]].states[int(chosen[model.cluster_node[cluster]])]
            dims: list[tuple[str, ...]] = [()] * rank
            for dim, own in enumerate(model.structure.dims_of[taken]):
                axes = np.flatnonzero(state == own) if own >= 0 else []
                major = next((f for f in op.rule.operands[operand][dim] if op.rule.sizes[f] > 1), None)
                for out, factors in enumerate(op.rule.results[result]):
                    if major is not None and major == next((f for f in factors if op.rule.sizes[f] > 1), None):
                        dims[out] = tuple(self._names(axes))
            parts = sum(len(axes) for axes in dims)
            if parts > most:
                best, most = (tensor, tuple(dims)), parts
        return best

    def _names(self, axes: Sequence[int] | NDArray[np.int64]) -> list[str]:
        return [self.model.axis_names[int(a)] for a in axes]

    # Prices between what is held

    @functools.cached_property
    def copies(self) -> list[int]:
        return sorted(self.model.copy_nodes.values())

    @property
    def copies_of(self) -> Mapping[tuple[int, int], int]:
        return self.model.copy_nodes

    @functools.cached_property
    def reshards(self) -> tuple[dict[int, list[Reshard]], dict[int, list[Reshard]]]:
        """The reshards into and out of every node."""
        into, out = defaultdict(list), defaultdict(list)
        for reshard in self.model.reshards:
            into[reshard.target].append(reshard)
            out[reshard.source].append(reshard)
        return into, out

    def _runs_alone(self, op_id: int) -> NDArray[np.bool_]:
        """The strategies of an op that need nothing of a plan but specs: no region in space, no call on shards."""
        op, states = self.model.graph.ops[op_id], self.model.nodes[self.model.op_node[op_id]].states
        if op.opaque is not None and op.opaque.on_shards:
            return (states == WHOLE).all(axis=1)
        return ~split_in_space(op, states) if op.halos else np.ones(len(states), dtype=bool)

    def _cheapest(
        self,
        node: int,
        chosen: NDArray[np.int64],
        into: bool = True,
        out: bool = True,
        work: bool = True,
        allowed: NDArray[np.bool_] | None = None,
    ) -> int:
        """The alternative of a node that takes the least seconds with its neighbours as they are chosen."""
        record = self.model.nodes[node]
        seconds = np.zeros(len(record.states))
        if work:
            seconds = seconds + sum(record.time.values(), np.zeros(len(seconds)))
        if into:
            for reshard in self.reshards[0].get(node, ()):
                if chosen[reshard.source] >= 0:
                    row = int(reshard.rows[int(chosen[reshard.source])])
                    seconds = seconds + _seconds(reshard)[row, reshard.columns]
        if out:
            for reshard in self.reshards[1].get(node, ()):
                if chosen[reshard.target] >= 0:
                    column = int(reshard.columns[int(chosen[reshard.target])])
                    seconds = seconds + _seconds(reshard)[reshard.rows, column]
        if allowed is not None and allowed.any():
            seconds = np.where(allowed, seconds, np.inf)
        # Differences below a picosecond are rounding.
        return int(np.round(seconds, 12).argmin())


def _seconds(reshard: Reshard) -> NDArray[np.float64]:
    """Seconds of a reshard in one step for every pair of distinct states; infinite where there is no way."""
    total: NDArray[np.float64] = np.zeros((int(reshard.rows.max()) + 1, int(reshard.columns.max()) + 1))
    for cost in reshard.costs.values():
        total = total + cost * reshard.trips
    return total if reshard.forbidden is None else np.where(reshard.forbidden, np.inf, total)


def needs_pins(model: Model, choices: NDArray[np.int64]) -> bool:
    """Whether a choice splits an op in space, or a call, which takes more than specs."""
    for op_id, node in model.op_node.items():
        op, state = model.graph.ops[op_id], model.nodes[node].states[int(choices[node])][None, :]
        if op.halos and split_in_space(op, state)[0]:
            return True
        if op.op_class is OpClass.HEAVY and op.opaque is not None and op.opaque.on_shards and (state != WHOLE).any():
            return True
    return False
