"""A first guess of a decoder's step from its dims alone: no program, no plan, a few formulas for each layout.

Layouts are the usual ones: `data` devices split the batch (training: parameters, gradients and optimizer state too),
`model` devices split heads and MLPs, with the residual stream split between them. Matmuls, traffic and collectives are
priced as plans are; what a plan hides or fuses beyond that is not known here.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from autoshard.cost.calibration import Calibration
from autoshard.cost.collectives import Collectives, Kind
from autoshard.cost.compute import Compute
from autoshard.cost.device_mesh import make_mesh
from autoshard.cost.topology import Topology
from autoshard.errors import UserError
from autoshard.serving.decoder_counts import Decoder


REMATS = ("none", "dots", "full")
"""What the backward pass computes again, as estimates know it."""
_SPLASH_BACKWARD = 5
"""Passes of matmuls over the scores in the backward kernel, beside two forward ones (see `graph.MATMULS`)."""
_STREAMS = {"norms": 4, "rotary": 2, "product": 3}
"""Times that a layer's elementwise ops read or write a value: two norms, turned queries and keys, the gated product."""
_KERNELS = 4
"""Elementwise kernels of a layer where they are none of a matmul: two norms, turned queries and keys, the product."""
_QUANTISED = 4
"""Further ones where weights have a byte: the inputs of a layer's matmuls are brought to theirs."""


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
    multiplied: str = "bf16"
    """Dtype in which weights of layers are multiplied; embedding and head have at least 16 bits."""
    cache_bytes: float = 2
    """Bytes of each element of the key-value cache."""
    chunk: int = 0
    """Tokens of prompts that a step of decoding computes too, of the whole batch."""
    prompt: int = 1
    """Tokens of a prompt of which those are a chunk."""

    @property
    def training(self) -> bool:
        """Whether there is a backward pass and an update."""
        return self.kind == "train"

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.batch + self.chunk if self.kind == "decode" else self.batch * self.seq


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How devices share a step."""

    data: int
    """Copies of the model, each with its part of the batch."""
    model: int
    """Devices that hold one copy."""
    groups: int = 1
    """Groups of those, each of which has a part of a copy's batch in attention, and all of attention's weights."""
    experts: int | None = None
    """Parts of whole experts; a part's devices split each of its experts. None: as many as divide both."""

    @property
    def heads(self) -> int:
        """Devices that split the heads of attention."""
        return self.model // self.groups

    def expert_parts(self, decoder: Decoder) -> int:
        """Parts of whole experts that a copy has."""
        return math.gcd(self.model, decoder.experts) if self.experts is None else self.experts


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
        yield layout_estimate(decoder, compute, asked, Layout(data, model))


def layout_estimate(decoder: Decoder, compute: Compute, asked: StepAsked, layout: Layout) -> StepEstimate:
    """The estimate of one layout."""
    return _Estimated(decoder, compute, asked, layout).estimate()


def layout_bytes(decoder: Decoder, compute: Compute, asked: StepAsked, layout: Layout) -> dict[str, float]:
    """What a device holds by that estimate, as `StepEstimate.bytes`."""
    return _Estimated(decoder, compute, asked, layout).held()


