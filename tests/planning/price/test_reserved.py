"""Memory of results that replace no donated argument: the prediction against the reservation of real compilers."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import compile_plan
from autoshard.graph import OpClass, read_graph
from autoshard.planning import Options, make_plan
from autoshard.planning.price.device_memory import LiveBuffer, reserve
from autoshard.planning.space.user_constraints import read_asked
from autoshard.program import Program, trace


LAYERS, WIDTH, WIDE, ROWS = 6, 1024, 4096, 16384
S = jax.ShapeDtypeStruct
PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")


def scanned(donated: bool) -> Program:
    """Trace a step of SGD with momentum on layers in stacks, whose state outweighs what the forward pass saves."""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params)
        return jnp.square(y).mean()

    def step(params: dict[str, jax.Array], momentum: dict[str, jax.Array], x: jax.Array) -> object:
        value, grads = jax.value_and_grad(loss)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, params, momentum), momentum, value

    state = {"up": S((LAYERS, WIDTH, WIDE), jnp.float32), "down": S((LAYERS, WIDE, WIDTH), jnp.float32)}
    donate = (0, 1) if donated else ()
    return trace(step, (state, state, S((ROWS, WIDTH), jnp.float32)), donate_argnums=donate, training=True)


@pytest.mark.parametrize("topology", [pytest.param("h100:1", marks=[PLUGIN, pytest.mark.full]), "v5e:1x1"])
def test_temporaries_lie_in_the_memory_of_results_as_compilers_place_them(topology: str) -> None:
    peaks = {}
    for donated in (False, True):
        program = scanned(donated)
        plan = make_plan(program, Options(topology=topology, mesh="data=1")).plan
        compilation = compile_plan(program, plan, 300.0, quick=True)
        assert compilation.reserved_compiled is not None
        assert compilation.peak_predicted == pytest.approx(compilation.reserved_compiled, rel=0.05)
        peaks[donated] = compilation.peak_predicted
    assert peaks[True] <= peaks[False]


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("h100:8", marks=[PLUGIN, pytest.mark.full]),
        "v5p:2x2x2",
        pytest.param("v6e:2x4", marks=pytest.mark.full),
    ],
)
def test_gathered_weights_that_replace_no_argument_are_whole(topology: str) -> None:
    """Plan whole weights with split momentum: the compiler reserves the arguments and the results whole, and more."""
    program = scanned(donated=False)
    half = len(program.arguments) // 2
    pins = {a.name: "-,-,-" if i < half else "-,-,d" for i, a in enumerate(program.arguments[:-1])}
    pins[program.arguments[-1].name] = "d,-"
    plan = make_plan(program, Options(topology=topology, mesh="d=8", asked=read_asked(pins))).plan
    compilation = compile_plan(program, plan, 300.0, quick=True)
    assert compilation.reserved_compiled is not None
    assert plan.prediction.peak_bytes == pytest.approx(compilation.reserved_compiled, rel=0.15)


def graph_of_three() -> object:
    """Read a graph whose third op is elementwise."""
    program = trace(lambda x: jnp.tanh(jnp.exp(jnp.sin(x))), (S((8,), jnp.float32),))
    graph = read_graph(program.module)
    assert [op.op_class for op in graph.ops] == [OpClass.POINTWISE] * 3
    return graph


def peak(buffers: list[LiveBuffer]) -> int:
    return max(sum(b.size for b in buffers if b.start <= at < b.stop) for at in range(4))


def test_one_buffer_at_a_time_lies_in_a_result_that_is_as_large() -> None:
    graph = graph_of_three()
    result = LiveBuffer(2, 4, 100, "gradients", 9)
    early, beside, wide = (LiveBuffer(0 + 1, 2, size, "temporaries", t) for size, t in ((80, 1), (70, 2), (120, 3)))
    assert peak(reserve(graph, [result], {9})) == 100  # type: ignore[arg-type]
    assert peak(reserve(graph, [result, early], {9})) == 100  # type: ignore[arg-type]
    assert peak(reserve(graph, [result, early, beside], {9})) == 170  # type: ignore[arg-type]
    assert peak(reserve(graph, [result, wide], {9})) == 220  # type: ignore[arg-type]


def test_nothing_lies_in_results_that_are_apart() -> None:
    graph = graph_of_three()
    result, early = LiveBuffer(2, 4, 100, "gradients", 9), LiveBuffer(1, 2, 80, "temporaries", 1)
    assert peak(reserve(graph, [result, early], {9}, apart=True)) == 180  # type: ignore[arg-type]


def test_an_elementwise_op_writes_its_result_over_an_operand_of_the_same_size() -> None:
    graph = graph_of_three()
    result = LiveBuffer(2, 4, 100, "gradients", 9)
    for size, most in ((100, 100), (90, 190)):
        operand = LiveBuffer(1, 3, size, "temporaries", 1)
        assert peak(reserve(graph, [result, operand], {9})) == most  # type: ignore[arg-type]
