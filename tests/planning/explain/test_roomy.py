"""Recipes with more recomputation where memory is not short: they are tried only where they may be faster."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Topology, load_calibration
from autoshard.planning import Options, PlanResult, make_plan, plan_recipes
from autoshard.planning.price.analysed_program import Task, analyse_program, reprice
from autoshard.planning.price.remat_forecast import spared_seconds
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried
from autoshard.planning.recipes.recipe_follow_ups import MemoryPruning
from autoshard.program import Program, trace
from tests.graph.programs import f32
from tests.planning.recipes import tried


TOPOLOGY = "v5e:2x4"


@functools.cache
def stack(remat: str) -> Program:
    """Trace layers that recompute nothing or everything."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w["up"]) @ w["down"], None

    body = layer if remat == "none" else jax.checkpoint(layer)

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: (jax.lax.scan(body, x, p)[0] ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    weights = {"up": f32(4, 4096, 8192), "down": f32(4, 8192, 4096)}
    return trace(step, (weights, f32(4096, 4096)), name=f"remat {remat}")


def test_nothing_is_computed_again_where_memory_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(topology=TOPOLOGY, mesh="data=4,model=2")
    planned: list[str] = []

    def recorded(program: Program, *given: Any, **more: Any) -> PlanResult:
        planned.append(program.name)
        return make_plan(program, *given, **more)

    monkeypatch.setattr("autoshard.planning.recipes.recipe_search.make_plan", recorded)
    recipe, result = plan_recipes(stack, {"remat": ("none", "dots")}, options, of_source=True)
    assert recipe.arguments == {"remat": "none"} and len(planned) == 1
    assert 0 < result.unconstrained_bound_s <= result.plan.prediction.expected_s * (1 + 1e-9)
    row = tried(result)["remat dots"]
    assert row["verdict"] == "not planned: more memory gains less with remat none than this computes"
    again = make_plan(stack("dots"), options).plan.prediction
    assert row["bound_s"] <= again.step_time_s and again.expected_s > result.plan.prediction.expected_s


def test_where_memory_is_short_more_is_computed() -> None:
    options = Options(topology=TOPOLOGY, mesh="data=8")
    peaks = {remat: make_plan(stack(remat), options).plan.prediction.peak_bytes for remat in ("none", "dots")}
    assert peaks["dots"] < peaks["none"]
    short = Options(topology=TOPOLOGY, mesh="data=8", memory_limit=peaks["dots"])
    recipe, _ = plan_recipes(stack, {"remat": ("none", "dots")}, short, of_source=True)
    assert recipe.arguments == {"remat": "dots"}


@functools.cache
def pointwise(remat: str) -> Program:
    """Trace layers of one small matmul and many pointwise values."""

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        h = (x @ w).astype("float32")
        for _ in range(4):
            h = jnp.tanh(h) * jnp.sin(h)
        return h.astype("bfloat16"), None

    body = layer if remat == "none" else jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda p: (jax.lax.scan(body, x, p)[0] ** 2).mean())(w)

    shapes = jax.ShapeDtypeStruct((4, 512, 512), "bfloat16"), jax.ShapeDtypeStruct((65536, 512), "bfloat16")
    return trace(step, shapes, name=f"remat {remat}")


@pytest.mark.parametrize(
    ("make", "on", "expected"),
    [
        (pointwise, Options(topology="h100:2", mesh="data=2", refine_axes=False), ["remat none", "remat dots"]),
        (stack, Options(topology=TOPOLOGY, mesh="data=4,model=2"), ["remat none"]),
    ],
    ids=["stacks cost more than tanh", "matmuls cost more than stacks"],
)
def test_a_plain_step_that_fits_is_recomputed_where_that_saves_traffic(
    monkeypatch: pytest.MonkeyPatch, make: Any, on: Options, expected: list[str]
) -> None:
    results: list[PlanResult] = []

    def recorded(*given: Any, **more: Any) -> PlanResult:
        results.append(make_plan(*given, **more))
        return results[-1]

    monkeypatch.setattr("autoshard.planning.recipes.recipe_search.make_plan", recorded)
    choices = {"remat": ("none", "dots")}
    recipe, chosen = plan_recipes(make, choices, on, of_source=True, first_if_fits=True)
    assert [each.plan.program_name for each in results] == expected
    assert f"remat {recipe.arguments['remat']}" == expected[-1]
    plain_s, chosen_s = (each.plan.prediction.step_time_s for each in (results[0], chosen))
    assert (results[0].spared_s > 0.02 * plain_s) == (chosen_s < 0.98 * plain_s)
    assert chosen_s == plain_s or 0.5 < results[0].spared_s / (plain_s - chosen_s) < 1.5


def test_eager_steps_and_cpus_have_no_stacks_to_spare() -> None:
    plan = make_plan(pointwise("none"), Options(topology="h100:2", mesh="data=2", refine_axes=False)).plan
    reading = analyse_program(pointwise("none"), Topology.parse(plan.topology))
    model, choices = reprice(plan, pointwise("none"), reading)
    assert spared_seconds(model, choices) > 0
    assert spared_seconds(dataclasses.replace(model, eager=True), choices) == 0
    assert make_plan(pointwise("none"), Options(topology="cpu:2", mesh="data=2", refine_axes=False)).spared_s == 0


@pytest.mark.parametrize(
    ("first", "second", "unlimited_s", "known"),
    [("none", "dots", 1.0, True), ("none", "dots", 0.9, False), ("dots", "none", 1.0, False)],
    ids=["slower with any memory", "may be faster with memory", "computes less"],
)
def test_what_is_slower_with_any_memory_is_not_recomputed(
    first: str, second: str, unlimited_s: float, known: bool
) -> None:
    options = Options(topology=TOPOLOGY, mesh="data=4,model=2")
    topology, figures = Topology.parse(TOPOLOGY), load_calibration("v5e")
    pruning = MemoryPruning(topology)
    for remat in ("none", "dots"):
        program = stack(remat)
        reading = analyse_program(program, topology)
        task = Task(program, reading, options.asked, topology.usable_bytes, 0, figures)
        recipe = Recipe((("remat", remat), ("experts", "sorted")))
        if remat == "none":
            pruning.add(recipe, task, {"data": 4, "model": 2}, 0.0)
        else:
            assert pruning.why_not(recipe, task) is not None
    beaten, later = (Recipe((("remat", remat), ("experts", "ragged:4"))) for remat in (first, second))
    rows = [RecipeTried(beaten, RecipeOutcome.BEATEN, elements=2, unlimited_s=2 * unlimited_s)]
    assert bool(pruning.slower(later, rows, 0.95)) is known
    assert not pruning.slower(later.but(experts="sorted"), rows, 0.95), "its experts are dispatched in another way"


@pytest.mark.parametrize("remat", ["full", "none"])
def test_only_what_is_known_to_compute_longer_is_left_out(remat: str) -> None:
    rows = [RecipeTried(Recipe((("remat", "dots"), ("stages", 2))), RecipeOutcome.UNMOVED)]
    assert not MemoryPruning(Topology.parse(TOPOLOGY)).slower(Recipe((("remat", remat), ("stages", 2))), rows, 1.0)
