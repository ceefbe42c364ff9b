"""Plan of a torch module cut into stages: its chunks, the prediction of the whole step, and notes for the user."""

from collections.abc import Iterator

import numpy as np

from autoshard.base.units import format_seconds
from autoshard.cost import ZERO_BUBBLE, Schedule
from autoshard.planning.price.prediction import mfu
from autoshard.planning.record.plan_parts import Collective, Prediction
from autoshard.planning.record.planned_stages import PlannedChunk, PlannedPipeline
from autoshard.planning.space.decision_model import Model
from autoshard.planning.stages.segment_prices import SegmentPrices
from autoshard.planning.stages.stage_cut import Cut, chunk_weights, cut_timetable
from autoshard.program import Segments


AXIS = "stage"
"""Mesh axis along which the stages are laid out."""


def planned_stages(cut: Cut, schedule: Schedule, prices: SegmentPrices, names: list[str]) -> PlannedPipeline:
    """Return the pipeline record of a cut: seconds, bytes and module names of every chunk.

    - `cut`, `schedule`: the stages and their order of work.
    - `prices`: prices of the segments.
    - `names`: name of the first module of each segment.

    `after_s` is the step time beyond the timetable's end, for the last updates.
    """
    costs = prices.costs
    runs = list(zip(cut.begins, [*cut.begins[1:], len(costs.forward_s)], strict=True))
    limits = [j - 1 for _, j in runs]
    weights = chunk_weights(costs, cut.begins) if schedule.name == ZERO_BUBBLE else [0.0] * len(runs)
    chunks = tuple(
        PlannedChunk(
            forward_s=float(costs.forward_s[i:j].sum()),
            backward_s=float(costs.backward_s[i:j].sum()) if costs.trains else None,
            weights_s=own,
            modules=(names[i], names[j - 1]),
            kept_bytes=round(float(costs.kept_bytes[i, j])),
            fixed_bytes=round(float(costs.fixed_bytes[i:j].sum() + np.max(costs.working_bytes[i:j], initial=0))),
            hand_over_s=float(costs.hand_over_s[last]) if last < len(names) - 1 else 0.0,
            handed_bytes=round(float(prices.handed_bytes[last])) if last < len(names) - 1 else 0,
            update_s=float(costs.update_s[i:j].sum()),
        )
        for (i, j), last, own in zip(runs, limits, weights, strict=True)
    )
    table = cut_timetable(costs, schedule, cut.begins)
    return PlannedPipeline(
        schedule=str(schedule),
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        rounds=schedule.rounds,
        together=False,
        chunks=chunks,
        after_s=cut.step_time_s - table.step_time_s,
        memory_bytes=tuple(round(size) for size in cut.memory_bytes),
        bound_s=cut.bound_s,
    )


def stages_notes(training: bool, schedule: Schedule, prices: SegmentPrices, segments: Segments) -> Iterator[str]:
    """Yield notes for the user on a module that is computed in microbatches.

    One note is on batch norms in training. The other is on a segment that takes longer than the mean of a stage.
    """
    modules = () if segments.module is None else segments.module.modules()
    if training and any("BatchNorm" in base.__name__ for child in modules for base in type(child).__mro__):
        yield (
            f"Batch norms take the statistics of a microbatch, {1 / schedule.microbatches:.1%} of the batch: the "
            "loss is not that of the module on the whole batch."
        )
    segment_s = prices.costs.forward_s + prices.costs.backward_s
    slowest, mean = float(segment_s.max()), float(segment_s.sum()) / schedule.stages
    if slowest > mean:
        number = int(np.argmax(segment_s))
        yield (
            f"A stage cannot be smaller than `{segments.names[number]}` up to the next segment, which takes "
            f"{format_seconds(slowest)} of a microbatch where the mean of a stage is {format_seconds(mean)}."
        )


def stages_prediction(
    model: Model, cut: Cut, schedule: Schedule, prices: SegmentPrices, pipeline: PlannedPipeline
) -> Prediction:
    """Return the prediction of the whole step; bubbles and waits between stages count as compute.

    - `model`: the priced step of one microbatch.
    - `cut`, `schedule`: the stages and their order of work.
    - `prices`: prices of the segments.
    - `pipeline`: the record of the cut.

    Exposed communication is that of the stage with most. Memory is that of the fullest stage; what its kinds leave is
    activations. The collectives are the permutes between chunks, which count as hidden. Wire bytes are those of the
    stage whose chunks hand on most. The cut is assumed to fit.
    """
    costs, count = prices.costs, schedule.microbatches
    runs = list(zip(cut.begins, [*cut.begins[1:], len(costs.forward_s)], strict=True))
    stages = range(schedule.stages)
    waits = [
        sum(
            float(count * prices.exposed_s[:2, i:j].sum() + prices.exposed_s[2, i:j].sum())
            for i, j in runs[s :: schedule.stages]
        )
        for s in stages
    ]
    fullest = max(stages, key=lambda s: cut.memory_bytes[s])
    own = runs[fullest :: schedule.stages]
    memory = {kind: round(sum(float(sizes[i:j].sum()) for i, j in own)) for kind, sizes in prices.kinds.items()}
    memory["temporaries"] = round(max(float(costs.working_bytes[i:j].max(initial=0)) for i, j in own))
    memory["activations"] = round(cut.memory_bytes[fullest]) - sum(memory.values())
    step_s = cut.step_time_s
    exposed = min(max(waits), step_s)
    passes = 2 if costs.trains else 1
    sent_bytes = [round(chunk.handed_bytes * count * passes) for chunk in pipeline.chunks[:-1]]
    permutes = tuple(
        Collective(
            "collective-permute",
            (AXIS,),
            count * passes,
            size,
            chunk.hand_over_s * count * passes,
            True,
            f"from {chunk.modules[-1]} to {after.modules[0]}",
            "",
            0.0,
        )
        for size, chunk, after in zip(sent_bytes, pipeline.chunks, pipeline.chunks[1:], strict=False)
    )
    return Prediction(
        step_time_s=step_s,
        compute_s=step_s - exposed,
        hidden_comm_s=0.0,
        exposed_comm_s=exposed,
        mfu=mfu(model, step_s / count),
        peak_bytes=round(max(cut.memory_bytes)),
        memory={kind: size for kind, size in memory.items() if size},
        fits=True,
        wire_bytes={AXIS: max(sum(sent_bytes[s :: schedule.stages]) for s in stages)},
        collectives=permutes,
    )
