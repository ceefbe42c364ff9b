"""Seconds and bytes of a step of a stated run: stages, microbatches, sums and gathers of replicas, the optimizer."""

import dataclasses

from autoshard.degrees.gpu_run import GpuRun, GpuStage, gpu_stages, waiting
from autoshard.degrees.gpu_stage import NOTHING, GpuPrices, HostFigures, Pass


_ADAM_BYTES = 34.0
"""Read and written for each element of the state: parameter, gradient and two moments in float32, the 16-bit copy."""
_NORM_BYTES = 16.0
"""For each gradient: zeroed, its norm taken, clipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuStep:
    """What a step of a run takes."""

    seconds: float
    peak_bytes: float
    runs: bool
    """Whether every stage has something to do."""
    parts: dict[str, float]
    """Seconds: `microbatches`, `bubble`, `gradients`, `optimizer`."""


def price_step(run: GpuRun, figures: HostFigures | None = None) -> GpuStep:
    """Prices one run."""
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
    each, last = [], 0.0
    for stage in stages:
        front, back = forward.times(stage.layers), backward.times(stage.layers)
        for name, there in (("embedding", stage.embedding), ("head", stage.head)):
            front += ends[name, False] if there else NOTHING
            back += ends[name, True] if there else NOTHING
        each.append(front.seconds + back.seconds + 2 * sent)
        last = back.seconds
    slowest = max(each)
    busy = run.accumulation * slowest
    bubble = (sum(each) - slowest) / run.chunks
    gradients, optimizer = _updated(prices, stages)
    if run.pp == 1 and run.zero == 0 and run.eager.overlapped_sums:
        beside = min(gradients, last)
        gradients += (prices.figures.contention - 1.0) * beside
    parts = {"microbatches": busy, "bubble": bubble, "gradients": gradients, "optimizer": optimizer}
    return GpuStep(sum(parts.values()), max(_stage_bytes(run, s, n) for n, s in enumerate(stages)), True, parts)


def _gathered(prices: GpuPrices, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
    """Passes beside which the next layer's parameters are gathered, and the last one's gradients scattered."""
    run = prices.run
    size = 2.0 * run.decoder.layer_parameters / run.tp
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
    """A pass beside which something is sent: its kernels take multiprocessors and bandwidth from matmuls."""
    longer, shorter = max(each.device, sent), min(each.device, sent)
    return Pass(longer + contention * shorter, each.host)


def _parameters(run: GpuRun, stage: GpuStage) -> float:
    """Parameters of a stage on one GPU of its tensor-parallel group."""
    tables = stage.embedding + stage.head
    if run.decoder.tied and stage.embedding and stage.head:
        tables = 1
    return (stage.layers * run.decoder.layer_parameters + tables * run.decoder.table_parameters) / run.tp


def _updated(prices: GpuPrices, stages: tuple[GpuStage, ...]) -> tuple[float, float]:
    """Seconds of the sums over replicas, and of the update, on the stage with most parameters."""
    run = prices.run
    held = max(_parameters(run, stage) for stage in stages)
    sums = 0.0
    if run.dp > 1 and run.zero < 3:
        bucket = run.eager.bucket_bytes or 2.0 * held
        count = 2.0 * held / bucket
        size = bucket / 2.0 * run.eager.gradient_bytes
        if run.zero:
            each = prices.collective("reduce-scatter", "dp", size) + prices.collective("all-gather", "dp", bucket)
        else:
            each = prices.collective("all-reduce", "dp", size)
        sums = count * each
    mine = held / (run.dp if run.zero else 1)
    all_gradients = held / (run.dp if run.zero == 3 else 1)
    return sums, prices.streamed(_ADAM_BYTES * mine + _NORM_BYTES * all_gradients, 200)


def _stage_bytes(run: GpuRun, stage: GpuStage, place: int) -> float:
    """Bytes of one GPU of a stage at its peak: state, activations of the microbatches under way, logits."""
    eager, decoder = run.eager, run.decoder
    held = _parameters(run, stage)
    over = [run.dp if run.zero >= least else 1 for least in (1, 2, 3)]
    copies = 2.0 if eager.gradient_copies and run.dp > 1 else 0.0
    state = held * (12.0 / over[0] + eager.gradient_bytes / over[1] + 2.0 / over[2] + copies)
    tokens = run.micro_batch * run.seq
    spread = run.tp if eager.sequence_parallel else 1
    kept = eager.kept_bytes
    layer = kept["hidden"] * tokens * decoder.width / spread
    layer += kept["gathered"] * tokens * decoder.width
    layer += kept["ffn"] * decoder.ffn * tokens / run.tp
    layer += kept["scores"] * run.micro_batch * decoder.heads / run.tp * run.seq * run.seq
    if run.recompute == "full":
        saved = 2.0 * tokens * decoder.width / spread
        activations = saved * stage.layers * waiting(run, place) + layer
    else:
        activations = layer * stage.layers * waiting(run, place)
    logits = kept["logits"] * tokens * decoder.vocab / run.tp * stage.head
    return state + activations + logits
