"""What serving a decoder takes, by closed form: one engine or several, prompts and decoding in the same steps.

An engine holds one copy of the weights and `batch` sequences. In a steady state each of them is replaced after
`output` tokens, so that a step of decoding has on the mean `batch * input / output` tokens of prompts beside it: they
come in chunks, in some of the steps (chunked prefill, continuous batching). Engines that decode only have none.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from autoshard.cost.calibration import Calibration
from autoshard.cost.compute import Compute
from autoshard.cost.topology import Topology
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.decoder_estimate import Layout, StepAsked, StepEstimate, layout_bytes, layout_estimate


STORED_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Dtypes of stored weights, and of keys and values, and their bytes; their scales are not counted."""
LEAST_CHUNK = 128
"""Tokens of prompts that a step takes at least."""
MEMORY_SHARE = 0.95
"""The share of a device's memory that is filled: plans of traced steps need up to 2 % more than the closed form, and a
server has fragments and buffers of its own."""
_NEAR = 0.98
"""Chunks that serve nearly as much as the best are as good; longer ones have sooner first tokens, and longer gaps."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingAsked:
    """The requests that are served, and how the model is stored."""

    input: int
    """How many tokens a prompt has."""
    output: int
    """How many tokens an answer has."""
    weights: str = "bf16"
    """Dtype of stored weights, of `STORED_BYTES`, which is also what they are multiplied in."""
    cache: str = "bf16"
    """Dtype of stored keys and values, of `STORED_BYTES`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingLimits:
    """What is allowed at most, in seconds."""

    first_s: float = math.inf
    """The longest time until a first token."""
    token_s: float = math.inf
    """The longest time of each further token, on the mean."""
    gap_s: float = math.inf
    """The longest time between any two tokens of an answer."""

    def keeps(self, point: "ServingPoint") -> bool:
        """Whether a way to serve stays within all of them."""
        return point.first_s <= self.first_s and point.token_s <= self.token_s and point.gap_s <= self.gap_s


@dataclasses.dataclass(frozen=True, slots=True)
class ServingEngine:
    """The devices that hold one copy of a model, and what they split."""

    tensor: int
    """Devices that split the heads of attention."""
    attention: int = 1
    """Groups of so many devices, each with its part of the sequences and with all weights of attention
    (data-parallel attention); everything else is split over all of them."""
    experts: int = 1
    """Parts of whole experts; with 1 each expert is split over all devices."""

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return self.tensor * self.attention


