"""Completion of given argument specs to choices of the priced alternatives, as XLA or DTensor would complete them.

XLA propagates specs, for which Shardy's own passes are run. DTensor goes forward from op to op. Either method decides
the specs of values. Each op is then computed in the cheapest way between these specs, as both systems do.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard import mlir
from autoshard.graph import CUDNN, TOP_K, FactorKind, Op
from autoshard.planning.forms.export_forms import Rest
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.space.op_strategies import result_states
from autoshard.planning.xla.axis_assignments import WHOLE, States
from autoshard.planning.xla.partitioner_rules import called_on_shards
from autoshard.planning.xla.spatial_splits import split_in_space


Given = Mapping[str, Spec | None]
"""Specs of arguments by name; None leaves one open."""


def typed_choices(model: Model, choices: NDArray[np.int64]) -> dict[int, int]:
    """Return the plan's choice of each node of values that the step's own code computes, or takes.

    Explicit mode gives them the plan's specs by hints. Values of the backward pass alone have no place in the code.
    """
    graph, structure = model.graph, model.structure
    nodes = [
        model.cluster_node[cluster.id]
        for cluster in structure.clusters
        if any((op := graph.maker(tensor)) is None or "transpose(jvp" not in op.name for tensor in cluster.tensors)
    ]
    return {node: int(choices[node]) for node in nodes}


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """Choices to which given specs complete."""

    choices: NDArray[np.int64]
    """Alternative of every node."""
    disputed: bool
    """True if XLA splits a matmul's result along another dim than the values that share its spec here: the choices are
    not what it compiles.
    """


@dataclasses.dataclass(frozen=True)
class Propagation:
    """Completion of argument specs to choices on one model."""

    model: Model
    rest: Rest
    """System that completes the specs: `XLA`, `DTENSOR` or `NAMES`."""
    results: Mapping[str, Spec] = dataclasses.field(default_factory=dict)
    """Specs of results that are given too. A result that replaces an argument always has the argument's spec."""

    def choices(
        self, given: Given, inner: Iterable[tuple[int, mlir.Dims]] = (), fixed: Mapping[int, int] | None = None
    ) -> NDArray[np.int64]:
        """Return the choices of `complete`: the alternative of every node (int array [nodes])."""
        return self.complete(given, inner, fixed).choices

    def complete(
        self,
        given: Given,
        inner: Iterable[tuple[int, mlir.Dims]] = (),
        fixed: Mapping[int, int] | None = None,
        matmuls: bool = False,
    ) -> Completion:
        """Complete argument specs to the alternative of every node.

        - `given`: specs of arguments by name.
        - `inner`: specs of computed values by tensor, which only `Rest.NAMES` uses.
        - `fixed`: alternatives of the nodes of values with types in the code; types alone then decide all others.
        - `matmuls`: True to let results of matmuls alone decide where they are disputed.

        Values are decided first, by the system of `rest`; open ones take state 0. Then copies and ops take the
        alternative with the least seconds between these values.
        """
        chosen = np.full(len(self.model.nodes), -1, dtype=np.int64)
        disputed = False
        self._apply_given(chosen, given)
        if fixed is not None:
            chosen[list(fixed)] = list(fixed.values())
            self._fill(chosen)
        elif self.rest is Rest.DTENSOR:
            self._propagate_forward(chosen)
        elif self.rest is Rest.NAMES:
            self._apply_names(chosen, inner)
        else:
            disputed = self._propagate_with_shardy(chosen, given, matmuls)
        for node in range(len(chosen)):
            if chosen[node] < 0 and self.model.nodes[node].kind == "cluster":
                chosen[node] = 0
        for node in self.copies:
            chosen[node] = self._cheapest(node, chosen, into=True, out=False)
        for op_id, node in self.model.op_node.items():
            # A state of DTensor's may be one that XLA replaces, such as a whole scatter whose result is sliced.
            if chosen[node] < 0 or any(_is_forbidden(each, chosen) for each in self.reshards[1].get(node, ())):
                chosen[node] = self._cheapest(node, chosen, allowed=self._runs_alone(op_id))
        for node in self.copies:
            chosen[node] = self._cheapest(node, chosen)
        return Completion(chosen, disputed)

    # Given specs

    def _apply_given(self, chosen: NDArray[np.int64], given: Given) -> None:
        """Choose the states of the clusters of arguments with given specs (in place); a later argument of one cluster
        overrides.
        """
        model = self.model
        for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
            spec, cluster = given.get(argument.name), model.structure.cluster_of[tensor]
            if spec is not None and cluster >= 0:
                node = model.cluster_node[cluster]
                words = len(model.structure.dims_of[tensor]) - len(spec.dims)  # dims of a typed PRNG key's words
                chosen[node] = self._nearest(node, [(tensor, (*spec.dims, *((),) * words))])

    def _nearest(self, node: int, wanted: Sequence[tuple[int, mlir.Dims]]) -> int:
        """Return the state of a cluster that agrees best with wanted specs; the first of equals.

        `wanted` has the axes of each dim for some tensors of the cluster. Each mesh axis that agrees counts with the
        elements of the tensor.
        """
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

    def _propagate_with_shardy(self, chosen: NDArray[np.int64], given: Given, matmuls: bool) -> bool:
        """Choose the state of every open cluster as Shardy's propagation does (in place).

        The program's results have the specs of the arguments that they replace, or those of `results`. Values that
        Shardy's passes replace are left to `_fill`. With `matmuls`, disputed results of matmuls decide for their
        clusters. Return True if any result is disputed (`Completion.disputed`).
        """
        model, program = self.model, self.model.program
        arguments = [given.get(a.name) for a in program.arguments]
        results = [
            arguments[r.argument] if r.argument is not None else self.results.get(r.name) for r in program.results
        ]
        specs = mlir.propagated_specs(self.inlined, model.mesh.axes, arguments, results)
        disputed = False
        for cluster in model.structure.clusters:
            node = model.cluster_node[cluster.id]
            if chosen[node] < 0:
                tensors = [(tensor, model.graph.tensors[tensor]) for tensor in cluster.tensors]
                wanted = [
                    (tensor, specs[record.value] or ((),) * len(record.shape))
                    for tensor, record in tensors
                    if record.value in specs
                ]
                if wanted:
                    chosen[node] = self._nearest(node, wanted)
                    other = [each for each in wanted if self._is_disputed(node, int(chosen[node]), *each)]
                    disputed = disputed or bool(other)
                    if matmuls and other:
                        chosen[node] = self._nearest(node, other)
        self._fill(chosen)  # results of ops that Shardy's passes replace
        return disputed

    def _is_disputed(self, node: int, state: int, tensor: int, wanted: mlir.Dims) -> bool:
        """Return True for a matmul's result of which a state of its cluster splits another dim than `wanted` does."""
        model, maker = self.model, self.model.graph.maker(tensor)
        if maker is None or maker.kind not in ("dot_general", "convolution"):
            return False
        own, split = model.structure.dims_of[tensor], model.nodes[node].states[state]
        names = {axis: factor for factor, axes in zip(own, wanted, strict=True) for axis in axes if factor >= 0}
        return any(split[model.axis_names.index(axis)] not in (WHOLE, factor) for axis, factor in names.items())

    def _fill(self, chosen: NDArray[np.int64]) -> None:
        """Choose the states of all clusters that are still open as their producers leave them (in place); ops stay
        open.
        """
        ahead = chosen.copy()
        self._propagate_forward(ahead)
        nodes = list(self.model.cluster_node)
        chosen[nodes] = ahead[nodes]

    # Names

    def _apply_names(self, chosen: NDArray[np.int64], inner: Iterable[tuple[int, mlir.Dims]]) -> None:
        """Choose the state of every open cluster with specs in `inner` (in place), then the others as their producers
        leave them.
        """
        model = self.model
        wanted: dict[int, list[tuple[int, mlir.Dims]]] = defaultdict(list)
        for tensor, dims in inner:
            wanted[model.structure.cluster_of[tensor]].append((tensor, dims))
        for cluster, specs in wanted.items():
            if cluster >= 0 and chosen[model.cluster_node[cluster]] < 0:
                chosen[model.cluster_node[cluster]] = self._nearest(model.cluster_node[cluster], specs)
        self._fill(chosen)

    @functools.cached_property
    def inlined(self) -> bytes:
        """The module of the program, with calls inlined, as bytecode."""
        return mlir.to_bytes(mlir.inline_calls(mlir.parse_module(self.model.program.module)))

    # DTensor

    def _propagate_forward(self, chosen: NDArray[np.int64]) -> None:
        """Choose strategies and values op by op, in program order (in place).

        Each op moves its operands least, in seconds, and leaves its results split like them. Open operands become
        whole.

        Among equal costs the first strategy wins, which splits least. Partial results are summed if the result is
        planned whole.
        """
        model = self.model
        copies = self.copies_of
        for op in model.graph.ops:
            node = model.op_node.get(op.id)
            if node is not None:
                for position, tensor in enumerate(op.operands):
                    cluster = model.structure.cluster_of[tensor]
                    if cluster >= 0 and chosen[model.cluster_node[cluster]] < 0:
                        chosen[model.cluster_node[cluster]] = 0
                    copy = copies.get(op.use(position))
                    if copy is not None:
                        chosen[copy] = self._cheapest(copy, chosen, into=True, out=False)
                allowed = self._runs_alone(op.id)
                chosen[node] = self._cheapest(node, chosen, into=True, out=False, work=False, allowed=allowed)
            for number, tensor in enumerate(op.results):
                cluster = model.structure.cluster_of[tensor]
                if cluster >= 0 and chosen[model.cluster_node[cluster]] < 0:
                    result_axes = self._left(op, node, number, chosen)
                    if result_axes is not None:
                        chosen[model.cluster_node[cluster]] = self._nearest(model.cluster_node[cluster], [result_axes])

    def _left(self, op: Op, node: int | None, result: int, chosen: NDArray[np.int64]) -> tuple[int, mlir.Dims] | None:
        """Return an op's result tensor with the axes of its dims as the op leaves it; None if no operand is chosen yet.

        - `node`: node of the op's strategies; None for an op without.
        - `result`: number of the result.
        - `chosen`: alternative of every node, -1 if open.

        An op without strategies follows the operand that gives its result the most axes, the first of equals; without a
        rule, None.
        """
        model, tensor = self.model, op.results[result]
        rank = len(model.graph.tensors[tensor].shape)
        if node is not None:
            state = result_states(op, model.nodes[node].states[int(chosen[node])][None, :], result)[0]
            return tensor, tuple(tuple(self._names(np.flatnonzero(state == dim))) for dim in range(rank))
        if op.rule is None:
            return None
        best: tuple[int, mlir.Dims] | None = None
        most = -1
        for operand, operand_tensor in enumerate(op.operands):
            cluster = model.structure.cluster_of[operand_tensor]
            if cluster < 0 or chosen[model.cluster_node[cluster]] < 0:
                continue
            state = model.nodes[model.cluster_node[cluster]].states[int(chosen[model.cluster_node[cluster]])]
            dims: list[tuple[str, ...]] = [()] * rank
            for dim, own in enumerate(model.structure.dims_of[operand_tensor]):
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
        """Return the names of mesh axes by their numbers."""
        return [self.model.axis_names[int(a)] for a in axes]

    # Prices between chosen states

    @functools.cached_property
    def copies(self) -> list[int]:
        """The nodes of copies of tensors in another spec, sorted."""
        return sorted(self.model.copy_nodes.values())

    @property
    def copies_of(self) -> Mapping[tuple[int, int, int], int]:
        """The node of each copy, by the use that shares it (`Op.use`)."""
        return self.model.copy_nodes

    @functools.cached_property
    def reshards(self) -> tuple[dict[int, list[Reshard]], dict[int, list[Reshard]]]:
        """The reshards into every node and those out of every node, by node."""
        into, out = defaultdict(list), defaultdict(list)
        for reshard in self.model.reshards:
            into[reshard.target].append(reshard)
            out[reshard.source].append(reshard)
        return into, out

    def _seconds(self, reshard: Reshard) -> NDArray[np.float64]:
        """Return the seconds of a reshard in one step for every pair of distinct states of source and target.

        The array is [rows, columns]; it is infinite for a forbidden pair. It is made once for each reshard.
        """
        if id(reshard) not in self._seconds_of:
            total: NDArray[np.float64] = np.zeros((int(reshard.rows.max()) + 1, int(reshard.columns.max()) + 1))
            for cost in reshard.costs.values():
                total = total + cost * reshard.trips
            forbidden = reshard.forbidden
            self._seconds_of[id(reshard)] = total if forbidden is None else np.where(forbidden, np.inf, total)
        return self._seconds_of[id(reshard)]

    @functools.cached_property
    def _seconds_of(self) -> dict[int, NDArray[np.float64]]:
        """The arrays of `_seconds` by the id of their reshard, which the model holds."""
        return {}

    def _runs_alone(self, op_id: int) -> NDArray[np.bool_]:
        """Return True for the strategies of an op that specs alone can express: no split in space with halos, no call
        on shards.
        """
        op, states = self.model.graph.ops[op_id], self.model.nodes[self.model.op_node[op_id]].states
        if op.on_shards:
            called = called_on_shards(op, states, self.model.axis_sizes, self.model.mesh.topology.backend)
            return ~called | _splits_itself(self.rest, op, states)
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
        """Return the alternative of a node with the least seconds, given its neighbours' alternatives; the first of
        equals.

        - `node`: the node to choose for.
        - `chosen`: alternative of every node, -1 if open; open neighbours cost nothing.
        - `into`, `out`: True to count reshards into the node and out of it.
        - `work`: True to count the node's own time.
        - `allowed`: True for each alternative that may be chosen; None, or no True, allows all.
        """
        record = self.model.nodes[node]
        seconds = np.zeros(len(record.states))
        if work:
            seconds = seconds + sum(record.time.values(), np.zeros(len(seconds)))
        if into:
            for reshard in self.reshards[0].get(node, ()):
                if chosen[reshard.source] >= 0:
                    row = int(reshard.rows[int(chosen[reshard.source])])
                    seconds = seconds + self._seconds(reshard)[row, reshard.columns]
        if out:
            for reshard in self.reshards[1].get(node, ()):
                if chosen[reshard.target] >= 0:
                    column = int(reshard.columns[int(chosen[reshard.target])])
                    seconds = seconds + self._seconds(reshard)[reshard.rows, column]
        if allowed is not None and allowed.any():
            seconds = np.where(allowed, seconds, np.inf)
        # Differences below a picosecond are rounding.
        return int(np.round(seconds, 12).argmin())


