"""Ops split in space: every strategy of convolutions and windows runs correctly and sends the predicted bytes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost import Collectives, Compute, Mesh, Topology, make_mesh
from autoshard.errors import UserError
from autoshard.exec import Application, measure, read_collectives, wire_by_axis
from autoshard.graph import Op, OpGraph, analyse, read_graph
from autoshard.planning import Options, Pin, Plan, Region, Spec, make_plan
from autoshard.planning.explain.plan_pins import region_of
from autoshard.planning.price.reshard_paths import path_steps
from autoshard.planning.record.plan_files import plan_from_json, plan_to_json
from autoshard.planning.space.decision_model import Path, Residency
from autoshard.planning.space.op_models import heavy_seconds
from autoshard.planning.space.op_strategies import heavy_strategies, result_states
from autoshard.planning.space.op_work import OpWork
from autoshard.planning.xla.array_layouts import Padding
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.planning.xla.spatial_splits import halo_exchanges, split_in_space
from autoshard.program import Program, trace
from tests.exec.planned_programs import handmade
from tests.graph.programs import f32


MESHES = {"8": {"a": 8}, "4x2": {"a": 4, "b": 2}, "2x2x2": {"a": 2, "b": 2, "c": 2}}


def mesh_of(name: str) -> Mesh:
    return make_mesh(Topology.parse("cpu:8"), MESHES[name])


def values_of(args: tuple[Any, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=a.shape).astype(a.dtype) for a in args]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, and the kind of its op that is split."""

    name: str
    kind: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def convolution(stride: int, pads: Any, rank: int = 2, **options: Any) -> Callable[..., Any]:
    letters = "HW"[:rank]
    numbers = (f"NC{letters}", f"OI{letters}", f"NC{letters}")

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride,) * rank, pads, dimension_numbers=numbers, **options)

    return run


def three(name: str, run: Callable[..., Any], x: Any, w: Any) -> list[Case]:
    """Return cases for a convolution and its gradients for the input and for the kernel."""
    g = jax.eval_shape(run, x, w)
    return [
        Case(f"{name}, forward", "convolution", lambda x, w, g: run(x, w), (x, w, g)),
        Case(f"{name}, input", "convolution", lambda x, w, g: jax.vjp(lambda x: run(x, w), x)[1](g)[0], (x, w, g)),
        Case(f"{name}, kernel", "convolution", lambda x, w, g: jax.vjp(lambda w: run(x, w), w)[1](g)[0], (x, w, g)),
    ]


