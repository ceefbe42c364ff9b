"""The best of several recipes of a program: the planned ones, the pruned ones, and the plan's rows about them."""

import dataclasses
import functools
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost import Topology, load_calibration
from autoshard.errors import InfeasibleError, UserError
from autoshard.exports import export_plan
from autoshard.planning import (
    Options,
    PlanResult,
    Running,
    make_plan,
    plan_builder,
    plan_recipes,
    read_asked,
    settled_options,
    source_choices,
)
from autoshard.planning.mesh.mesh_attempt import Incumbent
from autoshard.planning.mesh.mesh_search import PrunedByBound
from autoshard.planning.mesh_choice import EarlierRecipes
from autoshard.planning.price.analysed_program import analyse_program, least_seconds
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried, needs_no_less, verdict_of
from autoshard.planning.recipes.recipe_report import report_recipes
from autoshard.planning.recipes.recipe_search import RecipeSearch
from autoshard.program import DecoderDims, Program, decoder_program, open_source, read_choices, trace
from autoshard.report.figures import WHOLE_AXES, mesh_notes
from tests.graph.programs import f32
from tests.planning import programs as made
from tests.planning.recipes import ON, tried


KINDS = {"none": "mlp", "full": "two matmuls"}


def test_the_fastest_is_chosen_and_the_others_are_reported() -> None:
    recipe, result = plan_recipes(lambda remat: made.program(KINDS[remat]), {"remat": ("none", "full")}, Options(**ON))
    plans = {name: make_plan(made.program(kind), Options(**ON)).plan for name, kind in KINDS.items()}
    rate = {name: plan.prediction.expected_s / elements(KINDS[name]) for name, plan in plans.items()}
    (chosen,) = recipe.arguments.values()
    assert rate[chosen] == min(rate.values())
    assert result.plan.prediction == plans[chosen].prediction
    assert result.plan.words[-1].startswith(f"remat {chosen} (instead: ")
    assert set(tried(result)) == {"remat none", "remat full"}
    assert set(result.wall_s) >= {"extract", "price", "solve"}


def test_a_recipe_on_the_mesh_of_another_reports_the_meshes_of_that_one() -> None:
    options = Options(topology=ON["topology"], refine_axes=False)
    search = RecipeSearch(lambda remat: made.program(KINDS[remat]), options, Running(), of_source=True)
    searched, other = (Recipe((("remat", remat),)) for remat in KINDS)
    search.plan(searched)
    assert search.best is not None
    before = search.best[1].plan
    search.plan(other, mesh=dict(before.mesh), force=True)
    row, result = search.best[0], make_plan(made.program(KINDS["full"]), dataclasses.replace(options, mesh=before.mesh))
    plan = report_recipes((dataclasses.replace(row, recipe=other), result), search.tried, search.meshes, (), {})[1].plan
    assert not result.plan.meshes and plan.meshes == before.meshes and len(plan.meshes) > 1
    assert plan.recipe is not None and plan.recipe.meshes_of == {"remat": "none"}
    assert mesh_notes(plan)[0].startswith("These are plans with remat none, ")
    assert mesh_notes(before) == [WHOLE_AXES]


def test_a_step_with_a_time_in_eager_torch_beats_one_without() -> None:
    recipe = Recipe((("remat", "none"),))
    compiled = RecipeTried(recipe, RecipeOutcome.PLANNED, step_time_s=1.0, expected_s=1.0, peak_bytes=1)
    eager, slower = (dataclasses.replace(compiled, eager_s=seconds) for seconds in (2.0, 3.0))
    assert eager.beats(compiled, compiled.per_element_s) and not compiled.beats(eager, eager.per_element_s)
    assert eager.beats(slower, slower.per_element_s) and not slower.beats(eager, eager.per_element_s)
    assert verdict_of(slower, eager) == "50.0% slower in eager torch"
    assert verdict_of(compiled, eager) == "its time in eager torch is not known"


def elements(kind: str) -> int:
    program = made.program(kind)
    return max(math.prod(a.shape) for a in program.arguments if str(a.role) == "batch")


