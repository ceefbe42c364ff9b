"""A first estimate of a decoder's step from its dims alone, without a program or a plan, by a few formulas per layout.

The layouts are the usual ones. `data` devices split the batch, and in training also parameters, gradients and optimizer
state. `model` devices split heads and MLPs, with the residual stream split between them. Matmuls, traffic and
collectives are priced as in plans. Overlap and fusion beyond that are not modelled.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from autoshard.cost.calibration import Calibration
from autoshard.cost.collectives import Collectives, Kind
from autoshard.cost.compute import Compute, smooth_max
from autoshard.cost.device_mesh import make_mesh
from autoshard.cost.topology import Topology
from autoshard.errors import UserError
from autoshard.program import kernel_work
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.decoder_memory import kv_parts, saved_bytes, step_bytes
from autoshard.serving.decoder_step import REMATS, Layout, StepAsked


_SPLASH_BACKWARD = 5
"""Passes of matmuls over the scores in the backward kernel; the forward kernel has two (see `graph.MATMULS`)."""
_STREAMS = {"norms": 4, "rotary": 2, "product": 3}
"""Reads and writes of a value by a layer's elementwise ops: two norms, rotated queries and keys, the gated product."""
_KERNELS = 4
"""Elementwise kernels of a layer outside of matmuls: two norms, rotated queries and keys, the product."""
_QUANTISED = 4
"""Further kernels of a layer with weights of one byte, which quantise the inputs of its matmuls."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimated cost of a step on one layout. Times in seconds, sizes in bytes of one device."""

    layout: Mapping[str, int]
    """The axes `data` and `model` with their sizes."""
    asked: StepAsked
    step_time_s: float
    """Sum of `compute_s` and `exposed_s`."""
    compute_s: float
    """Seconds of matmuls, attention, elementwise ops and the optimizer's update."""
    exposed_s: float
    """Seconds in which devices wait for collectives."""
    bytes: Mapping[str, float]
    """Bytes of one device by kind: parameters, optimizer state, gradients, saved, temporaries, cache."""
    limit_bytes: int
    """Usable bytes of a device's memory."""
    mfu: float
    """Model FLOPs over those that all devices do in bf16 at their peak in the step's time, as a fraction."""

    @property
    def peak_bytes(self) -> float:
        """The sum of all kinds, as if all had their peak at the same time."""
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        """True if the peak fits in a device's memory."""
        return self.peak_bytes <= self.limit_bytes


def estimate_step(
    decoder: Decoder, topology: Topology, asked: StepAsked, calibration: Calibration | None = None
) -> StepEstimate:
    """Return the estimate of the fastest layout of all devices that fits, or of the one with least memory if none does.

    `calibration` has the chip's measured efficiencies; None stands for `load_calibration` of it. Layouts are those of
    `estimates`. Raises `UserError` for an unknown remat policy, and if no layout divides the batch and the heads.
    """
    if asked.remat not in REMATS:
        raise UserError(f"--remat {asked.remat} is not estimated; give {', '.join(REMATS)}, or plan it.")
    candidates = list(estimates(decoder, topology, asked, calibration))
    if not candidates:
        raise UserError(
            f"no layout of the {topology.num_devices} devices of {topology.name} divides a batch of {asked.batch} and "
            f"{decoder.heads} heads; give a batch that is a multiple of {_least_batch(decoder, topology)}."
        )
    fitting = [each for each in candidates if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.step_time_s)
    return min(candidates, key=lambda each: each.peak_bytes)


def _least_batch(decoder: Decoder, topology: Topology) -> int:
    """Return the smallest batch that some layout divides, with as many devices as possible splitting heads.

    It is the number of copies of that layout; every multiple of it is divided too.
    """
    return topology.num_devices // math.gcd(topology.num_devices, decoder.heads)


def estimates(
    decoder: Decoder, topology: Topology, asked: StepAsked, calibration: Calibration | None = None
) -> Iterator[StepEstimate]:
    """Yield an estimate for each layout of all devices that divides the batch by `data` and the heads by `model`.

    They are ordered by `model`, from 1. None of them has groups in attention. Estimates that do not fit are included.
    """
    devices, compute = topology.num_devices, Compute(topology, calibration)
    for model in range(1, devices + 1):
        data = devices // model
        if devices % model or asked.batch % data or decoder.heads % model:
            continue
        yield layout_estimate(decoder, compute, asked, Layout(data, model))


