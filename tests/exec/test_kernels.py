"""jax's own TPU attention kernels: split by batch and heads, forward and backward, and rebuilt for the shards."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from autoshard import UserError, mlir
from autoshard.exec.apply.calls_on_shards import lower_for_compiler
from autoshard.graph import FactorKind, Op, Scores, attention_scores, read_graph
from autoshard.planning import Options, Plan, make_plan
from autoshard.program import Program, trace


BATCH, HEADS, SEQ, DIM = 8, 4, 256, 128


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


QKV = (bf16(BATCH, HEADS, SEQ, DIM),) * 3


def flash(q: Any, k: Any, v: Any) -> Any:
    return flash_attention(q, k, v, causal=True)


def splash(q: Any, k: Any, v: Any) -> Any:
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((SEQ, SEQ)) for _ in range(HEADS)])
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(mask))(q, k, v)


@functools.cache
def gradients(kind: str) -> Program:
    attend = {"flash": flash, "splash": splash}[kind]

    def loss(*args: Any) -> Any:
        return attend(*args).astype(jnp.float32).sum()

    return trace(jax.grad(loss, (0, 1, 2)), QKV, name=kind)


def calls(program: Program) -> list[Op]:
    return [op for op in read_graph(program.module).ops if op.opaque is not None]


def free_sizes(op: Op) -> list[int]:
    assert op.rule is not None
    return [size for size, kind in zip(op.rule.sizes, op.rule.kinds, strict=True) if kind is FactorKind.PARALLEL]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("flash", ["_flash_attention_kernel", "_flash_attention_dkv_kernel", "_flash_attention_dq_kernel"]),
        ("splash", ["splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals"]),
    ],
)
def test_batch_and_heads_may_be_split(kind: str, names: list[str]) -> None:
    found = {op.opaque.target: op for op in calls(gradients(kind)) if op.opaque}
    assert sorted(found) == sorted(names)
    for op in found.values():
        # Splash attention can also split the blocks of queries, with the rows of its mask tables. The gradients of keys
        # and values are sums over these blocks.
        summed = "_dkv_" in op.opaque.target if op.opaque else False
        assert free_sizes(op) == [BATCH, HEADS, SEQ // 128][: 3 if kind == "splash" and not summed else 2]
        # Blocks of 128 x 128: the one above the diagonal is skipped.
        pairs = BATCH * HEADS * SEQ * SEQ * DIM * 0.75
        assert 4 * pairs <= op.flops <= 12 * pairs
        assert op.opaque is not None
        assert 0 < op.opaque.traffic < 50 * BATCH * HEADS * SEQ * DIM * 4, "no scores in memory"


def test_scores_and_blocks_of_attention_are_read() -> None:
    """Judge by jax: kernels have blocks of 128 x 128 by default, and a softmax has the shapes of its einsums."""
    for op in calls(gradients("splash")):
        assert attention_scores(read_graph(gradients("splash").module), op) == Scores(SEQ, SEQ, DIM, 128 * 128)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    graph = read_graph(trace(plain, (bf16(4, 512, 2, 64), bf16(4, 256, 2, 64), bf16(4, 256, 2, 64))).module)
    assert [each for op in graph.ops if (each := attention_scores(graph, op))] == [Scores(512, 256, 64)]


def planned(program: Program, limit: int | None = None) -> Plan:
    return make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4", memory_limit=limit)).plan


@pytest.mark.parametrize("kind", ["flash", "splash"])
def test_every_device_gets_a_kernel_for_its_shard(kind: str) -> None:
    program = gradients(kind)
    plan = planned(program, 16 << 20)
    bodies = lower_for_compiler(program, plan, "tpu")
    assert {call.op for call in plan.calls} == set(bodies)
    for call in plan.calls:
        specs = [spec for spec in call.operands if len(spec.dims) == 4]
        parts = [int(np.prod([plan.mesh[a] for a in specs[0].dims[d]])) for d in range(2)]
        assert int(np.prod(parts)) == 8
        text = str(mlir.parse_module(bodies[call.op]))
        (line,) = (line for line in text.splitlines() if "@tpu_custom_call" in line)
        assert f"tensor<{BATCH // parts[0]}x{HEADS // parts[1]}x{SEQ}x{DIM}xbf16>" in line.rpartition(" : ")[2]
        # The kernel's cost estimate, which the compiler and readers of its program use, is the work of one shard.
        (flops,) = re.findall(r"flops\\22: ?(\d+)", line)
        (op,) = (op for op in calls(program) if op.opaque and op.opaque.target == call.name)
        assert int(flops) == op.flops // 8


def test_a_kernel_file_is_planned_by_its_name() -> None:
    lowered = jax.jit(gradients("flash").fn).trace(*QKV).lower(lowering_platforms=("tpu",))
    found = [op for op in read_graph(lowered.as_text().encode()).ops if op.opaque is not None]
    assert len(found) == 3
    for op in found:
        assert op.opaque is not None and op.opaque.fixed
        assert free_sizes(op) == [BATCH, HEADS]
        assert op.flops in [n * BATCH * HEADS * SEQ * SEQ * DIM for n in (4, 6, 8)]


def test_shards_of_flash_attention_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernel itself, interpreted on eight CPU devices that split heads and batch."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    shape = jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.float32)
    program = trace(flash, (shape,) * 3, name="flash")
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=2,model=4", memory_limit=500_000)).plan
    (call,) = plan.calls
    assert str(call.operands[0]) == "[data, model, -, -]"
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape.shape).astype(np.float32) for _ in range(3)]
    result = np.asarray(plan.jit(flash)(*given))
    scores = np.einsum("bhsd,bhtd->bhst", given[0], given[1])
    scores = np.where(np.tril(np.ones((128, 128), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bhst,bhtd->bhsd", weights / weights.sum(-1, keepdims=True), given[2])
    np.testing.assert_allclose(result, wanted, rtol=0, atol=1e-4)


def counted(a: Any, out: Any) -> None:
    out[...] = a[...] + 1


def test_side_effects_in_order_are_refused() -> None:
    def fn(a: Any) -> Any:
        return pl.pallas_call(counted, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))(a)

    refused = pytest.raises(UserError, match=r"`simulated` has side effects in a fixed order .* interpret=True\.")
    with pltpu.force_tpu_interpret_mode(), refused:
        trace(fn, (jax.ShapeDtypeStruct((8, 128), jnp.float32),), name="simulated")


def doubled(a: Any, out: Any) -> None:
    out[...] = a[...] * 2


def placed(a: Any, out: Any) -> None:
    out[...] = a[...] + pl.program_id(0)


def added(a: Any, out: Any) -> None:
    out[...] += a[...]


@pytest.mark.parametrize(
    ("kernel", "into", "out", "free"),
    [
        (doubled, lambda i, j: (i, j), lambda i, j: (i, j), [4, 2]),
        (placed, lambda i, j: (i, j), lambda i, j: (i, j), [2]),  # reads its position along the first dim
        (added, lambda i, j: (i, j), lambda i, j: (0, j), [2]),  # sums over the first dim
        (doubled, lambda i, j: (3 - i, j), lambda i, j: (i, j), [2]),  # reads other blocks along the first dim
    ],
)
def test_what_a_grid_says(kernel: Any, into: Any, out: Any, free: list[int]) -> None:
    def fn(a: Any) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(4, 2),
            in_specs=[pl.BlockSpec((8, 128), into)],
            out_specs=pl.BlockSpec((8, 128), out),
            out_shape=jax.ShapeDtypeStruct((32, 256), jnp.float32),
        )(a)

    (op,) = calls(trace(fn, (jax.ShapeDtypeStruct((32, 256), jnp.float32),), name="grid"))
    assert op.rule is not None and free_sizes(op) == free
