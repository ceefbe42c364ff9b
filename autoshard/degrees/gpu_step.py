"""Seconds and bytes of a step of a stated run: stages, microbatches, sums and gathers of replicas, the optimizer."""

import dataclasses

from autoshard.cost import Kind
from autoshard.degrees.gpu_run import GpuRun, GpuStage, gpu_stages, waiting
from autoshard.degrees.gpu_stage import NOTHING, GpuPrices, HostFigures, MachinePrices, Pass


_ADAM_BYTES = 34.0
"""Bytes moved for each element of the state: parameter, gradient and two moments in float32, the 16-bit copy."""
_NORM_BYTES = 16.0
"""Bytes read and written for each element of a gradient: it is zeroed, its norm computed, and clipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuStep:
    """Predicted seconds and bytes of a step of a run."""

    seconds: float
    """Seconds of the step, the sum of `parts`."""
    peak_bytes: float
    """Peak bytes of one GPU of the stage that needs most."""
    runs: bool
    """True if every stage has work."""
    parts: dict[str, float]
    """Seconds by part: `microbatches`, `bubble`, `gradients`, `optimizer`."""
    eager_seconds: float = 0.0
    """Seconds of kernels of layers other than matmuls and attention, which a compiler would fuse."""


def price_step(run: GpuRun, figures: HostFigures | None = None, machine: MachinePrices | None = None) -> GpuStep:
    """Price one step of a run: seconds of all microbatches, the bubble, the sums of gradients and the update.

    `figures` and `machine` are as in `GpuPrices`. If a stage has no work, the step has infinite seconds and
    bytes, and no parts.
    """
    stages = gpu_stages(run)
    if stages is None:
        return GpuStep(float("inf"), float("inf"), False, {})
    prices = GpuPrices(run, figures, machine)
    forward, backward = prices.layer_forward(), prices.layer_backward()
    if run.recompute == "full":
        backward = backward + forward
    elif run.recompute == "selective":
        backward = backward + prices.layer_selective()
    elif run.recompute == "matmuls":
        backward = backward + prices.layer_matmuls_saved()
    if run.zero == 3:
        forward, backward = _gathered(prices, forward, backward)
    ends = {(name, late): getattr(prices, name)(late) for name in ("embedding", "head") for late in (False, True)}
    sent = prices.sent()
    stage_seconds, first, last = [], 0.0, 0.0
    for stage in stages:
        front, back = forward.times(stage.layers), backward.times(stage.layers)
        for name, present in (("embedding", stage.embedding), ("head", stage.head)):
            front += ends[name, False] if present else NOTHING
            back += ends[name, True] if present else NOTHING
        stage_seconds.append(front.seconds + back.seconds + 2 * sent)
        first, last = front.seconds, back.seconds
    slowest = max(stage_seconds)
    busy = run.accumulation * slowest
    bubble = (sum(stage_seconds) - slowest) / run.chunks
    sums, gathers, optimizer = _updated(prices, stages)
    gradients = sums + gathers
    if run.zero == 1 and run.eager.overlapped_state:
        # Overlapped transfers are hidden, but for the share that contention exposes.
        hidden = min(sums, _overlap(run, last)) + min(gathers, _overlap(run, first))
        gradients += (prices.figures.contention - 1.0) * hidden
    if run.pp == 1 and run.zero == 0 and run.eager.overlapped_sums:
        overlap = min(gradients, last)
        # Overlapped sums are hidden, but for the share that contention exposes.
        gradients += (prices.figures.contention - 1.0) * overlap
    parts = {"microbatches": busy, "bubble": bubble, "gradients": gradients, "optimizer": optimizer}
    peak = max(_stage_bytes(run, s, n) for n, s in enumerate(stages))
    eager = prices.elementwise_seconds(run.recompute != "none") * run.accumulation * stages[0].layers
    return GpuStep(sum(parts.values()), peak, True, parts, eager)


def price_forward(run: GpuRun, figures: HostFigures | None = None, machine: MachinePrices | None = None) -> float:
    """Return the seconds of a forward pass over all microbatches of a run, as for log-probabilities of samples.

    Arguments are those of `price_step`. A pipeline fills and drains once. The result is infinite if a stage has no
    work.
    """
    stages = gpu_stages(run)
    if stages is None:
        return float("inf")
    prices = GpuPrices(run, figures, machine)
    layer = prices.layer_forward()
    if run.zero == 3:
        layer = _gathered(prices, layer, NOTHING)[0]
    stage_seconds = []
    for stage in stages:
        work = layer.times(stage.layers)
        work += prices.embedding(False) if stage.embedding else NOTHING
        work += prices.head(False) if stage.head else NOTHING
        stage_seconds.append(work.seconds + prices.sent())
    slowest = max(stage_seconds)
    return run.accumulation * slowest + (sum(stage_seconds) - slowest) / run.chunks


def resident_bytes(run: GpuRun) -> float:
    """Return the bytes that a run occupies between its steps, on the stage with most: parameters and optimizer state.

    Gradients are freed after an update. All stages of the run have work.
    """
    stages = gpu_stages(run)
    assert stages is not None
    return max(
        sum(
            parameters * (12.0 / (replicas if run.zero else 1) + 2.0 / (replicas if run.zero == 3 else 1))
            for parameters, replicas in run.split_parameters(stage.layers, _tables(run, stage))
        )
        for stage in stages
    )


def _gathered(prices: GpuPrices, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
    """Return the passes of one layer under ZeRO stage 3, overlapped with its collectives over replicas.

    The forward pass overlaps a gather of a layer's parameters. The backward pass overlaps such a gather and the
    reduce-scatter of a layer's gradients. Copies of the state then sum them.
    """
    run = prices.run
    gather = scatter = 0.0
    for parameters, wires, axis in prices.replicas(1):
        size = 2.0 * parameters
        reduced = size * (run.reduced_bytes or run.eager.gradient_bytes) / 2
        gather += float(wires.time("all-gather", (axis,), size))
        scatter += float(wires.time("reduce-scatter", (axis,), reduced))
    if run.copies > 1:
        ((held, replicas),) = run.split_parameters(1)
        size = held / replicas * (run.reduced_bytes or run.eager.gradient_bytes)
        scatter += prices.collective("all-reduce", "copies", size)
    return (
        _beside(forward, gather, prices.figures.contention),
        _beside(backward, gather + scatter, prices.figures.contention),
    )


def _beside(each: Pass, sent: float, contention: float) -> Pass:
    """Return a pass overlapped with communication: the longer of both times, plus the exposed share of the shorter.

    - `sent`: seconds of the communication.
    - `contention`: share of the shorter time that is exposed, because kernels compete for multiprocessors and
      bandwidth.

    The host's time is unchanged.
    """
    longer, shorter = max(each.device, sent), min(each.device, sent)
    return Pass(longer + contention * shorter, each.host)


def _overlap(run: GpuRun, seconds: float) -> float:
    """Return the seconds of passes that can hide the sums, or the gathers, of a stage's parameters.

    Without chunks they are those of one microbatch (`seconds`). A schedule with chunks runs `pp` microbatches through
    one chunk before the next. So all but one chunk are ready while the others compute their last microbatches.
    """
    if run.chunks == 1:
        return seconds
    return seconds * min(run.pp, run.accumulation) * (run.chunks - 1) / run.chunks


def _tables(run: GpuRun, stage: GpuStage) -> int:
    """Return the number of tables of a stage; a tied table with both embedding and head counts once."""
    return 1 if run.decoder.tied and stage.embedding and stage.head else stage.embedding + stage.head


def _updated(prices: GpuPrices, stages: tuple[GpuStage, ...]) -> tuple[float, float, float]:
    """Return seconds of sums over replicas, gathers, and the optimizer's update, on the stage with most parameters.

    ZeRO stages 1 and 2 reduce-scatter gradients and gather parameters. The sums of stage 3 are zero here, since the
    passes contain them; sums of a single replica are zero, too. The update includes the zeroing, norm and clipping of
    gradients.
    """
    run = prices.run
    largest = max(
        stages, key=lambda each: sum(held for held, _ in run.split_parameters(each.layers, _tables(run, each)))
    )
    shares = run.split_parameters(largest.layers, _tables(run, largest))
    sums = gathers = 0.0
    for parameters, wires, axis in prices.replicas(largest.layers, _tables(run, largest)) if run.zero < 3 else ():
        bucket = run.eager.bucket_bytes or 2.0 * parameters
        count = 2.0 * parameters / bucket
        size = bucket / 2.0 * run.eager.gradient_bytes
        kind: Kind = "reduce-scatter" if run.zero else "all-reduce"
        sums += count * float(wires.time(kind, (axis,), size))
        gathers += count * float(wires.time("all-gather", (axis,), bucket)) if run.zero else 0.0
    mine = sum(held / (replicas if run.zero else 1) for held, replicas in shares)
    all_gradients = sum(held / (replicas if run.zero == 3 else 1) for held, replicas in shares)
    # 200 is a rough count of the kernels of an update.
    return sums, gathers, prices.streamed(_ADAM_BYTES * mine + _NORM_BYTES * all_gradients, 200)


def _stage_bytes(run: GpuRun, stage: GpuStage, place: int) -> float:
    """Return the peak bytes of one GPU of a stage: state, activations of the microbatches in flight, logits.

    With recomputation a layer in flight stores its input alone, and one layer all its activations.

    - `place`: number of the stage from 0.
    """
    eager, decoder = run.eager, run.decoder
    state = 0.0
    for parameters, replicas in run.split_parameters(stage.layers, _tables(run, stage)):
        over = [replicas if run.zero >= least else 1 for least in (1, 2, 3)]
        copies = 2.0 if eager.gradient_copies and replicas > 1 else 0.0
        # Float32 parameter and two moments; the gradient; the 16-bit parameter. Each is split from its ZeRO stage on.
        state += parameters * (12.0 / over[0] + eager.gradient_bytes / over[1] + 2.0 / over[2] + copies)
    if run.adapter_rank:
        frozen = stage.layers * decoder.dense_layer_params + _tables(run, stage) * decoder.table_params
        state += (1.0 if run.dtype == "fp8" else 2.0) * frozen / run.tp
    tokens = run.micro_tokens
    spread = run.tp if eager.sequence_parallel else 1
    routed = tokens / spread * decoder.active_experts
    saved_bytes = eager.kept_bytes
    # Heads may be wider than the residual stream; the counts do not tell the two apart.
    layer = (
        (saved_bytes["hidden"] - _narrower(run)[0])
        * tokens
        * max(decoder.width, decoder.heads * decoder.head_size)
        / spread
    )
    layer += saved_bytes["gathered"] * tokens * decoder.width
    if decoder.experts == 1:
        layer += (saved_bytes["ffn"] - _narrower(run)[1]) * decoder.mlp_width * tokens / run.tp
    else:
        # Rows sorted by expert, and the rows that return, have 2 bytes an element.
        layer += routed * (saved_bytes["ffn"] * decoder.expert_inner + 4.0 * decoder.width)
    layer += saved_bytes["scores"] * run.micro_batch * decoder.heads / run.tp * run.seq * run.seq / run.cp
    flying = stage.layers * waiting(run, place)
    if run.recompute == "none":
        activations = layer * flying
    elif run.recompute == "full":
        activations = 2.0 * tokens * decoder.width / spread * flying + layer
    else:
        saved = _selective_bytes(run) if run.recompute == "selective" else _matmul_bytes(run)
        activations = saved * flying + layer
    columns = decoder.vocabulary / (1 if eager.gathered_logit_bytes else run.tp)
    logits = saved_bytes["logits"] * tokens * columns * stage.head
    return state + activations + logits


def _narrower(run: GpuRun) -> tuple[float, float]:
    """Return by how many bytes an element of the hidden and of the MLP width less is saved than with 16-bit training.

    The inputs of the four matmuls of a layer are saved for the gradients of weights: three of the hidden width, one of
    the MLP's. With `fp8` they may have one byte. Frozen weights need none; adapters read two of the former.
    """
    if run.adapter_rank:
        return 2.0, 2.0
    return (3.0, 1.0) if run.dtype == "fp8" and run.eager.narrow_inputs else (0.0, 0.0)


def _selective_bytes(run: GpuRun) -> float:
    """Return the bytes that torchtitan's policy by op saves of one layer for one microbatch.

    These are 16-bit results: the input; queries, values, attention, `gate` and `down` (`GpuPrices.layer_selective`);
    with `tp` the two scattered sums. Experts save the rows after both exchanges.
    """
    decoder, tokens = run.decoder, run.micro_tokens
    spread = run.tp if run.eager.sequence_parallel else 1
    queries, keys = decoder.heads * decoder.head_size, decoder.kv_heads * decoder.head_size
    elements = tokens * (decoder.width / spread + (2 * queries + keys) / run.tp)
    if decoder.experts == 1:
        elements += tokens * (decoder.mlp_width / run.tp + decoder.width)
        elements += 2 * tokens * decoder.width / spread if run.tp > 1 else 0
    else:
        elements += 2 * tokens / spread * decoder.active_experts * decoder.width if run.ep > 1 else 0
        elements += tokens * decoder.width / spread if run.tp > 1 else 0
    return 2.0 * elements


def _matmul_bytes(run: GpuRun) -> float:
    """Return the bytes of a dense layer's input, and of the results of its matmuls but the last, for one microbatch."""
    decoder = run.decoder
    spread = run.tp if run.eager.sequence_parallel else 1
    split = (decoder.heads + 2 * decoder.kv_heads) * decoder.head_size + (1 + decoder.gated) * decoder.mlp_width
    return 2.0 * run.micro_tokens * (decoder.width / spread + decoder.width + split / run.tp)
