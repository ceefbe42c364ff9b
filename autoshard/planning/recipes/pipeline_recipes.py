"""Pipelines among the recipes of a search: their order, their bubble, and the words on their outcome."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.base.units import format_seconds
from autoshard.graph import OpGraph
from autoshard.planning.recipes.recipe import Recipe, RecipeOutcome, RecipeTried
from autoshard.planning.space.plan_options import MICROBATCHES, PARTS
from autoshard.program import Pipeline


SKIPPED_OUTCOMES = (RecipeOutcome.SKIPPED, RecipeOutcome.DOMINATED)
"""Outcomes of pipelines that were not looked at."""

MOVED = 0.3
"""Time of parameters and gradients on the links over compute time, used only to order pipelines. The figure is about
that of the best plan without stages for Llama-3.1-405B on four slices of v5p.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic time of a program without a pipeline."""

    seconds: float
    """Seconds of arithmetic per element of the batch."""
    layers: float
    """Share of this time that the layers of a stack take."""

    def in_stages(self, pipeline: Pipeline, layers: int) -> float:
        """Return a lower bound in seconds per element for all plans of the pipeline.

        Stages compute in every tick, so the time within them is stretched by all ticks over the useful ones. Layers
        that run outside of the stages, and all other work, are not stretched. `layers` is above 0.
        """
        staged = self.layers * (1 - pipeline.outside(layers) / layers)
        return self.seconds * (1 + staged * (pipeline.ticks(layers) / _useful(pipeline, layers) - 1))


def _useful(pipeline: Pipeline, layers: int) -> int:
    """Return the number of a stage's ticks whose results are used: its microbatches times its rounds."""
    return pipeline.microbatches * pipeline.rounds(layers)


def arithmetic_of(graph: OpGraph, seconds: float, elements: int, layers: int) -> Arithmetic:
    """Return the arithmetic of a program whose stack of `layers` layers is a loop.

    - `seconds`: the step's bound by `least_seconds`.
    - `elements`: elements of the batch.

    Without FLOPs the share of the layers is 0.
    """
    inside = dataclasses.replace(graph, ops=tuple(op for op in graph.ops if _in_loop_of(graph, op.loop, layers)))
    all_flops, layer_flops = graph.flops, inside.flops
    return Arithmetic(seconds / elements, layer_flops / all_flops if all_flops else 0.0)


def _in_loop_of(graph: OpGraph, loop: int, trips: int) -> bool:
    """Return True if a loop, or one around it, has this number of trips and is no conditional; -1 gives False."""
    while loop >= 0:
        if graph.loops[loop].trips == trips and not graph.loops[loop].branches:
            return True
        loop = graph.loops[loop].parent
    return False


def pipeline_of(recipe: Recipe) -> Pipeline | None:
    """Return the pipeline of a recipe; None if it has no choice of stages or one stage."""
    choices = recipe.arguments
    if choices.get("stages", 1) == 1:
        return None
    return Pipeline(choices["stages"], choices["microbatches"], choices["schedule"])


def without_pipeline(recipe: Recipe) -> Recipe:
    """Return a recipe without its choices of the pipeline (`PARTS`)."""
    return Recipe(tuple((name, value) for name, value in recipe.choices if name not in PARTS))


def in_order(
    recipes: Sequence[tuple[Any, ...]], names: Sequence[str], slices: int, layers: Callable[[], int]
) -> Iterator[tuple[Any, ...]]:
    """Yield recipes without stages first, fewer microbatches before more, then pipelines.

    Pipelines with as many stages as `slices` are first, since these send little over slow links. The others follow by
    number of stages, the most promising first; until `layers` is known, more microbatches come first.

    - `recipes`: values of each recipe, by the positions of `names`.
    - `layers`: returns the number of layers of the cut stack, 0 until a program was made.
    """
    places = [names.index(name) for name in ("stages", "microbatches", "schedule")]

    def parts(values: tuple[Any, ...]) -> list[Any]:
        """Return the stages, microbatches and schedule of a recipe."""
        return [values[place] for place in places]

    yield from sorted((each for each in recipes if parts(each)[0] == 1), key=lambda values: parts(values)[1])

    def key(values: tuple[Any, ...]) -> tuple[bool, int, float]:
        """Return the sort key of a pipeline; the least is first."""
        stages, count, schedule = parts(values)
        if schedule is None or not layers():
            return stages != slices, stages, -count
        return stages != slices, stages, promise(Pipeline(stages, count, schedule), layers())

    yield from sorted((each for each in recipes if parts(each)[0] > 1), key=key)