def test_one_that_does_not_fit_is_passed_over() -> None:
    def make(size: str) -> Program:
        if size == "small":
            return made.program("mlp")
        return trace(lambda w, x: x @ w, (f32(2048, 2048), f32(2048, 2048)), name="large")

    limit = make_plan(made.program("mlp"), Options(**ON)).plan.prediction.peak_bytes + 1000
    recipe, result = plan_recipes(make, {"size": ("large", "small")}, Options(**ON, memory_limit=limit))
    assert str(recipe) == "size small"
    assert result.plan.words[-1] == "size small (instead: large does not fit)"
    assert tried(result)["size large"]["step_time_s"] is None


@pytest.mark.parametrize("kind", ["mlp", "decoder"])
def test_a_given_mesh_that_cannot_beat_the_best_so_far_is_not_solved(kind: str) -> None:
    program, options = made.program(kind), Options(**ON)
    alone = make_plan(program, options)
    step_s = alone.plan.prediction.expected_s

    def against(seconds: float) -> PlanResult:
        rival = Incumbent(seconds, sys.maxsize, alone.weights, len(alone.plan.mesh), 0.0)
        return make_plan(program, options, before=EarlierRecipes(rival, PathTables(1 << 26)))

    assert against(1.5 * step_s).plan.prediction == alone.plan.prediction
    with pytest.raises(PrunedByBound) as pruned:
        against(0.3 * step_s)
    assert 0.3 * step_s <= pruned.value.bound_s <= step_s


def test_what_fits_on_no_mesh_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.planning.recipes.recipe_search.make_plan", recorded := Recorded())
    make = {"large": lambda: trace(lambda w, x: x @ w, (f32(4096, 4096), f32(4096, 4096)), name="large")}
    make["small"] = lambda: made.program("mlp")
    limit = 4096 * 4096 * 4 * 2 // 8
    options = Options(**ON | {"mesh": "auto"}, memory_limit=limit)
    recipe, result = plan_recipes(lambda size: make[size](), {"size": ("large", "small")}, options)
    assert str(recipe) == "size small" and recorded.names == ["mlp"]
    assert result.plan.words[-1] == "size small (instead: large does not fit)"


class Recorded:
    """`make_plan` with a list of the programs that it planned."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, program: Program, *given: Any, **options: Any) -> PlanResult:
        self.names.append(program.name)
        return make_plan(program, *given, **options)


def test_meshes_are_compared_with_the_best_recipe() -> None:
    kinds = ("wide mlp", "mlp", "two matmuls")
    options = Options(**ON | {"mesh": "auto"}, refine_axes=False)
    recipe, result = plan_recipes(lambda kind: made.program(kind), {"kind": kinds}, options)
    plans = {kind: make_plan(made.program(kind), options).plan for kind in kinds}
    rate = {kind: plan.prediction.expected_s / elements(kind) for kind, plan in plans.items()}
    (chosen,) = recipe.arguments.values()
    assert rate[chosen] == min(rate.values()) and result.plan.prediction == plans[chosen].prediction
    for kind in kinds:
        row = tried(result)[f"kind {kind}"]
        assert row["bound_s"] <= plans[kind].prediction.step_time_s
        if row["step_time_s"] is None:
            assert row["verdict"].startswith(("not planned", "at least", "no faster on any mesh"))
    assert any(tried(result)[f"kind {kind}"]["step_time_s"] is None for kind in kinds)


def test_when_none_fits_the_last_says_what_would_help() -> None:
    with pytest.raises(InfeasibleError, match="the least found is"):  # although it is pruned before it is planned
        plan_recipes(lambda remat: made.program("two matmuls"), {"remat": ("none",)}, Options(**ON, memory_limit=200))


def test_the_reason_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse two recipes that are planned, and explain one; the sentence is pickled."""
    asked: list[int] = []
    monkeypatch.setattr(plan_builder, "explain_infeasible", lambda *_: asked.append(1) or "no plan fits")
    limit = make_plan(made.program("two matmuls"), Options(**ON)).plan.prediction.peak_bytes // 3
    with pytest.raises(InfeasibleError) as refused:
        plan_recipes(
            lambda remat: made.program("two matmuls"), {"remat": ("none", "full")}, Options(**ON, memory_limit=limit)
        )
    assert not asked
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value) == "no plan fits"
    assert asked == [1]


