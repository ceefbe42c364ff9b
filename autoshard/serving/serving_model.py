"""Cost of serving a decoder in closed form: one engine or several, with prompts and decoding in the same steps.

An engine has one copy of the weights and `batch` sequences. In a steady state each sequence is replaced after `output`
tokens. So a decoding step has on average `batch * input / output` tokens of prompts to compute too. They are computed
in chunks, in some of the steps (chunked prefill, continuous batching). Engines that only decode have none.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from autoshard.cost.calibration import Calibration
from autoshard.cost.compute import Compute
from autoshard.cost.topology import Topology
from autoshard.program import parse_sampling
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.decoder_estimate import StepEstimate, layout_bytes, layout_estimate
from autoshard.serving.decoder_step import Layout, StepAsked


STORED_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Dtypes of stored weights, and of keys and values, and their bytes; their scales are not counted."""
LEAST_CHUNK = 128
"""Least tokens of prompts in a step that computes any."""
MEMORY_SHARE = 0.95
"""Share of a device's memory that is filled.

Plans of traced steps need up to 2 % more than the closed form, and a server has fragments and buffers of its own.
"""
_LOGIT_BITS = 16
"""Bits of a logit, from which tokens are selected."""
_NEAR = 0.98
"""Chunks that serve this share of the best throughput count as equally good.

Longer chunks have earlier first tokens, and longer gaps.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingRequests:
    """The requests to serve, and the dtypes of the stored model."""

    input: int
    """Number of tokens in a prompt."""
    output: int
    """Number of tokens in an answer."""
    weights: str = "bf16"
    """Dtype of stored weights, one of `STORED_BYTES`, which is also the dtype of their matmuls."""
    cache: str = "bf16"
    """Dtype of stored keys and values, one of `STORED_BYTES`."""
    sample: str = "greedy"
    """Selection of tokens, in a form of `parse_sampling`; the vocabulary is split over an engine's devices."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingLimits:
    """Latency limits in seconds."""

    first_s: float = math.inf
    """The longest time until a first token."""
    token_s: float = math.inf
    """The longest mean time of each further token."""
    gap_s: float = math.inf
    """The longest time between any two tokens of an answer."""

    def allows(self, point: "ServingPoint") -> bool:
        """Return True if a serving point is within all limits."""
        return point.first_s <= self.first_s and point.token_s <= self.token_s and point.gap_s <= self.gap_s


@dataclasses.dataclass(frozen=True, slots=True)
class ServingEngine:
    """The devices that share one copy of a model, and the degrees of their splits."""

    tensor: int
    """Number of devices that split the heads of attention."""
    attention: int = 1
    """Number of groups of `tensor` devices, each with its own sequences and all attention weights.

    This is data-parallel attention. All else is split over the devices of all groups.
    """
    experts: int = 1
    """Number of parts of whole experts; with 1 each expert is split over all devices."""

    @property
    def devices(self) -> int:
        """Number of devices in the engine, all groups together."""
        return self.tensor * self.attention


