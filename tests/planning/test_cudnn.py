"""cuDNN's attention in module files, as JAX lowers it for CUDA: batch and heads are split, other dims stay whole."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import UserError
from autoshard.exec.apply.calls_on_shards import lower_for_compiler
from autoshard.graph import FactorKind, Op, read_graph
from autoshard.planning import Options, make_plan
from autoshard.program import load_artifact, trace


QUERIES, KEYS = (
    jax.ShapeDtypeStruct((16, 128, 8, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((16, 128, 4, 64), jnp.bfloat16),
)
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"


def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    return jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn", is_causal=bias is None)


def gradients(*args: Any) -> Any:
    return jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), tuple(range(len(args))))(*args)


def test_a_program_that_jax_cannot_trace_here_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", None)
    with pytest.raises(UserError, match="`attend` uses implementation='cudnn', .* plan the StableHLO file"):
        trace(attend, (QUERIES, KEYS, KEYS))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for cuDNN: JAX refuses to trace the call without it, although its lowering does not need it."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


def lowered(fn: Any, *args: Any) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls(text: str) -> list[Op]:
    return [op for op in read_graph(text.encode()).ops if op.opaque]


def split_sizes(op: Op) -> list[int]:
    assert op.rule is not None
    return [n for n, kind in zip(op.rule.sizes, op.rule.kinds, strict=True) if kind is FactorKind.PARALLEL and n > 1]


@pytest.mark.usefixtures("cudnn")
def test_batch_and_heads_of_both_passes_are_split_and_counted() -> None:
    forward, backward = calls(lowered(gradients, QUERIES, KEYS, KEYS))
    assert [op.opaque and op.opaque.target for op in (forward, backward)] == [FORWARD, BACKWARD]
    assert split_sizes(forward) == split_sizes(backward) == [16, 4, 2]
    assert forward.flops == 4 * 16 * 8 * 128 * 128 * 64
    assert backward.flops == 2.5 * forward.flops


def heads_first(q: Any, k: Any, v: Any) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    return dot_product_attention(q, k, v, qkv_layout="BNTH")


@pytest.mark.usefixtures("cudnn")
def test_heads_may_come_before_positions() -> None:
    shape = jax.ShapeDtypeStruct((4, 8, 32, 64), jnp.bfloat16)
    (op,) = calls(lowered(heads_first, shape, shape, shape))
    assert op.rule is not None
    assert split_sizes(op) == [4, 8]
    assert [op.rule.sizes[dim[0]] for dim in op.rule.operands[0]] == [4, 8, 32, 64]


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(("batch", "split"), [(16, [16, 4, 2]), (1, [4, 2])])
def test_a_bias_of_all_rows_keeps_the_batch_whole_where_its_gradient_is_summed(batch: int, split: list[int]) -> None:
    bias = jax.ShapeDtypeStruct((batch, 8, 128, 128), jnp.bfloat16)
    forward, backward = calls(lowered(gradients, QUERIES, KEYS, KEYS, bias))
    assert split_sizes(forward) == [16, 4, 2]
    assert split_sizes(backward) == split


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"max_seg_per_batch\22: 1", r"max_seg_per_batch\22: 4"),
        (r"is_paged_attention\22: false", r"is_paged_attention\22: true"),
        ("fmhaSoftmax(", "fmhaSoftmaxF8("),
        ("bmm1_dot", "bmm9_dot"),
    ],
)
def test_what_shards_would_change_has_no_rule(old: str, new: str) -> None:
    text = lowered(attend, QUERIES, KEYS, KEYS)
    assert old in text
    (op,) = calls(text.replace(old, new))
    assert op.rule is None


@pytest.mark.usefixtures("cudnn")
def test_a_plan_from_a_file_splits_the_calls_and_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "step.mlir"
    path.write_text(lowered(gradients, QUERIES, KEYS, KEYS))
    program = load_artifact(path)
    plan = make_plan(program, Options(topology="h100:8", mesh="data=4,model=2")).plan
    assert plan.unruled == ()
    assert [call.name for call in plan.calls] == [FORWARD, BACKWARD]
    for call in plan.calls:
        batch, positions, heads, channels = call.operands[0].dims
        assert set(batch) | set(heads) == {"data", "model"}
        assert positions == channels == ()
    assert any(f"`{FORWARD}` is compiled for whole tensors" in line for line in plan.warnings)
    with pytest.raises(UserError, match=r"the plan splits `__cudnn\$fmhaSoftmax"):
        plan.lower(program.fn, *program.args)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("bias", [False, True])
def test_a_traced_program_splits_queries_keys_and_values_alike_and_lowers_for_gpus(bias: bool) -> None:
    """Replace JAX's own sharding rule, which leaves keys and values free and has no FLOPs. JAX runs no other shards."""
    more = (jax.ShapeDtypeStruct((16, 8, 128, 128), jnp.bfloat16),) if bias else ()
    program = trace(gradients, (QUERIES, KEYS, KEYS, *more))
    forward, backward = (op for op in read_graph(program.module).ops if op.opaque)
    assert split_sizes(forward) == split_sizes(backward) == [16, 4]
    assert forward.flops == 4 * 16 * 8 * 128 * 128 * 64 * (1.0 if bias else 0.5)  # causal without a bias
    assert backward.flops == 2.5 * forward.flops
    plan = make_plan(program, Options(topology="h100:8", mesh="data=4,model=2")).plan
    assert not any("states no work" in line for line in plan.warnings)
    for call in plan.calls:
        queries, keys, values = call.operands[:3]
        assert queries == keys == values
        assert queries.axes
    assert len(lower_for_compiler(program, plan, "cuda")) == 2
