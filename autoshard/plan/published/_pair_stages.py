"""Stages of a pipeline as a measured plan states them, by MaxText's names or by ours."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.plan.published._pair_dims import whole_number
from autoshard.plan.published._published import IncompleteError, Run
from autoshard.program import Pipeline, read_pipeline


MICROBATCHES = ("num_pipeline_microbatches", "microbatches")
ROUNDS = "num_pipeline_repeats"
LAYERS = "num_layers_per_pipeline_stage"
SCHEDULE = "schedule"
NETWORK = {"dcn_dp": "data", "dcn_pp": "stage", "dcn_fsdp": "fsdp"}
"""How many slices a degree spans -> its axis."""
STAGED = frozenset({*MICROBATCHES, ROUNDS, LAYERS, SCHEDULE, *NETWORK})
"""Keys of a plan that are read here."""


def staged(run: Run, said: Mapping[str, Any], stages: int) -> Run:
    """The run with its layers in so many stages, and with what lies between slices.

    There are as many microbatches as stages if nothing is said. In MaxText a microbatch goes round as often as there
    are chunks of `num_layers_per_pipeline_stage` layers for (of one layer, if not even rounds are stated); where no
    framework is named and neither is stated, it goes through the stages once. Raises `IncompleteError` for what cannot
    be.
    """
    run = dataclasses.replace(run, network=_network(said, run.topology))
    if stages == 1:
        return run
    framework = str(said.get("framework", ""))
    if framework and "maxtext" not in framework.lower() and SCHEDULE not in said:
        raise IncompleteError(f"pp={stages}: how {framework} runs stages is not stated, and not rebuilt")
    counts = [whole_number(said, key) for key in MICROBATCHES if key in said]
    if len(set(counts)) > 1:
        raise IncompleteError(f"{' and '.join(MICROBATCHES)} are stated differently, {counts[0]} and {counts[1]}")
    layers = (run.decoder.layers - run.decoder.dense_layers) // run.decoder.global_every
    try:
        pipeline = read_pipeline(stages, counts[0] if counts else None, _schedule(said, stages, layers))
    except UserError as error:
        raise IncompleteError(str(error)) from None
    assert pipeline is not None
    part = run.batch // run.accumulation
    if part % pipeline.microbatches:
        raise IncompleteError(f"{pipeline.microbatches} microbatches do not divide {part} sequences")
    return dataclasses.replace(run, pipeline=pipeline, assumed=(*run.assumed, *_assumed(pipeline, layers)))


def _schedule(said: Mapping[str, Any], stages: int, layers: int) -> str:
    if SCHEDULE in said:
        return str(said[SCHEDULE])
    if ROUNDS in said:
        rounds = whole_number(said, ROUNDS)
        own = whole_number(said, LAYERS, layers // (stages * rounds) or 1)
        if LAYERS in said and stages * own * rounds > layers:
            what = f"{ROUNDS}={rounds} with {LAYERS}={own} in {stages} stages"
            raise IncompleteError(f"{what} are more than {layers} layers")
    elif LAYERS not in said and "framework" not in said:
        return "gpipe"
    else:
        rounds = layers // (stages * whole_number(said, LAYERS, 1))
    if rounds < 1:
        raise IncompleteError(f"{LAYERS}={said.get(LAYERS, 1)} in {stages} stages are more than {layers} layers")
    return f"circular:{rounds}" if rounds > 1 else "gpipe"


def _assumed(pipeline: Pipeline, layers: int) -> list[str]:
    found = []
    if pipeline.outside(layers):
        found.append(f"{pipeline.outside(layers)} of {layers} layers before the stages")
    if pipeline.rounds(layers) > 1:
        found.append("weights of all rounds brought to their stages once a step")
    return found


def _network(said: Mapping[str, Any], topology: Topology) -> tuple[tuple[str, int], ...]:
    """How many slices each axis spans; nothing where no row says so: then the first axes do."""
    spans = {axis: whole_number(said, key) for key, axis in NETWORK.items() if key in said}
    if spans and math.prod(spans.values()) != topology.slices:
        listed = ", ".join(f"{key}={said[key]}" for key in NETWORK if key in said)
        made = math.prod(spans.values())
        raise IncompleteError(f"{listed} make {made} slices, but {topology.name} has {topology.slices}")
    return tuple((axis, count) for axis, count in spans.items() if count > 1)
