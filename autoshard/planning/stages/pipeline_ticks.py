"""Where in a step the ticks of a pipeline are: what a stage takes in each, and what lies before, between and after."""

from autoshard.graph import OpGraph
from autoshard.planning.record.plan_parts import Span, Timeline
from autoshard.planning.record.planned_stages import PlannedChunk, PlannedPipeline
from autoshard.program import Program


def pipeline_of_ticks(program: Program, graph: OpGraph, timeline: Timeline) -> PlannedPipeline | None:
    """The stages of a program whose layers are a pipeline; None of one without, or if its loops are not found.

    A pass over the ticks is a loop with as many trips. Of a training step there are two, the longest ones.
    """
    said = program.pipeline
    if said is None:
        return None
    stages, count, rounds = said["stages"], said["microbatches"], said["rounds"]
    ticks = count * rounds + stages - 1
    passes = []
    for loop in graph.loops:
        if loop.trips == ticks and loop.parent < 0 and not loop.branches:
            spans = [span for span in timeline.spans if _is_within(graph, span, loop.id)]
            if spans:
                passes.append((spans[0].start_s, spans[-1].start_s + spans[-1].seconds))
    wanted = 2 if program.training else 1
    longest = sorted(sorted(passes, key=lambda each: each[0] - each[1])[:wanted])
    if len(longest) < wanted:
        return None
    (start, middle), (after, end) = longest[0], longest[-1]
    backward = (end - after) / ticks if program.training else None
    return PlannedPipeline(
        schedule=said["schedule"] if rounds == 1 else f"circular:{rounds}",
        stages=stages,
        microbatches=count,
        rounds=rounds,
        together=True,
        layers=said["layers"],
        chunks=(PlannedChunk((middle - start) / ticks, backward),) * (stages * rounds),
        before_s=start,
        between_s=after - middle if program.training else 0.0,
        after_s=timeline.end_s - end,
    )


def _is_within(graph: OpGraph, span: Span, loop: int) -> bool:
    """Whether a span holds up compute in the loop, or in one within it."""
    block = span.block
    while span.lane in ("compute", "exposed") and block >= 0:
        if block == loop:
            return True
        block = graph.loops[block].parent
    return False
