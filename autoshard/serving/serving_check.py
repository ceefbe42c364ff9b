"""Comparison of a serving point with plans of its steps: traced programs with the same splits."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.planning.plan_builder import Running, make_plan
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.plan_options import read_options, settled_options
from autoshard.program import Program, open_source
from autoshard.serving.decoder_estimate import StepEstimate
from autoshard.serving.serving_layouts import ServingSpecs, serving_specs
from autoshard.serving.serving_model import ServingEngine, ServingPoint, engine_steps
from autoshard.serving.serving_plan import ServingPlan


_PLACES = 128
"""Positions of which the attention kernel's cache has a multiple."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedStep:
    """One step, estimated in closed form and planned."""

    kind: str
    """The kind of step, `decode` or `prefill`."""
    sequences: int
    """Number of sequences in the step if all devices form such engines."""
    length: int
    """Number of tokens in the cache of a decoding sequence (the prompt and half of the answer), or of a prompt."""
    estimate: StepEstimate
    """The closed form of the same step."""
    laid_out: Plan | None
    """Plan with weights, cache and inputs split as the serving point does; None if there is no such plan."""
    free: Plan | None
    """Plan without pinned specs, on the same mesh; None if there is no such plan."""
    failed: tuple[str, ...] = ()
    """Messages of the errors for which plans are missing."""


def check_serving(
    plan: ServingPlan, point: ServingPoint | None = None, progress: Callable[[str], None] | None = None
) -> list[CheckedStep]:
    """Return two checked steps at a serving point, by default the best: a decoding step, then a step of prompts.

    Each is planned twice on the same mesh, with the point's splits and freely. An error of the planner leaves that plan
    None. `progress` receives sentences on the work. Raises `UserError` for weights or caches of one byte, for which
    there is no program.
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
    length, full_length = asked.input + asked.output // 2, asked.input + asked.output
    # Separate engines are planned as if all devices formed such engines, since engines share only the program.
    steps: tuple[tuple[str, ServingEngine, int, int, int, StepEstimate], ...] = (
        ("decode", point.engine, point.batch, length, full_length, decode),
        ("prefill", prompts, prompts.attention, asked.input, asked.input, prefill),
    )
    checked = []
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
            options: Any = {"mesh": mesh, "pins": pins}
            running = Running(progress=progress, kept=True)
            try:
                both.append(make_plan(program, read_options(place.name, options), running).plan)
            except UserError as error:
                both.append(None)
                failed.append(str(error))
        checked.append(CheckedStep(kind, sequences, tokens, estimate, both[0], both[1], tuple(failed)))
    return checked


def _program(plan: ServingPlan, kind: str, **sizes: int) -> Program:
    """Return the program of a serving step of `kind`; `sizes` are its options `batch`, `seq` and `cache`.

    Decoding on a topology with splash attention uses the kernel for caches; a model that it refuses uses plain ops.
    """
    options: dict[str, Any] = {"serve": kind, **sizes} | ({"sample": plan.asked.sample} if kind == "decode" else {})
    if kind == "decode" and Topology.parse(plan.topology).traits.attention == "splash":
        places = -(-sizes["cache"] // _PLACES) * _PLACES
        kernel = settled_options(options | {"attention": "cached", "cache": places}, plan.topology)
        with contextlib.suppress(UserError):
            return open_source(plan.config, kept=True, **kernel)
    return open_source(plan.config, kept=True, **settled_options(options, plan.topology))


def _pins(specs: ServingSpecs, names: list[str]) -> dict[str, Any]:
    """Return the pinned specs, by argument or pattern of weights, of a program whose arguments have these names.

    Weights with one dim, and concatenated weights with a split joint dim, are not pinned. Stacked layers add leading
    dims to a spec.
    """
    pins: dict[str, Any] = {}
    for pattern, dims in specs.weights.items():
        # A dim of several concatenated weights is split differently in serving, so it is left to the solver.
        if len(dims) > 1 and pattern not in specs.joined:
            pins[pattern] = dims
    for part, dims in specs.cache.items():
        pins |= {name: dims for name in names if name.startswith("cache.") and name.endswith(f".{part}")}
    return pins | {"batch.input_ids": specs.inputs["input_ids"]}
