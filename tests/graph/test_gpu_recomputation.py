"""Values that XLA's GPU compiler stores around batch normalisations, as its fusions for h100 show, and their lives."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.graph import FusionRules, Liveness, OpGraph, analyse, defer_filter_gradients
from autoshard.graph.memory.gpu_recomputation import GpuRecomputation
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.program import trace
from tests.graph.programs import graph_of


GPU = FusionRules(gpu_kernels=True)
BATCH, SIZE, WIDTH = 64, 32, 64
LARGE = BATCH * SIZE * SIZE * WIDTH


def normalised(layers: int, dtype: str, norm: bool = True) -> OpGraph:
    """Return the gradients of convolutions with residuals, each after a batch normalisation unless `norm` is False."""

    def loss(convs: Any, head: Any, x: Any) -> Any:
        for kernel, scale in convs:
            y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            if norm:
                mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
                y = (y - mean) * jax.lax.rsqrt(var + 1e-5) * scale
            y = jax.nn.relu(y)
            x = y if y.shape != x.shape else x + y
        return jnp.sum((x.mean((1, 2)) @ head).astype(jnp.float32) ** 2)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    convs = [(array(3, 3, 3 if i == 0 else WIDTH, WIDTH), array(WIDTH)) for i in range(layers)]
    return graph_of(jax.grad(loss, (0, 1)), convs, array(WIDTH, 10), array(BATCH, SIZE, SIZE, 3))


def large(graph: OpGraph, tensors: Any) -> list[int]:
    return [t for t in tensors if graph.tensors[t].elements == LARGE]


@pytest.mark.parametrize(
    ("layers", "dtype", "stored"),
    [
        # The masked gradient of the first layer alone is computed from three values, and is stored.
        (3, "bfloat16", {"convolution": 5, "maximum": 1, "add": 1 + 3, "select": 1}),
        # One sum of residual gradients is stored, and every other masked gradient.
        (6, "float32", {"convolution": 11, "maximum": 1, "add": 4 + 6 + 1, "select": 3}),
    ],
)
def test_gpus_store_masked_gradients_that_many_kernels_compute_from_several_values(
    layers: int, dtype: str, stored: dict[str, int]
) -> None:
    graph = normalised(layers, dtype)
    fusions = analyse(graph, rules=GPU).fusions
    assert Counter(graph.ops[f.root].kind for f in fusions for _ in large(graph, f.writes)) == stored


def test_gpus_sum_alike_values_in_one_kernel_but_read_again_for_a_variance() -> None:
    graph = normalised(3, "bfloat16")
    forward = [f for f in analyse(graph, rules=GPU).fusions if "transpose" not in graph.ops[f.root].name]
    sums = [f for f in forward if graph.ops[f.root].kind == "reduce" and large(graph, f.reads)]
    # Mean and variance of each layer, and the means over each image.
    assert len(sums) == 3 * 2 + 1


def stops(graph: OpGraph, liveness: Liveness) -> dict[int, int]:
    return {tensor: stop for tensor, _, stop in liveness.buffers if graph.tensors[tensor].elements == LARGE}


def test_gradients_of_filters_wait_for_the_last_sums_over_devices() -> None:
    graph = normalised(3, "bfloat16")
    before = analyse(graph, rules=GPU)
    first, after = stops(graph, before), stops(graph, defer_filter_gradients(graph, before))
    reads = {f.root: f.reads for f in before.fusions}
    filters = [op for op in graph.ops if op.kind == "convolution" and graph.tensors[op.results[0]].shape[0] == 3]
    *late, last = filters
    assert len(late) == 2
    # The gradient of the first layer's filter needs the last sum itself.
    extended = {t for op in late for t in large(graph, reads[op.id])}
    assert {t for t in after if after[t] > first[t]} == extended
    norm = max(op.id for op in graph.ops if op.kind == "reduce" and graph.tensors[op.operands[0]].elements == LARGE)
    assert {after[t] for t in extended} == {norm + 1} and norm < last.id


def test_without_sums_over_the_batch_gradients_of_filters_run_at_once() -> None:
    graph = normalised(3, "bfloat16", norm=False)
    liveness = analyse(graph, rules=GPU)
    assert defer_filter_gradients(graph, liveness) == liveness


def test_zeros_for_gradients_that_go_on_are_written_before_the_backward_pass() -> None:
    """Scatter into zeros for the gradients of a resize and of a table; only updates need the latter."""

    def step(table: Any, kernel: Any, ids: Any) -> Any:
        def loss(table: Any, kernel: Any) -> Any:
            x = table[ids].reshape(-1, 8, 8, 16) @ kernel
            x = jax.image.resize(x, (x.shape[0], 16, 8, 16), "nearest")
            return jnp.sum((x @ kernel) ** 2)

        return jax.value_and_grad(loss, (0, 1))(table, kernel)

    shape = jax.ShapeDtypeStruct
    graph = graph_of(step, shape((512, 1024), "float32"), shape((16, 16), "float32"), shape((4096,), "int32"))
    live = {tensor: (start, stop) for tensor, start, stop in analyse(graph, rules=GPU).buffers}
    resized, rows = (op for op in graph.ops if op.kind == "scatter")
    loss = graph.tensors[graph.results[0]].producer
    assert graph.tensors[rows.results[0]].shape == (512, 1024)
    assert live[resized.results[0]][0] == loss < resized.id
    assert live[rows.results[0]][0] == rows.id


@pytest.mark.parametrize("typed", [True, False])
def test_random_keys_of_many_layers_are_followed_in_few_steps(typed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each round of the generator joins two values that two ops read, so the paths through one key are thousands.
    def loss(layers: list[Any], x: Any, seed: Any) -> Any:
        key = jax.random.key(seed) if typed else jax.random.wrap_key_data(seed)
        for weight in layers:
            key, own = jax.random.split(key)
            x = jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x @ weight, 0)
        return jnp.sum(x**2)

    calls, follow = [0], GpuRecomputation._kernels

    def counted(*args: Any) -> Any:
        calls[0] += 1
        assert calls[0] < 10_000
        return follow(*args)

    monkeypatch.setattr(GpuRecomputation, "_kernels", counted)
    seed = jax.ShapeDtypeStruct(() if typed else (2,), "int32" if typed else "uint32")
    layers = [jax.ShapeDtypeStruct((64, 64), "float32") for _ in range(3)]
    x = jax.ShapeDtypeStruct((256, 64), "float32")
    analyse_program(trace(jax.grad(loss), (layers, x, seed)), "gpu")