@dataclasses.dataclass(frozen=True, slots=True)
class ServingPoint:
    """One configuration of engines on a topology. Times in seconds, sizes in bytes of one device."""

    engine: ServingEngine
    """The kind of the engines that decode."""
    engines: int
    """Number of all engines, those that only compute prompts included."""
    batch: int
    """Sequences that one engine serves at once."""
    chunk: int
    """Most tokens of prompts in a step of one group of an engine."""
    prompt_s: float
    """Seconds in which one engine computes a prompt, the least time until a first token."""
    decode_s: float
    """Seconds of a decoding step without prompts."""
    added_s: float
    """Seconds that all chunks of a prompt add to decoding steps, over the groups that compute prompts at the same time.

    It is 0 if other engines compute prompts.
    """
    gap_s: float
    """The longest seconds between two tokens of an answer: a step with a whole chunk of prompts."""
    peak_bytes: float
    """Bytes at the end of answers, of the fuller kind of engine if there are two."""
    limit_bytes: int
    """`MEMORY_SHARE` of a device's usable bytes."""
    output: int
    """Number of tokens in an answer."""
    prompt_engines: int = 0
    """Number of engines, of all, that only compute prompts for engines that only decode; 0 if each does both."""
    prompts: ServingEngine | None = None
    """The kind of the engines that only compute prompts; None without such engines."""
    sent_s: float = 0.0
    """Seconds in which a prompt's keys and values are sent over the network to an engine that decodes."""

    @property
    def token_s(self) -> float:
        """Mean seconds between two tokens of an answer, including the prompts computed between them."""
        return self.decode_s + self.batch / self.output * self.added_s

    @property
    def first_s(self) -> float:
        """Seconds until a first token if no other request waits.

        They are those of the current step and the prompt. With separate engines they are those of the prompt, and of
        sending its keys and values to an engine that decodes.
        """
        return self.prompt_s + (self.sent_s if self.prompt_engines else self.token_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second, of all engines.

        Separate engines for prompts limit it to the answers of the prompts that they compute.
        """
        decoded = (self.engines - self.prompt_engines) * self.batch / self.token_s
        if self.prompts is None:
            return decoded
        # Each group of an engine computes one prompt at a time.
        return min(decoded, self.prompt_engines * self.prompts.attention / self.prompt_s * self.output)

    @property
    def fits(self) -> bool:
        """True if the weights and the whole batch's keys and values at full length fit in memory."""
        return self.peak_bytes <= self.limit_bytes


class Engines:
    """Engines of one kind on all of a topology, and the cost of their steps."""

    def __init__(self, decoder: Decoder, compute: Compute, asked: ServingRequests, engine: ServingEngine) -> None:
        self.decoder, self.compute, self.asked, self.engine = decoder, compute, asked, engine
        self.count = compute.topology.num_devices // engine.devices
        self.layout = Layout(self.count, engine.devices, engine.attention, engine.experts)

    @property
    def limit_bytes(self) -> int:
        """`MEMORY_SHARE` of a device's usable bytes, the most that it may fill."""
        return int(MEMORY_SHARE * self.compute.topology.usable_bytes)

    def step(self, kind: str, sequences: int, length: int, chunk: int = 0) -> StepEstimate:
        """Return the estimate of one step of all engines.

        - `kind`: `prefill` or `decode`.
        - `sequences`: number of sequences in each engine.
        - `length`: tokens of a prompt, or in the cache of a decoding sequence.
        - `chunk`: tokens of prompts that each group computes in addition.
        """
        return layout_estimate(self.decoder, self.compute, self._asked(kind, sequences, length, chunk), self.layout)

    def memory_bytes(self, sequences: int, chunk: int = 0, length: int | None = None) -> dict[str, float]:
        """Return the bytes of one device by kind, in a decoding step of engines with `sequences` each.

        - `chunk`: tokens of prompts of each group.
        - `length`: tokens of a sequence in the cache; None for a prompt with its whole answer.
        """
        full = self.asked.input + self.asked.output
        step = self._asked("decode", sequences, full if length is None else length, chunk)
        return layout_bytes(self.decoder, self.compute, step, self.layout)

    @functools.cached_property
    def alone(self) -> StepEstimate:
        """The estimate of a step of whole prompts, one in each group."""
        return self.step("prefill", self.engine.attention, self.asked.input)

    @property
    def sent_s(self) -> float:
        """Seconds in which the keys and values of these prompts are sent to another engine; 0 without a known network.

        Each device sends its part over the network of its host, as if engines were on separate hosts.
        """
        chip = self.compute.topology.chip
        rate = chip.network_bytes_per_s_per_chip * self.compute.calibration.network_efficiency / chip.devices_per_chip
        return self.alone.bytes["cache"] / rate if rate else 0.0

    def batches(self) -> Iterator[int]:
        """Yield batches of one engine that fit: one sequence in each group, then doubled, and the largest.

        All are multiples of the number of groups. Nothing is yielded if one sequence in each group does not fit.
        """
        batch = self.engine.attention
        while self._fits(batch):
            yield batch
            batch *= 2
        fits, too_large = batch // 2 // self.engine.attention, batch // self.engine.attention
        first = fits
        # Bisect between the last doubled batch that fits and the first that does not.
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            fits, too_large = (middle, too_large) if self._fits(middle * self.engine.attention) else (fits, middle)
        if fits > first:
            yield fits * self.engine.attention

    def _fits(self, batch: int) -> bool:
        """Return True if a batch with its smallest chunk fits below `limit_bytes`."""
        return sum(self.memory_bytes(batch, self.chunks(batch)[0]).values()) <= self.limit_bytes

    def chunks(self, batch: int) -> list[int]:
        """Return chunks in tokens of a group, as ascending powers of two.

        The least is at least `LEAST_CHUNK` and absorbs the prompts that arrive at a group in a step with `batch`
        sequences an engine. The largest has at least a whole prompt. There is always one.
        """
        least = max(LEAST_CHUNK, batch / self.engine.attention * self.asked.input / self.asked.output)
        first = max(0, math.ceil(math.log2(least)))
        last = max(first, math.ceil(math.log2(self.asked.input)))
        return [1 << power for power in range(first, last + 1)]

    def _asked(self, kind: str, sequences: int, length: int, chunk: int) -> StepAsked:
        """Return the step of all engines from the sequences of one engine and the prompt tokens of one group."""
        asked = self.asked
        sampling = parse_sampling(asked.sample) if kind == "decode" else None
        return StepAsked(
            sequences * self.count,
            length,
            kind,
            param_bytes=STORED_BYTES[asked.weights],
            multiplied=asked.weights,
            cache_bytes=STORED_BYTES[asked.cache],
            chunk=chunk * self.engine.attention * self.count,
            prompt=asked.input,
            candidates=0 if sampling is None else sampling.candidates,
            rounds=0 if sampling is None else sampling.rounds(_LOGIT_BITS),
        )

    def points(self, batch: int, chunks: list[int]) -> Iterator[ServingPoint]:
        """Yield points with prompts and decoding in the same steps, one for each of the chunks, fitting or not.

        `batch` counts the sequences of one engine, `chunks` the tokens of one group.
        """
        asked, limit = self.asked, self.limit_bytes
        # On average a sequence has its prompt and half of its answer in the cache.
        length = asked.input + asked.output // 2
        decode = self.step("decode", batch, length)
        for chunk in chunks:
            mixed = self.step("decode", batch, length, chunk)
            longer = mixed.step_time_s - decode.step_time_s
            peak = sum(self.memory_bytes(batch, chunk).values())
            added = asked.input / (chunk * self.engine.attention) * longer
            yield ServingPoint(
                self.engine, self.count, batch, chunk, math.ceil(asked.input / chunk) * mixed.step_time_s,
                decode.step_time_s, added, mixed.step_time_s, peak, limit, asked.output,
            )  # fmt: skip


def _separate_engines(
    point: ServingPoint, own: Engines, others: Sequence[Engines], limits: ServingLimits
) -> ServingPoint | None:
    """Return the best point at which the engines of `point` only decode and others only compute prompts.

    The numbers of both use all devices. Points within the limits come first, then those with more tokens per second.
    Ties prefer engines of the same kind for both, then the earlier first token. None if no split of the devices fits.

    - `point`: a point whose engines do both.
    - `own`: the engines of `point`.
    - `others`: the kinds of engine that may compute prompts.
    """
    devices, peak = own.compute.topology.num_devices, sum(own.memory_bytes(point.batch).values())
    options = []
    for other in others:
        for count in range(1, devices // other.engine.devices):
            left, rest = divmod(devices - count * other.engine.devices, own.engine.devices)
            if rest or not left:
                continue
            candidate = dataclasses.replace(
                point, engines=count + left, prompt_engines=count, prompts=other.engine, sent_s=other.sent_s,
                chunk=max(own.asked.input, LEAST_CHUNK), prompt_s=other.alone.step_time_s, added_s=0.0,
                gap_s=point.decode_s, peak_bytes=max(peak, other.alone.peak_bytes),
            )  # fmt: skip
            if candidate.fits:
                options.append(candidate)
    # Ties prefer engines of the same kind.
    return max(
        options, default=None,
        key=lambda each: (limits.allows(each), each.tokens_per_s, each.prompts == each.engine, -each.first_s),
    )  # fmt: skip


def _chosen(points: list[ServingPoint], limits: ServingLimits) -> ServingPoint:
    """Return the best of points that differ in their chunks, from those within the limits, else from all.

    Among those with at least `_NEAR` of the most throughput, it has the least product of `first_s` and `gap_s`.
    """
    allowed = [each for each in points if limits.allows(each)] or points
    most = max(each.tokens_per_s for each in allowed)
    good = [each for each in allowed if each.tokens_per_s >= _NEAR * most]
    return min(good, key=lambda each: each.first_s * each.gap_s)


def serving_point(
    decoder: Decoder,
    topology: Topology,
    asked: ServingRequests,
    engine: ServingEngine,
    batch: int,
    chunk: int | None = None,
    calibration: Calibration | None = None,
) -> ServingPoint:
    """Return the point of one kind of engine on all of a topology, with prompts in decoding steps; it may not fit.

    - `asked`: the requests and dtypes.
    - `engine`: the kind of engine.
    - `batch`: sequences of each engine.
    - `chunk`: tokens of prompts of each group in a step; None for the largest of `Engines.chunks`, a whole prompt.
    - `calibration`: measured efficiencies of the chip; None for `load_calibration` of it.
    """
    engines = Engines(decoder, Compute(topology, calibration), asked, engine)
    return next(engines.points(batch, [engines.chunks(batch)[-1] if chunk is None else chunk]))


def engine_steps(
    decoder: Decoder, topology: Topology, asked: ServingRequests, engine: ServingEngine, batch: int
) -> tuple[StepEstimate, StepEstimate]:
    """Return the estimates of a decoding step without prompts, and of a step with one prompt in each group.

    Both are steps of all engines. The decoding step has `batch` sequences an engine. Its time is that at half of the
    answer, its bytes are those at the end of all answers.
    """
    engines = Engines(decoder, Compute(topology), asked, engine)
    decode = engines.step("decode", batch, asked.input + asked.output // 2)
    with_cache = dataclasses.replace(decode, bytes=engines.memory_bytes(batch))
    return with_cache, engines.step("prefill", engine.attention, asked.input)


def serving_points(
    decoder: Decoder,
    topology: Topology,
    asked: ServingRequests,
    limits: ServingLimits | None = None,
    calibration: Calibration | None = None,
) -> Iterator[ServingPoint]:
    """Yield points of every kind of engine that divides devices and heads, with doubled and the largest batches.

    For each kind and batch there is a point with prompts and decoding in the same steps. Its chunk serves nearly as
    much as any within the limits. If devices allow, another point has separate engines for prompts, of any kind. All
    points fit in memory, but need not be within the limits (None: no limits).
    """
    compute, limits = Compute(topology, calibration), limits or ServingLimits()
    kinds = [Engines(decoder, compute, asked, engine) for engine in engine_kinds(decoder, topology)]
    for_prompts = [each for each in kinds if each.alone.peak_bytes <= each.limit_bytes]
    for engines in kinds:
        for batch in engines.batches():
            point = _chosen([each for each in engines.points(batch, engines.chunks(batch)) if each.fits], limits)
            yield point
            apart = _separate_engines(point, engines, for_prompts, limits)
            if apart is not None:
                yield apart


def engine_kinds(decoder: Decoder, topology: Topology) -> Iterator[ServingEngine]:
    """Yield the engines whose devices divide those of a topology, and whose groups' sizes divide the model's heads.

    Groups in attention are for mixtures of experts. On TPUs, whose servers support them, they are also for more devices
    than a model has heads of keys and values.
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
    """Return the divisors of a number, ascending."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)
