"""A stack of layers: a scan, or a pipeline of stages with the same results."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import UserError
from autoshard.exec import measure
from autoshard.graph import read_graph
from autoshard.planning import Options, make_plan, read_asked
from autoshard.program import open_source, pipelined, read_pipeline, trace


LAYERS, BATCH, LENGTH, WIDTH, INNER = 8, 8, 3, 6, 10
RNG = np.random.default_rng(0)
WEIGHTS = {
    "up": RNG.normal(size=(LAYERS, WIDTH, INNER)).astype(np.float32),
    "down": RNG.normal(size=(LAYERS, INNER, WIDTH)).astype(np.float32),
}
X = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
SEEN = RNG.random((BATCH, LENGTH, 1)) > 0.3
TABLE = RNG.normal(size=(LENGTH, WIDTH)).astype(np.float32)


def loss(weights: Any, x: Any, table: Any, remat: bool, **how: Any) -> Any:
    """Compute a loss of numbered layers that read a table from outside and a mask that belongs to the batch."""

    def layer(state: Any, own: Any) -> Any:
        hidden, seen = state
        inner = jnp.tanh((hidden + table) @ own["up"]) @ own["down"] * (1 + 0.1 * own["number"])
        norm = jax.lax.rsqrt((inner * inner).sum(-1, keepdims=True))  # no epsilon: zeros would give NaN
        return hidden + jnp.where(seen, inner * norm, 0), seen

    run = jax.checkpoint(layer) if remat else layer
    stacked = {**weights, "number": jnp.arange(LAYERS)}
    hidden, _ = autoshard.stack(run, stacked, (x, jnp.asarray(SEEN)), **how)
    return (hidden * jnp.cos(hidden)).sum()


@functools.cache
def value_and_gradients(remat: bool = False, **how: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda *a: loss(*a, remat, **how), argnums=(0, 1, 2)))(WEIGHTS, X, TABLE)


@pytest.mark.few(1)
@pytest.mark.parametrize(("asked", "sums"), [((0, 1, 2), 1), ((0, 1), 0), ((0,), 0)])
def test_rounds_sum_no_gradients_that_nobody_asks_for(asked: tuple[int, ...], sums: int) -> None:
    """Count the sums: the gradient of a table that all stages read is summed over them at every tick."""

    def run(*args: Any) -> Any:
        return jax.grad(lambda *a: loss(*a, True, stages=2, microbatches=4, schedule="circular:2"), argnums=asked)(
            *args
        )

    graph = read_graph(trace(run, (WEIGHTS, X, TABLE), name="rounds").module)
    tables = [c for loop in graph.loops for c in loop.carries if loop.parent < 0 if shape_of(graph, c) == TABLE.shape]
    assert len(tables) == sums
    wanted = jax.jit(jax.grad(lambda *a: loss(*a, True), argnums=asked))(WEIGHTS, X, TABLE)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(jax.jit(run)(WEIGHTS, X, TABLE)), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * abs(a).max())


def shape_of(graph: Any, carry: Any) -> tuple[int, ...]:
    return graph.tensors[carry.body].shape


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "remat"),
    [
        (8, 2, None, False),
        (2, 4, "circular:2", True),
        (4, 4, "circular", False),
        (3, 4, None, False),  # two layers outside of the stages
        (2, 4, "circular:3", True),
    ],
)
def test_a_pipeline_computes_what_the_scan_does(
    stages: int, microbatches: int, schedule: str | None, remat: bool
) -> None:
    wanted = value_and_gradients()
    found = value_and_gradients(remat, stages=stages, microbatches=microbatches, schedule=schedule)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * abs(np.asarray(a)).max())


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 4.0), ("circular:2", 4.5)])
def test_no_tick_keeps_its_weights_for_the_backward_pass(schedule: str, most: float) -> None:
    shape = jax.ShapeDtypeStruct
    weights = {"w": shape((8, 256, 256), jnp.float32)}

    def run(weights: Any, x: Any) -> Any:
        layer = lambda x, w: jnp.tanh(x @ w["w"])  # noqa: E731
        return autoshard.stack(layer, weights, x, stages=2, microbatches=16, schedule=schedule).sum()

    lowered = jax.jit(jax.grad(run)).lower(weights, shape((16, 256), jnp.float32))
    memory = lowered.compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < most * 8 * 256 * 256 * 4


def test_of_a_recipe_every_stack_is_a_pipeline_and_jitted_parts_are_traced_again() -> None:
    run = jax.jit(lambda w, x: autoshard.stack(lambda x, w: x + w, w, x))
    w, x = jnp.ones((4, 3)), jnp.ones((8, 3))

    def rolls() -> int:
        return str(jax.make_jaxpr(run)(w, x)).count("concatenate")

    assert rolls() == 0
    with pipelined(read_pipeline(2, 4, None)) as stacks:
        assert rolls() > 0 and stacks == [4]
        np.testing.assert_array_equal(run(w, x), x + 4)
    assert rolls() == 0


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"stages": 16}, "16 stages are more than the 8 layers of this stack; use 8 or fewer, or none."),
        ({"stages": 0}, "0 stages cannot be; 1 is no pipeline."),
        ({"microbatches": 4}, "autoshard.stack takes microbatches only with stages; add stages=2 or more, or leave"),
        ({"microbatches": 3, "schedule": "1f1b"}, "autoshard.stack takes microbatches and schedule only with stages;"),
        ({"stages": 4, "microbatches": 3}, "3 microbatches do not divide the batch: this stack has 8 examples."),
        ({"stages": 4, "schedule": "1f1b"}, "schedule `1f1b` is not known; use gpipe, circular, or circular:2"),
        ({"stages": 4, "schedule": "circular:1"}, "schedule `circular:1` is not known"),
        (
            {"stages": 4, "microbatches": 2, "schedule": "circular"},
            "so 4 stages need 4 microbatches or a multiple of it, not 2; use gpipe, or 4 microbatches.",
        ),
        (
            {"stages": 8, "schedule": "circular"},
            "8 stages with 2 chunks each are more than the 8 layers of this stack; use gpipe.",
        ),
        (
            {"stages": 2, "schedule": "circular:5"},
            "2 stages with 5 chunks each are more than the 8 layers of this stack; use circular:4, or gpipe.",
        ),
    ],
)
def test_what_cannot_be_is_reported(how: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        jax.eval_shape(lambda *a: loss(*a, False, **how), WEIGHTS, X, TABLE)


def test_a_layer_gives_what_it_takes_of_a_microbatch() -> None:
    w, x = jnp.ones((4, 3)), jnp.ones((8, 3))
    outside = jnp.ones((8, 3))
    for microbatches in (2, 8):  # microbatches of several examples and of one, which could be broadcast
        with pytest.raises(UserError, match=r"part of `x`"):
            autoshard.stack(lambda x, w: x * w + outside, w, x, stages=2, microbatches=microbatches)
    with pytest.raises(UserError, match="one entry for each layer in front, but their first dims are 3, 4"):
        autoshard.stack(lambda x, w: x, (w, jnp.ones((3,))), x)


FILE = """
import autoshard
import jax
import jax.numpy as jnp