def promise(pipeline: Pipeline, layers: int) -> float:
    """Return a rough estimate of a pipeline's step over its compute without stages; less is more promising.

    The bubble stretches compute. In every tick each stage gathers the parameters of one of its chunks and sums
    gradients. So more microbatches in fewer rounds send more.
    """
    chunks = pipeline.stages * max(1, pipeline.rounds(layers))
    return 1 / (1 - pipeline.bubble(layers)) + MOVED * pipeline.ticks(layers) / chunks


def with_skipped_meshes(row: RecipeTried, skipped_meshes: int, bound_s: float) -> RecipeTried:
    """Return the row of a pipeline of which `skipped_meshes` meshes were skipped; the row itself if none was.

    A pipeline that does not fit becomes `PARTLY_UNFIT`. `bound_s` is a lower bound of a step, in seconds, on all its
    meshes.
    """
    if not skipped_meshes:
        return row
    if row.outcome is RecipeOutcome.UNFIT:
        row = dataclasses.replace(row, outcome=RecipeOutcome.PARTLY_UNFIT, reason="")
    return dataclasses.replace(row, skipped_meshes=skipped_meshes, bound_s=bound_s)


def is_sensible(user_options: Mapping[str, Any], counts: Sequence[int], stacks: Sequence[int] | None) -> bool:
    """Return True if stages, schedule and microbatches suit each other and the program's `stacks`, where these are
    known.

    - `user_options`: the three values by name.
    - `counts`: all numbers of microbatches that may be chosen; with one number there is no choice.
    - `stacks`: numbers of layers in the stacks; None if unknown.

    One stage has no schedule. Microbatches must be a multiple of the stages by a factor of `MICROBATCHES`, if there is
    a choice. Each stage needs a layer for each round, and schedules other than GPipe several rounds.
    """
    stages, count, schedule = user_options["stages"], user_options["microbatches"], user_options["schedule"]
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
    """Return a sentence on the chosen pipeline, or on the reason for which none was chosen; empty without a choice.

    - `best`, `rows`: row of the chosen recipe, and all rows.
    - `stacks`: numbers of layers in the program's stacks.
    """
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
    others = [each for each in others if each[0].outcome not in SKIPPED_OUTCOMES] or others
    planned = [(row, pipeline) for row, pipeline in others if row.step_time_s is not None]
    if planned:
        row, pipeline = min(planned, key=lambda pair: pair[0].per_element_s)
        assert row.step_time_s is not None
        step = f"{row.verdict} ({format_seconds(row.step_time_s)})"
        return f"no pipeline: the best is {step} with {pipeline.words(layers)}{more}"
    row, pipeline = min(others, key=lambda pair: pair[1].bubble(layers))
    return f"no pipeline: none of {len(others)} was worth planning; {pipeline.words(layers)}: {row.verdict}{more}"


def _unlooked(rows: Sequence[RecipeTried]) -> str:
    """Return words on skipped pipelines and meshes, with lower bounds of their steps; empty if none was skipped."""
    bounds = [row.bound_s or 0.0 for row in rows if row.outcome in SKIPPED_OUTCOMES]
    partial = [row for row in rows if row.skipped_meshes and row.outcome not in SKIPPED_OUTCOMES]
    words = ""
    if bounds:
        words += f"; {len(bounds)} more were not looked at, of which none takes less than {format_seconds(min(bounds))}"
    if partial:
        least_s = format_seconds(min(row.bound_s or 0.0 for row in partial))
        words += (
            f"; {len(partial)} were planned on their most promising meshes, and on others take no less than {least_s}"
        )
    return words
