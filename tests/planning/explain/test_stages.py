"""Pipelines among recipes: the ones that are considered, and the choice of the fastest."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest

from autoshard.cost import Topology, load_calibration
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning import Options, make_plan, plan_recipes, source_choices
from autoshard.planning.price.analysed_program import Task, analyse_program, least_seconds
from autoshard.planning.recipes.pipeline_meshes import PipelineMeshes
from autoshard.planning.recipes.pipeline_recipes import arithmetic_of, in_order, is_sensible, pipeline_of, promise
from autoshard.planning.recipes.recipe import Recipe
from autoshard.program import Pipeline, Program
from tests.scripts import load_script


LAYERS = 8


def program(width: int, tokens: int, batch: int, **how: Any) -> Program:
    """Trace a step of MLPs that are recomputed in the backward pass, with or without stages."""
    stack = load_script("experiments/quality/pipeline_search.py").Stack
    return stack("", LAYERS, width, 4 * width, tokens, batch).program(**how)


@pytest.mark.parametrize(
    ("width", "tokens", "schedules", "stages"),
    [
        (8192, 1024, ("gpipe",), 2),  # gradients need longer between slices than the activations of the stages
        pytest.param(256, 64, ("gpipe", "circular:2"), 1, marks=pytest.mark.full),
    ],
)
def test_the_best_of_all_recipes_is_chosen(width: int, tokens: int, schedules: tuple[str, ...], stages: int) -> None:
    make = functools.cache(functools.partial(program, width, tokens, 16))
    options = Options(topology="v5e:2x2*2", mesh="data=2,model=4")
    choices = {"stages": (1, 2), "schedule": (None, *schedules), "microbatches": (1, 4, 8)}
    chosen, made = plan_recipes(make, choices, options, of_source=True)
    steps: dict[Recipe, float] = {}
    alone = None
    for values in itertools.product(*choices.values()):
        recipe = Recipe(tuple(zip(choices, values, strict=True)))
        if not is_sensible(recipe.arguments, choices["microbatches"], (LAYERS,)):
            continue
        try:
            each = make(**recipe.arguments)
            steps[recipe] = make_plan(each, options).plan.prediction.expected_s
        except (InfeasibleError, UserError):
            continue
        graph = analyse_program(each, "tpu", False).graph
        least = least_seconds(graph, Topology.parse("v5e:2x2*2"), load_calibration("v5e"))
        pipeline = pipeline_of(recipe)
        if pipeline is None:
            alone = arithmetic_of(graph, least, 1, LAYERS)
        else:  # before the pipeline is traced, only its program is known
            assert alone is not None
            assert alone.in_stages(pipeline, LAYERS) == pytest.approx(least, rel=1e-6)
    assert steps[chosen] == min(steps.values()) == made.plan.prediction.expected_s
    assert chosen.arguments["stages"] == stages
    assert made.plan.words[-1].startswith("pipeline of 2 stages, " if stages == 2 else "no pipeline: ")
    assert "bubble" in made.plan.words[-1]
    if stages == 2:
        assert "stage over data" in made.plan.words


@pytest.mark.parametrize("pipeline", [Pipeline(3, 4), Pipeline(2, 4, "circular:3")])
def test_layers_outside_of_the_stages_are_computed_once(pipeline: Pipeline) -> None:
    topology, figures = Topology.parse("v5e:2x2*2"), load_calibration("v5e")
    plain, staged = (
        analyse_program(program(64, 16, 8, **how), "tpu", False).graph for how in ({}, dataclasses.asdict(pipeline))
    )
    assert pipeline.outside(LAYERS) == 2
    alone = arithmetic_of(plain, least_seconds(plain, topology, figures), 1, LAYERS)
    assert alone.in_stages(pipeline, LAYERS) == pytest.approx(least_seconds(staged, topology, figures), rel=1e-6)


def test_stages_are_parts_of_the_devices_and_the_rest_is_chosen_with_them() -> None:
    late = {"gradient_groups": (None,)}
    found = source_choices({"stages": "auto", "batch": 16}, "v5e:2x4")
    assert found["stages"] == (1, 2, 4, 8) and found["schedule"][:2] == (None, "gpipe")
    assert found["microbatches"] == (1, 2, 4, 8, 16)
    assert source_choices({"stages": 4, "microbatches": 8, "schedule": "gpipe"}, "v5e:2x4") == {}
    given = source_choices({"stages": "auto", "microbatches": 8, "schedule": "gpipe"}, "v5e:2x4")
    assert given == {"stages": (1, 2, 4, 8), "schedule": (None, "gpipe"), "microbatches": (8,), **late}
    fixed = source_choices({"stages": 4, "microbatches": "auto", "batch": 16}, "v5e:2x4")
    assert fixed == {"stages": (4,), "schedule": ("gpipe",), "microbatches": (4, 8, 16), **late}
    with pytest.raises(UserError, match="--schedule auto is for stages; add --stages auto"):
        source_choices({"schedule": "auto"}, "v5e:2x4")
    with pytest.raises(UserError, match="1, 2, 4 or 8 for each stage divides the batch of 4; say --microbatches"):
        source_choices({"stages": 3, "microbatches": "auto", "batch": 4}, "cpu:6")


@pytest.mark.parametrize(
    ("stages", "schedule", "microbatches", "stacks", "sensible"),
    [
        (1, None, 4, None, True),
        (1, "gpipe", 4, None, False),
        (1, None, 16, None, False),
        (2, None, 4, None, False),
        (2, "gpipe", 3, None, False),
        (2, "gpipe", 4, (8,), True),
        (2, "gpipe", 4, (3, 7), True),
        (4, "gpipe", 4, (3,), False),
        (2, "gpipe", 4, (), False),
        (2, "circular:2", 4, (8,), True),
        (4, "circular:4", 4, (8,), False),
    ],
)
def test_what_goes_together(
    stages: int, schedule: str | None, microbatches: int, stacks: tuple[int, ...] | None, sensible: bool
) -> None:
    said = {"stages": stages, "schedule": schedule, "microbatches": microbatches}
    assert is_sensible(said, (1, 2, 3, 4, 16), stacks) == sensible


NAMES = ["stages", "schedule", "microbatches"]


def test_more_microbatches_come_first_of_a_pipeline_of_which_no_layers_are_known() -> None:
    rows = [(stages, None if stages == 1 else "gpipe", count) for stages in (2, 1) for count in (2, 4)]
    found = [(stages, count) for stages, _, count in in_order(rows, NAMES, 1, lambda: 0)]
    assert found == [(1, 2), (1, 4), (2, 4), (2, 2)]


def test_as_many_stages_as_slices_come_before_fewer() -> None:
    rows = [(stages, None if stages == 1 else "gpipe", 8) for stages in (1, 2, 4, 8)]
    assert [stages for stages, *_ in in_order(rows, NAMES, 4, lambda: 8)] == [1, 4, 2, 8]


def test_the_most_promising_pipeline_of_as_many_stages_comes_first() -> None:
    """Rank pipelines of equal stages by their bubble and by the ticks in which they gather parameters again."""
    rows = [(4, schedule, count) for schedule in ("gpipe", "circular:4") for count in (4, 32)]
    found = [(schedule, count) for _, schedule, count in in_order(rows, NAMES, 1, lambda: 16)]
    assert found == [("circular:4", 4), ("gpipe", 4), ("circular:4", 32), ("gpipe", 32)]
    assert promise(Pipeline(4, 4, "circular:4"), 16) == pytest.approx(19 / 16 * 1.3)


def test_of_pipelines_that_are_planned_in_vain_less_promising_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unplanned(_: Program, stages: int) -> Task:
        raise AssertionError(f"{stages} stages are looked at")

    search = PipelineMeshes(Topology.parse("v5e:2x4"), lambda **said: program(8, 8, 8), unplanned)

    def recipe(stages: int, microbatches: int) -> Recipe:
        return Recipe((("stages", stages), ("schedule", "circular:4"), ("microbatches", microbatches)))

    search.record_slower(recipe(4, 8), 16)
    assert not search.dominated(recipe(4, 16), 16)  # few meshes were searched
    search.planned = 100_000_000
    assert search.dominated(recipe(4, 16), 16) and search.dominated(recipe(4, 8), 16)
    assert not search.dominated(recipe(4, 4), 16) and not search.dominated(recipe(2, 16), 16)


def test_the_bubble_is_the_share_of_ticks_that_nobody_uses() -> None:
    assert Pipeline(4, 8).ticks(16) == 11 and Pipeline(4, 8).bubble(16) == pytest.approx(3 / 11)
    assert Pipeline(4, 8, "circular").ticks(16) == 8 * 4 + 3
    assert "2 stages, circular:2, 4 microbatches, 11.1% of the ticks bubble" in Pipeline(2, 4, "circular:2").words(8)


def test_programs_without_gradient_groups_report_none() -> None:
    options = Options(topology="v5e:2x2*2", mesh="data=2,model=4", time_limit=20)

    def make(stages: int, gradient_groups: int | None) -> Any:
        if gradient_groups is not None:
            raise UserError("`--gradient-groups` only applies to `hf:CONFIG` and to torch modules")
        return program(8192, 1024, 16)

    choices = {"stages": (1,), "gradient_groups": (None,)}
    result = plan_recipes(make, choices, options, of_source=True)[1]
    assert result.plan.prediction.exposed_comm_s > 0
    assert [row["choices"] for row in result.plan.provenance["recipe"]["tried"]] == [
        {"stages": 1, "gradient_groups": None}
    ]
