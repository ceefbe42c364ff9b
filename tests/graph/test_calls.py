"""Custom calls whose meaning is known."""

import jax
import pytest

from autoshard.graph import MATMULS, FactorKind, OpClass, read_graph
from autoshard.program import trace
from autoshard.program._kernels import flash_attention


def attention_ops(window: int | None = None) -> dict:
    def loss(q, k, v):
        return flash_attention(q, k, v, causal=True, window=window).astype("float32").sum()

    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2, 4, 3, 64, 16), (2, 4, 64, 16), (2, 4, 64, 16))]
    graph = read_graph(trace(jax.value_and_grad(loss, (0, 1, 2)), shapes, name="attention").module)
    assert not graph.without_rule
    return {op.kind: op for op in graph.ops if op.kind in MATMULS}


def test_factors_of_attention() -> None:
    ops = attention_ops()
    assert list(ops) == ["attention", "attention_backward"]
    for op in ops.values():
        assert op.op_class is OpClass.HEAVY
        assert op.rule.sizes == (2, 4, 3, 64, 64, 16, 16)
        assert op.rule.kinds == (FactorKind.PARALLEL,) * 3 + (FactorKind.NEED_REPLICATION,) * 4
        assert len(op.rule.operands) == len(op.operands) and len(op.rule.results) == len(op.results)


@pytest.mark.parametrize(("window", "share"), [(None, 0.5), (16, 16 * (1 - 16 / 128) / 64)])
def test_flops_count_the_scores_that_are_computed(window: int | None, share: float) -> None:
    ops = attention_ops(window)
    scores = 2 * 4 * 3 * 64 * 64
    assert ops["attention"].flops == pytest.approx(2 * scores * (16 + 16) * share, abs=1)
    assert ops["attention_backward"].flops == pytest.approx(5 * scores * (16 + 16) * share, abs=1)
