"""Intermediate values that a plan pins, ops that it runs in regions, and opaque calls that it runs on shards."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.graph import FactorKind, Op, OpClass, OpGraph, source_of
from autoshard.mlir import WINDOWED
from autoshard.planning.price.evaluate import spec_of, tensor_spec
from autoshard.planning.record.plan_parts import Call, Pin, Region
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import factor_states, looped_factors
from autoshard.planning.space.op_strategies import result_states
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, Emitted, States, decompose, emitted, emitted_gather
from autoshard.planning.xla.partitioner_rules import called_on_shards, collected_factors
from autoshard.planning.xla.spatial_splits import in_region


def make_pins(model: Model, choices: NDArray[np.int64]) -> tuple[Pin, ...]:
    """Return pins at every place where a spec is decided rather than passed on.

    Pinned values are:

    - the tensor of every edge between decisions, and the result of the edge's op unless the op is heavy;
    - values that loops carry, at their entry too (`_carry_pins`);
    - operands that heavy ops consume in another spec than they are stored in (`_operand_pins`);
    - operands of other ops in a loop that does not change them, if they are resharded there (`_invariant_pins`);
    - results of heavy ops, in the states of `intermediate_states` before the planned one;
    - results that combine partial ones of all devices, in the state of the combined result before the planned one.

    Values that the plan leaves whole are pinned too: the partitioner would otherwise split them like their neighbours
    and gather them later. Values without a cluster are not pinned.
    """
    values: dict[int, list[Spec]] = {}
    graph, structure, backend = model.graph, model.structure, model.mesh.topology.backend

    def pin(tensor: int, before: Sequence[Spec] = ()) -> None:
        """Pin the source of a tensor to its planned spec, after the specs in `before`; replaces an earlier pin. Tensors
        without a cluster or without an op that computes them are skipped.
        """
        tensor = source_of(graph, tensor)
        if structure.cluster_of[tensor] >= 0 and graph.tensors[tensor].value[0] >= 0:
            values[tensor] = [*before, tensor_spec(model, choices, tensor)]

    for edge in structure.edges:
        pin(edge.tensor)
        if edge.op >= 0 and graph.ops[edge.op].op_class is not OpClass.HEAVY:
            pin(graph.ops[edge.op].results[edge.result])
    for loop in graph.loops:
        for carry in loop.carries:
            pin(carry.body)
            pin(carry.update)
            pin(carry.result)
    for edge in structure.edges:
        if edge.op >= 0 and edge.operand < 0 and graph.ops[edge.op].op_class is OpClass.HEAVY:
            pin(edge.tensor, list(_result_intermediates(model, choices, edge.op, edge.result)))
        elif edge.op >= 0 and edge.result >= 0 and collected_factors(graph, graph.ops[edge.op], backend):
            out = graph.ops[edge.op].results[edge.result]
            pin(out, list(_combined(model, choices, graph.ops[edge.op], out)))
    pins = [
        Pin(*graph.tensors[t].value, spec=spec, name=graph.tensors[t].name)
        for t in sorted(values, key=lambda t: graph.tensors[t].value)
        for spec in values[t]
    ]
    return (
        *pins,
        *_carry_pins(model, choices),
        *_operand_pins(model, choices),
        *_invariant_pins(model, choices),
    )


def _carry_pins(model: Model, choices: NDArray[np.int64]) -> Iterator[Pin]:
    """Yield a pin for the initial value of every carry, at the loop op, to the body's spec; propagation might otherwise
    split the carried value.
    """
    for loop in model.graph.loops:
        for carry in loop.carries:
            if model.structure.cluster_of[carry.body] >= 0:
                body, init = model.graph.tensors[carry.body], model.graph.tensors[carry.init]
                number, position = body.value[0], body.value[1] - loop.width
                yield Pin(*init.value, tensor_spec(model, choices, carry.body), (number, position), init.name)


def intermediate_states(
    source: Sequence[int], target: Sequence[int], collectives: Collectives, size: float
) -> Iterator[tuple[int, ...]]:
    """Yield the states to pin between the state of an op's result, or of a stored value, and the planned state.

    - `source`: state in which the op leaves its result, one entry for each mesh axis; `PARTIAL` entries are sums.
    - `target`: planned state, which is never yielded.
    - `collectives`: prices that decide how XLA emits sums and gathers.
    - `size`: bytes of the whole tensor.

    A summed axis is scattered if it splits a dim of `target`. The states come in this order:

    - Sums staged over several scattered axes: the state after each scatter, the other axes summed.
    - Else, if some sums are scattered at once (`Emitted.SCATTER`) and others are not: the state after both.
    - Else, if there are sums, or axes that leave a dim: the state with all sums whole. A pure slice needs none.
    - Scattered axes that are not split yet, if other dims are gathered afterwards: the state after these slices.
    - The states of `gather_intermediates`.

    Evidence: docs/compiler_behaviour.md, "Pins between a partial sum and its planned spec".
    """
    now = [max(s, WHOLE) for s in source]
    summed = [a for a, s in enumerate(source) if s <= PARTIAL]
    scattered = [a for a in summed if target[a] >= 0]
    form = emitted(collectives, scattered) if scattered else Emitted.SUM
    # As `waves` prices it: TPU compilers scatter the sums of different factors one after the other.
    together = len({source[a] for a in scattered}) == 1 or not collectives.mesh.topology.traits.joins_sums
    if form is Emitted.SCATTER and together and len({target[a] for a in scattered}) > 1:
        form = Emitted.SUM
    if len(scattered) > 1 and form is Emitted.STAGED:
        for axis in scattered:
            now[axis] = target[axis]
            if now != list(target):
                yield tuple(now)
    elif scattered and len(scattered) < len(summed) and form is Emitted.SCATTER:
        for axis in scattered:
            now[axis] = target[axis]
        if now != list(target):
            yield tuple(now)
    elif now != list(target) and (summed or any(n >= 0 and n != t for n, t in zip(now, target, strict=True))):
        yield tuple(now)
    gathered_dims = {n for n, t in zip(now, target, strict=True) if n >= 0 and n != t}
    sliced_later = [a for a in scattered if now[a] != target[a]]
    if gathered_dims and sliced_later and gathered_dims.isdisjoint(target[a] for a in sliced_later):
        for axis in sliced_later:
            now[axis] = target[axis]
        yield tuple(now)
    yield from gather_intermediates(now, target, collectives, size)


def gather_intermediates(
    source: Sequence[int], target: Sequence[int], collectives: Collectives, size: float
) -> Iterator[tuple[int, ...]]:
    """Yield the states between two states of a value whose gather must run one axis at a time, the last axis first.

    Yield nothing if at most one axis is gathered, or if the compiler emits one collective for all (`emitted_gather`).
    """
    gathered = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s >= 0 and t == WHOLE]
    form, most = emitted_gather(collectives, gathered)
    # Only gathers over all devices are staged, and these end with the whole tensor.
    if len(gathered) > 1 and form is Emitted.STAGED and size <= most:
        now = list(source)
        for axis in reversed(gathered[1:]):
            now[axis] = WHOLE
            yield tuple(now)


def _specs(model: Model, states: Iterator[tuple[int, ...]], rank: int) -> Iterator[Spec]:
    """Yield the specs of states over the dims of a tensor of `rank` dims, in order."""
    for state in states:
        yield spec_of(model, np.array([state]), 0, rank)


def _result_intermediates(model: Model, choices: NDArray[np.int64], op_id: int, result: int) -> Iterator[Spec]:
    """Return the specs to pin on a heavy op's result (by number) before its planned spec, in order. There are none
    without a sharding rule.
    """
    op = model.graph.ops[op_id]
    if op.rule is None:
        return iter(())
    number = model.op_node[op_id]
    state = model.nodes[number].states[int(choices[number])][None, :]
    rank = len(model.graph.tensors[op.results[result]].shape)
    planned_state = _held(model, choices, op.results[result])
    result_state = result_states(op, state, result)[0].tolist()
    record = model.graph.tensors[op.results[result]]
    pinned_states = list(intermediate_states(result_state, planned_state, model.collectives, record.bytes))
    summed = tuple(max(s, WHOLE) for s in result_state)
    if collected_factors(model.graph, op, model.mesh.topology.backend):
        pinned_states = [summed] if summed != planned_state else []
    if (op.kind in WINDOWED or op.kind == "fft") and not pinned_states and summed != planned_state:
        # Given only the planned spec, the partitioner splits the op itself. It sometimes computes wrong values for
        # windowed ops, and emits FFTs that do not compile.
        pinned_states = [summed]
    return _specs(model, iter(pinned_states), rank)


def _combined(model: Model, choices: NDArray[np.int64], op: Op, result: int) -> Iterator[Spec]:
    """Yield the spec of the combined partial results of a light op, if it is not the planned one of tensor `result`.

    Given only the planned spec, the partitioner splits the op's operands by it, which takes an all-to-all. Evidence:
    docs/compiler_behaviour.md, "Reductions of several operands".
    """
    assert op.rule is not None
    collected = collected_factors(model.graph, op, model.mesh.topology.backend)
    planned = _held(model, choices, result)
    combined = list(planned)
    for tensor, dims in zip(op.operands, op.rule.operands, strict=True):
        if model.structure.cluster_of[tensor] >= 0:
            held = np.array([_held(model, choices, tensor)])
            source, _ = decompose(held, dims, op.rule.sizes, model.axis_sizes)
            for axis in np.flatnonzero(np.isin(source[0], list(collected))):
                combined[axis] = WHOLE
    if tuple(combined) != planned:
        yield from _specs(model, iter([tuple(combined)]), len(model.graph.tensors[result].shape))


def _held(model: Model, choices: NDArray[np.int64], tensor: int) -> tuple[int, ...]:
    """Return the planned state of a tensor: for each mesh axis the dim that it splits, or `WHOLE`."""
    spec = tensor_spec(model, choices, tensor)
    dim_of = {axis: dim for dim, axes in enumerate(spec.dims) for axis in axes}
    return tuple(dim_of.get(axis, WHOLE) for axis in model.axis_names)


def _operand_pins(model: Model, choices: NDArray[np.int64]) -> Iterator[Pin]:
    """Yield pins for every operand that a heavy op consumes in another spec than the planned one of its tensor.

    Each pin is at the operand of one use. If the plan stores a copy of the tensor in a third spec, the pins pass
    through it. Gathers in stages add the specs of `gather_intermediates`.
    """
    for op_id, number in model.op_node.items():
        op = model.graph.ops[op_id]
        if op.rule is None:
            continue
        states: States = model.nodes[number].states
        for k, tensor in enumerate(op.operands):
            if model.structure.cluster_of[tensor] < 0:
                continue
            rank = len(model.graph.tensors[tensor].shape)
            have = _held(model, choices, tensor)
            want = tuple(factor_states(states, op.rule.operands[k])[int(choices[number])].tolist())
            path = [have]
            copy = model.copy_nodes.get(op.use(k))
            if copy is not None:
                path.append(tuple(model.nodes[copy].states[int(choices[copy])].tolist()))
            path.append(want)
            for a, b in zip(path, path[1:], strict=False):
                if a == b:
                    continue
                record = model.graph.tensors[tensor]
                stages = gather_intermediates(a, b, model.collectives, record.bytes)
                for spec in _specs(model, iter([*stages, b]), rank):
                    for place in op.operand_uses or ((op.number, op.operand_numbers[k]),):
                        yield Pin(*record.value, spec, place, record.name)


def _invariant_pins(model: Model, choices: NDArray[np.int64]) -> Iterator[Pin]:
    """Yield pins for operands of light ops in a loop that does not change them, if they are needed in another spec.

    The plan reshards such a value once, before the loop. Without a pin there the compiler would do it in every trip.
    Evidence: docs/compiler_behaviour.md, "Values that a loop does not change".
    """
    graph = model.graph
    for edge in model.structure.edges:
        op, record = graph.ops[edge.op], graph.tensors[edge.tensor]
        light = min(edge.op, edge.operand, edge.result) >= 0 and op.rule is not None
        if not light or not graph.is_invariant(edge.tensor, op.loop):
            continue
        rank = len(record.shape)
        have, want = _held(model, choices, edge.tensor), _needed(model, choices, op, edge.operand, edge.result)
        if any(held not in (WHOLE, needed) for held, needed in zip(have, want, strict=True)):
            stages = gather_intermediates(have, want, model.collectives, record.bytes)
            for spec in _specs(model, iter([*stages, want]), rank):
                for place in op.operand_uses or ((op.number, op.operand_numbers[edge.operand]),):
                    yield Pin(*record.value, spec, place, record.name)


def _needed(model: Model, choices: NDArray[np.int64], op: Op, operand: int, result: int) -> tuple[int, ...]:
    """Return the state in which an op without strategies needs an operand to compute a result in its planned state.

    Axes on reduced factors stay: they leave partial sums.
    """
    assert op.rule is not None
    rule, axes = op.rule, model.axis_sizes
    have = np.array([_held(model, choices, op.operands[operand])])
    planned = np.array([_held(model, choices, op.results[result])])
    source, _ = decompose(have, rule.operands[operand], rule.sizes, axes, looped_factors(model.structure, op))
    aim, _ = decompose(planned, rule.results[result], rule.sizes, axes)
    reduced = [f for f, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCTION]
    needed = np.where(np.isin(source, reduced), source, aim)
    return tuple(factor_states(needed, rule.operands[operand])[0].tolist())


def make_calls(model: Model, choices: NDArray[np.int64]) -> tuple[Call, ...]:
    """Return the specs of the opaque calls with a sharding rule that run on shards, in program order.

    Each top-k that the partitioner would gather is one of them.
    """
    calls = []
    for op_id, number in sorted(model.op_node.items()):
        op = model.graph.ops[op_id]
        if op.rule is None or not op.on_shards:
            continue
        state = model.nodes[number].states[int(choices[number])][None, :]
        if op.opaque is None and not called_on_shards(op, state, model.axis_sizes, model.mesh.topology.backend)[0]:
            continue

        def specs(tensors: Sequence[int], states: Sequence[States]) -> tuple[Spec, ...]:
            """Return the spec of each tensor in the one state of the same position."""
            ranks = [len(model.graph.tensors[t].shape) for t in tensors]
            return tuple(spec_of(model, s, 0, rank) for s, rank in zip(states, ranks, strict=True))

        operand_specs = specs(op.operands, [factor_states(state, dims) for dims in op.rule.operands])
        result_rows = [np.maximum(result_states(op, state, r), WHOLE) for r in range(len(op.results))]
        reduced_factors = [f for f, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION]
        summed = tuple(model.axis_names[a] for a in np.flatnonzero(np.isin(state[0], reduced_factors)))
        name = op.opaque.target if op.opaque is not None else op.kind
        calls.append(Call(op.number, name, operand_specs, specs(op.results, result_rows), summed))
    return tuple(calls)


def make_regions(model: Model, choices: NDArray[np.int64]) -> tuple[Region, ...]:
    """Return one region for every op that the plan does not leave to the partitioner (`in_region`), sorted by op
    number.
    """
    regions = []
    for op_id, number in model.op_node.items():
        op = model.graph.ops[op_id]
        state = model.nodes[number].states[int(choices[number])][None, :]
        if in_region(op, state)[0]:
            regions.append(region_of(model.graph, op, state, model.axis_names))
    return tuple(sorted(regions, key=lambda region: region.op))


def region_of(graph: OpGraph, op: Op, state: States, names: list[str]) -> Region:
    """Return the region of an op in one state (shape [1, axes]); the op must have a sharding rule.

    `names` are those of the mesh axes. `summed` are the axes over which the first result is partial.
    """
    assert op.rule is not None

    def spec(row: NDArray[np.int64], rank: int) -> Spec:
        """Return the spec of one state over `rank` dims; partial sums split nothing."""
        return Spec(tuple(tuple(names[a] for a in np.flatnonzero(row == dim)) for dim in range(rank)))

    tensors = graph.tensors
    operands = [
        spec(factor_states(state, dims)[0], len(tensors[t].shape))
        for t, dims in zip(op.operands, op.rule.operands, strict=True)
    ]
    result_rows = [result_states(op, state, r)[0] for r in range(len(op.results))]
    results = [spec(row, len(tensors[t].shape)) for row, t in zip(result_rows, op.results, strict=True)]
    summed = tuple(names[a] for a in np.flatnonzero(result_rows[0] <= PARTIAL))
    return Region(op.number, tuple(operands), tuple(results), summed, op.name)
