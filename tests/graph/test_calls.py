"""Custom calls with known semantics."""

import jax
import pytest

from autoshard.graph import MATMULS, FactorKind, OpClass, read_graph
from autoshard.program import trace
from autoshard.program.kernels.flash_attention import KernelBlocks, flash_attention
from autoshard.program.kernels.grouped_kernels import GroupedKernels, GroupedTiles, kernel_matmul


def attention_ops(window: int | None = None, length: int = 64, blocks: KernelBlocks | None = None) -> dict:
    def loss(q, k, v):
        return flash_attention(q, k, v, causal=True, window=window, blocks=blocks).astype("float32").sum()

    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2, 4, 3, length, 16), *[(2, 4, length, 16)] * 2)]
    graph = read_graph(trace(jax.value_and_grad(loss, (0, 1, 2)), shapes, name="attention").module)
    assert not graph.without_rule
    return {op.kind: op for op in graph.ops if op.kind in MATMULS}


def test_factors_of_attention() -> None:
    ops = attention_ops()
    assert list(ops) == ["attention", "attention_backward"]
    for op in ops.values():
        assert op.op_class is OpClass.HEAVY
        assert op.rule.sizes == (2, 4, 3, 64, 64, 16, 16)
        # Gradients of keys and values are sums over parts of the queries.
        along = FactorKind.REDUCTION if op.kind == "attention_backward" else FactorKind.PARALLEL
        assert op.rule.kinds == (*(FactorKind.PARALLEL,) * 3, along, *(FactorKind.NEED_REPLICATION,) * 3)
        assert op.triangular == ((3, 1),), "one block of queries"
        assert len(op.rule.operands) == len(op.operands) and len(op.rule.results) == len(op.results)


@pytest.mark.parametrize(
    ("length", "window", "blocks"),
    # Computed blocks of 512: those up to the diagonal and back to the window of the block's first row.
    [(64, None, 1), (2048, None, 10), (2048, 512, 7), (2048, 513, 7), (2048, 514, 9), (4096, 1024, 21)],
)
def test_flops_count_the_blocks_of_scores_that_are_computed(length: int, window: int | None, blocks: int) -> None:
    ops = attention_ops(window, length)
    scores = 2 * 4 * 3 * blocks * min(512, length) ** 2
    assert ops["attention"].flops == pytest.approx(2 * scores * (16 + 16), rel=1e-6)
    assert ops["attention_backward"].flops == pytest.approx(7 * scores * (16 + 16), rel=1e-6)
    assert ops["attention"].steps == 2 * 4 * 3 * blocks
    assert ops["attention_backward"].steps == 2 * ops["attention"].steps  # two kernels


def test_blocks_of_a_kernel_are_its_own_and_a_fused_one_computes_scores_once() -> None:
    scores = 2 * 4 * 3 * 2048 * 2048
    apart = attention_ops(None, 2048, KernelBlocks((1024, 512), (2048, 512), (1024, 1024)))
    # Forward: rows of 1024 need 2 and 4 of 4 blocks, one row of 2048 needs all, blocks of 1024 need 3 of 4.
    assert apart["attention"].flops == pytest.approx(2 * scores * 32 * 6 / 8, rel=1e-6)
    assert apart["attention_backward"].flops == pytest.approx((4 * 1.0 + 3 * 0.75) * scores * 32, rel=1e-6)
    assert apart["attention"].steps == 2 * 4 * 3 * (2 + 4)
    assert apart["attention_backward"].steps == 2 * 4 * 3 * (4 + 3)
    fused = attention_ops(None, 2048, KernelBlocks(keys=(1024, 1024), fused=True))
    assert list(fused) == ["attention", "attention_backward_fused"]
    assert fused["attention_backward_fused"].flops == pytest.approx(5 * 0.75 * scores * 32, rel=1e-6)
    assert fused["attention_backward_fused"].steps == 2 * 4 * 3 * 3


def test_factors_and_work_of_rows_in_groups() -> None:
    def loss(rows, weight):
        kernels = GroupedKernels(GroupedTiles(32, 64, 48), row_parts=2)
        return kernel_matmul(rows, weight, kernels, 96).astype("float32").sum()

    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2, 4, 16, 128), (4, 128, 96))]
    graph = read_graph(trace(jax.value_and_grad(loss, (0, 1)), shapes, name="grouped").module)
    forward, of_rows, of_weight = (op for op in graph.ops if op.kind.startswith("grouped_matmul"))
    parallel, whole, summed = FactorKind.PARALLEL, FactorKind.NEED_REPLICATION, FactorKind.REDUCTION
    assert forward.rule.kinds == of_rows.rule.kinds == (parallel, parallel, whole, summed, parallel)
    assert (forward.rule.sizes, of_rows.rule.sizes) == ((2, 4, 16, 128, 96), (2, 4, 16, 96, 128))
    assert of_weight.rule.kinds == (summed, parallel, whole, parallel, parallel)
    for op in (forward, of_rows, of_weight):
        assert op.op_class is OpClass.HEAVY
        sides = *zip(op.operands, op.rule.operands, strict=True), *zip(op.results, op.rule.results, strict=True)
        assert all(graph.tensors[t].shape == tuple(op.rule.sizes[f] for (f,) in dims) for t, dims in sides)
        # 64 rows of a device are 2 tiles, plus one for each of 4 groups: 6 of 32 rows where 2 suffice.
        assert op.flops == 2 * (2 * 4 * 16) * 128 * 96 * 3
        assert op.steps == 2 * 6 * 2 * 2
        assert op.opaque is not None and op.opaque.traffic > 2 * (2 * 4 * 16) * (128 + 96)
