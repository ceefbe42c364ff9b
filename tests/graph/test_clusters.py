"""Clusters: tensors that must have one spec."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import OpClass, OpGraph, Structure, build_structure, read_graph
from autoshard.program import Role
from tests.graph import programs as made
from tests.graph.programs import f32, graph_of, ops


def argument(graph: OpGraph, program: Any, name: str) -> int:
    return next(t for t, a in zip(graph.arguments, program.arguments, strict=True) if a.name == name)


@pytest.fixture(scope="module", params=made.PROGRAMS)
def built(request: pytest.FixtureRequest) -> tuple[Any, OpGraph, Structure]:
    program = made.PROGRAMS[request.param]()
    return program, *made.structure_of(program)


def test_every_dim_is_a_factor_of_its_own_with_its_size(built: tuple[Any, OpGraph, Structure]) -> None:
    _, graph, structure = built
    for tensor in graph.tensors:
        cluster, dims = structure.cluster_of[tensor.id], structure.dims_of[tensor.id]
        if cluster < 0:
            continue
        sizes = structure.clusters[cluster].sizes
        assert len(dims) == len(tensor.shape)
        real = [f for f in dims if f >= 0]
        assert len(set(real)) == len(real)
        for size, factor in zip(tensor.shape, dims, strict=True):
            assert size == (sizes[factor] if factor >= 0 else 1)


def test_some_tensor_has_all_factors_that_may_be_split(built: tuple[Any, OpGraph, Structure]) -> None:
    _, _, structure = built
    for cluster in structure.clusters:
        wanted = set(range(len(cluster.sizes))) - cluster.blocked
        assert any(wanted <= set(structure.dims_of[t]) for t in cluster.tensors)


def test_clusters_share_out_the_tensors(built: tuple[Any, OpGraph, Structure]) -> None:
    _, graph, structure = built
    seen = [t for cluster in structure.clusters for t in cluster.tensors]
    assert sorted(seen) == [t.id for t in graph.tensors if structure.cluster_of[t.id] >= 0]
    for cluster in structure.clusters:
        assert {structure.cluster_of[t] for t in cluster.tensors} == {cluster.id}
    large = {t.id for t in graph.tensors if t.elements > 1 and t.producer < 0}
    assert all(structure.cluster_of[t] >= 0 for t in large), "arguments and carried values are always decided"


def test_carried_values_have_one_spec(built: tuple[Any, OpGraph, Structure]) -> None:
    program, graph, structure = built
    stored = {t for t, a in zip(graph.arguments, program.arguments, strict=True) if a.role is Role.PARAMETER}
    for carry in (c for loop in graph.loops for c in loop.carries):
        if structure.cluster_of[carry.body] < 0:
            continue
        for tensor in (carry.init, carry.update, carry.result):
            if tensor not in stored:
                assert structure.cluster_of[tensor] == structure.cluster_of[carry.body]
                assert structure.dims_of[tensor] == structure.dims_of[carry.body]


def test_parameters_are_separated_from_what_updates_them(built: tuple[Any, OpGraph, Structure]) -> None:
    program, graph, structure = built
    of_role: dict[Role, set[int]] = {}
    for tensor, a in zip(graph.arguments, program.arguments, strict=True):
        if structure.cluster_of[tensor] >= 0:
            of_role.setdefault(a.role, set()).add(structure.cluster_of[tensor])
    assert of_role.get(Role.PARAMETER, set()).isdisjoint(of_role.get(Role.OPTIMIZER_STATE, set()))


def test_updated_state_is_tied_to_what_it_replaces(built: tuple[Any, OpGraph, Structure]) -> None:
    program, graph, structure = built
    for tensor, a in zip(graph.arguments, program.arguments, strict=True):
        if a.result is None or structure.cluster_of[tensor] < 0:
            continue
        result = graph.results[a.result]
        together = (
            structure.cluster_of[result] == structure.cluster_of[tensor]
            and structure.dims_of[result] == structure.dims_of[tensor]
        )
        assert together or (result, tensor) in structure.ties


def test_edges_are_where_values_change_hands(built: tuple[Any, OpGraph, Structure]) -> None:
    _, graph, structure = built
    heavy = set(structure.heavy)
    entering = {(e.op, e.operand) for e in structure.edges if e.op in heavy and e.operand >= 0}
    leaving = {(e.op, e.result) for e in structure.edges if e.op in heavy and e.operand < 0}
    for op_id in heavy:
        op = graph.ops[op_id]
        assert op.op_class is OpClass.HEAVY
        for k, tensor in enumerate(op.operands):
            assert ((op_id, k) in entering) == (structure.cluster_of[tensor] >= 0)
        for k, tensor in enumerate(op.results):
            assert ((op_id, k) in leaving) == (structure.cluster_of[tensor] >= 0)
    for edge in structure.edges:
        if edge.op >= 0 and edge.op not in heavy:
            op = graph.ops[edge.op]
            assert op.operands[edge.operand] == edge.tensor
            assert structure.cluster_of[op.results[edge.result]] >= 0 and structure.cluster_of[edge.tensor] >= 0


def test_pointwise_ops_pass_specs_on_or_have_an_edge(built: tuple[Any, OpGraph, Structure]) -> None:
    _, graph, structure = built
    crossing = {(e.op, e.operand, e.result) for e in structure.edges}
    for op in graph.ops:
        if op.op_class is not OpClass.POINTWISE or op.rule is None:
            continue
        for r, out in enumerate(op.results):
            for k, tensor in enumerate(op.operands):
                if structure.cluster_of[out] < 0 or structure.cluster_of[tensor] < 0 or (op.id, k, r) in crossing:
                    continue
                assert structure.cluster_of[out] == structure.cluster_of[tensor]
                ours = dict(zip(op.rule.operands[k], structure.dims_of[tensor], strict=True))
                theirs = dict(zip(op.rule.results[r], structure.dims_of[out], strict=True))
                assert all(ours[f] == theirs[f] for f in ours if f in theirs)


# Single cases


def test_a_transpose_permutes_factors_and_meets_its_source_through_an_edge() -> None:
    structure = build_structure(graph := graph_of(lambda x: (x + x.T) * 2, f32(8, 8)))
    (add,) = ops(graph, "add")
    (x,) = graph.arguments
    (edge,) = structure.edges
    assert edge.op in {add.id, add.id - 1}
    assert structure.cluster_of[add.results[0]] == structure.cluster_of[graph.results[0]]
    straight = build_structure(graph := graph_of(lambda x: jnp.tanh(x.T), f32(8, 6)))
    (x,), (result,) = graph.arguments, graph.results
    assert straight.cluster_of[x] == straight.cluster_of[result] and straight.edges == ()
    assert straight.dims_of[result] == straight.dims_of[x][::-1]


def test_stacks_and_their_slices_share_a_cluster_and_the_layer_dim_stays_whole() -> None:
    program = made.decoder()
    graph, structure = made.structure_of(program)
    for name in ("qkv", "out", "up", "down"):
        stack = argument(graph, program, f"params.layers.{name}")
        cluster = structure.clusters[structure.cluster_of[stack]]
        layer = structure.dims_of[stack][0]
        assert layer in cluster.blocked and cluster.sizes[layer] == made.LAYERS
        assert cluster.blocked == {layer}
        taken = [op.results[0] for op in ops(graph, "dynamic_slice") if op.operands[0] == stack]
        assert len(taken) == 2, "forward and backward"
        for tensor in taken:
            assert structure.cluster_of[tensor] == cluster.id
            assert structure.dims_of[tensor] == (-1, *structure.dims_of[stack][1:])


def test_a_stack_that_a_loop_writes_parts_of_layers_into_keeps_its_layer_dim_whole() -> None:
    def prefill(stack: Any, x: Any) -> Any:
        def layer(state: Any, _: Any) -> Any:
            x, i, stack = state
            return (jnp.tanh(x), i + 1, lax.dynamic_update_slice(stack, x[None], (i, 0, 0, 0))), None

        return lax.scan(layer, (x, jnp.int32(0), stack), None, length=made.LAYERS)[0]

    graph = graph_of(prefill, f32(made.LAYERS, 8, 64, 16), f32(8, 32, 16))
    structure = build_structure(graph)
    (write,) = ops(graph, "dynamic_update_slice")
    assert write.op_class is OpClass.HEAVY
    stack = write.results[0]
    cluster = structure.clusters[structure.cluster_of[stack]]
    assert {graph.arguments[0], write.operands[0], stack} <= set(cluster.tensors)
    assert cluster.blocked == {structure.dims_of[stack][0]}


def test_reshapes_of_merged_dims_have_an_edge_and_trivial_ones_none() -> None:
    graph = graph_of(lambda x: jnp.tanh(x).reshape(32, 6)[None, :, None, :] * 2, f32(8, 4, 6))
    structure = build_structure(graph)
    (edge,) = structure.edges
    assert graph.ops[edge.op].kind == "reshape"
    assert len(structure.clusters) == 2


def test_a_reduction_of_a_dim_of_size_one_needs_no_decision() -> None:
    graph = graph_of(lambda x: jnp.tanh(x).reshape(1, 8, 4).sum(0), f32(8, 4))
    assert any(op.kind == "reduce" for op in graph.ops)
    structure = build_structure(graph)
    assert structure.edges == () and len(structure.clusters) == 1


def test_scalars_and_generated_values_need_no_decision() -> None:
    graph = graph_of(lambda x, s: x * s + jnp.arange(8.0)[:, None], f32(8, 4), f32())
    structure = build_structure(graph)
    x, s = graph.arguments
    assert structure.cluster_of[s] == -1 and structure.cluster_of[x] >= 0
    free = {t for op in graph.ops if op.op_class is OpClass.FREE for t in op.results}
    assert free and all(structure.cluster_of[t] == -1 for t in free)


def test_a_generated_value_that_a_loop_fills_is_decided() -> None:
    graph = graph_of(lambda x, w: lax.scan(lambda c, p: (jnp.tanh(c @ p), c), x, w)[1], f32(8, 4), f32(5, 4, 4))
    structure = build_structure(graph)
    (stack,) = (c for c in graph.loops[0].carries if graph.tensors[c.body].shape == (5, 8, 4))
    assert graph.ops[graph.tensors[stack.init].producer].op_class is OpClass.FREE
    assert structure.cluster_of[stack.init] == structure.cluster_of[stack.body] >= 0


def test_a_carry_that_the_body_transposes_keeps_both_dims_whole() -> None:
    graph = graph_of(lambda x: lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c).T, x), f32(8, 8))
    structure = build_structure(graph)
    (carry,) = (c for c in graph.loops[0].carries if graph.tensors[c.body].shape == (8, 8))
    for tensor in (carry.body, carry.update):
        cluster = structure.clusters[structure.cluster_of[tensor]]
        same = structure.cluster_of[carry.body] == structure.cluster_of[carry.update]
        aligned = structure.dims_of[carry.body] == structure.dims_of[carry.update]
        assert (same and aligned) or set(structure.dims_of[tensor]) <= cluster.blocked


def test_names_and_roles_do_not_change_clusters_of_the_rest() -> None:
    program = made.mlp()
    graph = read_graph(program.module)
    plain, apart = build_structure(graph), made.structure_of(program)[1]
    assert len(apart.clusters) >= len(plain.clusters)
    up = argument(graph, program, "params.up")
    merged = plain.clusters[plain.cluster_of[up]].tensors
    assert len(merged) > len(apart.clusters[apart.cluster_of[up]].tensors), "its moments join it unless kept apart"


def test_building_twice_gives_equal_records() -> None:
    assert made.structure_of(made.decoder()) == made.structure_of(made.decoder())


def test_ties_that_cannot_be_are_reported_apart() -> None:
    """Bind a result to an argument of its shape, except to one whose other dim it is."""
    graph = graph_of(lambda x, y: (jnp.sort(y), jnp.sin(x.T)), f32(8, 8), f32(8, 8))
    (x, y), (ordered, turned) = graph.arguments, graph.results
    structure = build_structure(graph, ties=[(ordered, y), (turned, x)])
    assert structure.ties == ((turned, x),)
    assert structure.cluster_of[ordered] == structure.cluster_of[y]
    assert structure.dims_of[ordered] == structure.dims_of[y]
    structure = build_structure(graph, ties=[(turned, y)])
    assert structure.ties == () and structure.cluster_of[turned] == structure.cluster_of[y]
    assert structure.dims_of[turned] == structure.dims_of[y]
    structure = build_structure(graph, parameters=[y], ties=[(turned, y)])
    assert structure.ties == ((turned, y),) and structure.cluster_of[turned] != structure.cluster_of[y]
