"""A first guess of a decoder's step from its dims alone: no program, no plan, a few formulas for each layout.

Layouts are the usual ones: `data` devices split the batch (training: parameters, gradients and optimizer state too),
`model` devices split heads and MLPs, with the residual stream split between them. Matmuls, traffic and collectives are
priced as plans are; what a plan hides or fuses beyond that is not known here.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from autoshard.cost._calibration import Calibration
from autoshard.cost._collectives import Collectives, Kind
from autoshard.cost._compute import Compute
from autoshard.cost._decoder import Decoder
from autoshard.cost._mesh import make_mesh
from autoshard.cost._topology import Topology
from autoshard.errors import UserError


REMATS = ("none", "dots", "full")
"""What the backward pass computes again, as estimates know it."""
_SPLASH_BACKWARD = 5
"""Passes of matmuls over the scores in the backward kernel, beside two forward ones (see `graph.MATMULS`)."""
_STREAMS = {"norms": 4, "rotary": 2, "product": 3}
"""Times that a layer's elementwise ops read or write a value: two norms, turned queries and keys, the gated product."""
_KERNELS = 4
"""Elementwise kernels of a layer where they are none of a matmul: two norms, turned queries and keys, the product."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepAsked:
    """The step whose memory and time are asked for."""

    batch: int
    seq: int
    """Tokens of a sequence; of a step of decoding those that its cache holds."""
    kind: str = "train"
    """`train`, `infer` (a forward pass), `prefill` or `decode`."""
    remat: str = "none"
    param_bytes: float = 4
    """Bytes of one stored parameter."""
    state_bytes: float = 4
    """Bytes of each of an optimizer's two moments of a parameter."""

    @property
    def training(self) -> bool:
        """Whether there is a backward pass and an update."""
        return self.kind == "train"

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.batch * (1 if self.kind == "decode" else self.seq)


