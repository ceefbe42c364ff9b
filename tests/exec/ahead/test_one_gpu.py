"""Steps on one GPU: memory and time as planned, compared with the program of XLA's compiler for GPUs."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import compile_plan
from autoshard.graph import FusionRules, analyse, read_graph
from autoshard.planning import Options, make_plan
from autoshard.program import Program, trace


PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")
LAYERS, BATCH, PLACES, HEADS, GROUPS, SIZE = 4, 8, 2048, 8, 4, 128


def low(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def decode(heads_first: bool) -> Program:
    """Trace a token of attention over caches that a loop over layers slices; `heads_first`: heads before positions."""
    width = HEADS * GROUPS * SIZE
    kept = "bkpd" if heads_first else "bpkd"

    def step(weights: Any, keys: Any, values: Any, x: Any, at: Any) -> Any:
        def layer(x: Any, part: Any) -> Any:
            w, k, v = part
            place = (0, 0, at, 0) if heads_first else (0, at, 0, 0)
            new = (x @ w["kv"]).reshape(BATCH, HEADS, 1, SIZE) if heads_first else (x @ w["kv"]).reshape(
                BATCH, 1, HEADS, SIZE
            )  # fmt: skip
            k, v = (jax.lax.dynamic_update_slice(cache, new, place) for cache in (k, v))
            q = (x @ w["q"]).reshape(BATCH, HEADS, GROUPS, SIZE)
            chances = jax.nn.softmax(jnp.einsum(f"bkgd,{kept}->bkgp", q, k).astype(jnp.float32)).astype(x.dtype)
            return x + jnp.einsum(f"bkgp,{kept}->bkgd", chances, v).reshape(BATCH, width) @ w["o"], (k, v)

        return jax.lax.scan(layer, x, (weights, keys, values))

    weights = {"q": low(LAYERS, width, width), "o": low(LAYERS, width, width), "kv": low(LAYERS, width, HEADS * SIZE)}
    shape = (HEADS, PLACES) if heads_first else (PLACES, HEADS)
    cache = low(LAYERS, BATCH, *shape, SIZE)
    return trace(step, (weights, cache, cache, low(BATCH, width), jax.ShapeDtypeStruct((), jnp.int32)))


def trained(loss: Callable[..., Any], params: Any, *batch: Any) -> Program:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return trace(step, (params, *batch), donate_argnums=0, training=True)


def perceptron() -> Program:
    """Trace a step of gradient descent on layers with biases, whose activation follows each matmul alone."""

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.square(x).mean()

    return trained(loss, [(f32(1024, 1024), f32(1024))] * 4, f32(32768, 1024))


def convolutions() -> Program:
    """Trace a step of gradient descent on convolutions between norms over the batch."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            h = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean = h.mean((0, 1, 2))
            spread = jnp.square(h).mean((0, 1, 2)) - mean * mean
            x = x + jax.nn.relu((h - mean) * jax.lax.rsqrt(spread + 1e-5))
        return jnp.square(x).mean()

    return trained(loss, [f32(3, 3, 128, 128)] * 3, f32(64, 56, 56, 128))


def saved() -> Program:
    """Trace a step of gradient descent on scanned layers, whose stacks of saved activations feed matmuls."""

    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None), x, params)
        return jnp.square(x.astype(jnp.float32)).mean()

    return trained(loss, {"up": low(6, 1024, 4096), "down": low(6, 4096, 1024)}, low(8192, 1024))


@pytest.mark.few(1)
@PLUGIN
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: decode(False), id="places first", marks=pytest.mark.full),
        pytest.param(lambda: decode(True), id="heads first", marks=pytest.mark.full),
        perceptron,
        pytest.param(convolutions, marks=pytest.mark.full),
        saved,
    ],
)
def test_a_step_of_one_gpu_takes_the_memory_and_time_that_were_planned(make: Callable[[], Program]) -> None:
    program = make()
    compilation = compile_plan(program, make_plan(program, Options(topology="h100:1", mesh="data=1")).plan, 300.0)
    assert compilation.peak_compiled is not None and compilation.estimate is not None
    assert compilation.peak_predicted == pytest.approx(compilation.peak_compiled, rel=0.05)
    assert compilation.step_time_predicted_s == pytest.approx(compilation.estimate.step_time_s, rel=0.2)


def test_a_cache_whose_heads_come_first_is_copied_nowhere() -> None:
    for heads_first in (False, True):
        graph = read_graph(decode(heads_first).module)
        cache = graph.tensors[graph.arguments[3]]
        counts = [
            sum(
                graph.tensors[each.tensor].shape == cache.shape
                for each in analyse(graph, rules=FusionRules(gpu_kernels=gpu)).extra_traffic
            )
            for gpu in (False, True)
        ]
        # The two stacks that the loop fills begin as zeros. Caches of both layouts are copied before and after the
        # loop.
        assert counts == [0, 2 if heads_first else 6]
