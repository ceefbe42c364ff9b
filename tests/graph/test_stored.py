"""Stacks that are stored in another dtype than their traced one."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.graph import FusionRules, analyse, read_graph, round_operands
from autoshard.program import trace
from tests.graph.buffers import TPU


LAYERS, WIDTH = 4, 128


def step(axis: int, gradients: str):
    def run(params, x):
        def loss(stack):
            layers = jnp.moveaxis(stack, axis, 0)
            layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w.astype(h.dtype)), None))
            hidden, _ = jax.lax.scan(layer, x, layers)
            return hidden.astype("float32").mean()

        return params - 1e-3 * jax.grad(loss)(params).astype(gradients)

    return run


@pytest.mark.parametrize("axis", [0, 1])
def test_a_stack_is_narrowed_before_the_loop_along_any_dim_of_layers(axis: int) -> None:
    shape = (LAYERS, WIDTH, WIDTH) if axis == 0 else (WIDTH, LAYERS, WIDTH)
    given = (jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct((64, WIDTH), "bfloat16"))
    graph = read_graph(trace(step(axis, "float32"), given, name="stack", donate_argnums=(0,)).module)
    liveness = analyse(graph, rules=TPU)
    stacks = {b: w for b, w in liveness.widths.items() if graph.tensors[b[0]].shape == (LAYERS, WIDTH, WIDTH)}
    assert list(stacks.values()) == [2]
    ((_, start, stop),) = stacks
    assert start == min(loop.start for loop in graph.loops) and stop == max(loop.stop for loop in graph.loops)


@pytest.mark.parametrize(("gradients", "widths"), [("float32", []), ("bfloat16", [2])])
def test_a_stack_of_gradients_that_is_narrowed_afterwards_is_narrow(gradients: str, widths: list[int]) -> None:
    given = (jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((64, WIDTH), "bfloat16"))
    graph = read_graph(trace(step(0, gradients), given, name="stack", donate_argnums=(0,)).module)
    liveness = analyse(graph, rules=TPU)
    carried = {carry.body for loop in graph.loops for carry in loop.carries}
    assert [w for (t, *_), w in liveness.widths.items() if t in carried and t not in graph.arguments] == widths


@pytest.mark.parametrize(("norm", "width"), [(False, 2), (True, None)])
def test_a_saved_stack_that_only_matmuls_take_is_rounded(norm: bool, width: int | None) -> None:
    """Match libtpu for v5e and v5p: `bf16[8,4,2048,2048]` in both loops, and float32 if a norm reads the stack too."""

    def loss(stack, x):
        def layer(h, w):
            y = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True)) if norm else h
            return h + jnp.tanh(y @ w), None

        return jax.lax.scan(jax.checkpoint(layer), x, stack)[0].mean()

    given = (jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((64, WIDTH), "float32"))
    graph = round_operands(read_graph(trace(jax.grad(loss), given, name="stack").module))
    liveness = analyse(graph, rules=TPU)
    carried = {
        c.body for loop in graph.loops for c in loop.carries if graph.tensors[c.body].shape == (LAYERS, 64, WIDTH)
    }
    (buffer,) = (b for b in liveness.buffers if b[0] in carried)
    assert liveness.widths.get(buffer) == width
    on_gpus = analyse(graph, rules=FusionRules(narrows_stacks=False))
    assert not [b for b in on_gpus.widths if b[0] in carried]


def test_saved_states_of_a_recurrence_stay_wide() -> None:
    """Match libtpu's RWKV for v5e: matmuls of a vector and its state, in each head, read slices in float32."""

    def loss(r, k):
        def step(state, given):
            r, k = given
            return state * 0.9 + k[:, :, None] * k[:, None, :], jnp.einsum("hk,hkv->hv", r, state)

        return jax.lax.scan(step, jnp.zeros((16, WIDTH, WIDTH)), (r, k))[1].mean()

    given = jax.ShapeDtypeStruct((LAYERS, 16, WIDTH), "float32")
    graph = round_operands(read_graph(trace(jax.grad(loss), (given, given), name="states").module))
    shape = (LAYERS, 16, WIDTH, WIDTH)
    carried = {c.body for loop in graph.loops for c in loop.carries if graph.tensors[c.body].shape == shape}
    assert carried and not [b for b in analyse(graph, rules=TPU).widths if b[0] in carried]


@pytest.mark.parametrize("schedule", ["gpipe", "circular:2"])
def test_stacks_of_stages_are_narrowed_once_for_both_passes(schedule: str) -> None:
    def run(params, x):
        def loss(stack):
            layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w.astype(h.dtype)))
            return autoshard.stack(layer, stack, x, stages=2, microbatches=4, schedule=schedule).astype("float32").sum()

        return params - 1e-3 * jax.grad(loss)(params)

    given = (jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((64, WIDTH), "bfloat16"))
    graph = read_graph(trace(run, given, name="stages", donate_argnums=(0,)).module)
    liveness = analyse(graph, rules=TPU)
    elements = LAYERS * WIDTH * WIDTH
    (stack,) = (b for b, w in liveness.widths.items() if w == 2 and graph.tensors[b[0]].elements == elements)
    assert graph.tensors[stack[0]].loop < 0 and graph.tensors[stack[0]].shape != (LAYERS, WIDTH, WIDTH)
    whole = [loop for loop in graph.loops if loop.parent < 0]
    assert len(whole) > 1
    assert stack[1:] == (min(loop.start for loop in whole), max(loop.stop for loop in whole))
