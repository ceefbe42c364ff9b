"""From a lowered module to ops, tensors and loops."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import FactorKind, OpClass, analyse, build_structure, read_graph, replace_names
from tests.graph import programs as made
from tests.graph.programs import f32, graph_of, ops


def test_every_tensor_knows_its_maker_and_its_users() -> None:
    def step(x: Any, w: Any) -> Any:
        last, saved = lax.scan(lambda c, p: (jnp.tanh(c @ p) * c, c), x, w)
        return last + saved[0], last * last

    graph = graph_of(step, f32(8, 4), f32(5, 4, 4))
    for tensor in graph.tensors:
        makers = [op for op in graph.ops if tensor.id in op.results]
        assert makers == [op for op in (graph.maker(tensor.id),) if op is not None]
        assert list(graph.users[tensor.id]) == [op for op in graph.ops if tensor.id in op.operands]
    (square,) = (op for op in ops(graph, "multiply") if op.loop < 0)
    assert square.operands[0] == square.operands[1] and graph.users[square.operands[0]].count(square) == 1
    (constant, *_) = ops(graph, "constant")
    assert constant.results[0] in graph.generated and graph.generated.isdisjoint(graph.arguments)
    (loop,) = graph.loops
    assert graph.returned == {*graph.results, *(t for c in loop.carries for t in (c.init, c.update))}


def test_a_pickled_graph_lacks_what_is_derived() -> None:
    graph = graph_of(lambda x: jnp.tanh(x) + x, f32(8, 4))
    before = len(pickle.dumps(graph))
    assert len(graph.users) == len(graph.tensors) and not graph.generated and graph.returned
    assert len(pickle.dumps(graph)) == before
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and again.users == graph.users


def test_tensors_carry_shape_bytes_producer_and_place() -> None:
    graph = graph_of(lambda x, w: (x @ w).astype(jnp.bfloat16), f32(8, 4), f32(4, 6))
    assert [graph.tensors[t].shape for t in graph.arguments] == [(8, 4), (4, 6)]
    assert [graph.tensors[t].value for t in graph.arguments] == [(-1, 0), (-1, 1)]
    assert all(graph.tensors[t].producer == -1 for t in graph.arguments)
    (result,) = graph.results
    record = graph.tensors[result]
    assert (record.shape, record.dtype, record.bytes, record.elements) == ((8, 6), "bfloat16", 96, 48)
    assert graph.ops[record.producer].kind == "convert"
    named = replace_names(graph, ["x", "w"])
    assert [named.tensors[t].name for t in named.arguments] == ["x", "w"]


@pytest.mark.parametrize("name", made.PROGRAMS)
def test_ops_and_tensors_are_numbered_consistently(name: str) -> None:
    graph = read_graph(made.PROGRAMS[name]().module)
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    assert [t.id for t in graph.tensors] == list(range(len(graph.tensors)))
    assert [op.number for op in graph.ops] == sorted({op.number for op in graph.ops})
    for op in graph.ops:
        for index, tensor in enumerate(op.results):
            assert graph.tensors[tensor].producer == op.id
            assert graph.tensors[tensor].value == (op.number, index)
        assert all(graph.tensors[t].producer < op.id for t in op.operands)
        if op.rule is not None:
            for tensor, dims in zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True):
                assert len(dims) == len(graph.tensors[tensor].shape)
    for loop in graph.loops:
        assert all(graph.ops[o].loop >= loop.id for o in range(loop.start, loop.stop))


def test_classes_of_ops() -> None:
    def fn(x: Any, stack: Any, w: Any, i: Any) -> Any:
        scale = jnp.arange(8, dtype=jnp.float32)[:, None] * 2
        pointwise = jnp.tanh(x) * scale
        views = pointwise.reshape(4, 2, 16).sum(1)
        heavy = jnp.concatenate([x @ w, x @ w]), jnp.cumsum(x, 0), x[:, 3:9]
        part = lax.dynamic_slice_in_dim(stack, i, 1)[0]
        stack = lax.dynamic_update_slice_in_dim(stack, part[None] * 2, i, 0)
        window = lax.dynamic_slice(x, (i, 0), (3, 16))
        return views, heavy, stack, window, x.T

    graph = graph_of(fn, f32(8, 16), f32(5, 8, 16), f32(16, 16), jax.ShapeDtypeStruct((), jnp.int32))
    classes: dict[str, set[OpClass]] = {}
    for op in graph.ops:
        classes.setdefault(op.kind, set()).add(op.op_class)
    assert classes["iota"] == classes["constant"] == {OpClass.FREE}
    assert classes["tanh"] == classes["transpose"] == {OpClass.POINTWISE}
    assert classes["reshape"] == classes["reduce"] == {OpClass.VIEW}
    assert classes["dot_general"] == classes["concatenate"] == classes["slice"] == {OpClass.HEAVY}
    assert classes["dynamic_update_slice"] == {OpClass.LAYER}
    assert classes["dynamic_slice"] == {OpClass.LAYER, OpClass.HEAVY}, "one layer of a stack; a window of a dim"
    multiplied = next(op for op in ops(graph, "multiply") if op.op_class is OpClass.FREE)
    assert graph.tensors[multiplied.results[0]].shape == (8, 1), "generated from an iota and a constant"


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("mk,kn->mn", ((8, 4), (4, 6)), 2 * 8 * 4 * 6),
        ("bmk,bkn->bmn", ((3, 8, 4), (3, 4, 6)), 2 * 3 * 8 * 4 * 6),
        ("bshk,bthk->bhst", ((2, 16, 4, 8), (2, 16, 4, 8)), 2 * 2 * 4 * 16 * 16 * 8),
        ("k,k->", ((32,), (32,)), 2 * 32),
        ("mab,abn->mn", ((8, 3, 5), (3, 5, 7)), 2 * 8 * 15 * 7),
    ],
)
def test_flops_of_a_dot(equation: str, shapes: tuple[tuple[int, ...], ...], flops: int) -> None:
    assert graph_of(lambda a, b: jnp.einsum(equation, a, b), *(f32(*s) for s in shapes)).flops == flops


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "groups"),
    [
        ((8, 16, 16, 4), (3, 3, 4, 32), 1, 1),
        ((8, 16, 16, 4), (3, 3, 4, 32), 2, 1),
        ((8, 16, 16, 8), (3, 3, 2, 16), 1, 4),
        ((8, 16, 16, 4), (3, 3, 4, 1), 1, 1),
    ],
)
def test_flops_of_a_convolution_and_of_its_gradients(
    image: tuple[int, ...], kernel: tuple[int, ...], stride: int, groups: int
) -> None:
    def convolve(x: Any, w: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    n, h, w, _ = image
    once = 2 * n * (h // stride) * (w // stride) * kernel[0] * kernel[1] * kernel[2] * kernel[3]
    assert graph_of(convolve, f32(*image), f32(*kernel)).flops == once
    for side in (0, 1):
        graph = graph_of(jax.grad(lambda x, w: convolve(x, w).sum(), argnums=side), f32(*image), f32(*kernel))
        assert [op.flops for op in ops(graph, "convolution")] == [once, once]


def test_convolutions_sum_over_features_or_batch_and_over_space_with_halos() -> None:
    """Read the halos: a sum over space needs the windows that reach into the neighbouring shards."""
    graph = read_graph(made.convolutions().module)
    for op in ops(graph, "convolution"):
        assert op.rule is not None
        spatial = {halo.factor for halo in op.halos}
        assert len(spatial) == 2
        summed = [f for f, kind in enumerate(op.rule.kinds) if kind is FactorKind.REDUCTION and f not in spatial]
        (factor,) = summed
        assert all(halo.dim.summed == (op.rule.kinds[halo.factor] is FactorKind.REDUCTION) for halo in op.halos)
        left, right = (graph.tensors[t].shape for t in op.operands)
        places = [dims.index((factor,)) for dims in op.rule.operands]
        assert left[places[0]] == right[places[1]] == op.rule.sizes[factor]
        assert places in ([3, 2], [0, 0], [3, 3]), "features, the batch of a kernel's gradient, features reversed"


def test_flops_of_vector_work_are_not_counted() -> None:
    assert graph_of(lambda x: jax.nn.softmax(x).sum(), f32(64, 64)).flops == 0


# Loops


def _scan(reverse: bool = False) -> Any:
    return lambda x, w: lax.scan(lambda c, p: (jnp.tanh(c @ p), c), x, w, reverse=reverse)


@pytest.mark.parametrize(
    ("fn", "trips", "known"),
    [
        (_scan(), 5, True),
        (_scan(reverse=True), 5, True),
        (lambda x, w: lax.fori_loop(2, 9, lambda i, x: jnp.sin(x) @ w[0], x), 7, True),
        (lambda x, w: lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 2, s[1] @ w[0]), (0, x))[1], 5, True),
        (lambda x, w: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w[0], x), 1, False),
        (lambda x, w: lax.fori_loop(0, x[0, 0].astype(int), lambda i, x: jnp.sin(x) @ w[0], x), 1, False),
    ],
    ids=["scan", "reverse", "from 2 to 9", "in steps of 2", "until a value", "to a value"],
)
def test_trips_of_a_loop(fn: Any, trips: int, known: bool) -> None:
    graph = graph_of(fn, f32(8, 4), f32(5, 4, 4))
    (loop,) = graph.loops
    assert (loop.trips, loop.known, loop.parent) == (trips, known, -1)
    assert graph.trips(loop.id) == trips
    assert graph.flops == trips * 2 * 8 * 4 * 4
    (dot,) = ops(graph, "dot_general")
    assert dot.loop == loop.id and loop.start <= dot.id < loop.stop


def test_trips_of_nested_loops_multiply() -> None:
    def inner(c: Any, w: Any) -> Any:
        return lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w), c), None

    graph = graph_of(lambda x, w: lax.scan(inner, x, w)[0], f32(8, 4), f32(5, 4, 4))
    outer, nested = graph.loops
    assert (outer.trips, outer.parent, nested.trips, nested.parent) == (5, -1, 4, outer.id)
    assert outer.start < nested.start < nested.stop < outer.stop
    assert graph.trips(nested.id) == 20
    assert graph.flops == 20 * 2 * 8 * 4 * 4


def test_carried_values_and_what_a_loop_only_reads() -> None:
    graph = graph_of(_scan(), f32(8, 4), f32(5, 4, 4))
    (loop,) = graph.loops
    carried = {graph.tensors[c.body].shape for c in loop.carries}
    assert carried == {(), (8, 4), (5, 8, 4)}, "counter, carry and stacked outputs; the stack of weights is only read"
    for carry in loop.carries:
        shapes = {graph.tensors[t].shape for t in (carry.init, carry.body, carry.update, carry.result)}
        assert len(shapes) == 1
        assert graph.tensors[carry.body].loop == loop.id and graph.tensors[carry.body].producer == -1
        assert graph.tensors[carry.result].loop == -1
    layer = next(op for op in ops(graph, "dynamic_slice"))
    assert layer.operands[0] == graph.arguments[1]
    assert {c.result for c in loop.carries} >= set(graph.results)


def test_the_backward_loop_runs_as_often_as_the_forward_one() -> None:
    graph = read_graph(made.decoder().module)
    assert [(loop.trips, loop.known) for loop in graph.loops] == [(made.LAYERS, True)] * 2


# Calls and wrappers


def test_nested_calls_are_read_as_their_bodies() -> None:
    inner = jax.jit(lambda x: jnp.tanh(x) * 2)
    outer = jax.jit(lambda x, w: inner(x @ w) @ w)
    graph = graph_of(lambda x, w: outer(x, w) + inner(x), f32(8, 4), f32(4, 4))
    assert [op.kind for op in graph.ops if op.op_class is not OpClass.FREE] == [
        "dot_general", "tanh", "multiply", "dot_general", "tanh", "multiply", "add",
    ]  # fmt: skip
    assert graph.flops == 2 * 2 * 8 * 4 * 4


def test_checkpoints_and_barriers_are_seen_through() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x).sum()

    graph = graph_of(jax.grad(loss), f32(4, 4), f32(8, 4))
    assert {op.kind for op in graph.ops}.isdisjoint({"optimization_barrier"})
    dots = ops(graph, "dot_general")
    assert len(dots) == 6, "two forward, one of them again, three backward"
    w, x = graph.arguments
    assert [dot.operands for dot in dots].count((x, w)) == 2, "recomputed from the arguments themselves"
    first, again = (dot for dot in dots if dot.operands == (x, w))
    for operand in (0, 1):
        assert first.use(operand)[2] == -1 < again.use(operand)[2], "no copy is shared across the barrier"
    barrier = graph_of(lambda x: lax.optimization_barrier((jnp.sin(x), x))[0] * 2, f32(8, 4))
    sine = ops(barrier, "sine")[0]
    assert ops(barrier, "multiply")[0].operands[0] == sine.results[0]


def test_chlo_ops_have_rules() -> None:
    graph = graph_of(lambda x: (jax.scipy.special.erf(x), lax.top_k(x, 2)), f32(8, 4))
    assert ops(graph, "erf")[0].op_class is OpClass.POINTWISE
    (top,) = ops(graph, "top_k")
    assert top.rule is not None and top.rule.sizes == (8, 4, 2)
    assert top.rule.kinds == (FactorKind.PARALLEL, FactorKind.REDUCTION, FactorKind.NEED_REPLICATION)
    assert graph.without_rule == ()


def test_a_constraint_is_a_tensor_of_its_own() -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("a", jax.sharding.PartitionSpec.UNCONSTRAINED)
    )
    graph = graph_of(lambda x: lax.with_sharding_constraint(jnp.sin(x), sharding) * 2, f32(8, 4))
    (constraint,) = graph.constraints
    (op,) = ops(graph, "sharding_constraint")
    assert op.operands == ops(graph, "sine")[0].results and op.results == (constraint.tensor,)
    assert [[use.name for use in dim] for dim in constraint.sharding.dims] == [["a"], []]
    assert constraint.sharding.open == (False, True) and constraint.sharding.mesh == (("a", 8),)
    assert constraint.where.startswith("with_sharding_constraint at test_read.py:")
    structure = build_structure(graph)
    ends = {structure.cluster_of[t] for t in (*op.operands, *op.results, *graph.results)}
    assert len(ends) == 3, "what goes in, what the program asks for and what is made of it are decided apart"


def test_a_constraint_on_an_argument_that_nothing_else_uses_is_the_arguments_own() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    graph = graph_of(lambda x: lax.with_sharding_constraint(x, sharding) * 2, f32(8, 4))
    (constraint,) = graph.constraints
    assert constraint.tensor == graph.arguments[0] and not ops(graph, "sharding_constraint")


def test_regions_by_hand_are_read_through() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    body = jax.shard_map(
        lambda x: lax.psum(x, "b") @ jnp.ones((4, 3)), mesh=mesh, in_specs=spec("a", None), out_specs=spec("a", None),
        check_vma=False,
    )  # fmt: skip
    graph = graph_of(lambda x: body(jnp.sin(x)), f32(8, 4))
    (region,) = graph.regions
    assert region.axes == ("a", "b") and region.mesh == (("a", 4), ("b", 2))
    (enter,), (leave,), (total,) = (ops(graph, kind) for kind in ("shard_map_in", "shard_map_out", "all_reduce"))
    assert [graph.tensors[t].shape for t in (*enter.operands, *enter.results)] == [(8, 4), (2, 4)]
    assert [graph.tensors[t].shape for t in (*leave.operands, *leave.results)] == [(2, 3), (8, 3)]
    assert enter.fixed == ((0, ("a",)),) and set(enter.manual) == {"a", "b"}
    assert total.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert graph.tensors[total.results[0]].manual == ("a", "b") and not graph.tensors[leave.results[0]].manual
    assert graph.without_rule == ()


# Ops without a rule


UNRULED = """
func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.sine %x : tensor<8x4xf32>
  %1 = stablehlo.custom_call @their_kernel(%0) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