def _is_forbidden(reshard: Reshard, chosen: NDArray[np.int64]) -> bool:
    """Return True if the alternatives of a reshard's two nodes exclude each other; open ones (-1) do not."""
    source, target = int(chosen[reshard.source]), int(chosen[reshard.target])
    if reshard.forbidden is None or source < 0 or target < 0:
        return False
    return bool(reshard.forbidden[reshard.rows[source], reshard.columns[target]])


def _splits_itself(rest: Rest, op: Op, states: States) -> NDArray[np.bool_]:
    """Return a mask of the states in which the system of a form itself splits an op that XLA would gather, [states].

    DTensor splits torch's attention by batch and heads, as cuDNN's kernel is split, and a top-k by rows.
    """
    if rest is not Rest.DTENSOR or op.rule is None:
        return np.zeros(len(states), dtype=bool)
    if op.kind == TOP_K:
        selected = [f for f, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION]
        return ~np.any(np.isin(states, selected), axis=1)
    return np.full(len(states), op.opaque is not None and op.opaque.target.startswith(CUDNN))


def needs_pins(model: Model, choices: NDArray[np.int64], rest: Rest) -> bool:
    """Return True if a choice splits an op in space or runs a call on shards, which specs alone cannot express.

    - `rest`: system that splits the ops, see `_splits_itself`.
    """
    for op_id, node in model.op_node.items():
        op, state = model.graph.ops[op_id], model.nodes[node].states[int(choices[node])][None, :]
        if op.halos and split_in_space(op, state)[0]:
            return True
        called = called_on_shards(op, state, model.axis_sizes, model.mesh.topology.backend)
        if (called & ~_splits_itself(rest, op, state))[0]:
            return True
    return False
