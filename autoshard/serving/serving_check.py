"""A way to serve beside plans of its steps: programs of ours, traced and laid out in the same way."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.planning.plan_builder import make_plan
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.plan_options import read_options, settled_options
from autoshard.program import Program, open_source
from autoshard.serving.decoder_estimate import StepEstimate
from autoshard.serving.serving_layouts import ServingSpecs, serving_specs
from autoshard.serving.serving_model import ServingEngine, ServingPoint, engine_steps
from autoshard.serving.serving_plan import ServingPlan


_PLACES = 128
"""A kernel's cache has multiples of so many places."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedStep:
    """One step by closed form, and as planned."""

    kind: str
    """What it computes, `decode` or `prefill`."""
    sequences: int
    """How many sequences it has, if all devices are such engines."""
    length: int
    """Tokens that a sequence has, or its prompt."""
    estimate: StepEstimate
    laid_out: Plan | None
    """Weights, cache and inputs split as the way to serve has them; the rest is chosen. None if it cannot be."""
    free: Plan | None
    """All of it chosen, on the same mesh."""
    failed: tuple[str, ...] = ()
    """Why there is no plan."""


def check_serving(
    plan: ServingPlan, point: ServingPoint | None = None, progress: Callable[[str], None] | None = None
) -> list[CheckedStep]:
    """Plans of a step of decoding, and of prompts, at a way to serve, by default the best.

    Raises `UserError` for what has no program: weights or caches of a byte.
    """
    point, asked = plan.best if point is None else point, plan.asked
    if (asked.weights, asked.cache) != ("bf16", "bf16"):
        raise UserError(
            "--check plans programs whose weights and caches have 16 bits; leave out --weights and --cache-dtype, or "
            "--check."
        )
    place, prompts = Topology.parse(plan.topology), point.prompts or point.engine
    decode, _ = engine_steps(plan.decoder, place, asked, point.engine, point.batch)
    _, prefill = engine_steps(plan.decoder, place, asked, prompts, prompts.attention)
    length, whole = asked.input + asked.output // 2, asked.input + asked.output
    # Engines apart too are planned as if all devices were such engines: they share nothing but the program.
    steps: tuple[tuple[str, ServingEngine, int, int, int, StepEstimate], ...] = (
        ("decode", point.engine, point.batch, length, whole, decode),
        ("prefill", prompts, prompts.attention, asked.input, asked.input, prefill),
    )
    found = []
    for kind, engine, each_has, tokens, cache, estimate in steps:
        engines = place.num_devices // engine.devices
        specs, sequences = serving_specs(plan.config, plan.decoder, engine, engines), each_has * engines
        mesh = dict(specs.sizes) or {"engine": 1}
        if progress is not None:
            progress(f"tracing a step of {kind}")
        program = _program(plan, kind, batch=sequences, seq=tokens, cache=cache)
        both: list[Plan | None] = []
        failed: list[str] = []
        for pins in (_pins(specs, [each.name for each in program.arguments]), None):
            made: Any = {"mesh": mesh, "pins": pins}
            try:
                both.append(make_plan(program, read_options(place.name, made), progress=progress, kept=True).plan)
            except UserError as error:
                both.append(None)
                failed.append(str(error))
        found.append(CheckedStep(kind, sequences, tokens, estimate, both[0], both[1], tuple(failed)))
    return found


def _program(plan: ServingPlan, kind: str, **sizes: int) -> Program:
    """A step as it would be served: on TPUs decoding by the kernel that reads what a cache holds, where that can be."""
    options: dict[str, Any] = {"serve": kind, **sizes}
    if kind == "decode" and Topology.parse(plan.topology).traits.attention == "splash":
        places = -(-sizes["cache"] // _PLACES) * _PLACES
        kernel = settled_options(options | {"attention": "cached", "cache": places}, plan.topology)
        with contextlib.suppress(UserError):
            return open_source(plan.config, kept=True, **kernel)
    return open_source(plan.config, kept=True, **settled_options(options, plan.topology))


def _pins(specs: ServingSpecs, names: list[str]) -> dict[str, Any]:
    """What is fixed of a program with these arguments; layers may be stacked in front of what a spec says."""
    found: dict[str, Any] = {}
    for pattern, dims in specs.weights.items():
        # What lies one after the other in a dim is not split as it would be served: left to the solver.
        if len(dims) > 1 and pattern not in specs.joined:
            found[pattern] = dims
    for part, dims in specs.cache.items():
        found |= {name: dims for name in names if name.startswith("cache.") and name.endswith(f".{part}")}
    return found | {"batch.input_ids": specs.inputs["input_ids"]}
