"""Pipelines among the recipes of a search: which are worth planning, what is bubble, and what they came to."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.base.units import format_seconds
from autoshard.graph import OpGraph
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried
from autoshard.planning.space.plan_options import MICROBATCHES, PARTS
from autoshard.program import Pipeline


NOT_LOOKED = (RecipeOutcome.UNLOOKED, RecipeOutcome.OUTDONE)

MOVED = 0.3
"""What parameters and gradients take on the links over what is computed, where pipelines are put in order, and only
there: about as in the best plan without stages of Llama-3.1-405B on four slices of v5p."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arithmetic:
    """What an element of the batch takes without a pipeline, by arithmetic alone."""

    seconds: float
    layers: float
    """The share of it that is in the layers of a stack."""

    def in_stages(self, pipeline: Pipeline, layers: int) -> float:
        """Seconds below which no plan of the pipeline is: the stages compute in every tick, needed or not."""
        staged = self.layers * (1 - pipeline.outside(layers) / layers)
        return self.seconds * (1 + staged * (pipeline.ticks(layers) / _useful(pipeline, layers) - 1))


def _useful(pipeline: Pipeline, layers: int) -> int:
    """Ticks of a stage whose results are used."""
    return pipeline.microbatches * pipeline.rounds(layers)


def arithmetic_of(graph: OpGraph, seconds: float, elements: int, layers: int) -> Arithmetic:
    """Of a program that takes `seconds` by `least_seconds`, whose stack of `layers` is a loop."""
    inside = dataclasses.replace(graph, ops=tuple(op for op in graph.ops if _in_loop_of(graph, op.loop, layers)))
    whole, part = graph.flops, inside.flops
    return Arithmetic(seconds / elements, part / whole if whole else 0.0)


def _in_loop_of(graph: OpGraph, loop: int, trips: int) -> bool:
    while loop >= 0:
        if graph.loops[loop].trips == trips and not graph.loops[loop].branches:
            return True
        loop = graph.loops[loop].parent
    return False


def pipeline_of(recipe: Recipe) -> Pipeline | None:
    """The pipeline of a recipe; None if it has none."""
    said = recipe.arguments
    if said.get("stages", 1) == 1:
        return None
    return Pipeline(said["stages"], said["microbatches"], said["schedule"])


def without_pipeline(recipe: Recipe) -> Recipe:
    """What else a recipe says."""
    return Recipe(tuple((name, value) for name, value in recipe.choices if name not in PARTS))


def in_order(
    recipes: Sequence[tuple[Any, ...]], names: Sequence[str], slices: int, layers: Callable[[], int]
) -> Iterator[tuple[Any, ...]]:
    """Recipes without stages first, fewer microbatches before more; then as many stages as `slices`, which hand little
    over slow links, then fewer stages before more, of which the most promising pipelines come first. The `layers` of
    the stack that is cut are asked for when a program has been made."""
    places = [names.index(name) for name in ("stages", "microbatches", "schedule")]

    def parts(values: tuple[Any, ...]) -> list[Any]:
        return [values[place] for place in places]

    yield from sorted((each for each in recipes if parts(each)[0] == 1), key=lambda values: parts(values)[1])

    def key(values: tuple[Any, ...]) -> tuple[bool, int, float]:
        stages, count, schedule = parts(values)
        if schedule is None or not layers():
            return stages != slices, stages, -count
        return stages != slices, stages, promise(Pipeline(stages, count, schedule), layers())

    yield from sorted((each for each in recipes if parts(each)[0] > 1), key=key)


def promise(pipeline: Pipeline, layers: int) -> float:
    """Roughly what a step in the pipeline takes, over its compute without stages: less is more promising.

    The bubble stretches compute. In every tick each stage gathers the parameters of one of its chunks, and sums
    gradients, so that more microbatches in fewer rounds move more.
    """
    chunks = pipeline.stages * max(1, pipeline.rounds(layers))
    return 1 / (1 - pipeline.bubble(layers)) + MOVED * pipeline.ticks(layers) / chunks


def on_some(row: RecipeTried, unlooked: int, bound_s: float) -> RecipeTried:
    """A row of a pipeline of which so many meshes were not looked at; on none a step takes less than `bound_s`."""
    if not unlooked:
        return row
    if row.outcome is RecipeOutcome.UNFIT:
        row = dataclasses.replace(row, outcome=RecipeOutcome.PARTLY_UNFIT, reason="")
    return dataclasses.replace(row, unlooked=unlooked, bound_s=bound_s)


def is_sensible(said: Mapping[str, Any], counts: Sequence[int], stacks: Sequence[int] | None) -> bool:
    """Whether stages, schedule and microbatches go together, and with the `stacks` of the program, if these are known.

    `counts` are all microbatches that may be chosen: of one there is no choice.
    """
    stages, count, schedule = said["stages"], said["microbatches"], said["schedule"]
    if stages == 1:
        return schedule is None and (len(counts) == 1 or count in MICROBATCHES)
    if schedule is None or len(counts) > 1 and (count % stages or count // stages not in MICROBATCHES):
        return False
    pipeline = Pipeline(stages, count, schedule)
    if schedule != "gpipe" and count % stages:
        return False
    if stacks is None:
        return True
    layers = max(stacks, default=0)
    rounds = pipeline.rounds(layers)
    return stages * rounds <= layers and (schedule == "gpipe" or rounds > 1)


def pipeline_words(best: RecipeTried, rows: Sequence[RecipeTried], stacks: Sequence[int]) -> str:
    """One sentence on the pipeline that was chosen, or on why none was; empty where there was nothing to choose."""
    if "stages" not in best.recipe.arguments:
        return ""
    layers = max(stacks, default=0)
    chosen, more = pipeline_of(best.recipe), _unlooked(rows)
    if chosen is not None:
        return f"pipeline of {chosen.words(layers)}{more}"
    others = [(row, pipeline) for row in rows if (pipeline := pipeline_of(row.recipe)) is not None]
    if not layers:
        return "no pipeline: the program has no layers that repeat"
    if not others:
        return "no pipeline: no number of stages goes with the layers, the batch and the devices"
    others = [each for each in others if each[0].outcome not in NOT_LOOKED] or others
    planned = [(row, pipeline) for row, pipeline in others if row.step_time_s is not None]
    if planned:
        row, pipeline = min(planned, key=lambda pair: pair[0].per_element_s)
        assert row.step_time_s is not None
        step = f"{row.verdict} ({format_seconds(row.step_time_s)})"
        return f"no pipeline: the best is {step} with {pipeline.words(layers)}{more}"
    row, pipeline = min(others, key=lambda pair: pair[1].bubble(layers))
    return f"no pipeline: none of {len(others)} was worth planning; {pipeline.words(layers)}: {row.verdict}{more}"


def _unlooked(rows: Sequence[RecipeTried]) -> str:
    """How many pipelines were not looked at, and what none of them goes below; empty if all were."""
    bounds = [row.bound_s or 0.0 for row in rows if row.outcome in NOT_LOOKED]
    some = [row for row in rows if row.unlooked and row.outcome not in NOT_LOOKED]
    said = ""
    if bounds:
        said += f"; {len(bounds)} more were not looked at, of which none takes less than {format_seconds(min(bounds))}"
    if some:
        least_s = format_seconds(min(row.bound_s or 0.0 for row in some))
        said += f"; {len(some)} were planned on their most promising meshes, and on others take no less than {least_s}"
    return said
