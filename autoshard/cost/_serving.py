"""What serving a decoder takes, by closed form: one engine or several, prompts and decoding in the same steps.

An engine of `tensor` devices holds `batch` sequences. In a steady state each of them is replaced after `output` tokens,
so that in `output` steps as many prompts are computed as there are sequences: a step is one of decoding and
`batch / output` prompts (continuous batching, prompts in chunks). Engines that decode only have steps without prompts.
"""

import dataclasses
from collections.abc import Iterator

from autoshard.cost._calibration import Calibration
from autoshard.cost._compute import Compute
from autoshard.cost._decoder import Decoder
from autoshard.cost._estimate import StepAsked, layout_estimate
from autoshard.cost._topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class ServingAsked:
    """The requests that are served."""

    input: int
    """How many tokens a prompt has."""
    output: int
    """How many tokens an answer has."""
    weight_bytes: float = 2
    """Bytes of one stored weight."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingPoint:
    """One way to serve on a topology. Times in seconds, sizes in bytes of one device."""

    tensor: int
    """How many devices hold one copy of the weights together."""
    engines: int
    batch: int
    """Sequences that one engine holds at once."""
    prompt_s: float
    """Seconds in which one engine computes a prompt alone: no first token comes sooner."""
    decode_s: float
    """Seconds of a step of decoding without prompts."""
    token_s: float
    """Seconds between two tokens of an answer, with the prompts that come between them."""
    peak_bytes: float
    limit_bytes: int
    output: int
    """How many tokens an answer has."""
    prompt_engines: int = 0
    """Engines, of all, that compute prompts only, for others that decode only; 0: each does both."""

    @property
    def first_s(self) -> float:
        """Seconds until a first token where nobody else waits: the step that is under way, and the prompt."""
        return self.prompt_s + (0.0 if self.prompt_engines else self.token_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers in a second, of all engines."""
        decoded = (self.engines - self.prompt_engines) * self.batch / self.token_s
        return min(decoded, self.prompt_engines / self.prompt_s * self.output) if self.prompt_engines else decoded

    @property
    def fits(self) -> bool:
        """Whether weights and the keys and values of the whole batch at full length can be held."""
        return self.peak_bytes <= self.limit_bytes


def serving_point(
    decoder: Decoder,
    topology: Topology,
    asked: ServingAsked,
    tensor: int,
    batch: int,
    calibration: Calibration | None = None,
) -> ServingPoint:
    """Engines of `tensor` devices each on all of a topology, each with a batch of so many sequences."""
    compute, engines = Compute(topology, calibration), topology.num_devices // tensor

    def step(kind: str, sequences: int, length: int) -> StepAsked:
        return StepAsked(sequences * engines, length, kind, param_bytes=asked.weight_bytes)

    # On the mean a sequence has its prompt and half of its answer behind it.
    decode = layout_estimate(decoder, compute, step("decode", batch, asked.input + asked.output // 2), engines, tensor)
    prompt = layout_estimate(decoder, compute, step("prefill", 1, asked.input), engines, tensor)
    longest = layout_estimate(decoder, compute, step("decode", batch, asked.input + asked.output), engines, tensor)
    token = decode.step_time_s + batch / asked.output * prompt.step_time_s
    peak = longest.peak_bytes + prompt.bytes["temporaries"]
    return ServingPoint(
        tensor, engines, batch, prompt.step_time_s, decode.step_time_s, token, peak, topology.usable_bytes, asked.output
    )


def serving_points(
    decoder: Decoder, topology: Topology, asked: ServingAsked, calibration: Calibration | None = None
) -> Iterator[ServingPoint]:
    """Every tensor degree that divides devices and heads, with batches that double as long as they fit.

    Each is offered with prompts and decoding together, and with the number of engines apart that serves most. What
    keys and values take on their way from one engine to another is not in the times.
    """
    for tensor in range(1, topology.num_devices + 1):
        if topology.num_devices % tensor or decoder.heads % tensor:
            continue
        batch = 1
        while (point := serving_point(decoder, topology, asked, tensor, batch, calibration)).fits:
            yield point
            apart = [
                dataclasses.replace(point, prompt_engines=count, token_s=point.decode_s)
                for count in range(1, point.engines)
            ]
            if apart:
                yield max(apart, key=lambda each: each.tokens_per_s)
            batch *= 2
