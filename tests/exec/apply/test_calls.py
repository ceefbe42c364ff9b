"""Opaque calls under a plan: they run on shards, equal the unplanned run, and send the predicted bytes."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import UserError, register_rule
from autoshard.base.call_rules import forget
from autoshard.exec import plan_mesh, read_collectives, wire_by_axis
from autoshard.graph import read_graph
from autoshard.planning import Options, Plan, PlanResult, load_plan, make_plan
from autoshard.program import Program, load_artifact, trace
from tests.exec.planned_programs import assert_close, f32


SEEN: list[tuple[int, ...]] = []
"""Shapes of the queries that `attend` was traced with."""


@register_rule("b h s d, b h t d, b h t d -> b h s d", need_replication=("s", "t", "d"), flops="4 b h s t d")
def attend(q: Any, k: Any, v: Any) -> Any:
    SEEN.append(q.shape)
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k)
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, -1), v)


BACKWARD = "b h s d, b h t d, b h t d, b h s d -> b h s d, b h t d, b h t d"


@register_rule(BACKWARD, need_replication="s t d", flops="10 b h s t d")
def attend_backward(q: Any, k: Any, v: Any, g: Any) -> Any:
    return jax.vjp(attend.fn, q, k, v)[1](g)


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v)


attention.defvjp(lambda q, k, v: (attend(q, k, v), (q, k, v)), lambda kept, g: attend_backward(*kept, g))


def attention_step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        q, k, v = jnp.einsum("bsd,tdhe->tbhse", x, w["qkv"])
        out = jnp.einsum("bhse,hed->bsd", attention(q, k, v), w["out"])
        return jnp.mean((out - x) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


@register_rule("m k, k n -> m n", reduction="k", flops="2 m k n")
def product(a: Any, b: Any) -> Any:
    return a @ b


def multiply_kernel(a: Any, b: Any, out: Any) -> None:
    out[...] = jnp.dot(a[...], b[...])


def blockwise(a: Any, b: Any) -> Any:
    """Multiply in a Pallas kernel over blocks of 8 rows and 16 columns."""
    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        multiply_kernel,
        grid=(m // 8, n // 16),
        in_specs=[pl.BlockSpec((8, k), lambda i, j: (i, 0)), pl.BlockSpec((k, 16), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        interpret=True,
        name="blockwise",
    )(a, b)


def scanned(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(blockwise(x, w)), None), x, ws)[0]


@custom_partitioning
def theirs(a: Any) -> Any:
    """Return the squares of each row's elements over the row's sum, as an opaque call of a user."""
    return a * a / a.sum(1, keepdims=True)


def _theirs_partition(mesh: Any, operands: Any, result: Any) -> Any:
    rows = NamedSharding(mesh, PartitionSpec(operands[0].sharding.spec[0], None))
    return mesh, lambda a: a * a / a.sum(1, keepdims=True), rows, (rows,)


theirs.def_partition(_theirs_partition, sharding_rule="i j -> i j", need_replication_factors=("j",))


STEPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "attention": (attention_step, ({"qkv": f32(3, 32, 4, 8), "out": f32(4, 8, 32)}, f32(8, 16, 32)), 1 << 30),
    "sums": (lambda a, b: jnp.tanh(product(jnp.sin(a), b)), (f32(64, 512), f32(512, 256)), 200_000),
    "kernel": (lambda a, b: jnp.tanh(blockwise(jnp.sin(a), b)), (f32(64, 512), f32(512, 256)), 300_000),
    "kernel in a loop": (scanned, (f32(3, 256, 256), f32(64, 256)), 1_200_000),
    "their own": (lambda a: jnp.tanh(theirs(jnp.exp(a))), (f32(64, 128),), 20_000),
}


@functools.cache
def planned(name: str) -> tuple[Program, PlanResult]:
    step, args, limit = STEPS[name]
    program = trace(step, args, name=name)
    return program, make_plan(program, Options(topology="cpu:8", mesh="data=2,model=4", memory_limit=limit))


def values(program: Program) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (0.1 * rng.normal(size=a.shape)).astype(np.float32), program.args)


@pytest.mark.parametrize(
    ("name", "which", "calls"),
    [
        ("attention", "data_parallel", {"attend": "[dataxmodel, -, -, -]"}),
        ("attention", "tensor_parallel", {"attend": "[data, model, -, -]", "attend_backward": "[data, model, -, -]"}),
        ("sums", "", {"product": "[data, model]"}),
        ("sums", "fsdp", {"product": "[dataxmodel, -]"}),
        ("kernel", "", {"blockwise": "[data, -]"}),
        ("kernel in a loop", "", {"blockwise": "[dataxmodel, -]"}),
        ("their own", "", {"theirs": "[dataxmodel, -]"}),
    ],
)
def test_calls_run_as_planned(name: str, which: str, calls: dict[str, str]) -> None:
    """Run a plan's calls on shards. `calls` maps a call's name to the planned spec of its first operand."""
    program, result = planned(name)
    plan = result.baseline_plans[which] if which else result.plan
    assert calls.items() <= {call.name: str(call.operands[0]) for call in plan.calls}.items()
    lowered = plan.lower(program.fn, *program.args)
    compiled = lowered.compile()
    wire = wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))
    for axis, size in plan.prediction.wire_bytes.items():
        assert wire.get(axis, 0) == pytest.approx(size, abs=64)
    given = values(program)
    found = compiled(*jax.device_put(given, jax.tree.unflatten(jax.tree.structure(given), plan.in_shardings)))
    assert_close(found, jax.jit(program.fn)(*given), 2e-6)


def test_each_device_sees_its_shard_only() -> None:
    program, result = planned("attention")
    SEEN.clear()
    result.baseline_plans["tensor_parallel"].lower(program.fn, *program.args)
    whole, shard = (8, 4, 16, 8), (4, 1, 16, 8)
    assert {shard} <= set(SEEN) <= {whole, shard}, "whole only where jax traces the program once more"


def test_calls_are_saved_with_the_plan(tmp_path: Path) -> None:
    program, result = planned("sums")
    assert result.plan.calls[0].summed == ("model",)
    result.plan.save(tmp_path / "plan.json")
    loaded: Plan = load_plan(tmp_path / "plan.json")
    assert loaded.calls == result.plan.calls
    given = values(program)
    assert_close(loaded.jit(program.fn)(*given), jax.jit(program.fn)(*given), 2e-6)


def test_the_decorated_function_is_partitionable_without_a_plan() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x", None), (None, "x")))
    a, b = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((64, 32), (32, 16)))
    split = jax.jit(product, in_shardings=(rows, None), out_shardings=rows)
    assert not read_collectives(split.lower(a, b).compile().as_text(), plan_mesh(planned("sums")[1].plan))
    assert_close(split(a, b), a @ b, 2e-6)
    summed = jax.jit(product, in_shardings=(columns, rows))
    assert "all-reduce" in (summed.lower(a, b).compile().as_text() or "")
    assert_close(summed(a, b), a @ b, 2e-6)
    assert_close(product(a, b), a @ b, 2e-6)


def test_flops_and_traffic_of_calls_are_known() -> None:
    flops = {op.opaque.target: op.flops for op in read_graph(planned("attention")[0].module).ops if op.opaque}
    assert flops == {"attend": 4 * 8 * 4 * 16 * 16 * 8, "attend_backward": 10 * 8 * 4 * 16 * 16 * 8}
    (kernel,) = (op for op in read_graph(planned("kernel")[0].module).ops if op.opaque)
    assert kernel.flops == 2 * 64 * 512 * 256
    assert kernel.opaque is not None
    rows, columns, out = 64 * 512, 512 * 256 * (64 // 8), 64 * 256
    assert kernel.opaque.traffic == 4 * (rows + columns + out), "columns come again for every block of rows"


# Calls in files, by name


SOLVE = "lapack_strsm_ffi"


@pytest.fixture
def solver_rule() -> Iterator[None]:
    register_rule(SOLVE, "b i j, b k m -> b x y", need_replication="i j k m x y")
    yield
    forget(SOLVE)


def solve_file(directory: Path) -> Program:
    def solve(a: Any, b: Any) -> Any:
        return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True) * 2

    path = directory / "solve.mlir"
    path.write_text(jax.jit(solve).lower(f32(16, 8, 8), f32(16, 8, 8)).as_text())
    return load_artifact(path)


@pytest.mark.usefixtures("solver_rule")
def test_foreign_code_in_a_file_is_called_with_shards(tmp_path: Path) -> None:
    program = solve_file(tmp_path)
    plan = make_plan(program, Options(topology="cpu:8", mesh="x=8", memory_limit=4000)).plan
    (call,) = plan.calls
    assert (call.name, str(call.operands[0])) == (SOLVE, "[x, -, -]")
    lowered = plan.lower(program.fn, *program.args)
    assert "(tensor<2x8x8xf32>, tensor<2x8x8xf32>) -> tensor<2x8x8xf32>" in lowered.as_text()
    rng = np.random.default_rng(0)
    a = np.eye(8, dtype=np.float32) + np.tril(rng.normal(size=(16, 8, 8))).astype(np.float32) * 0.1
    b = rng.normal(size=(16, 8, 8)).astype(np.float32)
    assert_close(plan.jit(program.fn)(a, b), np.linalg.solve(np.tril(a), b) * 2, 2e-6)


KERNEL_FILE = """
func.func public @main(%x: tensor<64x32xf32>) -> tensor<64x32xf32> {{
  %0 = stablehlo.custom_call @{target}(%x) {{backend_config = ""}} : (tensor<64x32xf32>) -> tensor<64x32xf32>
  return %0 : tensor<64x32xf32>
}}
"""


def kernel_file(directory: Path, target: str) -> Program:
    path = directory / "kernel.mlir"
    path.write_text(KERNEL_FILE.format(target=target))
    return load_artifact(path)


def test_code_for_whole_tensors_is_planned_but_not_run(tmp_path: Path) -> None:
    register_rule("tpu_custom_call", "i j -> i j")
    try:
        program = kernel_file(tmp_path, "tpu_custom_call")
        plan = make_plan(program, Options(topology="cpu:8", mesh="x=8", memory_limit=4000)).plan
    finally:
        forget("tpu_custom_call")
    assert plan.calls[0].operands[0].axes == ("x",)
    assert any("`tpu_custom_call` is compiled for whole tensors" in line for line in plan.warnings)
    with pytest.raises(UserError, match="the plan splits `tpu_custom_call`, whose code in the file is compiled for"):
        plan.lower(program.fn, *program.args)


def test_a_rule_that_does_not_fit_names_the_call(tmp_path: Path) -> None:
    register_rule("their_kernel", "i j k -> i j k")
    try:
        with pytest.raises(UserError, match=r"the call of `their_kernel`.* has the shape \[64, 32\]"):
            make_plan(kernel_file(tmp_path, "their_kernel"), Options(topology="cpu:8", mesh="x=8"))
    finally:
        forget("their_kernel")


def test_a_call_without_a_rule_says_how_to_give_it_one(tmp_path: Path) -> None:
    plan = make_plan(kernel_file(tmp_path, "their_kernel"), Options(topology="cpu:8", mesh="x=8")).plan
    (unruled,) = plan.unruled
    assert (unruled.kind, unruled.custom_call, unruled.count) == ("their_kernel", True, 1)
    assert 0 < unruled.share <= 1 and unruled.share == pytest.approx(unruled.seconds / plan.prediction.step_time_s)
    (line,) = (line for line in plan.warnings if "their_kernel" in line)
    assert line.startswith("custom call `their_kernel` has no sharding rule and states no work: every device repeats")
    assert f"({unruled.share:.1%} of the step, as no FLOPs and " in line and " of memory traffic)" in line
    assert line.endswith('give it both with autoshard.register_rule("their_kernel", "b ... -> b ...", flops="...").')


def test_a_function_that_a_file_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "kernel.mlirbc"
    path.write_bytes(planned("kernel")[0].module)
    saved = load_artifact(path)
    plan = make_plan(saved, Options(topology="cpu:8", mesh="x=8")).plan
    with pytest.raises(UserError, match="the program calls `blockwise`, a Python function or kernel that a file does"):
        plan.lower(saved.fn, *saved.args)


def test_a_gradient_through_a_rule_says_what_to_do() -> None:
    def loss(a: Any, b: Any) -> Any:
        return product(a, b).sum()

    with pytest.raises(UserError, match="put jax.custom_vjp around it, and register_rule on its backward function"):
        trace(jax.grad(loss), (f32(64, 32), f32(32, 16)), name="loss")


def test_a_kernel_in_a_region_by_hand_gets_the_shards_it_is_given() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("x", None)
    by_hand = jax.shard_map(blockwise, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False)

    def step(a: Any, b: Any) -> Any:
        return jnp.tanh(by_hand(jnp.sin(a), b))

    program = trace(step, (f32(64, 32), f32(32, 16)), name="by hand")
    plan = make_plan(program, Options(topology="cpu:8", mesh="x=8")).plan
    given = values(program)
    assert_close(plan.jit(program.fn)(*given), jnp.tanh(jnp.sin(given[0]) @ given[1]), 2e-6)