def test_state_that_no_device_can_hold_ends_the_search() -> None:
    """Trace two recipes, not all of them, where parameters alone exceed the memory of all devices."""
    traced: list[str] = []

    def make(remat: str) -> Program:
        traced.append(remat)
        return made.program("two matmuls")

    kinds = {"of_source": True, "first_if_fits": True}
    with pytest.raises(InfeasibleError, match="the least found is"):
        plan_recipes(make, {"remat": ("none", "dots", "full")}, Options(**ON, memory_limit=200), **kinds)
    assert traced == ["none", "full"]


def test_no_plan_is_priced_below_the_bound_of_its_arithmetic() -> None:
    for kind in ("mlp", "two matmuls", "wide mlp"):
        program = made.program(kind)
        for topology in ("v5e:2x4", "cpu:8", "h100:8"):
            parsed = Topology.parse(topology)
            graph = analyse_program(program, parsed.backend).graph
            bound = least_seconds(graph, parsed, load_calibration(parsed.chip))
            assert 0 < bound
            plan = make_plan(program, Options(topology=topology, mesh={"data": 2, "model": 4}, time_limit=20)).plan
            assert bound <= plan.prediction.step_time_s


def wide(times: int) -> Program:
    """Trace a chain of matmuls with `times` the arithmetic on the same batch."""

    def forward(w: Any, x: Any) -> Any:
        for _ in range(times):
            x = jnp.tanh(x @ w)
        return x

    return trace(forward, (f32(2048, 2048), f32(8192, 2048)), name=f"wide {times}")


def test_what_is_slower_by_its_arithmetic_alone_is_not_planned() -> None:
    asked: list[int] = []

    def make(times: int) -> Program:
        asked.append(times)
        return wide(times)

    recipe, result = plan_recipes(make, {"times": (1, 2, 40)}, Options(**ON))
    assert recipe.arguments == {"times": 1} and asked == [1, 2, 40]
    row = tried(result)["times 40"]
    assert row["verdict"] == "not planned: slower by its arithmetic alone" and row["step_time_s"] is None
    assert row["bound_s"] > result.plan.prediction.step_time_s


def test_batches_are_compared_by_the_time_of_an_element() -> None:
    def make(batch: int) -> Program:
        return trace(lambda w, x: jnp.tanh(x @ w), (f32(2048, 2048), f32(batch, 2048)), name=f"batch {batch}")

    recipe, result = plan_recipes(make, {"batch": (64, 4096)}, Options(**ON))
    rows = tried(result)
    assert recipe.arguments == {"batch": 4096}
    assert rows["batch 64"]["step_time_s"] < rows["batch 4096"]["step_time_s"]
    assert rows["batch 64"]["seconds_per_element"] > rows["batch 4096"]["seconds_per_element"]
    assert "for each element of the batch" in rows["batch 64"]["verdict"]
    assert rows["batch 64"]["frontier"] and rows["batch 4096"]["frontier"]


def test_what_a_source_leaves_open() -> None:
    assert source_choices({"remat": "full", "batch": 8}, "v5e:2x4") == {}
    assert source_choices({"remat": "auto"}, "v5e:2x4") == {"remat": ("none", "dots", "full")}
    assert source_choices({"microbatches": "auto", "batch": 12}, "v5e:2x4")["microbatches"] == (1, 2, 4)
    assert source_choices({"batch": "auto"}, "v5e:2x4")["batch"] == (8, 16, 32, 64, 128, 256, 4, 2, 1)


def test_a_ring_is_tried_where_a_sequence_is_split_and_chosen_where_it_is_long() -> None:
    dims = DecoderDims(layers=2, width=512, mlp_width=1024, heads=8, kv_heads=8, head_size=64, vocabulary=512)

    def make(exchange: str, batch: int = 2) -> Program:
        return decoder_program(dims, batch=batch, seq=65536, exchange=exchange, optimizer="sgd")

    split = Options(
        topology="v5p:2x2x2", mesh="context=8", refine_axes=False, calibration=False,
        asked=read_asked(axis_only={"context": "sequence"}),
    )  # fmt: skip
    left = source_choices({"exchange": "auto"}, "v5p:2x2x2")
    assert left == {"exchange": ("auto", "ring")}
    recipe, result = plan_recipes(make, left, split, of_source=True)
    assert recipe.arguments == {"exchange": "ring"}
    assert "ring over context" in result.plan.words
    assert "slower" in tried(result)["exchange auto"]["verdict"]
    whole = dataclasses.replace(split, asked=read_asked(axis_only={"context": "batch"}))
    recipe, result = plan_recipes(functools.partial(make, batch=8), left, whole, of_source=True)
    assert recipe.arguments == {"exchange": "auto"}
    assert "splits no sequence" in tried(result)["exchange ring"]["verdict"]


