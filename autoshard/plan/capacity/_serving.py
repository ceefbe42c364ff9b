"""How to serve a decoder within limits of latency: what serves most, and what else there is."""

import dataclasses
import math

from autoshard.cost import ServingAsked, ServingPoint, Topology, serving_points
from autoshard.errors import UserError
from autoshard.plan.capacity._estimates import config_decoder
from autoshard.units import format_seconds


SERVED_WEIGHTS = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Dtypes of stored weights, and their bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingPlan:
    """The ways to serve that fit a topology; times in seconds."""

    config: str
    topology: str
    asked: ServingAsked
    points: tuple[ServingPoint, ...]
    best: ServingPoint
    """The way within the limits that serves most tokens in a second."""
    frontier: tuple[ServingPoint, ...]
    """Ways that no other beats in both tokens a second and time of a token, the quickest first."""
    first_limit_s: float = math.inf
    """The longest time until a first token that was allowed."""
    token_limit_s: float = math.inf
    """The longest time of each further token that was allowed."""


def plan_serving(
    config: str,
    topology: str,
    asked: ServingAsked,
    first_limit_s: float = math.inf,
    token_limit_s: float = math.inf,
) -> ServingPlan:
    """The way to serve `hf:CONFIG` that gives most tokens a second within limits of the first and each further token.

    Raises `UserError` for a model that is no decoder of known form, one that fits in no way, and limits that no way
    keeps, with the best there is.
    """
    decoder = config_decoder(config)
    if decoder is None:
        raise UserError(f"{config} is no decoder that can be counted; plan a step of it with --serve decode instead.")
    place = Topology.parse(topology)
    points = tuple(serving_points(decoder, place, asked))
    if not points:
        least = asked.weight_bytes * decoder.params / place.num_devices
        raise UserError(
            f"{config} cannot be served on {place.name}: weights alone are {least / 2**30:.1f} GiB of each device's "
            f"{place.usable_bytes / 2**30:.1f} GiB when all hold one copy; use more devices, or --weights fp8."
        )
    kept = [each for each in points if each.first_s <= first_limit_s and each.token_s <= token_limit_s]
    if not kept:
        first, token = min(points, key=lambda each: each.first_s), min(points, key=lambda each: each.token_s)
        raise UserError(
            f"no way to serve {config} on {place.name} keeps the limits; the best there is has a first token after "
            f"{format_seconds(first.first_s)} (tensor {first.tensor}, batch {first.batch}), or a further token each "
            f"{format_seconds(token.token_s)} (tensor {token.tensor}, batch {token.batch})."
        )
    best = max(kept, key=lambda each: each.tokens_per_s)
    return ServingPlan(config, place.name, asked, points, best, _frontier(points), first_limit_s, token_limit_s)


def _frontier(points: tuple[ServingPoint, ...]) -> tuple[ServingPoint, ...]:
    found: list[ServingPoint] = []
    for point in sorted(points, key=lambda each: (each.token_s, -each.tokens_per_s)):
        if not found or point.tokens_per_s > found[-1].tokens_per_s:
            found.append(point)
    return tuple(found)