def pool(fn: Any, start: float, window: int, stride: int, pad: int) -> Callable[..., Any]:
    shape = ((1, 1, window, window), (1, 1, stride, stride), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    return lambda x: lax.reduce_window(x, start, fn, *shape)


SAME = ((1, 1), (1, 1))
LARGEST, MEAN = pool(lax.max, -jnp.inf, 3, 2, 1), pool(lax.add, 0.0, 3, 1, 1)
CONVOLUTIONS = [
    *three("3, stride 1", convolution(1, SAME), f32(2, 4, 16, 8), f32(6, 4, 3, 3)),
    *three("3, stride 2", convolution(2, SAME), f32(4, 2, 16, 16), f32(8, 2, 3, 3)),
    *three("7, stride 2", convolution(2, ((3, 3), (3, 3))), f32(2, 3, 64, 32), f32(4, 3, 7, 7)),
    *three("1, stride 1", convolution(1, "VALID"), f32(2, 4, 8, 8), f32(8, 4, 1, 1)),
    *three("1, stride 2", convolution(2, "VALID"), f32(2, 4, 16, 16), f32(8, 4, 1, 1)),
    *three("5, spread 2", convolution(1, ((4, 4), (4, 4)), rhs_dilation=(2, 2)), f32(2, 2, 32, 8), f32(4, 2, 5, 5)),
    *three("uneven", convolution(1, SAME), f32(2, 4, 14, 12), f32(4, 4, 3, 3)),
    *three("causal", convolution(1, ((3, 0),), 1, feature_group_count=8), f32(2, 8, 32), f32(8, 1, 4)),
    *three("grouped", convolution(1, SAME, feature_group_count=2), f32(2, 8, 8, 8), f32(4, 4, 3, 3)),
    *three("patches", convolution(4, "VALID"), f32(2, 3, 32, 32), f32(8, 3, 4, 4)),
]
X = f32(2, 4, 32, 16)
WINDOWS = [
    Case("largest", "reduce_window", LARGEST, (X,)),
    Case("largest, backward", "select_and_scatter", lambda x, g: jax.vjp(LARGEST, x)[1](g)[0], (X, f32(2, 4, 16, 8))),
    Case("mean", "reduce_window", MEAN, (X,)),
    Case("every second", "slice", lambda x: x[:, :, 1::2, ::2], (X,)),
    Case("every second, backward", "pad", lambda g: jax.vjp(lambda x: x[:, :, 1::2, ::2], jnp.zeros(X.shape))[1](g),
         (f32(2, 4, 16, 8),)),
    Case("shifted", "pad", lambda x: lax.pad(x, 2.0, ((0, 0, 0), (0, 0, 0), (1, -1, 0), (-2, 2, 0))), (X,)),
]  # fmt: skip


@functools.cache
def found(case: Case) -> tuple[Program, OpGraph, Op]:
    program = trace(case.fn, case.args, name=case.name)
    graph = read_graph(program.module)
    op = [op for op in graph.ops if op.kind == case.kind][-1]
    assert op.rule is not None and (op.halos or op.grouped)
    return program, graph, op


def compiled(case: Case, mesh: Mesh, state: np.ndarray) -> Any:
    """Compile the program with one op in one state and everything else whole."""
    program, graph, op = found(case)
    assert op.rule is not None
    names = {t: a.name for t, a in zip(graph.arguments, program.arguments, strict=True)}
    region = region_of(graph, op, state, list(mesh.axes))
    plan = handmade(program, dict(mesh.axes), {})
    into = {names[t]: spec for t, spec in zip(op.operands, region.operands, strict=True) if t in names}
    plan = dataclasses.replace(
        plan,
        arguments={name: into.get(name, spec) for name, spec in plan.arguments.items()},
        pins=(Pin(op.number, 0, region.results[0]), Pin(op.number, 0, Spec.replicated(len(region.results[0].dims)))),
        regions=(region,),
    )
    return Application(plan).lower(program.fn, program.args, module=program.module).compile()


def predicted(case: Case, mesh: Mesh, state: np.ndarray) -> dict[str, float]:
    """Compute the predicted bytes on the wire by axis: halos, sums, and the gather of the result."""
    _, graph, op = found(case)
    collectives = Collectives(mesh)
    names = list(mesh.axes)
    steps = [
        (i.kind, i.axes, i.size[0] * i.senders) for i in halo_exchanges(graph, op, state, list(mesh.axes.values()))
    ]
    record = graph.tensors[op.results[0]]
    left = result_states(op, state, 0)
    ends = left, np.full_like(left, WHOLE)
    path = Path(record.shape, left, left, record.shape, *ends, 4, 4)
    steps += [(s.kind, s.axes, s.size[0, 0]) for s in path_steps(path, collectives)[1]]
    wire: dict[str, float] = {}
    for kind, axes, size in steps:
        for axis, share in collectives.wire_bytes(kind, tuple(names[a] for a in axes), size).items():
            wire[axis] = wire.get(axis, 0.0) + float(share)
    return {axis: size for axis, size in wire.items() if size}


def states_in_space(case: Case, mesh: Mesh) -> np.ndarray:
    _, graph, op = found(case)
    states = heavy_strategies(graph, op, list(mesh.axes.values()), "cpu")
    return states[split_in_space(op, states)]


def check(case: Case, mesh: Mesh, state: np.ndarray) -> None:
    program, _, op = found(case)
    values = values_of(program.args)
    run = compiled(case, mesh, state)
    wanted = jax.block_until_ready(jax.jit(program.fn)(*values))
    got = run(*values)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(np.abs(a).max()), err_msg=str(state))
    wire = {axis: float(size) for axis, size in wire_by_axis(read_collectives(run.as_text(), mesh)).items() if size}
    assert wire == pytest.approx(predicted(case, mesh, state), rel=1e-3), (state, op.rule)


ALL = [*CONVOLUTIONS, *WINDOWS]
MEETINGS = [
    pytest.param(case, mesh, id=f"{case.name}, {mesh}")
    for number, case in enumerate(ALL)
    for place, mesh in enumerate(MESHES)
    if case.name in ("3, stride 1, kernel", "7, stride 2, forward", "largest, backward") or number % 3 == place
]


@pytest.mark.parametrize(("case", "mesh"), MEETINGS)
def test_an_op_split_in_space_runs_right_and_sends_what_is_predicted(case: Case, mesh: str) -> None:
    """Run one strategy, a different one for each op and mesh. Compare the values and the bytes on the wire."""
    states = states_in_space(case, mesh_of(mesh))
    if case.name.startswith("uneven") and mesh == "8":
        assert not len(states), "8 devices divide neither 14 nor 12"
        return
    number = sum(map(ord, case.name + mesh)) % len(states)
    check(case, mesh_of(mesh), states[number : number + 1])


