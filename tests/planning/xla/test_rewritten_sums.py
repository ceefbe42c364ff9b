"""Sums over devices that XLA joins or leaves whole because of the ops that read them, as predicted and as compiled."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.exec import compile_plan
from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.space.op_strategies import result_states
from autoshard.planning.xla.axis_assignments import PARTIAL
from autoshard.planning.xla.rewritten_sums import added_sums, summed_whole
from autoshard.program import Program, trace


ROWS, WIDTH = 4096, 512
S = jax.ShapeDtypeStruct
PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")


def joined(function: Any) -> list[tuple[int, int]]:
    """Return the joined matmuls of a function of (x, v, w), each with the last of its addition, counted from 0."""
    square = S((WIDTH, WIDTH), jnp.bfloat16)
    found = analyse_program(trace(function, (S((ROWS, WIDTH), jnp.bfloat16), square, square)), "tpu")
    matmuls = [op.id for op in found.graph.ops if op.kind == "dot_general"]
    pairs = added_sums(found.graph, found.structure)
    return sorted((matmuls.index(op), matmuls.index(last)) for op, last in pairs.items())


def gated() -> Program:
    """Trace a training step whose hidden value is multiplied by two weights, of which both have a gradient."""

    def loss(params: dict[str, Any], x: Any) -> Any:
        h = jnp.tanh(x @ params["first"])
        return jnp.square((jnp.tanh(h @ params["gate"]) * (h @ params["up"])) @ params["down"]).mean()

    def step(params: dict[str, Any], x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    shapes = {"first": (WIDTH, WIDTH), "gate": (WIDTH, WIDTH), "up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}
    params = {name: S(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return trace(step, (params, S((ROWS, WIDTH), jnp.bfloat16)), donate_argnums=(0,), training=True)


def test_only_matmuls_that_additions_alone_read_are_joined() -> None:
    assert joined(lambda x, v, w: x @ v + x @ w) == [(0, 1)]
    assert joined(lambda x, v, w: (x @ v + x @ w) + x @ (v * w)) == [(0, 2), (1, 2)]
    assert joined(lambda x, v, w: x @ v + x) == []
    assert joined(lambda x, v, w: x @ v + jnp.tanh(x @ w)) == []

    def read(x: Any, v: Any, w: Any) -> Any:
        product = x @ v
        return product + x @ w, product.sum()

    assert joined(read) == []


def test_a_sum_that_does_not_join_is_priced() -> None:
    """Charge one sum for two matmuls of an addition if both leave partial results, and a sum each otherwise."""
    program = gated()
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=8")).plan
    model = plan.graph(program).priced.model
    kinds = [tuple(model.nodes[node].kind for node in (each.source, each.target)) for each in model.reshards]
    (apart,) = [each for each, ends in zip(model.reshards, kinds, strict=True) if ends == ("op", "op")]
    own, last = (
        result_states(model.graph.ops[node.ref], node.states, 0)[:, 0] <= PARTIAL
        for node in (model.nodes[apart.source], model.nodes[apart.target])
    )
    costs = np.sum(list(apart.costs.values()), axis=0)[apart.rows[:, None], apart.columns[None, :]] > 0
    assert own.any() and not own.all()
    assert (costs == (own[:, None] & ~last[None, :])).all()


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("topology", "mesh", "split", "most"),
    [
        pytest.param("h100:8", "data=8", "-,-", 2, marks=PLUGIN),
        pytest.param("v5e:2x4", "data=8", "-,-", 2, marks=pytest.mark.full),
        # The sums are apart if one is staged. The rows may then be sent instead.
        ("v5p:2x2x2", "data=4,model=2", "-,data+model", 5),
    ],
)
def test_the_gradient_of_a_tied_table_is_summed_as_foreseen(topology: str, mesh: str, split: str, most: int) -> None:
    """Add the scattered rows of the embedding and the product of the head before the one sum of both, if possible.

    The table crosses the links `most` times.
    """

    def loss(table: Any, ids: Any) -> Any:
        logits = (jnp.tanh(table[ids]) @ table.T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1).mean()

    def step(table: Any, ids: Any) -> Any:
        return table - 0.1 * jax.grad(loss)(table, ids)

    table, ids = S((4096, WIDTH), jnp.bfloat16), S((64, 256), jnp.int32)
    program = trace(step, (table, ids), donate_argnums=(0,), training=True)
    batch = "+".join(axis.partition("=")[0] for axis in mesh.split(","))
    asked = read_asked({"table": split, "ids": f"{batch},-"})
    plan = make_plan(program, Options(topology=topology, mesh=mesh, asked=asked)).plan
    predicted = sum(each.wire_bytes for each in plan.prediction.collectives)
    compilation = compile_plan(program, plan, 300.0, quick=True)
    assert predicted == pytest.approx(sum(each.wire_bytes for each in compilation.collectives), rel=0.05)
    assert predicted <= 1.05 * most * 7 / 8 * 2 * 4096 * WIDTH
    assert not compilation.unforeseen


@pytest.mark.heavy
@pytest.mark.parametrize("topology", [pytest.param("h100:8", marks=[PLUGIN, pytest.mark.full]), "v5e:2x4"])
def test_the_gradient_of_a_value_that_two_split_weights_multiply_is_summed_once(topology: str) -> None:
    split = {f"params.{name}": "-,data" for name in ("gate", "up")} | {"params.down": "data,-"}
    asked = read_asked({"x": "-,-", "params.first": "-,-"} | split)
    program = gated()
    plan = make_plan(program, Options(topology=topology, mesh="data=8", asked=asked)).plan
    value = 2 * ROWS * WIDTH
    predicted = sum(each.wire_bytes for each in plan.prediction.collectives)
    compilation = compile_plan(program, plan, 300.0, quick=True)
    assert predicted == pytest.approx(sum(each.wire_bytes for each in compilation.collectives), rel=0.05)
    # One sum of the loss's values forward and one of the gradient backward, each in at most 2 x 7/8 of its bytes.
    assert predicted <= 1.05 * 2 * 2 * 7 / 8 * value
    assert not compilation.unforeseen


def test_only_slices_leave_sums_whole() -> None:
    def sliced(x: Any, y: Any) -> Any:
        product, other = x.T @ y, y.T @ x
        return product[:, :-1], product[:, -1:], other[:-1] + other[:-1].sum(), jnp.tanh(other)

    rows = S((ROWS, WIDTH), jnp.bfloat16)
    graph = analyse_program(trace(sliced, (rows, rows)), "tpu").graph
    first, second = (op.results[0] for op in graph.ops if op.kind == "dot_general")
    assert summed_whole(graph, first) and not summed_whole(graph, second)


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize(("columns", "kind"), [(WIDTH - 128, "all-reduce"), (WIDTH, "reduce-scatter")])
def test_a_sum_that_is_sliced_is_an_all_reduce(columns: int, kind: str) -> None:
    def product(x: Any, y: Any) -> Any:
        return 2 * jnp.tanh(x.T @ y)[:, :columns] if columns == WIDTH else 2 * (x.T @ y)[:, :columns]

    rows = S((ROWS, WIDTH), jnp.bfloat16)
    program = trace(product, (rows, rows))
    asked = read_asked({"x": "data,-", "y": "data,-", "result": "data,-"})
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=8", asked=asked)).plan
    assert [each.kind for each in plan.prediction.collectives] == [kind]
    compilation = compile_plan(program, plan, 300.0, quick=True)
    assert [each.kind for each in compilation.collectives] == [kind]
    assert compilation.collectives[0].wire_bytes == pytest.approx(plan.prediction.collectives[0].wire_bytes, rel=0.01)