"""


def test_ops_without_rule_are_reported() -> None:
    graph = read_graph(UNRULED.encode())
    (op_id,) = graph.without_rule
    op = graph.ops[op_id]
    assert (op.kind, op.op_class, op.rule) == ("custom_call", OpClass.HEAVY, None)
    assert build_structure(graph).heavy == (op_id,)


def test_branches_agree_with_what_is_made_of_them() -> None:
    def fn(x: Any, w: Any, i: Any) -> Any:
        return lax.cond(i > 0, lambda x: jnp.sin(x @ w), lambda x: x * 2, x) + 1

    graph = graph_of(fn, f32(16, 8), f32(8, 8), jax.ShapeDtypeStruct((), jnp.int32))
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    assert graph.without_rule == ()
    (case,) = ops(graph, "case")
    (dot,), (sine,), (double,) = ops(graph, "dot_general"), ops(graph, "sine"), ops(graph, "multiply")
    assert case.operands == (double.results[0], sine.results[0])
    assert graph.tensors[case.results[0]].value == (case.number, 0)
    assert case.number < min(op.number for op in (dot, sine, double)), "numbered before its branches, as in the module"
    structure = build_structure(graph)
    assert structure.heavy == (dot.id,)
    assert len({structure.cluster_of[t] for t in (*case.operands, *case.results)}) == 1
    assert graph.trips(dot.loop) == graph.trips(double.loop) == 0.5
    assert graph.flops == dot.flops / 2
    assert analyse(graph).buffers


def test_an_opaque_call_needs_whole_what_it_does_not_tie() -> None:
    graph = graph_of(jnp.linalg.cholesky, f32(4, 8, 8))
    (call,) = ops(graph, "custom_call")
    assert call.rule is not None
    for factor, kind in enumerate(call.rule.kinds):
        tied = any(factor in dim for dim in call.rule.operands[0]) and any(factor in d for d in call.rule.results[0])
        assert kind is (FactorKind.PARALLEL if tied else FactorKind.NEED_REPLICATION)
    assert call.rule.kinds.count(FactorKind.PARALLEL) == 1


@pytest.mark.parametrize("sides", [1, 32])
def test_a_triangular_solve_costs_a_row_of_the_triangle_for_each_number_of_its_right_hand_sides(sides: int) -> None:
    def left(a: Any, b: Any) -> Any:
        return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    def right(a: Any, b: Any) -> Any:
        return lax.linalg.triangular_solve(a, b, lower=True)

    assert graph_of(left, f32(3, 8, 8), f32(3, 8, sides)).flops == 3 * 8 * 8 * sides
    assert graph_of(right, f32(3, 8, 8), f32(3, sides, 8)).flops == 3 * 8 * 8 * sides


def test_complex_values_are_tensors_like_others() -> None:
    graph = graph_of(lambda x: jnp.fft.fft(x).real, f32(8, 4))
    (fft,) = ops(graph, "fft")
    assert graph.tensors[fft.results[0]].shape == (8, 4)
    assert graph.tensors[fft.results[0]].bytes == 8 * 4 * 8
    structure = build_structure(graph)
    assert structure.heavy == (fft.id,)
    assert all(structure.cluster_of[t] >= 0 for t in (*fft.operands, *fft.results))