@dataclasses.dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step is guessed to take on one layout. Times in seconds, sizes in bytes of one device."""

    layout: Mapping[str, int]
    """The axes `data` and `model` with their sizes."""
    asked: StepAsked
    step_time_s: float
    compute_s: float
    exposed_s: float
    """Seconds in which devices wait for one another."""
    bytes: Mapping[str, float]
    """Bytes of one device by kind: parameters, optimizer state, gradients, saved, temporaries, cache."""
    limit_bytes: int
    mfu: float

    @property
    def peak_bytes(self) -> float:
        """The sum of all kinds, as if all were at their most at once."""
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        """Whether a device can hold that."""
        return self.peak_bytes <= self.limit_bytes


def estimate_step(
    decoder: Decoder, topology: Topology, asked: StepAsked, calibration: Calibration | None = None
) -> StepEstimate:
    """The fastest layout that fits, or the one of least memory if none does.

    Raises `UserError` for a policy that is not known here, and where no layout divides the batch and the heads.
    """
    if asked.remat not in REMATS:
        raise UserError(f"--remat {asked.remat} is not estimated; give {', '.join(REMATS)}, or plan it.")
    found = list(estimates(decoder, topology, asked, calibration))
    if not found:
        raise UserError(
            f"no layout of the {topology.num_devices} devices of {topology.name} divides a batch of {asked.batch} and "
            f"{decoder.heads} heads; give a batch that is a multiple of {_least_batch(decoder, topology)}."
        )
    fitting = [each for each in found if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.step_time_s)
    return min(found, key=lambda each: each.peak_bytes)


def _least_batch(decoder: Decoder, topology: Topology) -> int:
    """Sequences that some layout divides, with as many of its devices as can be splitting heads."""
    return topology.num_devices // math.gcd(topology.num_devices, decoder.heads)


def estimates(
    decoder: Decoder, topology: Topology, asked: StepAsked, calibration: Calibration | None = None
) -> Iterator[StepEstimate]:
    """One estimate for each layout that divides the batch and the heads."""
    devices, compute = topology.num_devices, Compute(topology, calibration)
    for model in range(1, devices + 1):
        data = devices // model
        if devices % model or asked.batch % data or decoder.heads % model:
            continue
        yield layout_estimate(decoder, compute, asked, data, model)


def layout_estimate(decoder: Decoder, compute: Compute, asked: StepAsked, data: int, model: int) -> StepEstimate:
    """The estimate of one layout: `data` parts of the batch, each on `model` devices."""
    return _Layout(decoder, compute, asked, data, model).estimate()


class _Layout:
    """One decoder's step on `data` times `model` devices."""

    def __init__(self, decoder: Decoder, compute: Compute, asked: StepAsked, data: int, model: int) -> None:
        self.decoder, self.compute, self.asked = decoder, compute, asked
        self.data, self.model = data, model
        topology = compute.topology
        sizes = {name: size for name, size in (("data", data), ("model", model)) if size > 1}
        self.wires = Collectives(make_mesh(topology, sizes or {"data": 1}), compute.calibration)
        self.tokens = asked.tokens // data
        """Tokens of the devices that share a part of the batch."""

    def estimate(self) -> StepEstimate:
        forward, backward = self._layers()
        head, sent = self._head(), self._exchanged()
        passes = 1.0
        if self.asked.training:
            passes = 3.0 if self.asked.remat == "full" else 2.0
            # The backward pass has twice the matmuls of the head, and the layers again if they are computed again.
            again = forward if self.asked.remat == "full" else 0.0
            gathers, scatters = self._gathered(), self._scattered()
            update = float(self.compute.memory_seconds(self._updated_bytes()))
            compute = forward + backward + again + 3 * head + update
            exposed = max(0.0, gathers - forward - head) + max(0.0, gathers + scatters - backward - again - 2 * head)
        else:
            compute, exposed = forward + head, 0.0
        exposed += passes * sent
        flops = self._model_flops()
        step = compute + exposed
        topology = self.compute.topology
        peak = topology.peak_flops("bf16") * topology.num_devices
        return StepEstimate(
            {"data": self.data, "model": self.model}, self.asked, step, compute, exposed, self._bytes(),
            topology.usable_bytes, flops / peak / step,
        )  # fmt: skip

    def _model_flops(self) -> float:
        count = self.decoder.train_flops if self.asked.training else self.decoder.forward_flops
        if self.asked.kind == "decode":
            return count(self.tokens * self.data, self.asked.seq, causal=False)
        return count(self.tokens * self.data, self.asked.seq)

    def _layers(self) -> tuple[float, float]:
        """Seconds of all layers, forward, and backward without what is computed again."""
        decoder, tokens, model = self.decoder, self.tokens, self.model
        width, layers = decoder.width, decoder.layers + decoder.ahead
        value = decoder.head_size if decoder.latent is None else decoder.latent.value
        out = decoder.heads * value
        joined = decoder.attention_params / width - out
        gates = 2 if decoder.gated else 1
        sparse = 0 if decoder.experts == 1 else layers - decoder.dense_layers
        matmuls = [(layers, tokens, joined / model, width, 1.0), (layers, tokens, width, out / model, 1.0)]
        if sparse < layers:
            inner = decoder.mlp_width / model
            count = layers - sparse
            matmuls += [(count, tokens, gates * inner, width, 1.0), (count, tokens, width, inner, 1.0)]
        if sparse:
            experts = min(decoder.experts, max(1.0, tokens * decoder.active_experts))
            here = max(1.0, experts / model)
            rows = tokens * decoder.active_experts / (here * model)
            inner = float(decoder.expert_inner)
            matmuls += [(sparse, rows, gates * inner, width, here), (sparse, rows, width, inner, here)]
            shared = decoder.shared_experts * inner / model
            if shared:
                matmuls += [(sparse, tokens, gates * shared, width, 1.0), (sparse, tokens, width, shared, 1.0)]
        dots = [count * self._dot(m, n, k, b) for count, m, n, k, b in matmuls]
        turned = [
            count * (float(self.compute.dot_seconds(m, k, n, b)) + float(self.compute.dot_seconds(k, n, m, b)))
            for count, m, n, k, b in matmuls
        ]
        streams = self._streamed()
        forward = sum(dots) + self._attention(2) + streams
        if not self.asked.training:
            return forward, 0.0
        return forward, sum(turned) + self._attention(_SPLASH_BACKWARD) + 2 * streams

    def _dot(self, m: float, n: float, k: float, batch: float) -> float:
        """A matmul with weights `[k, n]`; those that are stored in a byte are multiplied so."""
        if self.asked.training or self.asked.param_bytes >= 2:
            return float(self.compute.dot_seconds(m, n, k, batch))
        size = batch * (2.0 * (m * k + m * n) + self.asked.param_bytes * k * n)
        return float(self.compute.dot_seconds(m, n, k, batch, "fp8", size))

    def _attention(self, passes: int) -> float:
        decoder, asked = self.decoder, self.asked
        sequences = asked.batch / self.data
        layers = decoder.layers + decoder.ahead
        sizes = (decoder.head_size,) * 2
        if decoder.latent is not None:
            sizes = (decoder.latent.head_size, decoder.latent.value)
        if asked.kind == "decode":
            # The cache is read once, whatever queries share it.
            return float(self.compute.memory_seconds(decoder.kv_bytes(sequences * asked.seq) / self._kv_parts()))
        seen = decoder.attention_flops_per_token(asked.seq) / (2.0 * decoder.heads * sum(sizes) * layers)
        scores = sequences * asked.seq * seen * decoder.heads / self.model
        if self.compute.topology.traits.attention == "plain":
            rows = sequences * decoder.heads / self.model
            pair = [
                float(self.compute.dot_seconds(asked.seq, n, k, rows))
                for n, k in ((asked.seq, sizes[0]), (sizes[1], asked.seq))
            ]
            return layers * sum(pair) * passes / 2
        size = 2.0 * self.tokens * (2 * decoder.heads / self.model) * sum(sizes)
        head, value = sizes
        return layers * float(self.compute.attention_seconds(scores, head, value, passes, "bf16", size))

    def _kv_parts(self) -> int:
        """Parts that a sequence's keys and values are in: heads are split, the last few are held by several devices."""
        return min(self.model, self.decoder.kv_heads)

    def _streamed(self) -> float:
        """Elementwise ops of all layers, forward; where a compiler fuses them into matmuls, norms and turning alone."""
        decoder = self.decoder
        widths = {
            "norms": decoder.width,
            "rotary": (decoder.heads + decoder.kv_heads) * decoder.head_size,
            "product": decoder.mlp_width if decoder.experts == 1 else decoder.active_experts * decoder.expert_inner,
        }
        if self.compute.topology.traits.fuses_into_matmuls:
            del widths["product"]
        elements = sum(_STREAMS[name] * size for name, size in widths.items())
        size = 2.0 * self.tokens / self.model * elements
        each = float(self.compute.memory_seconds(size))
        if not self.compute.topology.traits.fuses_into_matmuls:
            each += _KERNELS * self.compute.calibration.op_overhead_s
        return (decoder.layers + decoder.ahead) * each

    def _head(self) -> float:
        rows = self.asked.batch / self.data if self.asked.kind in ("prefill", "decode") else self.tokens
        columns = self.decoder.vocabulary / self.model
        return (1 + self.decoder.ahead) * float(self.compute.dot_seconds(rows, columns, self.decoder.width))

    def _collective(self, kind: Kind, axis: str, size_bytes: float, devices: int) -> float:
        return float(self.wires.time(kind, (axis,), size_bytes)) if devices > 1 else 0.0

    def _exchanged(self) -> float:
        """Seconds of one pass over the layers that `model` devices send one another what they need to go on."""
        size = 2.0 * self.tokens * self.decoder.width
        both = sum(self._collective(kind, "model", size, self.model) for kind in ("all-gather", "reduce-scatter"))
        return 2 * (self.decoder.layers + self.decoder.ahead) * both

    def _gathered(self) -> float:
        return self._collective("all-gather", "data", 2.0 * self.decoder.params / self.model, self.data)

    def _scattered(self) -> float:
        return self._collective("reduce-scatter", "data", 2.0 * self.decoder.params / self.model, self.data)

    def _updated_bytes(self) -> float:
        """Read and written by the update: parameter and both moments, and the gradient."""
        asked = self.asked
        held = self.decoder.params / (self.data * self.model)
        return held * (2 * (asked.param_bytes + 2 * asked.state_bytes) + 4)

    def _bytes(self) -> dict[str, float]:
        decoder, asked, model = self.decoder, self.asked, self.model
        parts = model * (self.data if asked.training else 1)
        found = {"parameters": asked.param_bytes * decoder.params / parts}
        columns = decoder.vocabulary / model
        widths = decoder.activation_widths()
        if decoder.experts > 1:
            inner = (decoder.active_experts + decoder.shared_experts) * decoder.expert_inner
            widths |= {name: inner for name in ("gate", "up", "product") if name in widths}
        layer = 2.0 * self.tokens / model * sum(widths.values())
        if asked.training:
            found["optimizer state"] = 2 * asked.state_bytes * decoder.params / parts
            found["gradients"] = asked.param_bytes * decoder.params / parts
            kept = {
                "full": ("input",),
                "dots": tuple(set(widths) - {"normed", "mlp_normed", "product"}),
                "none": tuple(widths),
            }[asked.remat]
            layers = decoder.layers + decoder.ahead
            found["saved"] = 2.0 * layers * self.tokens / model * sum(widths[name] for name in kept)
            gathered = 2.0 * 2.0 * decoder.params / layers / model if self.data > 1 else 0.0
            # Logits and their gradient are alive between the last layer and its backward pass, not beside a layer.
            found["temporaries"] = max(layer + gathered, 4.0 * self.tokens * columns)
            return found
        if asked.kind in ("prefill", "decode"):
            found["cache"] = decoder.kv_bytes(asked.batch / self.data * asked.seq) / self._kv_parts()
        rows = self.tokens if asked.kind == "infer" else asked.batch / self.data
        found["temporaries"] = layer + 4.0 * rows * columns
        return found
