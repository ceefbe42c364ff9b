"""Operands of float32 that a TPU compiler rounds to bfloat16."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import OpGraph, analyse, round_operands, source_of
from tests.graph.buffers import TPU
from tests.graph.programs import bf16, f32, graph_of, ops


def taken(graph: OpGraph, kind: str = "dot_general") -> list[list[str]]:
    """Return the dtypes of the operands of all ops of a kind."""
    return [[graph.tensors[t].dtype for t in op.operands] for op in ops(graph, kind)]


def test_what_matmuls_take_is_rounded_once_and_what_they_make_is_not() -> None:
    graph = round_operands(graph_of(lambda a, b, c: (a @ b, a @ c), f32(8, 4), f32(4, 8), f32(4, 16)))
    inserted = [op for op in graph.ops if op.number < 0]
    assert taken(graph) == [["bfloat16"] * 2] * 2
    assert len(inserted) == 3 and {op.operands[0] for op in inserted} == set(graph.arguments)
    assert all(graph.tensors[t].dtype == "float32" for t in graph.results)
    assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
    assert all(graph.tensors[t].producer == op.id for op in graph.ops for t in op.results)
    assert {source_of(graph, op.results[0]) for op in inserted} == set(graph.arguments)


@pytest.mark.parametrize(
    ("precision", "narrow"),
    [
        (None, True),
        ("highest", False),
        ("high", False),
        (lax.DotAlgorithmPreset.BF16_BF16_F32, True),
        (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, False),
        (lax.DotAlgorithmPreset.F32_F32_F32, False),
    ],
)
def test_a_matmul_that_asks_for_more_keeps_its_operands(precision: Any, narrow: bool) -> None:
    graph = round_operands(graph_of(lambda a, b: jnp.dot(a, b, precision=precision), f32(8, 4), f32(4, 8)))
    assert taken(graph) == [["bfloat16" if narrow else "float32"] * 2]


def test_a_program_in_bfloat16_is_left_as_it_is() -> None:
    graph = graph_of(lambda a, b: a @ b, bf16(8, 4), bf16(4, 8))
    assert round_operands(graph) is graph


def test_loops_keep_their_ops_and_weights_are_rounded_before_them() -> None:
    def fn(w: Any, x: Any) -> Any:
        def body(h: Any, row: Any) -> Any:
            h = jnp.tanh(h @ w + row)
            return h, h @ w

        return lax.scan(body, x[0], x)

    before = graph_of(fn, f32(8, 8), f32(5, 4, 8))
    graph = round_operands(before)
    (loop,) = graph.loops
    inside = [op.id for op in graph.ops if op.loop == loop.id]
    assert inside == list(range(loop.start, loop.stop))
    assert len(inside) > before.loops[0].stop - before.loops[0].start
    (weights,) = (op for op in graph.ops if op.number < 0 and op.operands[0] == graph.arguments[0])
    assert weights.loop == -1 and weights.id < loop.start
    assert taken(graph) == [["bfloat16"] * 2] * 2


def test_what_only_moves_rows_to_matmuls_moves_them_rounded() -> None:
    def fn(table: Any, rows: Any, w: Any) -> Any:
        found = jnp.concatenate([table[rows], table[rows + 1]], axis=1)
        return found @ w, table[rows] * 2

    graph = round_operands(graph_of(fn, f32(32, 8), jax.ShapeDtypeStruct((4,), jnp.int32), f32(16, 8)))
    assert [kinds[0] for kinds in taken(graph, "gather")].count("bfloat16") == 2
    assert [kinds[0] for kinds in taken(graph, "gather")].count("float32") == 1
    assert taken(graph, "concatenate") == [["bfloat16"] * 2]


def test_a_kernel_is_rounded_before_it_is_reversed_for_the_gradient() -> None:
    """Match libtpu for v5e, which gathers a split kernel once, in bfloat16, for both passes."""

    def loss(kernel: Any, x: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names) ** 2)

    graph = round_operands(graph_of(jax.grad(loss, (0, 1)), f32(3, 3, 8, 8), f32(4, 8, 8, 8)))
    (kernel,) = (u for u in graph.users[graph.arguments[0]])
    assert kernel.kind == "convert" and {u.kind for u in graph.users[kernel.results[0]]} == {"convolution", "reverse"}


def test_a_gradient_is_stored_in_its_matmuls_dtype_and_summed_separately() -> None:
    """Compute an activation's gradient in the kernel of the matmul before it. Its bias sums the unrounded gradient.

    The last layer's gradient follows its own matmul. The compiler stores three bfloat16 values too (v5e, libtpu 0.0.52,
    65536 rows of 1024).
    """

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.sum(x * x)

    params = [(f32(64, 64), f32(64))] * 3
    graph = round_operands(graph_of(jax.grad(loss), params, f32(512, 64)))
    liveness = analyse(graph, rules=TPU)
    kept = [graph.tensors[t] for t in liveness.stores.values()]
    assert {t.dtype for t in kept if graph.ops[t.producer].number < 0} == {"bfloat16"}
    assert sum(graph.ops[t.producer].number < 0 for t in kept) == 3
    sums = [f for f in liveness.fusions if graph.ops[f.root].kind == "reduce" and len(f.writes) == 1]
    assert all(graph.tensors[t].elements < 512 * 64 for f in sums[1:] for t in f.reads)