def layer(x, weights):
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def step(params, x):
    def loss(p):
        return (autoshard.stack(layer, p["layers"], x @ p["first"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def program():
    shape = jax.ShapeDtypeStruct
    layers = {"up": shape((8, 64, 256), "float32"), "down": shape((8, 256, 64), "float32")}
    params = {"first": shape((64, 64), "float32"), "layers": layers}
    return step, (params, shape((64, 16, 64), "float32"))


def other():
    return (lambda x: x * 2), (jax.ShapeDtypeStruct((4,), "float32"),)
"""


@pytest.mark.parametrize(("schedule", "ticks"), [pytest.param("gpipe", 11, marks=pytest.mark.full), ("circular:2", 17)])
def test_a_file_runs_in_stages_as_planned(tmp_path: Path, schedule: str, ticks: int) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    stages = 4 if schedule == "gpipe" else 2
    program = open_source(str(file), stages=stages, microbatches=8, schedule=schedule)
    asked = read_asked(axis_only={"stage": "stage"})
    plan = make_plan(program, Options(topology="cpu:8", mesh=f"stage={stages},data={8 // stages}", asked=asked)).plan
    assert "stage over stage" in plan.words
    permutes = [c for c in plan.prediction.collectives if c.kind == "collective-permute"]
    assert {c.axes for c in permutes} == {("stage",)} and sum(c.count for c in permutes) == 2 * ticks
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed
    assert measured.wire_compiled["stage"] == pytest.approx(measured.wire_predicted["stage"], rel=0.05)
    assert sum(measured.wire_compiled.values()) == pytest.approx(sum(measured.wire_predicted.values()), rel=0.05)
    names: dict[str, Any] = {}
    exec(FILE, names)
    assert "collective_permute" in plan.jit(names["step"]).lower(*program.args).compile().as_text().replace("-", "_")


def test_a_file_without_a_stack_has_no_stages(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    with pytest.raises(
        UserError, match=r"has no layers that could be 2 stages: write the loop over them as `autoshard"
    ):
        open_source(str(file), entry="other", stages=2)
    with pytest.raises(UserError, match="`--microbatches` only applies to"):
        open_source(str(file), microbatches=2)
    with pytest.raises(UserError, match="--schedule gpipe is for stages; add --stages 2 or more"):
        open_source(str(file), schedule="gpipe")
