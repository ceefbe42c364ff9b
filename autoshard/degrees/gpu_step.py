"""Seconds and bytes of a step of a stated run: stages, microbatches, sums and gathers of replicas, the optimizer."""

import dataclasses

from autoshard.degrees.gpu_run import GpuRun, GpuStage, gpu_stages, waiting
from autoshard.degrees.gpu_stage import NOTHING, GpuPrices, HostFigures, Pass


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


def price_step(run: GpuRun, figures: HostFigures | None = None) -> GpuStep:
    """Price one step of a run: seconds of all microbatches, the bubble, the sums of gradients and the update.

    `figures` replace the shipped ones of `host_figures`. If a stage has no work, the step has infinite seconds and
    bytes, and no parts.
    """
    stages = gpu_stages(run)
    if stages is None:
        return GpuStep(float("inf"), float("inf"), False, {})
    prices = GpuPrices(run, figures)
    forward, backward = prices.layer_forward(), prices.layer_backward()
    if run.recompute == "full":
        backward = backward + forward
    if run.zero == 3:
        forward, backward = _gathered(prices, forward, backward)
    ends = {(name, late): getattr(prices, name)(late) for name in ("embedding", "head") for late in (False, True)}
    sent = prices.sent()
    stage_seconds, last = [], 0.0
    for stage in stages:
        front, back = forward.times(stage.layers), backward.times(stage.layers)
        for name, present in (("embedding", stage.embedding), ("head", stage.head)):
            front += ends[name, False] if present else NOTHING
            back += ends[name, True] if present else NOTHING
        stage_seconds.append(front.seconds + back.seconds + 2 * sent)
        last = back.seconds
    slowest = max(stage_seconds)
    busy = run.accumulation * slowest
    bubble = (sum(stage_seconds) - slowest) / run.chunks
    gradients, optimizer = _updated(prices, stages)
    if run.pp == 1 and run.zero == 0 and run.eager.overlapped_sums:
        overlap = min(gradients, last)
        # Overlapped sums are hidden, but for the share that contention exposes.
        gradients += (prices.figures.contention - 1.0) * overlap
    parts = {"microbatches": busy, "bubble": bubble, "gradients": gradients, "optimizer": optimizer}
    return GpuStep(sum(parts.values()), max(_stage_bytes(run, s, n) for n, s in enumerate(stages)), True, parts)


def _gathered(prices: GpuPrices, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
    """Return the passes of one layer under ZeRO stage 3, overlapped with its collectives over replicas.

    The forward pass overlaps a gather of a layer's parameters. The backward pass overlaps such a gather and the
    reduce-scatter of a layer's gradients.
    """
    run = prices.run
    size = 2.0 * run.decoder.dense_layer_params / run.tp
    gather = prices.collective("all-gather", "dp", size) if run.dp > 1 else 0.0
    scatter = (
        prices.collective("reduce-scatter", "dp", size * (run.reduced_bytes or run.eager.gradient_bytes) / 2)
        if run.dp > 1
        else 0.0
    )
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


def _parameters(run: GpuRun, stage: GpuStage) -> float:
    """Return the number of a stage's parameters on one GPU of its tensor-parallel group.

    A tied table on a stage with both embedding and head counts once.
    """
    tables = stage.embedding + stage.head
    if run.decoder.tied and stage.embedding and stage.head:
        tables = 1
    return (stage.layers * run.decoder.dense_layer_params + tables * run.decoder.table_params) / run.tp


def _updated(prices: GpuPrices, stages: tuple[GpuStage, ...]) -> tuple[float, float]:
    """Return seconds of the sums over replicas, and of the optimizer's update, on the stage with most parameters.

    ZeRO stages 1 and 2 reduce-scatter gradients and gather parameters. The sums of stage 3 are zero here, since the
    passes contain them; sums of a single replica are zero, too. The update includes the zeroing, norm and clipping of
    gradients.
    """
    run = prices.run
    parameters = max(_parameters(run, stage) for stage in stages)
    sums = 0.0
    if run.dp > 1 and run.zero < 3:
        bucket = run.eager.bucket_bytes or 2.0 * parameters
        count = 2.0 * parameters / bucket
        size = bucket / 2.0 * run.eager.gradient_bytes
        if run.zero:
            each = prices.collective("reduce-scatter", "dp", size) + prices.collective("all-gather", "dp", bucket)
        else:
            each = prices.collective("all-reduce", "dp", size)
        sums = count * each
    mine = parameters / (run.dp if run.zero else 1)
    all_gradients = parameters / (run.dp if run.zero == 3 else 1)
    # 200 is a rough count of the kernels of an update.
    return sums, prices.streamed(_ADAM_BYTES * mine + _NORM_BYTES * all_gradients, 200)


def _stage_bytes(run: GpuRun, stage: GpuStage, place: int) -> float:
    """Return the peak bytes of one GPU of a stage: state, activations of the microbatches in flight, logits.

    With recomputation a layer in flight stores its input alone, and one layer all its activations.

    - `place`: number of the stage from 0.
    """
    eager, decoder = run.eager, run.decoder
    parameters = _parameters(run, stage)
    over = [run.dp if run.zero >= least else 1 for least in (1, 2, 3)]
    copies = 2.0 if eager.gradient_copies and run.dp > 1 else 0.0
    # Float32 parameter and two moments; the gradient; the 16-bit parameter. Each is split from its ZeRO stage on.
    state = parameters * (12.0 / over[0] + eager.gradient_bytes / over[1] + 2.0 / over[2] + copies)
    tokens = run.micro_batch * run.seq
    spread = run.tp if eager.sequence_parallel else 1
    saved_bytes = eager.kept_bytes
    layer = saved_bytes["hidden"] * tokens * decoder.width / spread
    layer += saved_bytes["gathered"] * tokens * decoder.width
    layer += saved_bytes["ffn"] * decoder.mlp_width * tokens / run.tp
    layer += saved_bytes["scores"] * run.micro_batch * decoder.heads / run.tp * run.seq * run.seq
    if run.recompute == "full":
        saved = 2.0 * tokens * decoder.width / spread
        activations = saved * stage.layers * waiting(run, place) + layer
    else:
        activations = layer * stage.layers * waiting(run, place)
    logits = saved_bytes["logits"] * tokens * decoder.vocabulary / run.tp * stage.head
    return state + activations + logits
