"""Position of a pipeline's ticks in a step: time of a stage in each tick, and time before, between and after the
passes.
"""

from autoshard.graph import OpGraph
from autoshard.planning.record.plan_parts import Span, Timeline
from autoshard.planning.record.planned_stages import PlannedChunk, PlannedPipeline
from autoshard.program import Program


def pipeline_of_ticks(program: Program, graph: OpGraph, timeline: Timeline) -> PlannedPipeline | None:
    """Return the stages of a program whose layers are a pipeline in one SPMD program, with times from its timeline.

    None without a pipeline, or if its loops are not found. All chunks have equal times: those of a mean tick. A pass
    over the ticks is a loop with as many trips as ticks. A training step has two such passes: the two longest loops.
    """
    options = program.pipeline
    if options is None:
        return None
    stages, count, rounds = options["stages"], options["microbatches"], options["rounds"]
    ticks = count * rounds + stages - 1
    passes = []
    for loop in graph.loops:
        if loop.trips == ticks and loop.parent < 0 and not loop.branches:
            spans = [span for span in timeline.spans if _is_within(graph, span, loop.id)]
            if spans:
                passes.append((spans[0].start_s, spans[-1].start_s + spans[-1].seconds))
    passes_per_step = 2 if program.training else 1
    longest = sorted(sorted(passes, key=lambda each: each[0] - each[1])[:passes_per_step])
    if len(longest) < passes_per_step:
        return None
    (start, middle), (after, end) = longest[0], longest[-1]
    backward = (end - after) / ticks if program.training else None
    return PlannedPipeline(
        schedule=options["schedule"] if rounds == 1 else f"circular:{rounds}",
        stages=stages,
        microbatches=count,
        rounds=rounds,
        together=True,
        layers=options["layers"],
        chunks=(PlannedChunk((middle - start) / ticks, backward),) * (stages * rounds),
        before_s=start,
        between_s=after - middle if program.training else 0.0,
        after_s=timeline.end_s - end,
    )


def _is_within(graph: OpGraph, span: Span, loop: int) -> bool:
    """Return True if a span of compute or exposed communication belongs to a loop, or to a loop inside it."""
    block = span.block
    while span.lane in ("compute", "exposed") and block >= 0:
        if block == loop:
            return True
        block = graph.loops[block].parent
    return False
