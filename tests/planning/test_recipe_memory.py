"""Recipes that need less device memory: recomputed layers, and values or state that are offloaded to the hosts."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.cost import Topology, make_mesh
from autoshard.errors import InfeasibleError
from autoshard.planning import Options, make_plan, plan_recipes, source_choices
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.price.on_chip_memory import on_chip_room
from autoshard.planning.recipes.recipe import (
    Recipe,
    RecipeOutcome,
    RecipeTried,
    needs_no_less,
    slack_row,
    unfit_row,
    verdict_of,
)
from autoshard.planning.recipes.recipe_order import in_order
from autoshard.planning.solve.problem_builder import floors
from autoshard.planning.space.plan_options import OFFLOADED, REMATS
from autoshard.program import Program, open_source, trace
from tests.graph.programs import f32
from tests.planning.recipes import ON, tried


LAYERS = 8


def chain(again: int) -> Program:
    """Trace a training step of layers, the first `again` of which are recomputed in the backward pass."""

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x
            for number, w in enumerate(p):
                layer = functools.partial(lambda w, h: jnp.tanh(h @ w["up"]) @ w["down"], w)
                h = (jax.checkpoint(layer) if number < again else layer)(h)
            return (h * h).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    layer = {"up": f32(256, 2048), "down": f32(2048, 256)}
    program = trace(step, ([layer] * LAYERS, f32(16384, 256)), name=f"chain {again}")
    return dataclasses.replace(program, layers=LAYERS)


@pytest.mark.full
def test_a_mixture_that_fits_is_faster_than_what_computes_everything_again() -> None:
    def make(remat: str) -> Program:
        first, _, _ = remat.partition("+")
        return chain({"none": 0, "full": LAYERS}.get(first) or int(first.partition(":")[2] or 0))

    choices = {"remat": ("none", "full")}
    peaks = {name: make_plan(make(name), Options(**ON)).plan.prediction.peak_bytes for name in choices["remat"]}
    limit = int(1.4 * peaks["full"])
    plain = plan_recipes(make, choices, Options(**ON, memory_limit=limit))
    recipe, mixed = plan_recipes(make, choices, Options(**ON, memory_limit=limit), of_source=True)
    name = recipe.arguments["remat"]
    assert plain[0].arguments == {"remat": "full"} and name not in choices["remat"]
    assert mixed.plan.prediction.peak_bytes <= limit
    assert mixed.plan.prediction.step_time_s < plain[1].plan.prediction.step_time_s
    assert mixed.plan.words[-1].startswith(f"remat {name} (instead: ")
    count = int(name.removeprefix("full:").removesuffix("+none"))
    less = tried(mixed).get(f"remat full:{count - 1}+none", {"step_time_s": None})["step_time_s"]
    assert less is None or less > mixed.plan.prediction.step_time_s


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
FULLY: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=8", "time_limit": 20, "refine_axes": False}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Program]:
    """Return a function from a remat option to the step of a small decoder."""
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(LLAMA))

    @functools.cache
    def make(remat: str, batch: int = 32) -> Program:
        return open_source(f"hf:{file}", train=True, batch=batch, seq=512, remat=remat, attention="splash")

    return make


@pytest.mark.full
def test_values_are_preserved_and_offloaded_as_memory_allows(llama: Callable[..., Program]) -> None:
    full = make_plan(llama("full"), Options(**FULLY)).plan.prediction
    limit = int(1.1 * full.peak_bytes)
    recipe, result = plan_recipes(llama, {"remat": REMATS}, Options(**FULLY, memory_limit=limit), of_source=True)
    remat = recipe.arguments["remat"]
    assert remat.startswith("full,"), remat
    rows = tried(result)
    assert len(rows) <= 5 and rows["remat none"]["verdict"] == "does not fit"
    row, plain = rows[str(recipe)], rows["remat full"]
    assert row["step_time_s"] < plain["step_time_s"] == full.step_time_s
    assert row["peak_bytes"] <= limit
    assert row["foreseen"]["step_time_s"] == pytest.approx(row["step_time_s"], rel=0.03)
    assert row["foreseen"]["peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.05)
    assert "foreseen" not in plain
    assert make_plan(llama(remat), Options(**FULLY, memory_limit=limit)).plan.prediction == result.plan.prediction


@pytest.mark.full
def test_nothing_goes_to_the_host_where_everything_fits(llama: Callable[..., Program]) -> None:
    recipe, result = plan_recipes(llama, {"remat": REMATS}, Options(**FULLY), of_source=True)
    rows = tried(result)
    assert "offload" not in str(recipe) and len(rows) <= 4
    assert all(row["step_time_s"] >= result.plan.prediction.step_time_s for row in rows.values())


@pytest.mark.full
def test_inputs_of_layers_go_to_the_host_where_nothing_fits_otherwise(llama: Callable[..., Program]) -> None:
    llama = functools.partial(llama, batch=64)  # activations of smaller batches stay in on-chip memory
    away = make_plan(llama("full,offload=input"), Options(**FULLY)).plan.prediction
    assert away.host_bytes > 0
    options = Options(**FULLY, memory_limit=away.peak_bytes)
    recipe, result = plan_recipes(llama, {"remat": ("full",)}, options, of_source=True)
    assert "offload=" in recipe.arguments["remat"] and result.plan.prediction.peak_bytes <= away.peak_bytes
    # Without offloading no plan fits, or only one that splits so much that it takes several times as long.
    without = tried(result)["remat full"]
    assert without["verdict"] == "does not fit" or without["step_time_s"] > 5 * result.plan.prediction.step_time_s
    with pytest.raises(InfeasibleError):
        plan_recipes(llama, {"remat": ("full",)}, Options(**FULLY, memory_limit=away.peak_bytes // 4), of_source=True)


@dataclasses.dataclass
class Searched:
    """Search in which nothing fits until `OFFLOADED` is seen with `fits_at` microbatches."""

    fits_at: int
    offloads_inputs: bool = True
    of_source: bool = True
    stacks: tuple[int, ...] | None = None
    topology: Topology = dataclasses.field(default_factory=lambda: Topology.parse("cpu:8"))
    best: Recipe | None = None

    def least(self, **some: Any) -> float:
        """Return infinity: no batches are compared."""
        return math.inf


def test_the_hosts_hold_inputs_before_the_step_is_divided_further() -> None:
    """Count what is considered: every policy of one microbatch, then its inputs on the hosts, then two of them."""
    choices = {"remat": REMATS, "microbatches": (1, 2, 4)}
    for searched, offloaded in ((Searched(2), [1, 2]), (Searched(4, offloads_inputs=False), [])):
        seen = []
        for recipe in in_order(choices, searched):
            seen.append(recipe.arguments)
            if recipe.arguments["remat"] == OFFLOADED and recipe.arguments["microbatches"] == searched.fits_at:
                searched.best = recipe
        assert [each["microbatches"] for each in seen if each["remat"] == OFFLOADED] == offloaded
        counts = [each["microbatches"] for each in seen]
        assert counts == sorted(counts) and len(seen) == 9 + len(offloaded)


@functools.cache
def hosted(host: str) -> Program:
    """Trace a step of layers with AdamW, by the option for its state on the host."""
    rule = optax.adamw(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

        updates, state = rule.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    args = jax.eval_shape(lambda: (w := jnp.zeros((8, 512, 512)), rule.init(w), jnp.zeros((256, 512))))
    return trace(step, args, donate_argnums=(0, 1), host=host, name="layers")


def test_state_goes_to_the_hosts_where_memory_binds() -> None:
    choices = {"host": source_choices({"host": "auto"}, "v5e:2x4")["host"]}
    recipe, result = plan_recipes(hosted, choices, Options(**FULLY), of_source=True)
    assert str(recipe) == "host none"
    assert tried(result)["host optimizer"]["verdict"] == "not planned: memory does not bind with host none"
    plain = result.plan.prediction
    limit = 5 << 20  # 4 MiB are parameters, gradients and state split over all devices; 2 of them are state
    recipe, result = plan_recipes(hosted, choices, Options(**FULLY, memory_limit=limit), of_source=True)
    assert str(recipe) == "host optimizer" and result.plan.prediction.host_bytes > 0
    assert tried(result)["host none"]["verdict"] == "does not fit"
    assert result.plan.prediction.step_time_s > plain.step_time_s
    assert result.plan.words[-1] == "host optimizer (instead: none does not fit)"


def test_state_on_the_hosts_needs_less_memory() -> None:
    none, away = (Recipe((("remat", "full"), ("host", host))) for host in ("none", "optimizer"))
    assert needs_no_less(none, away) and not needs_no_less(away, none)
    assert needs_no_less(none.but(remat="dots"), away) and not needs_no_less(away.but(remat="dots"), none)


def test_gradients_of_microbatches_are_summed_once_where_that_is_faster() -> None:
    options = {"train": True, "batch": 64, "seq": 256, "attention": "plain", "microbatches": 4, "remat": "none"}
    running: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=8"}
    each = autoshard.plan("hf:llama-tiny", program_options=options, **running)
    once = autoshard.plan("hf:llama-tiny", program_options=options | {"gradient_groups": "auto"}, **running)
    assert once.provenance["recipe"]["chosen"] == {"gradient_groups": 8}
    assert once.words[-1].startswith("gradient groups 8 (instead: 1 ")
    assert once.prediction.step_time_s < 0.9 * each.prediction.step_time_s
    gradients = sum(4 * math.prod(shape) for name, shape in each.shapes.items() if each.roles[name] == "parameter")
    # A ring sends and receives 7/8 of the summed bytes, and again if every device needs the parameters.
    assert once.prediction.wire_bytes["data"] == pytest.approx(2 * 7 / 8 * gradients, rel=0.02)
    assert each.prediction.wire_bytes["data"] > 4 * gradients


def test_a_part_of_the_memory_that_does_not_fit_is_not_planned() -> None:
    def recipe(microbatches: int, remat: str = "none") -> Recipe:
        return Recipe((("remat", remat), ("microbatches", microbatches)))

    row = RecipeTried(recipe(2), RecipeOutcome.UNFIT, held_bytes=1000)
    known = unfit_row(recipe(8), [row], 249, 0)
    assert known is not None and known.outcome is RecipeOutcome.UNFIT
    assert known.reason == "does not fit: 1/4 of the memory with microbatches 2 does not"
    assert unfit_row(recipe(8), [row], 250, 0) is None, "a fourth fits"
    assert unfit_row(recipe(8), [row], 249, 1) is None, "a fourth fits beside on-chip memory"
    assert unfit_row(recipe(8, "full"), [row], 100, 0) is None, "other values are held"
    assert unfit_row(recipe(8), [dataclasses.replace(row, outcome=RecipeOutcome.BEATEN)], 100, 0) is None


def test_a_recipe_that_is_slower_with_unlimited_memory_needs_no_state_on_hosts() -> None:
    def recipe(host: str) -> Recipe:
        return Recipe((("remat", "dots"), ("host", host)))

    row = RecipeTried(recipe("none"), RecipeOutcome.BEATEN, elements=4, held_bytes=100, unlimited_s=8.0)
    slower = slack_row(recipe("optimizer"), [row], 100, beat_s=2.0)
    assert slower is not None and slower.reason == "not planned: host none is slower in every case"
    assert slack_row(recipe("optimizer"), [row], 100, beat_s=2.1) is None


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_microbatches_hold_at_least_their_part_of_the_memory(remat: str, tmp_path: Path) -> None:
    topology = Topology.parse("v5e:2x2")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    least = []
    for parts in (1, 2, 4):
        program = open_source(f"hf:{file}", train=True, batch=64, seq=512, remat=remat, microbatches=parts)
        reading = analyse_program(program, topology, False)
        least.append(floors(program, reading, make_mesh(topology, {"data": 4}), 1 << 40).bytes)
    assert least[0] > least[1] > 0
    for parts, held in zip((2, 4), least[1:], strict=True):
        assert (held + on_chip_room(topology, held)) * parts >= least[0], "one part is no smaller than its share"


def test_a_faster_recipe_that_may_lack_memory_is_called_so() -> None:
    def row(remat: str, step_s: float, expected_s: float) -> RecipeTried:
        times = {"step_time_s": step_s, "expected_s": expected_s, "elements": 4}
        return RecipeTried(Recipe((("remat", remat),)), RecipeOutcome.PLANNED, **times)

    best = row("full", 1.0, 1.0)
    assert verdict_of(row("dots", 0.9, 1.1), best) == "10.0% faster, 10.0% slower if memory is short"
    assert verdict_of(row("dots", 1.02, 1.1), best) == "2.0% slower, 10.0% if memory is short"
