"""Plans for serving a decoder within latency limits: the point with most throughput, and the alternatives."""

import dataclasses
import math

from autoshard.base.units import format_seconds
from autoshard.cost import Topology, larger_topologies
from autoshard.errors import UserError
from autoshard.program import read_config
from autoshard.serving.config_estimates import config_decoder
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.serving_model import (
    MEMORY_SHARE,
    STORED_BYTES,
    ServingLimits,
    ServingPoint,
    ServingRequests,
    serving_points,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ServingPlan:
    """The serving points that fit in a topology's memory, and the best of them within the limits."""

    config: str
    """The model as the user named it, `hf:CONFIG`."""
    decoder: Decoder
    topology: str
    """Canonical name of the topology."""
    asked: ServingRequests
    limits: ServingLimits
    points: tuple[ServingPoint, ...]
    """All points that fit, within the limits or not, in the order of `serving_points`."""
    best: ServingPoint
    """The point within the limits with the most tokens per second."""
    frontier: tuple[ServingPoint, ...]
    """Points that no other beats in both tokens per second and time of a token, within the limits or not.

    The point with the least time of a token comes first.
    """
    memory_share: float = MEMORY_SHARE
    """Share of a device's memory that engines may fill."""


def plan_serving(
    config: str, topology: str, asked: ServingRequests, limits: ServingLimits | None = None
) -> ServingPlan:
    """Return the serving points for `hf:CONFIG`, with the best one within the latency limits (None: no limits).

    Raises `UserError` for a model that is no decoder of known form, and for one that fits in no way. A prompt and
    answer beyond the model's positions, and limits that no point satisfies, raise it too.
    """
    decoder, limits = config_decoder(config), limits or ServingLimits()
    if decoder is None:
        raise UserError(f"{config} is no decoder that can be counted; plan a step of it with --serve decode instead.")
    _, fields = read_config(config.removeprefix("hf:"))
    positions, length = fields.get("max_position_embeddings") or fields.get("n_positions"), asked.input + asked.output
    if positions and length > positions:
        raise UserError(
            f"{config} has {positions} positions, and a prompt of {asked.input} tokens with its answer of "
            f"{asked.output} needs {length}."
        )
    place = Topology.parse(topology)
    points = tuple(serving_points(decoder, place, asked, limits))
    if not points:
        least = STORED_BYTES[asked.weights] * decoder.params / place.num_devices
        room = MEMORY_SHARE * place.usable_bytes
        raise UserError(
            f"{config} cannot be served on {place.name}: weights alone are {least / 2**30:.1f} GiB of each device's "
            f"{room / 2**30:.1f} GiB (5 % stay free) when all hold one copy; "
            f"{_ways_out(decoder, place, asked, limits)}."
        )
    allowed = [each for each in points if limits.allows(each)]
    if not allowed:
        raise UserError(
            f"no way to serve {config} on {place.name} keeps the limits; the best there is has {_bests(points)}."
        )
    best = max(allowed, key=lambda each: each.tokens_per_s)
    return ServingPlan(config, decoder, place.name, asked, limits, points, best, _frontier(points))


def _ways_out(decoder: Decoder, place: Topology, asked: ServingRequests, limits: ServingLimits) -> str:
    """Name the fewest devices of the same chip that serve the decoder, and weights of fp8 if these fit instead of bf16.

    If no larger topology serves it, the words are `use more devices`.
    """

    def serves(where: Topology, given: ServingRequests) -> bool:
        """Return True if any serving point fits."""
        return next(iter(serving_points(decoder, where, given, limits)), None) is not None

    narrow = dataclasses.replace(asked, weights="fp8")
    devices = math.ceil(STORED_BYTES[asked.weights] * decoder.params / (MEMORY_SHARE * place.usable_bytes))
    fewest = next((each for each in larger_topologies(place, devices) if serves(each, asked)), None)
    if fewest is None:
        more = "use more devices"
    else:
        more = f"the fewest devices of that chip that serve it are {fewest.num_devices} ({fewest.name})"
    return f"{more}, or use --weights fp8" if asked.weights == "bf16" and serves(place, narrow) else more


def _bests(points: tuple[ServingPoint, ...]) -> str:
    """Describe the least time to a first token, time of a further token and longest gap, each with its point."""
    first, token, gap = (min(points, key=lambda each: getattr(each, name)) for name in ("first_s", "token_s", "gap_s"))

    def words(point: ServingPoint) -> str:
        """Return the degrees and the batch of a point, in parentheses."""
        groups = f", attention {point.engine.attention}" if point.engine.attention > 1 else ""
        return f"(tensor {point.engine.tensor}{groups}, batch {point.batch})"

    return (
        f"a first token after {format_seconds(first.first_s)} {words(first)}, a further token each "
        f"{format_seconds(token.token_s)} {words(token)}, or no gap above {format_seconds(gap.gap_s)} {words(gap)}"
    )


def _frontier(points: tuple[ServingPoint, ...]) -> tuple[ServingPoint, ...]:
    """Return the points that no other beats in both tokens per second and time of a token, the quickest first.

    A point that equals another one in both is left out.
    """
    frontier: list[ServingPoint] = []
    for point in sorted(points, key=lambda each: (each.token_s, -each.tokens_per_s)):
        if not frontier or point.tokens_per_s > frontier[-1].tokens_per_s:
            frontier.append(point)
    return tuple(frontier)