def layout_estimate(decoder: Decoder, compute: Compute, asked: StepAsked, layout: Layout) -> StepEstimate:
    """Return the estimate of one layout, which need not divide the batch or the heads; shares may be fractions."""
    return _Estimated(decoder, compute, asked, layout).estimate()


def layout_bytes(decoder: Decoder, compute: Compute, asked: StepAsked, layout: Layout) -> dict[str, float]:
    """Return the bytes of one device by kind on one layout, as `StepEstimate.bytes`."""
    return step_bytes(decoder, asked, layout, _Estimated(decoder, compute, asked, layout).sequences)


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
        """Sequences of one group in attention; prompts count as whole ones."""
        self.rows = self.tokens / layout.groups
        """Tokens of one group in attention."""
        if asked.kind != "decode":
            self.sequences = float(math.ceil(self.sequences))
            self.rows = self.sequences * asked.seq

    def estimate(self) -> StepEstimate:
        """Return the estimate of time, memory and MFU.

        In training, gathers of parameters and scatters of gradients overlap with compute as in plans (`_waited`).
        Exchanges between a copy's devices are always exposed.
        """
        forward, backward = self._layers()
        head, sent = self._head(), self._exchanged()
        passes = 1.0
        if self.asked.training:
            passes = 3.0 if self.asked.remat == "full" else 2.0
            # The backward pass has twice the matmuls of the head. It computes layers again: all, or all but matmuls.
            again = {"full": forward, "dots": self._attention(2) + self._streamed()}.get(self.asked.remat, 0.0)
            gathers, scatters = self._gathered(), self._scattered()
            update = float(self.compute.memory_seconds(self._updated_bytes()))
            compute = forward + backward + again + 3 * head + self._stacked() + update
            first, second = forward + head, backward + again + 2 * head
            # Gathers overlap with the forward pass, gathers and scatters with the backward pass.
            exposed = self._waited(first, gathers) + self._waited(second, gathers, scatters)
        else:
            compute, exposed, update = forward + head + self._selected(), self._candidates(), 0.0
            if self.asked.shards_weights:
                exposed += self._waited(compute, self._gathered())
        count = self.asked.microbatches
        compute, exposed = count * (compute - update) + update, count * (exposed + passes * sent)
        flops = count * self._model_flops()
        step = compute + exposed
        topology = self.compute.topology
        peak = topology.peak_flops("bf16") * topology.num_devices
        sizes = step_bytes(self.decoder, self.asked, self.layout, self.sequences)
        return StepEstimate(
            {"data": self.data, "model": self.model}, self.asked, step, compute, exposed, sizes, topology.usable_bytes,
            flops / peak / step,
        )  # fmt: skip

    def _waited(self, compute: float, gathers: float, scatters: float = 0.0) -> float:
        """Return the seconds by which gathers and scatters make a pass of `compute` seconds longer.

        The compiler runs a share of them next to compute (`Calibration.gather_overlap` and `reduction_overlap`), as
        plans price it. The rest runs alone.
        """
        figures, several = self.compute.calibration, self.compute.topology.slices > 1
        early = figures.network_overlap if several else figures.gather_overlap
        late = figures.network_overlap if several else figures.reduction_overlap
        alone = (1 - early) * gathers + (1 - late) * scatters
        return alone + float(smooth_max(compute, early * gathers + late * scatters)) - compute

    def _stacked(self) -> float:
        """Return the seconds in which a loop over layers copies what it saves into its stacks: a read and a write."""
        return float(self.compute.memory_seconds(2 * saved_bytes(self.decoder, self.asked, self.layout)))

    def _model_flops(self) -> float:
        """Return the model FLOPs of the step; a decoding step attends to its whole cache."""
        count = self.decoder.train_flops if self.asked.training else self.decoder.forward_flops
        if self.asked.kind == "decode":
            return count(self.tokens * self.data, self.asked.seq, causal=False)
        return count(self.tokens * self.data, self.asked.seq)

    def _layers(self) -> tuple[float, float]:
        """Return the seconds of compute in all layers: forward, and backward without recomputation.

        The backward seconds are 0 outside of training. Collectives and the head are not included.
        """
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
            # Expected number of experts that receive any token, if tokens choose uniformly; every part has an equal
            # share.
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
        transposed = [
            count * (float(self.compute.dot_seconds(m, k, n, b)) + float(self.compute.dot_seconds(k, n, m, b)))
            for count, m, n, k, b in matmuls
        ]
        return forward, sum(transposed) + self._attention(_SPLASH_BACKWARD) + 2 * streams

    def _dot(self, m: float, n: float, k: float, batch: float) -> float:
        """Return the seconds of `batch` matmuls `[m, k] x [k, n]` with weights `[k, n]`.

        Outside of training, one-byte weights are multiplied in their own dtype; all others in 16 bits.
        """
        if self.asked.training or self.asked.param_bytes >= 2:
            return float(self.compute.dot_seconds(m, n, k, batch))
        size = batch * (2.0 * (m * k + m * n) + self.asked.param_bytes * k * n)
        return float(self.compute.dot_seconds(m, n, k, batch, self.asked.multiplied, size))

    def _attention(self, passes: int) -> float:
        """Return the seconds of attention in all layers, without projections, with `passes` matmuls over the scores.

        A decoding step reads its cache once. Chunks of prompts add their self-attention.
        """
        asked = self.asked
        if asked.kind != "decode":
            return self._over_scores(self.sequences, asked.seq, self.rows, passes)
        decoder, layers = self.decoder, self.decoder.layers + self.decoder.ahead
        # The cache is read once, however many queries share it.
        size = decoder.kv_bytes(self.sequences * asked.seq, asked.cache_bytes) / kv_parts(decoder, self.layout)
        seconds = float(self.compute.memory_seconds(size))
        if decoder.latent is not None:  # all heads share it, as rows of one matmul
            rows, inner = decoder.heads / self.layout.heads, decoder.latent.key_rank
            both = (
                self.compute.matmul_seconds(rows, asked.seq, inner + decoder.latent.rope_size, self.sequences),
                self.compute.matmul_seconds(rows, inner, asked.seq, self.sequences),
            )
            seconds = max(seconds, layers * float(sum(both)))
        seconds += layers * self.compute.calibration.op_overhead_s
        if asked.chunk:
            tokens = asked.chunk / self.data / self.layout.groups
            seconds += self._over_scores(tokens / asked.prompt, asked.prompt, tokens, passes)
        return seconds

    def _over_scores(self, sequences: float, length: int, tokens: float, passes: int) -> float:
        """Return the seconds of self-attention of one group's sequences, in all layers.

        Plain attention materialises the scores and is priced as matmuls; other topologies have a fused kernel.

        - `sequences`: number of sequences, possibly a fraction.
        - `length`: tokens of each.
        - `tokens`: tokens of all of them.
        - `passes`: matmuls over the scores.
        """
        decoder, heads = self.decoder, self.layout.heads
        layers = decoder.layers + decoder.ahead
        sizes = (decoder.head_size,) * 2
        if decoder.latent is not None:
            sizes = (decoder.latent.head_size, decoder.latent.value)
        rows = sequences * decoder.heads / heads
        if self.compute.topology.traits.attention == "plain":
            pair = [
                float(self.compute.dot_seconds(length, n, k, rows)) for n, k in ((length, sizes[0]), (sizes[1], length))
            ]
            return layers * sum(pair) * passes / 2
        size = 2.0 * tokens * (2 * decoder.heads / heads) * sum(sizes)
        head, value = sizes
        share, steps = self._kernel_work(length)
        busy = self.compute.attention_seconds(rows * length * length * share, head, value, passes, "bf16", size)
        return layers * float(busy + self.compute.step_seconds(rows * steps))

    def _kernel_work(self, length: int) -> tuple[float, float]:
        """Return the share of a head's scores that a kernel computes, and its grid steps, on the mean of all layers.

        Kernels of TPUs compute whole blocks of scores, those of GPUs nearly only the scores that are seen.
        """
        decoder = self.decoder
        if self.compute.topology.traits.attention != "splash":
            sizes = 2 * decoder.head_size
            if decoder.latent is not None:
                sizes = decoder.latent.head_size + decoder.latent.value
            layers = decoder.layers + decoder.ahead
            return decoder.attention_flops_per_token(length) / (2.0 * decoder.heads * sizes * layers * length), 0.0
        size = decoder.head_size if decoder.latent is None else decoder.latent.head_size
        full = kernel_work(length, None, size)
        if decoder.window is None or decoder.window >= length:
            return full
        local = kernel_work(length, decoder.window, size)
        windowed = 1 - 1 / decoder.global_every
        return full[0] + windowed * (local[0] - full[0]), full[1] + windowed * (local[1] - full[1])

    def _streamed(self) -> float:
        """Return the forward seconds of the elementwise ops of all layers: memory traffic, and launches of kernels.

        If the compiler fuses ops into matmuls, only norms and the rotation of queries and keys remain.
        """
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
        """Return the number of a layer's elementwise kernels, which are launched one by one."""
        normed = 2 if self.decoder.qk_norm else 0
        cached = 1 if self.asked.kind in ("prefill", "decode") else 0  # writes keys and values to the cache
        return _KERNELS + normed + cached + (_QUANTISED if self.asked.param_bytes < 2 else 0)

    def _head(self) -> float:
        """Return the forward seconds of the head's matmul, once more for each layer ahead.

        Prefill and decoding steps need the logits of one token per sequence only.
        """
        rows = self.asked.batch / self.data if self.asked.kind in ("prefill", "decode") else self.tokens
        columns = self.decoder.vocabulary / self.model
        return (1 + self.decoder.ahead) * float(self.compute.dot_seconds(rows, columns, self.decoder.width))

    def _selected(self) -> float:
        """Return the seconds in which devices select of their logits: a sort for several, and a pass for each round.

        A round reads the order of the logits and their weights, of four bytes each. Three passes precede it.
        """
        asked, compute = self.asked, self.compute
        if not asked.candidates:
            return 0.0
        columns = self.decoder.vocabulary / self.model
        logits = asked.batch / self.data * columns
        passes = (asked.rounds + 3) * 8.0 * logits if asked.rounds else 0.0
        if asked.candidates == 1:
            return float(compute.memory_seconds(2.0 * logits + passes)) + compute.calibration.op_overhead_s
        return float(compute.sort_seconds(logits, int(columns), 1, 2.0 * logits))

    def _candidates(self) -> float:
        """Return the seconds in which the devices of a copy exchange what they select: logits and tokens of 4 bytes.

        Each round sums three integers of a row, and three sums of one precede it. If it takes less, devices exchange
        logits of 2 bytes such that each has whole rows.
        """
        asked, rows, axes = self.asked, self.asked.batch / self.data, self._copy_axes()
        if not asked.candidates:
            return 0.0
        sent = 2 * self._collective("all-gather", axes, 4.0 * rows * asked.candidates * self.model, self.model)
        if not asked.rounds:
            return sent
        sent += asked.rounds * self._collective("all-reduce", axes, 12.0 * rows, self.model)
        sent += 3 * self._collective("all-reduce", axes, 4.0 * rows, self.model)
        columns = self.decoder.vocabulary / self.model
        return min(sent, self._collective("all-to-all", axes, 2.0 * rows * columns, self.model))

    def _copy_axes(self) -> tuple[str, ...]:
        """Return the axes over which the devices of a copy exchange."""
        sizes = (("group", self.layout.groups), ("model", self.layout.heads))
        return tuple(name for name, size in sizes if size > 1)

    def _collective(self, kind: Kind, axes: tuple[str, ...], size_bytes: float, devices: int) -> float:
        """Return the seconds of a collective of the tensor's whole `size_bytes` over `axes`; 0 if `devices` is 1."""
        return float(self.wires.time(kind, axes, size_bytes)) if devices > 1 else 0.0

    def _exchanged(self) -> float:
        """Return the seconds of all-gathers and reduce-scatters between a copy's devices in one pass over the layers.

        Attention gathers the tokens of its group, all other ops those of all groups.
        """
        layers, layout = self.decoder.layers + self.decoder.ahead, self.layout
        each = 2.0 * self.decoder.width
        all_of_it = self._copy_axes()
        kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter")
        within = sum(self._collective(kind, ("model",), each * self.rows, layout.heads) for kind in kinds)
        across = sum(self._collective(kind, all_of_it, each * self.tokens, self.model) for kind in kinds)
        return layers * (within + across)

    def _gathered(self) -> float:
        """Return the seconds in which all parameters of a device, in 16 bits, are gathered over `data` once."""
        return self._collective("all-gather", ("data",), 2.0 * self.decoder.params / self.model, self.data)

    def _scattered(self) -> float:
        """Return the seconds in which all gradients, in 16 bits, are reduce-scattered over `data`."""
        return self._collective("reduce-scatter", ("data",), 2.0 * self.decoder.params / self.model, self.data)

    def _updated_bytes(self) -> float:
        """Return the bytes of one device that the update reads and writes: parameters, both moments, gradients."""
        asked = self.asked
        share = self.decoder.params / (self.data * self.model)
        # Parameter and moments are read and written. The gradient is read, in four bytes.
        return share * (2 * (asked.param_bytes + 2 * asked.state_bytes) + 4)