@dataclasses.dataclass(frozen=True, slots=True)
class ServingPoint:
    """One way to serve on a topology. Times in seconds, sizes in bytes of one device."""

    engine: ServingEngine
    engines: int
    batch: int
    """Sequences that one engine holds at once."""
    chunk: int
    """Tokens of prompts that a step of one group of an engine takes at most."""
    prompt_s: float
    """Seconds in which one engine computes a prompt: no first token comes sooner."""
    decode_s: float
    """Seconds of a step of decoding without prompts."""
    added_s: float
    """Seconds by which all chunks of a prompt make steps of decoding longer; 0 where other engines compute it."""
    gap_s: float
    """The longest time between two tokens of an answer: a step with a whole chunk of prompts."""
    peak_bytes: float
    limit_bytes: int
    output: int
    """How many tokens an answer has."""
    prompt_engines: int = 0
    """Engines, of all, that compute prompts only, for others that decode only; 0: each does both."""
    prompts: ServingEngine | None = None
    """What those are; None where there are none."""
    sent_s: float = 0.0
    """Seconds in which keys and values of a prompt go over the network from one of those to one that decodes."""

    @property
    def token_s(self) -> float:
        """Seconds between two tokens of an answer on the mean, with the prompts that come between them."""
        return self.decode_s + self.batch / self.output * self.added_s

    @property
    def first_s(self) -> float:
        """Seconds until a first token where nobody else waits: the step that is under way, and the prompt; or the
        prompt, and its keys and values on their way to an engine that decodes."""
        return self.prompt_s + (self.sent_s if self.prompt_engines else self.token_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers in a second, of all engines."""
        decoded = (self.engines - self.prompt_engines) * self.batch / self.token_s
        if self.prompts is None:
            return decoded
        # Each group of an engine has a prompt at once.
        return min(decoded, self.prompt_engines * self.prompts.attention / self.prompt_s * self.output)

    @property
    def fits(self) -> bool:
        """Whether weights and the keys and values of the whole batch at full length can be held."""
        return self.peak_bytes <= self.limit_bytes


class _Engines:
    """Engines of one kind on all of a topology, and what their steps take."""

    def __init__(self, decoder: Decoder, compute: Compute, asked: ServingAsked, engine: ServingEngine) -> None:
        self.decoder, self.compute, self.asked, self.engine = decoder, compute, asked, engine
        self.count = compute.topology.num_devices // engine.devices
        self.layout = Layout(self.count, engine.devices, engine.attention, engine.experts)

    @property
    def limit_bytes(self) -> int:
        """What a device may hold."""
        return int(MEMORY_SHARE * self.compute.topology.usable_bytes)

    def step(self, kind: str, sequences: int, length: int, chunk: int = 0) -> StepEstimate:
        return layout_estimate(self.decoder, self.compute, self._asked(kind, sequences, length, chunk), self.layout)

    def held(self, sequences: int, chunk: int = 0) -> dict[str, float]:
        """Bytes of one device in a step of decoding at the end of an answer."""
        step = self._asked("decode", sequences, self.asked.input + self.asked.output, chunk)
        return layout_bytes(self.decoder, self.compute, step, self.layout)

    @functools.cached_property
    def alone(self) -> StepEstimate:
        """A step of whole prompts, one in each group."""
        return self.step("prefill", self.engine.attention, self.asked.input)

    @property
    def sent_s(self) -> float:
        """Seconds in which keys and values of those go to another engine: each device sends what it holds over the
        network of its host, as if engines were on hosts of their own."""
        chip = self.compute.topology.chip
        rate = chip.network_bytes_per_s_per_chip * self.compute.calibration.network_efficiency / chip.devices_per_chip
        return self.alone.bytes["cache"] / rate if rate else 0.0

    def batches(self) -> Iterator[int]:
        """Batches that fit: for a sequence in each group, doubled, and the largest."""
        batch = self.engine.attention
        while self._fits(batch):
            yield batch
            batch *= 2
        fits, too_large = batch // 2 // self.engine.attention, batch // self.engine.attention
        first = fits
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            fits, too_large = (middle, too_large) if self._fits(middle * self.engine.attention) else (fits, middle)
        if fits > first:
            yield fits * self.engine.attention

    def _fits(self, batch: int) -> bool:
        return sum(self.held(batch, self.chunks(batch)[0]).values()) <= self.limit_bytes

    def chunks(self, batch: int) -> list[int]:
        """Powers of two: enough for the prompts that come in to a group, and no longer than takes a whole one."""
        least = max(LEAST_CHUNK, batch / self.engine.attention * self.asked.input / self.asked.output)
        first = max(0, math.ceil(math.log2(least)))
        last = max(first, math.ceil(math.log2(self.asked.input)))
        return [1 << power for power in range(first, last + 1)]

    def _asked(self, kind: str, sequences: int, length: int, chunk: int) -> StepAsked:
        asked = self.asked
        return StepAsked(
            sequences * self.count,
            length,
            kind,
            param_bytes=STORED_BYTES[asked.weights],
            multiplied=asked.weights,
            cache_bytes=STORED_BYTES[asked.cache],
            chunk=chunk * self.engine.attention * self.count,
            prompt=asked.input,
        )

    def points(self, batch: int, chunks: list[int]) -> Iterator[ServingPoint]:
        """Prompts and decoding together, with each of the chunks."""
        asked, limit = self.asked, self.limit_bytes
        # On the mean a sequence has its prompt and half of its answer behind it.
        length = asked.input + asked.output // 2
        decode = self.step("decode", batch, length)
        for chunk in chunks:
            mixed = self.step("decode", batch, length, chunk)
            longer = mixed.step_time_s - decode.step_time_s
            peak = sum(self.held(batch, chunk).values())
            added = asked.input / (chunk * self.engine.attention) * longer
            yield ServingPoint(
                self.engine, self.count, batch, chunk, math.ceil(asked.input / chunk) * mixed.step_time_s,
                decode.step_time_s, added, mixed.step_time_s, peak, limit, asked.output,
            )  # fmt: skip


def _apart(
    point: ServingPoint, own: _Engines, others: Sequence[_Engines], limits: ServingLimits
) -> ServingPoint | None:
    """The engines of a point decoding only, and others for prompts, of which there are as many of each as serve most
    within the limits; None where devices are too few."""
    devices, peak = own.compute.topology.num_devices, sum(own.held(point.batch).values())
    options = []
    for other in others:
        for count in range(1, devices // other.engine.devices):
            left, rest = divmod(devices - count * other.engine.devices, own.engine.devices)
            if rest or not left:
                continue
            made = dataclasses.replace(
                point, engines=count + left, prompt_engines=count, prompts=other.engine, sent_s=other.sent_s,
                chunk=max(own.asked.input, LEAST_CHUNK), prompt_s=other.alone.step_time_s, added_s=0.0,
                gap_s=point.decode_s, peak_bytes=max(peak, other.alone.peak_bytes),
            )  # fmt: skip
            if made.fits:
                options.append(made)
    # Of equals engines of the same kind.
    return max(
        options, default=None,
        key=lambda each: (limits.keeps(each), each.tokens_per_s, each.prompts == each.engine, -each.first_s),
    )  # fmt: skip


def _chosen(points: list[ServingPoint], limits: ServingLimits) -> ServingPoint:
    """Of ways that differ in their chunks one within the limits, if any is, that serves nearly most, with the least
    product of the time to a first token and the longest gap."""
    kept = [each for each in points if limits.keeps(each)] or points
    most = max(each.tokens_per_s for each in kept)
    good = [each for each in kept if each.tokens_per_s >= _NEAR * most]
    return min(good, key=lambda each: each.first_s * each.gap_s)


def serving_point(
    decoder: Decoder,
    topology: Topology,
    asked: ServingAsked,
    engine: ServingEngine,
    batch: int,
    chunk: int | None = None,
    calibration: Calibration | None = None,
) -> ServingPoint:
    """Such engines on all of a topology, each with a batch of so many sequences; without a `chunk` whole prompts."""
    engines = _Engines(decoder, Compute(topology, calibration), asked, engine)
    return next(engines.points(batch, [engines.chunks(batch)[-1] if chunk is None else chunk]))


def engine_steps(
    decoder: Decoder, topology: Topology, asked: ServingAsked, engine: ServingEngine, batch: int
) -> tuple[StepEstimate, StepEstimate]:
    """A step of decoding of `batch` sequences without prompts, in a cache for whole answers, and one of a prompt in
    each group."""
    engines = _Engines(decoder, Compute(topology), asked, engine)
    decode = engines.step("decode", batch, asked.input + asked.output // 2)
    held = dataclasses.replace(decode, bytes=engines.held(batch))
    return held, engines.step("prefill", engine.attention, asked.input)


def serving_points(
    decoder: Decoder,
    topology: Topology,
    asked: ServingAsked,
    limits: ServingLimits | None = None,
    calibration: Calibration | None = None,
) -> Iterator[ServingPoint]:
    """Every kind of engine that divides devices and heads, with batches that double as long as they fit, and the
    largest.

    Each is offered with prompts and decoding together, in chunks that serve nearly as much as any within the limits,
    and with prompts on engines of their own, of any kind.
    """
    compute, limits = Compute(topology, calibration), limits or ServingLimits()
    kinds = [_Engines(decoder, compute, asked, engine) for engine in engine_kinds(decoder, topology)]
    for_prompts = [each for each in kinds if each.alone.peak_bytes <= each.limit_bytes]
    for engines in kinds:
        for batch in engines.batches():
            point = _chosen([each for each in engines.points(batch, engines.chunks(batch)) if each.fits], limits)
            yield point
            apart = _apart(point, engines, for_prompts, limits)
            if apart is not None:
                yield apart


def engine_kinds(decoder: Decoder, topology: Topology) -> Iterator[ServingEngine]:
    """Engines whose devices divide those of a topology, and their groups its heads.

    Attention by groups is for mixtures of experts, and on TPUs, where servers have it, for more devices than a model
    has heads of keys and values.
    """
    kv_heads = 1 if decoder.latent is not None else decoder.kv_heads
    for devices in _divisors(topology.num_devices):
        grouped = decoder.experts > 1 or (topology.traits.serves_by_mesh and devices > kv_heads)
        for attention in _divisors(devices) if grouped else (1,):
            if decoder.heads % (devices // attention):
                continue
            yield ServingEngine(devices // attention, attention)
            if devices > 1 and decoder.experts > 1 and decoder.experts % devices == 0:
                yield ServingEngine(devices // attention, attention, devices)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)
