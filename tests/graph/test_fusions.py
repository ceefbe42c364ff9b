"""Values that are materialised, and values that stay inside of one fusion."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import FusionRules, OpClass, analyse, round_operands
from tests.graph.buffers import TPU, lifetimes
from tests.graph.programs import bf16, f32, graph_of, ops


def test_pointwise_chains_stay_inside_one_fusion() -> None:
    graph = graph_of(lambda x: jnp.exp(jnp.sin(x) * 2) + 1, f32(8, 8))
    liveness = analyse(graph)
    (fusion,) = liveness.fusions
    assert (fusion.reads, fusion.writes) == (graph.arguments, graph.results)
    assert liveness.materialised == {*graph.arguments, *graph.results}


def test_a_value_is_preserved_when_recomputing_it_would_read_more() -> None:
    def fn(a: Any, b: Any, c: Any) -> Any:
        total = a + b + c
        return jnp.sum(total * 2, 0), jnp.max(total, 1)

    graph = graph_of(fn, *[f32(64, 64)] * 3)
    (total,) = (op.results[0] for op in ops(graph, "add") if graph.tensors[op.results[0]].producer == 1)
    assert total in analyse(graph).materialised
    once = graph_of(lambda a: (jnp.sum(jnp.sin(a) * 2, 0), jnp.max(jnp.sin(a), 1)), f32(64, 64))
    assert all(op.results[0] not in analyse(once).materialised for op in ops(once, "sine"))


@pytest.mark.parametrize(
    ("reads", "scaled", "matmuls", "summed", "stored"),
    [
        (1, False, 6, False, False),
        (2, False, 3, False, False),
        (2, False, 4, False, True),
        (2, True, 2, False, False),
        (2, True, 3, False, True),
        (3, False, 2, False, False),
        (3, False, 3, False, True),
        (2, False, 2, True, False),
        (2, False, 3, True, True),
    ],
)
def test_on_tpus_a_value_is_stored_if_that_moves_fewer_bytes(
    reads: int, scaled: bool, matmuls: int, summed: bool, stored: bool
) -> None:
    """Match the programs that libtpu compiles for v5e, at 16384 x 1024."""

    def fn(values: Any, scale: Any, weights: Any) -> Any:
        value = values[0]
        for other in values[1:]:
            value = value * other + 1
        value = value * scale if scaled else jnp.maximum(value, 0)
        return [value @ w for w in weights], value.sum(0) if summed else ()

    graph = graph_of(fn, [bf16(16384, 1024)] * reads, bf16(1024), [bf16(1024, 1024)] * matmuls)
    liveness = analyse(graph, rules=TPU)
    value = ops(graph, "dot_general")[0].operands[0]
    assert (value in liveness.materialised) == stored


@pytest.mark.parametrize(("reads", "matmuls", "stored"), [(1, 3, False), (1, 6, True), (2, 2, True)])
def test_on_tpus_a_value_is_stored_as_narrow_as_the_program_makes_it(reads: int, matmuls: int, stored: bool) -> None:
    """Match libtpu for v5e, which counts a cast of the program, and not the rounding of float32 operands."""

    def fn(values: Any, weights: Any) -> Any:
        value = values[0]
        for other in values[1:]:
            value = value * other + 1
        value = jnp.maximum(value, 0).astype(weights[0].dtype)
        return [value @ w for w in weights]

    graph = graph_of(fn, [f32(16384, 1024)] * reads, [bf16(1024, 1024)] * matmuls)
    assert (ops(graph, "dot_general")[0].operands[0] in analyse(graph, rules=TPU).materialised) == stored
    wide = round_operands(graph_of(fn, [f32(16384, 1024)] * reads, [f32(1024, 1024)] * matmuls))
    assert ops(wide, "dot_general")[0].operands[0] not in analyse(wide, rules=TPU).materialised


def test_a_matmul_stores_the_end_of_the_chain_that_leads_on_from_it() -> None:
    def fn(x: Any, y: Any, w: Any, others: Any) -> Any:
        value = jnp.maximum((x @ w) * y, 0)
        return [value @ other for other in others]

    graph = graph_of(fn, *[bf16(512, 64)] * 2, bf16(64, 64), [bf16(64, 64)] * 2)
    (product, end) = ops(graph, "dot_general")[0].results[0], ops(graph, "maximum")[0].results[0]
    assert analyse(graph, rules=TPU).stores == {product: end}


def test_on_tpus_labels_are_compared_and_their_logits_fetched_from_a_wide_copy() -> None:
    """Match libtpu for v5e: the product writes logits in both dtypes, and the gather alone reads the wide ones."""

    def picked(w: Any, x: Any, labels: Any) -> Any:
        logits = (x @ w).astype("float32")
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()

    labels = jax.ShapeDtypeStruct((512,), "int32")
    graph = graph_of(jax.grad(picked), bf16(64, 4096), bf16(512, 64), labels)
    liveness = analyse(graph, rules=TPU)
    (scatter,) = (op for op in ops(graph, "scatter") if graph.tensors[op.results[0]].elements == 512 * 4096)
    assert scatter.results[0] not in liveness.materialised
    logits = {b[0]: b for b in liveness.buffers if graph.tensors[b[0]].elements == 512 * 4096}
    assert sorted(graph.tensors[t].dtype for t in logits) == ["bfloat16", "float32"]
    gather = next(op for op in ops(graph, "gather") if op.operands[0] in logits)
    assert logits[gather.operands[0]][2] == gather.id + 1


def test_around_batch_statistics_products_and_sums_of_branches_are_stored() -> None:
    """Match libtpu for v5e: of two normalised convolutions and a residual, six values are stored at the image's size.

    These are three convolutions, the sum, and the gradients before two of the normalisations.
    """

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = jax.nn.relu((y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-5))
            x = y if y.shape != x.shape else x + y
        return (x.mean((1, 2)) ** 2).mean()

    kernels = [bf16(3, 3, 3 if i == 0 else 16, 16) for i in range(3)]
    graph = graph_of(jax.grad(loss), kernels, bf16(8, 32, 32, 3))
    liveness = analyse(graph, rules=TPU)
    large = {t for t in liveness.materialised if graph.tensors[t].elements == 8 * 32 * 32 * 16}
    assert len(large) == 6
    # The kernel that makes a gradient also sums it, weighted by the saved result of the layer before.
    gradients = large.intersection(liveness.stores.values())
    sums = [f for f in liveness.fusions if graph.ops[f.root].kind == "reduce" and large.intersection(f.reads)]
    assert len(gradients) == 2 and sums and not any(gradients.intersection(f.reads) for f in sums)


def recurrence(decay: Any, value: Any, axis: int = 1) -> Any:
    """Compute a gated recurrence by `lax.associative_scan`, whose levels halve the sequence and merge by padding."""
    pair = (jax.nn.sigmoid(decay), value)
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), pair, axis=axis)[1]


@pytest.mark.parametrize("tpu", [False, True])
def test_on_tpus_pads_between_elements_are_kernels(tpu: bool) -> None:
    def loss(decay: Any, value: Any, w: Any) -> Any:
        return jnp.sum(recurrence(decay @ w, value).sum(-1) ** 2)

    shape = f32(4, 64, 32, 8)
    graph = graph_of(jax.grad(loss, (0, 1)), shape, shape, f32(8, 8))
    liveness = analyse(graph, rules=FusionRules(fused_matmuls=tpu))
    between = [op for op in ops(graph, "pad") if op.strided and graph.tensors[op.results[0]].elements]
    assert len(between) > 20 and all(op.strided == (1,) for op in between)
    roots = {fusion.root for fusion in liveness.fusions}
    assert all(op.id in roots for op in between if op.op_class is OpClass.HEAVY) == tpu


def test_on_tpus_what_is_materialised_is_computed_once() -> None:
    def fn(x: Any) -> Any:
        whole = jnp.exp(x)
        return whole[:, :8] * whole[:, 8:]

    graph = graph_of(fn, f32(4, 16, 8))
    whole = ops(graph, "exponential")[0].results[0]
    assert whole in analyse(graph, rules=TPU).materialised
    assert whole not in analyse(graph).materialised


@pytest.mark.parametrize("axis, apart", [(0, False), (1, True), (2, True)])
def test_on_tpus_steps_through_tiles_are_kernels(axis: int, apart: bool) -> None:
    def half(x: Any) -> Any:
        return lax.slice_in_dim(jnp.sin(x), 0, 16, stride=2, axis=axis) * 2

    graph = graph_of(half, f32(16, 16, 16))
    (step,) = ops(graph, "slice")
    assert step.strided == (axis,)
    assert (step.results[0] in analyse(graph, rules=TPU).materialised) == apart


def test_of_a_value_in_memory_only_the_slice_is_read() -> None:
    graph = graph_of(lambda x, y: x[:, :2] + y, f32(8, 64), f32(8, 2))
    (fusion,) = analyse(graph).fusions
    assert sorted(graph.tensors[t].shape for t in fusion.reads) == [(8, 2), (8, 2)]
    assert lifetimes(analyse(graph))[graph.arguments[0]] == (0, 2), "though all of it is held until then"


def test_what_a_matmul_reads_is_written_but_for_cheap_moves() -> None:
    graph = graph_of(lambda x, w: jnp.sin(x) @ w.T.astype(jnp.float32), f32(8, 4), f32(6, 4))
    liveness = analyse(graph)
    assert ops(graph, "sine")[0].results[0] in liveness.materialised
    assert all(op.results[0] not in liveness.materialised for op in ops(graph, "transpose"))
    (matmul,) = (f for f in liveness.fusions if graph.ops[f.root].kind == "dot_general")
    assert graph.arguments[1] in matmul.reads


@pytest.mark.parametrize("fused", [True, False])
def test_tpus_compute_activations_inside_the_matmuls_that_take_them(fused: bool) -> None:
    """Differentiate an MLP: only the results of matmul kernels are stored, or without epilogues their consumers too."""

    def loss(w: Any, x: Any) -> Any:
        for k in range(3):
            x = jax.nn.gelu(x @ w[k])
        return jnp.sum(x)

    graph = graph_of(jax.grad(loss), tuple(f32(64, 64) for _ in range(3)), f32(256, 64))
    liveness = analyse(graph, rules=FusionRules(fused_matmuls=fused))
    products = {op.results[0] for op in ops(graph, "dot_general")} | set(liveness.stores.values())
    stored = [t for t in liveness.materialised if graph.tensors[t].shape == (256, 64) and t not in graph.arguments]
    assert stored and (set(stored) <= products) is fused


def test_products_of_stacks_compute_their_operands_on_tpus_and_attention_finds_them_stored() -> None:
    """Expect one fusion of libtpu 0.0.52 (v5e) for the product of two stacks of matrices, the sine inside."""

    def fn(q: Any, k: Any) -> Any:
        return jnp.einsum("bsd,btd->bst", jnp.sin(q), k)

    graph = graph_of(fn, f32(2, 8, 4), f32(2, 8, 4))
    assert len(analyse(graph, rules=TPU).fusions) == 1
    assert ops(graph, "sine")[0].results[0] in analyse(graph).materialised
    graph = graph_of(lambda q, k: jnp.einsum("bhsd,bhtd->bhst", jnp.sin(q), k), *[f32(2, 2, 8, 4)] * 2)
    assert ops(graph, "sine")[0].results[0] in analyse(graph, rules=TPU).materialised


def test_a_sum_is_stored_as_narrow_as_it_is_made() -> None:
    """Store the narrow dtype of the sum, not the wide dtype in which several consumers continue."""

    def fn(a: Any, b: Any, c: Any) -> Any:
        wide = (a + b + c).astype(jnp.float32)
        return jnp.sum(wide * 2, 0), jnp.max(wide, 1)

    graph = graph_of(fn, *[bf16(64, 64)] * 3)
    liveness = analyse(graph)
    held = {graph.tensors[t].dtype for t in liveness.materialised if graph.tensors[t].shape == (64, 64)}
    made = [t for t in liveness.materialised if graph.tensors[t].shape == (64, 64) and t not in graph.arguments]
    assert held == {"bfloat16"} and len(made) == 1


@pytest.mark.parametrize("masked", [True, False])
def test_scores_are_stored_as_what_the_matmul_goes_on_to(masked: bool) -> None:
    def fn(a: Any, b: Any) -> Any:
        scores = (a @ b).astype(jnp.float32)
        return jax.nn.softmax(jnp.sin(scores) if masked else scores)

    graph = graph_of(fn, bf16(8, 8), bf16(8, 8))
    liveness = analyse(graph)
    product = ops(graph, "dot_general")[0].results[0]
    (buffer,) = (b for b in liveness.buffers if b[0] == product)
    assert liveness.itemsize(graph, buffer) == (4 if masked else 2)


GPU = FusionRules(gpu_kernels=True, narrows_stacks=False)


def test_on_gpus_scatters_fetch_the_rows_that_they_add() -> None:
    """Keep messages of a graph's edges out of memory, as XLA's fusions `input_scatter_fusion` do (h100)."""

    def nodes(x: Any, w: Any, senders: Any, receivers: Any) -> Any:
        messages = jnp.where(senders[:, None] > 0, jax.nn.relu(x @ w)[senders], 0)
        return jax.ops.segment_sum(messages, receivers, x.shape[0])

    edges = jax.ShapeDtypeStruct((64,), jnp.int32)
    graph = graph_of(nodes, f32(8, 16), f32(16, 16), edges, edges)
    (gather,), (scatter,) = ops(graph, "gather"), ops(graph, "scatter")
    liveness = analyse(graph, rules=GPU)
    stored = {t for t in liveness.materialised if graph.tensors[t].shape[:1] == (64,)}
    assert stored == set(graph.arguments[2:])
    assert liveness.fetches == {gather.results[0]: 1}
    table = gather.operands[0]
    assert table in liveness.materialised and lifetimes(liveness)[table][1] == scatter.id + 1
    assert (
        gather.results[0] in analyse(graph).materialised and gather.results[0] in analyse(graph, rules=TPU).materialised
    )


def test_on_gpus_rows_that_another_kernel_reads_are_stored() -> None:
    """Store rows for a matmul; two sums of products fetch them twice instead."""
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    graph = graph_of(lambda x, i, w: x[i] @ w, f32(8, 16), ids, f32(16, 16))
    liveness = analyse(graph, rules=GPU)
    assert ops(graph, "gather")[0].results[0] in liveness.materialised and not liveness.fetches

    def sums(x: Any, i: Any, w: Any) -> Any:
        rows = x[i]
        return jnp.einsum("ned,ne->nd", rows, w), jnp.einsum("ned,nd->ne", rows, rows[:, 0])

    graph = graph_of(sums, f32(8, 16), jax.ShapeDtypeStruct((32, 4), jnp.int32), f32(32, 4))
    liveness = analyse(graph, rules=GPU)
    (gather,) = ops(graph, "gather")
    assert gather.results[0] not in liveness.materialised and liveness.fetches[gather.results[0]] >= 2


def test_on_gpus_zeros_live_from_the_first_scatter_into_them_to_the_last() -> None:
    """Count zeros twice: XLA copies them for the first of two segment sums of one shape (h100)."""
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)

    def twice(x: Any, i: Any, j: Any) -> Any:
        first = jax.ops.segment_sum(x[i], j, 8)
        return jax.ops.segment_sum(jnp.sin(first)[j], i, 8)

    graph = graph_of(lambda *args: jnp.sum(twice(*args)), f32(8, 16), ids, ids)
    first, last = ops(graph, "scatter")
    lives = lifetimes(analyse(graph, rules=GPU))
    assert lives[last.results[0]][0] == lives[first.results[0]][0] == first.id
    assert lifetimes(analyse(graph))[last.results[0]][0] == last.id