def test_windows_that_reach_past_the_neighbour_are_not_split() -> None:
    case = three("31", convolution(1, ((15, 15), (15, 15))), f32(2, 2, 64, 64), f32(2, 2, 31, 31))[0]
    _, graph, op = found(case)
    height = next(halo.factor for halo in op.halos if halo.dim.source == 2)
    for size, splits in ((4, True), (8, False)):
        assert (heavy_strategies(graph, op, [size], "cpu") == height).any() == splits


def test_a_cumulative_sum_is_not_split_along_itself() -> None:
    graph = read_graph(trace(lambda x: jnp.cumsum(x, 1), (f32(8, 64),)).module)
    (op,) = (op for op in graph.ops if op.kind == "reduce_window")
    assert not op.halos


def test_a_valid_convolution_stays_whole_in_space() -> None:
    """Offer no split in space: the result has fewer rows than the input, so their shards do not match."""
    graph = read_graph(trace(convolution(1, "VALID"), (f32(2, 4, 16, 16), f32(8, 4, 3, 3))).module)
    (op,) = (op for op in graph.ops if op.kind == "convolution")
    assert op.rule is not None and not op.halos
    spatial = {dims[d] for dims in (op.rule.operands[0], op.rule.results[0]) for d in (2, 3)}
    states = heavy_strategies(graph, op, [2], "cpu")
    assert not {(int(f),) for f in states.ravel()} & spatial


def convnet() -> Program:
    """Trace SGD with momentum on a stem, a pool, a residual block and a strided convolution, with batch norms."""

    def norm(x: Any) -> Any:
        mean = x.mean((0, 2, 3), keepdims=True)
        return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 2, 3), keepdims=True) + 1e-5)

    def net(p: dict[str, Any], x: Any) -> Any:
        x = LARGEST(jax.nn.relu(norm(convolution(2, ((3, 3), (3, 3)))(x, p["stem"]))))
        x = x + jax.nn.relu(norm(convolution(1, SAME)(x, p["mid"])))
        x = jax.nn.relu(norm(convolution(2, "VALID")(x, p["down"])))
        return x.mean((2, 3)) @ p["head"]

    def step(p: Any, momentum: Any, x: Any, y: Any) -> Any:
        loss, g = jax.value_and_grad(lambda p: jnp.mean((net(p, x) - y) ** 2))(p)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, g)
        return jax.tree.map(lambda p, m: p - 0.1 * m, p, momentum), momentum, loss

    shapes = {"stem": f32(8, 3, 7, 7), "mid": f32(8, 8, 3, 3), "down": f32(16, 8, 1, 1), "head": f32(16, 4)}
    return trace(step, (shapes, shapes, f32(2, 3, 64, 64), f32(2, 4)), name="convnet", donate_argnums=(0, 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", ["4x2", "2x2x2"])
def test_a_convnet_split_over_height_equals_the_unplanned_run(mesh: str) -> None:
    """Run a batch of 2 on 8 devices by the baseline `spatial`. Compare loss, gradients (momentum) and update."""
    program = convnet()
    result = make_plan(program, Options(topology="cpu:8", mesh=MESHES[mesh]))
    plan = result.baseline_plans["spatial"]
    assert any("image height over" in line for line in plan.words)
    assert any(region.operands[0].dims[2] for region in plan.regions)
    # The gradient of a kernel before a norm is a sum of terms that cancel: its relative rounding error is larger.
    measured = measure(program, plan, steps=1, warmup=0, check=True, tolerance=3e-5)
    assert measured.check is not None and measured.check.passed
    assert measured.wire_compiled == pytest.approx(measured.wire_predicted, rel=0.02)
    assert "collective-permute" in measured.counts_compiled
    assert load_text(plan) == plan


@pytest.mark.parametrize("mesh", ["8", "4x2"])
def test_a_convolution_of_a_value_that_nobody_holds_leaves_the_baseline(mesh: str) -> None:
    """Exclude a convolution from the baseline: it reads ones, the gradient of a sum. Other images are split by rows."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            y = convolution(1, SAME)(x, p["image"])
            return y.sum() + convolution(1, SAME)(jnp.ones_like(y), p["ones"]).sum()

        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p))

    program = trace(step, ({"image": f32(8, 8, 3, 3), "ones": f32(8, 8, 3, 3)}, f32(8, 8, 16, 16)), name="ones")
    plan = make_plan(program, Options(topology="cpu:8", mesh=MESHES[mesh])).baseline_plans["spatial"]
    assert any("image height over" in line for line in plan.words)
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed


def load_text(plan: Plan) -> Plan:
    return plan_from_json(plan_to_json(plan))


def test_images_larger_than_the_batch_can_feed_are_split_in_space() -> None:
    """Plan a batch of 4 large images for 16 chips: the plan splits their height or width."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            for k in w:
                x_ = convolution(1, SAME)(x, k)
            return jnp.mean(x_.astype(jnp.float32) ** 2)

        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))

    image = jax.ShapeDtypeStruct((4, 64, 2048, 2048), jnp.bfloat16)
    kernels = [jax.ShapeDtypeStruct((64, 64, 3, 3), jnp.bfloat16)]
    program = trace(step, (kernels, image), name="images")
    plan = make_plan(program, Options(topology="v5e:4x4", mesh="data=4,model=4")).plan
    assert all(set(region.operands[0].axes) == {"data", "model"} for region in plan.regions) and len(plan.regions) == 2