def test_more_memory_is_not_tried_where_less_did_not_fit() -> None:
    def recipe(batch: int, remat: str, microbatches: int) -> Recipe:
        return Recipe((("batch", batch), ("remat", remat), ("microbatches", microbatches)))

    failed = recipe(64, "dots", 2)
    assert needs_no_less(recipe(64, "none", 2), failed)
    assert needs_no_less(recipe(128, "dots", 1), failed)
    assert not needs_no_less(recipe(32, "none", 2), failed)
    assert not needs_no_less(recipe(64, "none", 4), failed)
    assert not needs_no_less(recipe(64, "full", 1), failed)
    assert needs_no_less(recipe(128, "dots", 4), failed), "as much at once, and of more"
    assert not needs_no_less(recipe(128, "dots", 8), failed) and not needs_no_less(recipe(32, "dots", 1), failed)


def rows_kept(kept: int, **recipe: int) -> Program:
    """Trace a step that saves `kept` rows of its batch at once, or with microbatches a part of them."""
    batch, parts = recipe.get("batch", kept), recipe.get("microbatches", 1)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any, rows: Any) -> Any:
            return (jnp.tanh(rows @ w["up"]) @ w["down"]).astype("float32").sum()

        def add(total: Any, rows: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, rows)), None

        zeros = jax.tree.map(jnp.zeros_like, w)
        total, _ = jax.lax.scan(add, zeros, x.reshape(batch // parts, parts, 256).swapaxes(0, 1))
        return jax.tree.map(lambda a, b: a - b, w, total)

    weights = {"up": f32(256, 4096), "down": f32(4096, 256)}
    return trace(step, (weights, f32(batch, 256)), name=f"rows {batch} in {parts}")


DATA: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=8", "time_limit": 20, "refine_axes": False}


def test_microbatches_are_tried_where_memory_binds_and_the_saved_problem_is_the_chosen_ones(tmp_path: Path) -> None:
    def make(**recipe: int) -> Program:
        return rows_kept(1 << 16, **recipe)

    choices = {"microbatches": (1, 2, 4)}
    free = plan_recipes(make, choices, Options(**DATA), of_source=True)
    assert free[0].arguments == {"microbatches": 1}
    verdicts = {name: row["verdict"] for name, row in tried(free[1]).items()}
    assert verdicts["microbatches 2"] == "not planned: memory does not bind with microbatches 1"
    few = make_plan(make(microbatches=4), Options(**DATA)).plan.prediction.peak_bytes
    assert few < 0.7 * free[1].plan.prediction.peak_bytes
    limit, problem = int(1.1 * few), tmp_path / "problem.json.gz"
    options = Options(**DATA, memory_limit=limit)
    recipe, result = plan_recipes(make, choices, options, Running(save_problem=problem), of_source=True)
    assert recipe.arguments["microbatches"] > 1 and result.plan.prediction.peak_bytes <= limit
    assert [file.name for file in tmp_path.iterdir()] == ["problem.json.gz"]
    alone = tmp_path / "alone.json.gz"
    make_plan(make(**recipe.arguments), options, Running(save_problem=alone))
    assert alone.read_bytes() == problem.read_bytes()


def test_the_batch_grows_while_that_pays_and_halves_where_none_fits() -> None:
    def make(**recipe: int) -> Program:
        return rows_kept(0, batch=recipe["batch"] * 256)

    choices = {"batch": (8, 16, 32, 64, 128, 256, 4, 2)}
    recipe, result = plan_recipes(make, choices, Options(**DATA), of_source=True)
    rows = list(tried(result).values())
    batches = sorted(row["choices"]["batch"] for row in rows)
    assert batches == [8 * 2**n for n in range(len(batches))] and 8 < recipe.arguments["batch"]
    least = make_plan(make(batch=4), Options(**DATA)).plan.prediction.peak_bytes
    small, _ = plan_recipes(make, choices, Options(**DATA, memory_limit=least + 1), of_source=True)
    assert small.arguments == {"batch": 4}


FILE = """
import jax, jax.numpy as jnp

choices = {"remat": ["none", "full"], "width": [64, 128]}

def program(remat="full", width=64):
    layer = lambda h, w: jnp.tanh(h @ w[0]) @ w[1]
    layer = jax.checkpoint(layer) if remat == "full" else layer
    def step(p, x):
        loss = lambda p: (jax.lax.scan(lambda h, w: (layer(h, w), None), x, p)[0] ** 2).mean()
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, jax.grad(loss)(p))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")
    return step, ((shape(4, 256, width), shape(4, width, 256)), shape(512, 256))
"""


def test_a_files_choices_are_searched_and_its_plan_runs(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    assert read_choices(str(file)) == {"remat": ("none", "full"), "width": (64, 128)}
    plan = autoshard.plan(str(file), topology="cpu:8", mesh="data=4,model=2")
    chosen = plan.provenance["recipe"]["chosen"]
    assert chosen["width"] == 64 and len(plan.provenance["recipe"]["tried"]) == 4
    assert plan.provenance["source"]["recipe"] == chosen
    planned = open_source(str(file), recipe=chosen)
    assert planned.fingerprint == plan.program_fingerprint
    other = open_source(str(file), recipe=chosen | {"remat": "none" if chosen["remat"] == "full" else "full"})
    assert other.fingerprint != planned.fingerprint
    random = np.random.default_rng(0)
    args = jax.tree.map(lambda a: random.standard_normal(a.shape).astype(a.dtype) / 16, planned.args)
    wanted, found = jax.jit(other.fn)(*args), plan.jit(planned.fn)(*args)
    for one, two in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(two)).max() <= 1e-5 * np.abs(np.asarray(one)).max()


def test_a_function_with_choices_is_planned_for_all() -> None:
    @autoshard.choices(times=[1, 2])
    def program(times: int = 2) -> Program:
        return wide(times)

    plan = autoshard.plan(program, topology="v5e:2x4", mesh="data=8")
    assert plan.provenance["recipe"]["chosen"] == {"times": 1}


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        ('{"remt": [1]}', "choices of `remt`, which it does not take; it takes remat, width"),
        ('{"remat": "none"}', "the choices of `remat` for .* are 'none'; write a list"),
        ('{"remat": []}', "write a list such as"),
        ('{"remat": [1, 1]}', "name a value twice"),
        ('{"remat": [[1]]}', "a choice of `remat` for .* is a list; use texts, numbers or booleans"),
    ],
)
def test_choices_that_cannot_be_are_named(tmp_path: Path, listed: str, text: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE.replace('{"remat": ["none", "full"], "width": [64, 128]}', listed))
    with pytest.raises(UserError, match=text):
        read_choices(str(file))


def test_a_file_without_choices_is_not_run_for_them(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise ValueError('run')")
    assert read_choices(str(file)) == {} == read_choices("hf:gpt2-tiny")
    assert settled_options({}, "h100:8") == {"preferred": {"attention": "auto:cudnn"}}


def test_layers_recompute_in_a_plan_for_maxtext() -> None:
    """Plan within what MaxText can do: its layers recompute at least what is elementwise."""
    given = {"topology": "v5p:2x2x1", "mesh": "data=4", "program_options": {"train": True, "batch": 8, "seq": 128}}
    plan = autoshard.plan("hf:llama-tiny", form="maxtext", **given)
    assert plan.recipe is not None and not str(plan.recipe.chosen["remat"]).startswith("none")
    assert "remat_policy: " in export_plan(plan, "maxtext")
    given |= {"program_options": {"train": True, "batch": 8, "seq": 128, "remat": "none"}}
    with pytest.raises(UserError, match="cannot hold --remat none: its layers would recompute by dots,keep=context"):
        autoshard.plan("hf:llama-tiny", form="maxtext", **given)