class _Estimated:
    """One decoder's step on the devices of one layout."""

    def __init__(self, decoder: Decoder, compute: Compute, asked: StepAsked, layout: Layout) -> None:
        self.decoder, self.compute, self.asked, self.layout = decoder, compute, asked, layout
        self.data, self.model = layout.data, layout.model
        axes = (("data", layout.data), ("group", layout.groups), ("model", layout.heads))
        sizes = {name: size for name, size in axes if size > 1}
        self.wires = Collectives(make_mesh(compute.topology, sizes or {"data": 1}), compute.calibration)
        self.tokens = asked.tokens // layout.data
        """Tokens of one copy."""
        self.sequences = asked.batch / layout.data / layout.groups
        """Sequences of one group in attention; of prompts whole ones."""
        self.rows = self.tokens / layout.groups
        """Tokens of one group in attention."""
        if asked.kind != "decode":
            self.sequences = float(math.ceil(self.sequences))
            self.rows = self.sequences * asked.seq

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
            {"data": self.data, "model": self.model}, self.asked, step, compute, exposed, self.held(),
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
        heads = self.layout.heads
        matmuls = [(layers, self.rows, joined / heads, width, 1.0), (layers, self.rows, width, out / heads, 1.0)]
        if sparse < layers:
            inner = decoder.mlp_width / model
            count = layers - sparse
            matmuls += [(count, tokens, gates * inner, width, 1.0), (count, tokens, width, inner, 1.0)]
        if sparse:
            parts, inner = self.layout.expert_parts(decoder), float(decoder.expert_inner)
            # Of the busiest part's experts those that get any token, as if each token chose evenly.
            chosen = decoder.experts * -math.expm1(tokens * math.log1p(-decoder.active_experts / decoder.experts))
            here = max(1.0, chosen / parts)
            rows, split = tokens * decoder.active_experts / (here * parts), parts * inner / model
            matmuls += [(sparse, rows, gates * split, width, here), (sparse, rows, width, split, here)]
            shared = decoder.shared_experts * inner / model
            if shared:
                matmuls += [(sparse, tokens, gates * shared, width, 1.0), (sparse, tokens, width, shared, 1.0)]
        dots = [count * self._dot(m, n, k, b) for count, m, n, k, b in matmuls]
        streams = self._streamed()
        forward = sum(dots) + self._attention(2) + streams
        if not self.asked.training:
            return forward, 0.0
        turned = [
            count * (float(self.compute.dot_seconds(m, k, n, b)) + float(self.compute.dot_seconds(k, n, m, b)))
            for count, m, n, k, b in matmuls
        ]
        return forward, sum(turned) + self._attention(_SPLASH_BACKWARD) + 2 * streams

    def _dot(self, m: float, n: float, k: float, batch: float) -> float:
        """A matmul with weights `[k, n]`; those that are stored in a byte are multiplied so."""
        if self.asked.training or self.asked.param_bytes >= 2:
            return float(self.compute.dot_seconds(m, n, k, batch))
        size = batch * (2.0 * (m * k + m * n) + self.asked.param_bytes * k * n)
        return float(self.compute.dot_seconds(m, n, k, batch, self.asked.multiplied, size))

    def _attention(self, passes: int) -> float:
        asked = self.asked
        if asked.kind != "decode":
            return self._over_scores(self.sequences, asked.seq, self.rows, passes)
        decoder, layers = self.decoder, self.decoder.layers + self.decoder.ahead
        # The cache is read once, whatever queries share it.
        size = decoder.kv_bytes(self.sequences * asked.seq, asked.cache_bytes) / self._kv_parts()
        seconds = float(self.compute.memory_seconds(size))
        if decoder.latent is not None:  # all heads share it, as rows of one matmul
            rows, inner = decoder.heads / self.layout.heads, decoder.latent.key_rank
            both = (
                self.compute.matmul_seconds(rows, asked.seq, inner + decoder.latent.turned, self.sequences),
                self.compute.matmul_seconds(rows, inner, asked.seq, self.sequences),
            )
            seconds = max(seconds, layers * float(sum(both)))
        seconds += layers * self.compute.calibration.op_overhead_s
        if asked.chunk:
            tokens = asked.chunk / self.data / self.layout.groups
            seconds += self._over_scores(tokens / asked.prompt, asked.prompt, tokens, passes)
        return seconds

    def _over_scores(self, sequences: float, length: int, tokens: float, passes: int) -> float:
        """Seconds of attention of one group, in all layers, to sequences by their own tokens."""
        decoder, heads = self.decoder, self.layout.heads
        layers = decoder.layers + decoder.ahead
        sizes = (decoder.head_size,) * 2
        if decoder.latent is not None:
            sizes = (decoder.latent.head_size, decoder.latent.value)
        seen = decoder.attention_flops_per_token(length) / (2.0 * decoder.heads * sum(sizes) * layers)
        scores = sequences * length * seen * decoder.heads / heads
        if self.compute.topology.traits.attention == "plain":
            rows = sequences * decoder.heads / heads
            pair = [
                float(self.compute.dot_seconds(length, n, k, rows)) for n, k in ((length, sizes[0]), (sizes[1], length))
            ]
            return layers * sum(pair) * passes / 2
        size = 2.0 * tokens * (2 * decoder.heads / heads) * sum(sizes)
        head, value = sizes
        return layers * float(self.compute.attention_seconds(scores, head, value, passes, "bf16", size))

    def _kv_parts(self) -> int:
        """Parts that a sequence's keys and values are in: heads are split, the last few are held by several devices.

        What latent attention keeps has no heads, so that all devices hold all of it.
        """
        return 1 if self.decoder.latent is not None else min(self.layout.heads, self.decoder.kv_heads)

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
            each += self._kernels() * self.compute.calibration.op_overhead_s
        return (decoder.layers + decoder.ahead) * each

    def _kernels(self) -> int:
        """Elementwise kernels of a layer, started one by one."""
        normed = 2 if self.decoder.qk_norm else 0
        kept = 1 if self.asked.kind in ("prefill", "decode") else 0  # keys and values go to the cache
        return _KERNELS + normed + kept + (_QUANTISED if self.asked.param_bytes < 2 else 0)

    def _head(self) -> float:
        rows = self.asked.batch / self.data if self.asked.kind in ("prefill", "decode") else self.tokens
        columns = self.decoder.vocabulary / self.model
        return (1 + self.decoder.ahead) * float(self.compute.dot_seconds(rows, columns, self.decoder.width))

    def _collective(self, kind: Kind, axes: tuple[str, ...], size_bytes: float, devices: int) -> float:
        return float(self.wires.time(kind, axes, size_bytes)) if devices > 1 else 0.0

    def _exchanged(self) -> float:
        """Seconds of one pass over the layers that a copy's devices send one another what they need to go on.

        Attention takes the tokens of its group, everything else those of all groups.
        """
        layers, layout = self.decoder.layers + self.decoder.ahead, self.layout
        each = 2.0 * self.decoder.width
        all_of_it = tuple(name for name, size in (("group", layout.groups), ("model", layout.heads)) if size > 1)
        kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter")
        within = sum(self._collective(kind, ("model",), each * self.rows, layout.heads) for kind in kinds)
        whole = sum(self._collective(kind, all_of_it, each * self.tokens, self.model) for kind in kinds)
        return layers * (within + whole)

    def _gathered(self) -> float:
        return self._collective("all-gather", ("data",), 2.0 * self.decoder.params / self.model, self.data)

    def _scattered(self) -> float:
        return self._collective("reduce-scatter", ("data",), 2.0 * self.decoder.params / self.model, self.data)

    def _updated_bytes(self) -> float:
        """Read and written by the update: parameter and both moments, and the gradient."""
        asked = self.asked
        held = self.decoder.params / (self.data * self.model)
        return held * (2 * (asked.param_bytes + 2 * asked.state_bytes) + 4)

    def held(self) -> dict[str, float]:
        decoder, asked, model = self.decoder, self.asked, self.model
        parts = model * (self.data if asked.training else 1)
        # Each group has attention's weights. Those of embedding and head are not stored in a byte.
        ends = (1 if decoder.tied else 2) * decoder.vocabulary * decoder.width
        attention = (decoder.layers + decoder.ahead) * decoder.attention_params
        again = (self.layout.groups - 1) * attention
        stored = asked.param_bytes * (decoder.params - ends + again) + max(2.0, asked.param_bytes) * ends
        found = {"parameters": stored / parts}
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
            found["cache"] = decoder.kv_bytes(self.sequences * asked.seq, asked.cache_bytes) / self._kv_parts()
        rows = self.tokens if asked.kind == "infer" else asked.batch / self.data
        found["temporaries"] = layer + 4.0 * rows * columns
        return found
