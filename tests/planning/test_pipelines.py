"""Pipelines on searched meshes: the pruned ones are no better, and the best of all is chosen."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.base.workers import WorkerCrew
from autoshard.cost import Topology, candidate_meshes, load_calibration, make_mesh
from autoshard.planning import plan_recipes, read_asked
from autoshard.planning.price.analysed_program import AnalysedProgram, Task, analyse_program, reprice
from autoshard.planning.recipes.pipeline_meshes import BoundingPipeline, PipelineMeshes, StagedMeshes
from autoshard.planning.recipes.pipeline_recipes import pipeline_words
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried
from autoshard.planning.solve.problem_builder import floors, least_compute
from autoshard.planning.solve.weight_search import search
from autoshard.planning.space.derived_axes import stage_axis, with_stages
from autoshard.planning.space.plan_options import Limits
from autoshard.program import Pipeline, Program
from tests.scripts import load_script


SEARCH = load_script("experiments/quality/pipeline_search.py")
STACK = SEARCH.Stack("v5e:2x2*2", 4, 2048, 8192, 64, 4)
TOPOLOGY = Topology.parse(STACK.topology)
FIGURES = load_calibration(TOPOLOGY.chip)


def task(program: Program, stages: int) -> Task:
    return Task(program, analyse_program(program, "tpu"), read_asked(), TOPOLOGY.usable_bytes, 0, FIGURES, None, stages)


def test_meshes_of_a_pipeline_have_an_axis_of_stages() -> None:
    found = with_stages(candidate_meshes(TOPOLOGY), 2)
    assert all(mesh.axes["stage"] == 2 and mesh.num_devices == 8 for mesh in found)
    places = {mesh.kinds(["stage"]) for mesh in found}
    assert {frozenset({"network"}), frozenset({"torus"})} <= places
    assert len({(mesh.names, mesh.sizes, mesh.layout) for mesh in found}) == len(found)
    assert with_stages(candidate_meshes(TOPOLOGY), 3) == ()


def test_only_stages_split_over_their_axis_where_there_are_any() -> None:
    reading = analyse_program(STACK.program(2, "gpipe", 2), "tpu")
    mesh = make_mesh(TOPOLOGY, {"stage": 2, "data": 4})
    axis = stage_axis(reading, mesh)
    assert axis is not None and axis.axis == 0
    groups = reading.groups
    model = task(STACK.program(2, "gpipe", 2), 2).priced(mesh)
    staged = free = 0
    for node in model.nodes:
        if node.kind != "cluster":
            continue
        sizes = reading.structure.clusters[node.ref].sizes
        named = [groups.names.get(groups.of_factor[(node.ref, f)]) for f in range(len(sizes))]
        if "stage" in named and sizes[named.index("stage")] > 1:
            assert set(node.states[:, 0].tolist()) == {named.index("stage")}
            staged += 1
        elif len(set(node.states[:, 0].tolist())) > 1:
            free += 1
    assert staged > 10 and free > 2
    assert stage_axis(reading, make_mesh(TOPOLOGY, {"data": 2, "model": 4})) is None


def least_s(reading: AnalysedProgram, program: Program, mesh: object) -> float:
    """Return the seconds of the best step on a mesh with an axis of stages."""
    own = task(program, 2)
    model = own.priced(mesh)  # type: ignore[arg-type]
    limits = Limits(TOPOLOGY.usable_bytes, 60.0, 0)
    return search(model, [], limits, lambda line: None, own.required(model), None, WorkerCrew()).best.expected_s


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "microbatches"), [("circular:2", 4)])
def test_no_pipeline_takes_less_than_the_bound_from_larger_microbatches(schedule: str, microbatches: int) -> None:
    recipe = Recipe((("stages", 2), ("schedule", schedule), ("microbatches", microbatches)))
    looking = PipelineMeshes(TOPOLOGY, STACK.program, task)
    everything = looking.of(recipe, (2, 4), lambda program: math.inf, None)
    assert everything is not None and set(everything.meshes) == set(with_stages(candidate_meshes(TOPOLOGY), 2))
    program = STACK.program(2, schedule, microbatches)
    reading = analyse_program(program, "tpu")
    best = min(least_s(reading, program, mesh) for mesh in everything.meshes)
    assert 0 < everything.bound_s <= best
    nothing = PipelineMeshes(TOPOLOGY, STACK.program, task).of(recipe, (2, 4), lambda program: 0.3 * best, {})
    assert nothing is not None and nothing.bound_s <= best and len(nothing.meshes) <= len(everything.meshes)


def test_after_enough_work_no_more_pipelines_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(**recipe: Any) -> Program:
        made.append(recipe["microbatches"])
        return STACK.program(**recipe)

    def of(looking: PipelineMeshes, count: int) -> StagedMeshes:
        recipe = Recipe((("stages", 2), ("schedule", "gpipe"), ("microbatches", count)))
        found = looking.of(recipe, (2, 4), lambda program: math.inf, {})
        assert found is not None
        return found

    whole = of(PipelineMeshes(TOPOLOGY, make, task), 4)
    assert not whole.skipped_meshes and made == [2], "known by the one with fewest microbatches"
    monkeypatch.setattr("autoshard.planning.recipes.pipeline_meshes.MOST_PAIRS", 1)
    looking = PipelineMeshes(TOPOLOGY, make, task)
    part, later = of(looking, 2), of(looking, 4)
    assert part.skipped_meshes and later.skipped_meshes and made == [2, 2], "nothing more is made"
    assert part.bound_s <= whole.bound_s and later.bound_s <= whole.bound_s
    row = later.row(Recipe((("stages", 2), ("schedule", "gpipe"), ("microbatches", 4))), 0.0, 1)
    assert row.outcome is RecipeOutcome.SKIPPED and row.bound_s == later.bound_s
    best = RecipeTried(
        Recipe((("stages", 1), ("schedule", None), ("microbatches", 1))), RecipeOutcome.PLANNED, "", 1.0, 1
    )
    said = pipeline_words(best, [best, row], (4,))
    assert "1 more were not looked at, of which none takes less than" in said


def test_arithmetic_alone_is_less_than_all_ops_together() -> None:
    program = STACK.program(2, "gpipe", 4)
    reading = analyse_program(program, "tpu")
    for mesh in with_stages(candidate_meshes(TOPOLOGY), 2):
        least = least_compute(program, reading, mesh, FIGURES)
        assert 0 < least <= floors(program, reading, mesh, TOPOLOGY.usable_bytes, FIGURES, staged=True).seconds
        assert least_compute(program, reading, mesh, FIGURES, enough=0.1 * least) <= least


@pytest.mark.parametrize(
    ("stack", "stages"),
    [
        (SEARCH.Stack("v5e:2x2*2", 2, 1024, 4096, 64, 8), 1),
        pytest.param(SEARCH.stack_of(20), 2, marks=pytest.mark.full),
        pytest.param(SEARCH.stack_of(22), 1, marks=pytest.mark.full),
    ],
)
def test_what_is_chosen_is_the_best_of_all(stack: Any, stages: int) -> None:
    recipe, made = plan_recipes(stack.program, stack.choices, SEARCH.options_of(stack), of_source=True)
    every = SEARCH.enumerated(stack)
    own = tuple(recipe.arguments.values())
    assert every[own] <= min(every.values()) * (1 + SEARCH.EQUAL)
    assert recipe.arguments["stages"] == stages
    # A plan whose axis of stages is used by nothing else is priced again as it was built.
    assert ("stage_axis" in made.plan.provenance) == (stages > 1)
    program = stack.program(**recipe.arguments)
    model, choices = reprice(made.plan, program, analyse_program(program, "tpu"))
    assert len(choices) == len(model.nodes)


def test_a_bound_is_stretched_by_the_bubble_of_those_that_it_is_for() -> None:
    layers = SimpleNamespace(program=SimpleNamespace(stacks=(126,)))
    bounding = BoundingPipeline(layers, Pipeline(4, 4), {})  # type: ignore[arg-type]
    assert bounding.stretch(Pipeline(4, 16)) == pytest.approx(19 / 16)
    # Two of 126 layers stand outside of four stages, and six if each stage has three chunks.
    assert bounding.stretch(Pipeline(4, 16, "circular:3")) == pytest.approx(120 / 124 * 51 / 48)
