"""Seconds of a stated run's parts on its GPUs: a layer, the embedding and the head, forward and backward.

A part is the list of kernels that its framework launches. Matmuls, traffic and collectives are priced as the planner
prices them (`Compute`, `Collectives`). The host that launches the kernels runs ahead of the GPU, so a pass takes the
longer of the kernels' time and the launch time.
"""

import dataclasses
import functools
import json
import pathlib

from autoshard.cost import Calibration, Chip, Collectives, Compute, Kind, Topology, make_mesh
from autoshard.degrees.gpu_run import GpuRun


@dataclasses.dataclass(frozen=True, slots=True)
class HostFigures:
    """Figures of eager frameworks that the shared prices lack, each with its source in `gpu_figures.json`."""

    host_op_s: float
    """Seconds in which the host launches an op."""
    dtensor_op_s: float
    """Seconds that an op of DTensors takes the host in addition."""
    attention_efficiency: dict[str, dict[str, float]]
    """Share of peak over a forward and a backward pass by kernel and chip, without masked scores."""
    contention: float
    """Share of the shorter of compute and overlapped communication that is exposed."""
    eager_traffic: float
    """Bytes at the bandwidth of a stream for each byte of kernels other than matmuls."""


@functools.cache
def host_figures() -> HostFigures:
    """Load the shipped figures of `gpu_figures.json`."""
    document = json.loads(pathlib.Path(__file__).with_name("gpu_figures.json").read_text())
    return HostFigures(**{name: entry["value"] for name, entry in document.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass of one microbatch over a part: of the device's kernels, and of the host's launches."""

    device: float
    """Seconds of the kernels and of exposed collectives."""
    host: float
    """Seconds of the launches."""

    def __add__(self, other: "Pass") -> "Pass":
        """Return one pass after the other: device and host times each add up."""
        return Pass(self.device + other.device, self.host + other.host)

    def times(self, count: float) -> "Pass":
        """Return the pass repeated so many times."""
        return Pass(self.device * count, self.host * count)

    @property
    def seconds(self) -> float:
        """The longer of device and host time."""
        return max(self.device, self.host)


NOTHING = Pass(0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerMatmul:
    """Sizes of `count` equal matmuls `[rows, contracted] x [contracted, columns]` on one GPU."""

    rows: float
    columns: float
    contracted: float
    block: str = ""
    """`begins` or `ends` a block of tensor parallelism, with a collective; empty for neither."""
    count: int = 1


@functools.lru_cache(maxsize=8)
def _priced_matmuls(chip: Chip, calibration: Calibration) -> dict[tuple[float, float, float, int, str], float]:
    """Return the seconds of matmuls that are priced already on a chip, which all of its topologies share."""
    return {}


class MachinePrices:
    """Prices of matmuls and collectives on one topology, each computed once for all runs that share them."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.compute = Compute(topology)
        self._wires: dict[tuple[tuple[str, int], ...], Collectives] = {}
        self._seconds = _priced_matmuls(topology.chip, self.compute.calibration)

    def wires(self, **axes: int) -> Collectives:
        """Return the prices of collectives on a mesh of named axes, major first."""
        key = tuple(axes.items())
        if key not in self._wires:
            self._wires[key] = Collectives(make_mesh(self.topology, axes))
        return self._wires[key]

    def dot_seconds(self, m: float, n: float, k: float, count: int, dtype: str) -> float:
        """Return the seconds of `count` matmuls `[m, k] x [k, n]`, as `Compute.dot_seconds` prices them."""
        key = (m, n, k, count, dtype)
        if key not in self._seconds:
            self._seconds[key] = float(self.compute.dot_seconds(m, n, k, count, dtype=dtype))
        return self._seconds[key]


class GpuPrices:
    """Prices of one microbatch of a run's parts on one GPU.

    - `figures`: figures of the host; `host_figures` by default.
    - `machine`: prices that runs on the same topology share; new ones by default.
    """

    def __init__(self, run: GpuRun, figures: HostFigures | None = None, machine: MachinePrices | None = None) -> None:
        self.run = run
        self.figures = figures or host_figures()
        self.machine = machine or MachinePrices(run.topology)
        self.compute = self.machine.compute
        groups = {"copies": run.copies, "dp": run.replicas // run.copies}
        if run.copies == 1:
            groups = {"dp": run.replicas}
        elif run.inner_copies:
            groups = dict(reversed(groups.items()))
        self.wires = self.machine.wires(pp=run.pp, **groups, tp=run.tp)
        self.expert_wires = self.machine.wires(pp=run.pp, replicas=run.expert_replicas, ep=run.ep)
        self.tokens = run.micro_tokens
        self.spread = run.tp if run.eager.sequence_parallel else 1
        """Parts into which the residual stream is cut."""
        self.routed = self.tokens / self.spread * run.decoder.active_experts
        """Rows that the experts of one GPU see."""

    def collective(self, kind: Kind, axis: str, size_bytes: float) -> float:
        """Return the seconds of one collective over one of `dp`, `tp`, `pp`; sizes are those of `Collectives`."""
        return float(self.wires.time(kind, (axis,), size_bytes))

    def replicas(self, layers: float, tables: float = 0) -> list[tuple[float, Collectives, str]]:
        """Return parameters of one GPU with the collectives and the axis of their replicas, of which there are several.

        - `layers`, `tables`: as in `GpuRun.split_parameters`.
        """
        dense, *experts = self.run.split_parameters(layers, tables)
        shares = [(*dense, self.wires, "dp"), *((*each, self.expert_wires, "replicas") for each in experts)]
        return [(held, wires, axis) for held, replicas, wires, axis in shares if replicas > 1]

    def matmul(self, m: float, n: float, k: float, count: int = 1, wide: bool = False) -> float:
        """Return the seconds of `count` matmuls `[m, k] x [k, n]` in the run's dtype, with traffic and overhead.

        With `wide` operands of 8 bits are excluded, as for the head.
        """
        dtype = self.run.dtype
        return self.machine.dot_seconds(m, n, k, count, "bf16" if wide and dtype == "fp8" else dtype)

    def streamed(self, size_bytes: float, ops: float) -> float:
        """Return the seconds of `ops` kernels that stream `size_bytes` in all, with their overheads."""
        return float(self.compute.memory_seconds(size_bytes)) + ops * self.compute.calibration.op_overhead_s

    def _matmuls(self) -> list[LayerMatmul]:
        """Return a layer's matmuls on one GPU: queries with keys and values, output, up with gate, and down.

        Experts have the last two for each expert of this GPU, with an equal share of the routed rows. A router is
        before them.
        """
        decoder, tp = self.run.decoder, self.run.tp
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        ups = 2 if decoder.gated else 1
        matmuls = [
            LayerMatmul(self.tokens, (queries + 2 * keys) / tp, decoder.width, "begins"),
            LayerMatmul(self.tokens, decoder.width, queries / tp, "ends"),
        ]
        if decoder.experts == 1:
            return [
                *matmuls,
                LayerMatmul(self.tokens, ups * decoder.mlp_width / tp, decoder.width, "begins"),
                LayerMatmul(self.tokens, decoder.width, decoder.mlp_width / tp, "ends"),
            ]
        experts = decoder.experts // self.run.ep
        rows = self.routed / experts
        return [
            *matmuls,
            LayerMatmul(self.tokens / self.spread, decoder.experts, decoder.width),
            LayerMatmul(rows, ups * decoder.expert_inner, decoder.width, count=experts),
            LayerMatmul(rows, decoder.width, decoder.expert_inner, count=experts),
        ]

    def _exchanges(self) -> float:
        """Return the seconds in which one pass sends a layer's routed rows to their experts and back; 0 without `ep`.

        Routing is balanced.
        """
        if self.run.ep == 1:
            return 0.0
        size = 2.0 * self.routed * self.run.decoder.width
        return 2 * float(self.expert_wires.time("all-to-all", ("ep",), size))

    def _attention(self, backward: bool) -> float:
        """Return the seconds of attention: one kernel with scores on chip, or matmuls with scores in memory.

        Softmax and masks of scores in memory are priced by `_elementwise`.
        """
        run, decoder = self.run, self.run.decoder
        heads = decoder.heads / run.tp
        scores = run.micro_batch * heads * run.seq * run.seq / run.cp
        if run.eager.attention != "scores":
            peak = run.topology.peak_flops("bf16")
            rate = peak * self.figures.attention_efficiency[run.eager.attention][run.topology.chip.name]
            # Masked scores are omitted, which is half of them: 2 of the 4 FLOPs forward, 5 of 10 backward.
            return (5 if backward else 2) * scores * decoder.head_size / rate
        batch = run.micro_batch * heads
        pair = [
            float(self.compute.dot_seconds(run.seq, run.seq, decoder.head_size, batch)),
            float(self.compute.dot_seconds(run.seq, decoder.head_size, run.seq, batch)),
        ]
        return sum(pair) * (2 if backward else 1)

    def _adapters(self) -> float:
        """Return the seconds of the adapters of one layer, forward; the backward pass takes twice as long."""
        run, decoder = self.run, self.run.decoder
        if not run.adapter_rank:
            return 0.0
        queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
        pairs = ((decoder.width, (queries + 2 * keys) / run.tp), (queries / run.tp, decoder.width))
        return sum(
            self.matmul(self.tokens, run.adapter_rank, wide, wide=True)
            + self.matmul(self.tokens, out, run.adapter_rank, wide=True)
            for wide, out in pairs
        )

    def _context(self, backward: bool) -> float:
        """Return the seconds of attention with the ring over `cp` that brings all keys and values to every GPU.

        The backward pass sends their gradients around too. Transfers overlap with attention and
        compete with it for multiprocessors, as all collectives do with compute.
        """
        run, decoder, attention = self.run, self.run.decoder, self._attention(backward)
        if run.cp == 1:
            return attention
        size = 2 * 2.0 * run.micro_batch * run.seq * decoder.kv_heads * decoder.head_size / run.tp
        wires = self.machine.wires(pp=run.pp, dp=run.dp, cp=run.cp, tp=run.tp)
        sent = float(wires.time("all-gather", ("cp",), size))
        sent += float(wires.time("reduce-scatter", ("cp",), size)) if backward else 0.0
        return max(attention, sent) + self.figures.contention * min(attention, sent)

    def _elementwise(self, backward: bool) -> float:
        """Return the device seconds of a layer's kernels other than matmuls and attention, for one microbatch."""
        run, decoder = self.run, self.run.decoder
        each = run.eager.backward_bytes if backward else run.eager.forward_bytes
        size = each["hidden"] * self.tokens * decoder.width / self.spread
        if decoder.experts == 1:
            size += each["ffn"] * self.tokens * decoder.mlp_width / run.tp
        else:
            # Rows are read and written at 2 bytes an element when they are sorted by expert, and when they return.
            size += self.routed * (each["ffn"] * decoder.expert_inner + 8.0 * decoder.width)
        size += each["rotary"] * self.tokens * decoder.heads * decoder.head_size / run.tp
        size += each["scores"] * run.micro_batch * decoder.heads / run.tp * run.seq * run.seq / run.cp
        ops = run.eager.backward_ops if backward else run.eager.forward_ops
        # About eight ops are matmuls and attention, whose prices contain their own overhead.
        return self.streamed(size * self.figures.eager_traffic, max(0, ops - 8))

    def elementwise_seconds(self, again: bool) -> float:
        """Return the device seconds of a layer's kernels that a compiler fuses, forward (twice if `again`) and back."""
        return (2 if again else 1) * self._elementwise(False) + self._elementwise(True)

    def _host(self, backward: bool) -> float:
        """Return the seconds in which the host launches a layer's ops, and its collectives if `tp` is above 1."""
        eager = self.run.eager
        ops = eager.backward_ops if backward else eager.forward_ops
        calls = (eager.backward_collectives if backward else eager.forward_collectives) if self.run.tp > 1 else 0
        # Rough count of a mixture's further ops: routing, sorting, counting, and the exchanges with their sizes.
        ops += 30 if self.run.decoder.experts > 1 else 0
        placed = ops * eager.dtensor_ops if self.run.tp > 1 else 0
        return (ops + calls) * self.figures.host_op_s + placed * self.figures.dtensor_op_s

    def layer_forward(self) -> Pass:
        """Price one layer of one microbatch, forward, with its gathers and scatters, or sums, over `tp`."""
        matmuls = self._matmuls()
        dots = sum(self.matmul(each.rows, each.columns, each.contracted, each.count) for each in matmuls)
        device = dots + self._context(False) + self._elementwise(False) + self._exchanges() + self._adapters()
        if self.run.tp > 1:
            size = 2.0 * self.tokens * self.run.decoder.width
            if self.run.eager.sequence_parallel:
                both = self.collective("all-gather", "tp", size) + self.collective("reduce-scatter", "tp", size)
            else:
                both = self.collective("all-reduce", "tp", size)
            device += self._exposed(sum(each.block == "begins" for each in matmuls) * both, dots)
        return Pass(device, self._host(False))

    def _exposed(self, sent: float, dots: float) -> float:
        """Return the seconds of gathers and scatters over `tp` that their matmuls (`dots` seconds) do not hide.

        Only asynchronous tensor parallelism hides any, and contention exposes a share of those.
        """
        return sent - (1.0 - self.figures.contention) * min(sent, dots) if self.run.async_tp else sent

    def layer_selective(self) -> Pass:
        """Price what torchtitan's policy by op computes again of one layer of one microbatch.

        These are all ops but attention, exchanges, scatters over `tp`, and half of the matmuls. Every second of
        queries, keys, values, output, `gate`, `up` and `down` is computed again. Grouped matmuls of experts all are.
        """
        run, decoder = self.run, self.run.decoder
        device = self._elementwise(False)
        device += self.matmul(self.tokens, decoder.kv_heads * decoder.head_size / run.tp, decoder.width)
        device += self.matmul(self.tokens, decoder.width, decoder.heads * decoder.head_size / run.tp)
        if decoder.experts == 1:
            device += self.matmul(self.tokens, decoder.mlp_width / run.tp, decoder.width)
        else:
            experts = [each for each in self._matmuls() if not each.block]
            device += sum(self.matmul(each.rows, each.columns, each.contracted, each.count) for each in experts)
        if run.tp > 1:
            gathers = 2 if decoder.experts == 1 else 1
            device += gathers * self.collective("all-gather", "tp", 2.0 * self.tokens * decoder.width)
        return Pass(device, self._host(False))

    def layer_matmuls_saved(self) -> Pass:
        """Price what a layer that saves the results of its matmuls computes again: other ops, attention, one sum."""
        device = self._elementwise(False) + self._context(False)
        if self.run.tp > 1:  # the sum of attention's output; nothing needs that of the layer's last matmul
            device += self.collective("all-reduce", "tp", 2.0 * self.tokens * self.run.decoder.width)
        return Pass(device, self._host(False))

    def layer_backward(self) -> Pass:
        """Price the gradients of one layer of one microbatch, and their addition to the buffer; no recomputation."""
        run = self.run
        device = self._context(True) + self._elementwise(True) + self._exchanges() + 2 * self._adapters()
        size = 2.0 * self.tokens * run.decoder.width
        for each in self._matmuls():
            m, n, k = each.rows, each.columns, each.contracted
            rows, weights = self.matmul(m, k, n, each.count), self.matmul(k, n, m, each.count)
            weights = 0.0 if run.adapter_rank else weights  # frozen weights have no gradients
            device += rows + weights
            if run.tp == 1 or not each.block:
                continue
            begins = each.block == "begins"
            if not run.eager.sequence_parallel:
                device += self.collective("all-reduce", "tp", size) if begins else 0.0
                continue
            if begins:
                hidden = weights if run.eager.overlapped_scatters else 0.0
                device += self._exposed(max(0.0, self.collective("reduce-scatter", "tp", size) - hidden), rows)
            else:
                device += self._exposed(self.collective("all-gather", "tp", size), rows)
        return Pass(device + self._accumulated(sum(held for held, _ in run.split_parameters(1))), self._host(True))

    def _accumulated(self, parameters: float) -> float:
        """Return the seconds in which a microbatch's gradients are added to their buffer.

        Zero if the framework has no buffer, or if a step has one microbatch and gradients of 2 bytes.

        - `parameters`: parameters of the part on one GPU.
        """
        eager, run = self.run.eager, self.run
        if not eager.accumulated or run.accumulation == 1 and eager.gradient_bytes == 2:
            return 0.0
        # The 16-bit gradient is read, and the buffer is read and written.
        return self.streamed((2 + 2 * eager.gradient_bytes) * parameters, 4)

    def head(self, backward: bool) -> Pass:
        """Price the head and the loss of one microbatch, forward or backward, with the collectives over `tp`."""
        run, decoder = self.run, self.run.decoder
        columns, gathered = decoder.vocabulary / run.tp, run.eager.gathered_logit_bytes
        # Rough counts: 8 kernels besides matmuls, and 20 launches. A split loss sums maximum, exponentials and targets.
        each = run.eager.backward_bytes if backward else run.eager.forward_bytes
        logits = self.tokens * (decoder.vocabulary if gathered else columns)
        device = self.streamed(each["logits"] * logits * self.figures.eager_traffic, 8)
        size = 2.0 * self.tokens * decoder.width
        if backward:
            device += self.matmul(self.tokens, decoder.width, columns, wide=True)
            device += 0.0 if run.adapter_rank else self.matmul(decoder.width, columns, self.tokens, wide=True)
            device += 0.0 if run.adapter_rank else self._accumulated(decoder.table_params / run.tp)
        else:
            device += self.matmul(self.tokens, columns, decoder.width, wide=True)
        if run.tp > 1:
            device += self.collective("all-gather", "tp", size)
            if not gathered:
                device += 3 * self.collective("all-reduce", "tp", 4.0 * self.tokens)
            elif not backward:
                device += self.collective("all-gather", "tp", gathered * logits)
        return Pass(device, 20 * self.figures.host_op_s)

    def embedding(self, backward: bool) -> Pass:
        """Price the lookup in the table of tokens, or backward the addition to the gradient of the table.

        A table that the head shares on the same stage is added to the buffer by the head alone.
        """
        run, decoder = self.run, self.run.decoder
        # Forward reads and writes 2 bytes an element; backward sums in float32. Rough counts: 4 kernels, 6 launches.
        size = (12.0 if backward else 4.0) * self.tokens * decoder.width
        device = self.streamed(size, 4)
        if backward and run.adapter_rank:
            return NOTHING
        if backward and not (decoder.tied and run.pp == 1):
            device += self._accumulated(decoder.table_params / run.tp)
        if run.tp > 1:
            kind: Kind = "all-gather" if backward else "reduce-scatter"
            device += self.collective(kind, "tp", 2.0 * self.tokens * decoder.width)
        return Pass(device, 6 * self.figures.host_op_s)

    def sent(self) -> float:
        """Return the seconds of a microbatch's transfer to the next stage; 0 without a pipeline.

        Each GPU sends its part of the group's activations. If the residual stream is not split, the parts are gathered
        there.
        """
        run = self.run
        if run.pp == 1:
            return 0.0
        size = 2.0 * self.tokens * run.decoder.width
        seconds = self.collective("collective-permute", "pp", size / run.tp)
        return seconds + (self.collective("all-gather", "tp", size) if run.tp > self.spread else 0.0)
