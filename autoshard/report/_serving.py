"""Ways to serve as a table, as figures for scripts, and as flags for vLLM."""

import dataclasses
import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.cost import ServingPoint, Topology
from autoshard.plan import ServingPlan
from autoshard.report._names import clean
from autoshard.units import format_bytes, format_count, format_seconds


_LEAST_CHUNK = 512
"""Tokens of a step that a scheduler is given at least."""


def serving_figures(plan: ServingPlan) -> dict[str, Any]:
    """The object that `autoshard serve-plan --json` prints."""
    topology = Topology.parse(plan.topology)
    return {
        "model": plan.config,
        "topology": plan.topology,
        "chip": topology.chip.name,
        "chips": topology.num_chips,
        "input": plan.asked.input,
        "output": plan.asked.output,
        "first_limit_s": _bounded(plan.first_limit_s),
        "token_limit_s": _bounded(plan.token_limit_s),
        "best": _figures(plan.best),
        "flags": vllm_flags(plan),
        "frontier": [_figures(point) for point in plan.frontier],
        "points": [
            _figures(point)
            | {"prompt_s": point.prompt_s, "decode_s": point.decode_s}
            | {"flags": vllm_flags(dataclasses.replace(plan, best=point))}
            for point in plan.points
        ],
    }


def _bounded(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _figures(point: ServingPoint) -> dict[str, Any]:
    return {
        "tensor": point.tensor,
        "engines": point.engines,
        "prompt_engines": point.prompt_engines,
        "batch": point.batch,
        "first_s": point.first_s,
        "token_s": point.token_s,
        "tokens_per_s": point.tokens_per_s,
        "peak_bytes": point.peak_bytes,
    }


def vllm_flags(plan: ServingPlan) -> list[str]:
    """Flags of `vllm serve` for one engine group; for engines apart two sets, of prompts and of decoding."""
    point, asked = plan.best, plan.asked
    length = asked.input + asked.output
    common = [f"--tensor-parallel-size {point.tensor}", f"--max-model-len {length}"]
    if point.prompt_engines:
        chunk = max(asked.input, _LEAST_CHUNK)
        prompts = [*common, *_copies(point.prompt_engines), f"--max-num-batched-tokens {chunk}"]
        decodes = [*common, *_copies(point.engines - point.prompt_engines), f"--max-num-seqs {point.batch}"]
        return [" ".join(prompts), " ".join(decodes)]
    tokens = point.batch * (1 + asked.input / asked.output)
    chunk = max(_LEAST_CHUNK, 1 << (int(tokens) - 1).bit_length())
    own = [f"--max-num-seqs {point.batch}", f"--max-num-batched-tokens {chunk}"]
    return [" ".join([*common, *_copies(point.engines), *own])]


def _copies(engines: int) -> list[str]:
    return [f"--data-parallel-size {engines}"] if engines > 1 else []


def serving_report(plan: ServingPlan) -> RenderableType:
    """The best way, its flags, and the frontier of throughput against the time of a token."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("tensor", "engines", "batch", "first token", "each token", "tokens/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = plan.frontier if plan.best in plan.frontier else (*plan.frontier, plan.best)
    for point in shown:
        engines = str(point.engines)
        if point.prompt_engines:
            engines = f"{point.prompt_engines}+{point.engines - point.prompt_engines}"
        table.add_row(
            "*" if point == plan.best else "",
            str(point.tensor),
            engines,
            str(point.batch),
            format_seconds(point.first_s),
            format_seconds(point.token_s),
            format_count(point.tokens_per_s),
            format_bytes(point.peak_bytes),
            style="bold" if point == plan.best else "",
        )
    asked = plan.asked
    head = f"{clean(plan.config)} on {plan.topology}: {asked.input} tokens in, {asked.output} out"
    note = "* most tokens within the limits; 2+6: two engines for prompts, six to decode. By closed form, no plan; "
    note += "first tokens where nobody else waits."
    flags = [Text(f"vllm serve MODEL {line}") for line in vllm_flags(plan)]
    return Group(Text(head, style="bold"), Text(), table, Text(), Text(note, style="dim"), Text(), *flags)