def test_a_region_of_another_program_is_refused() -> None:
    program = trace(lambda x: x + 1, (f32(8, 8),), name="other")
    region = Region(0, (Spec.replicated(2), Spec.replicated(2)), (Spec.replicated(2),), ())
    plan = dataclasses.replace(handmade(program, {"a": 8}, {}), regions=(region,))
    with pytest.raises(UserError, match="the plan runs op 0 shard by shard, which is .* here: the plan belongs"):
        Application(plan).lower(program.fn, program.args, module=program.module)


def state_space_block(p: Any, x: Any) -> Any:
    """Compute a causal depthwise convolution over the sequence, between two projections."""
    h = jnp.einsum("blc,cd->bdl", x, p["in"])
    h = jax.nn.silu(convolution(1, ((3, 0),), 1, feature_group_count=h.shape[1])(h, p["conv"]))
    return jnp.einsum("bdl,dc->blc", h, p["out"])


def speech_front_end(p: Any, x: Any) -> Any:
    x = jax.nn.gelu(convolution(1, ((1, 1),), 1)(x, p["in"]))
    return jnp.einsum("bct,cd->btd", jax.nn.gelu(convolution(2, ((1, 1),), 1)(x, p["conv"])), p["out"])


@pytest.mark.parametrize(
    ("net", "shapes", "x", "word"),
    [
        (state_space_block, {"in": f32(16, 32), "conv": f32(32, 1, 4), "out": f32(32, 16)}, f32(2, 64, 16), "sequence"),
        (speech_front_end, {"in": f32(16, 8, 3), "conv": f32(16, 16, 3), "out": f32(16, 16)}, f32(2, 8, 64), "length"),
    ],
)
def test_convolutions_over_a_sequence_are_split_along_it(
    net: Callable[..., Any], shapes: dict[str, Any], x: Any, word: str
) -> None:
    def step(p: Any, x: Any) -> Any:
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(lambda p: jnp.mean(net(p, x) ** 2))(p))

    program = trace(step, (shapes, x), name=word, donate_argnums=(0,))
    plan = make_plan(program, Options(topology="cpu:8", mesh={"a": 8})).baseline_plans["spatial"]
    assert plan.words == (f"{word} over a",) and plan.regions
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed
    assert measured.wire_compiled == measured.wire_predicted


def test_a_convolution_split_over_few_features_wastes_the_matrix_unit() -> None:
    """Compare 64 features over 8 devices, which fill 8 of 128 columns, with rows, which fill as many as before."""
    case = three("stem", convolution(2, ((3, 3), (3, 3))), f32(16, 3, 1024, 1024), f32(64, 3, 7, 7))[0]
    _, graph, op = found(case)
    assert op.rule is not None
    states = heavy_strategies(graph, op, [8], "tpu")
    topology = Topology.parse("v5p:2x2x2")
    residency = Residency(graph, analyse(graph), topology.chip)
    padding = Padding(graph, topology.backend)
    seconds = heavy_seconds(OpWork(graph, op, states, [8], Compute(topology), residency, padding))
    by_factor = {int(s[0]): float(t) for s, t in zip(states, seconds, strict=True)}
    (features,), (height,) = op.rule.results[0][1], op.rule.results[0][2]
    assert by_factor[height] < by_factor[WHOLE] / 5
    # The rows' seconds are those of images whose 64 features take 128 lanes in memory.
    assert by_factor[features] > 3 * by_factor[height]
