"""Choice of degrees of parallelism for a decoder under an eager framework on GPUs: all degrees, priced and sorted."""

import dataclasses
import pathlib
from collections.abc import Iterator

from autoshard.cost import Topology
from autoshard.degrees.gpu_run import GpuRun
from autoshard.degrees.gpu_stage import MachinePrices, host_figures
from autoshard.degrees.gpu_step import GpuStep, price_step
from autoshard.degrees.node_waits import steadiest, waits
from autoshard.errors import UserError
from autoshard.planning import EAGER_SHARE
from autoshard.program import config_dims, read_config
from autoshard.serving import Decoder


ZEROS = {"torchtitan": (2, 3), "megatron-core": (0, 1)}
"""Frameworks that degrees are chosen for, and the ZeRO stages of each."""
RECOMPUTED = {"torchtitan": ("none", "selective", "full"), "megatron-core": ("none", "full")}
"""Modes of activation checkpointing of each framework."""
_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe")
"""Types of configurations (`model_type`) for which degrees are chosen."""
_MOST_MICRO = 16
"""Sequences of the largest microbatch that is tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class DegreeChoice:
    """One plan of degrees, with the price of its step."""

    run: GpuRun
    step: GpuStep

    @property
    def limit_bytes(self) -> float:
        """Bytes of one GPU that tensors may occupy: the share `EAGER_SHARE` of its usable memory."""
        return self.run.topology.usable_bytes * EAGER_SHARE

    @property
    def fits(self) -> bool:
        """True if the peak of the step is at most `limit_bytes`."""
        return self.step.peak_bytes <= self.limit_bytes

    @property
    def waits(self) -> int:
        """Number of messages between islands that a step waits for in sequence."""
        return waits(self.run)

    @property
    def mfu(self) -> float:
        """Model FLOPs of a step over the peak bf16 FLOPs of all GPUs in its time, with half of the scores masked."""
        decoder, run = self.run.decoder, self.run
        # Six FLOPs for each parameter and token. Attention has 12 for each layer, width of heads and key; half are
        # masked.
        heads = decoder.heads * decoder.head_size
        flops = run.tokens * (6.0 * decoder.matmul_params + 6.0 * decoder.layers * heads * run.seq)
        peak = run.topology.peak_flops("bf16") * run.topology.num_devices
        return flops / (self.step.seconds * peak)


def gpu_decoder(program: str) -> Decoder:
    """Return the dims of a decoder's configuration, `hf:NAME` or `hf:PATH`, with or without experts.

    Raises: UserError for another program, for a model that is no such decoder, and for layers of several kinds.
    """
    if not program.startswith("hf:"):
        raise UserError(f"degrees are chosen for a configuration, hf:CONFIG; found {program!r}.")
    name, fields = read_config(program.removeprefix("hf:"))
    if fields["model_type"] not in _TYPES:
        raise UserError(
            f"{name} is of the type {fields['model_type']}; degrees are chosen for decoders: {', '.join(_TYPES)}."
        )
    decoder = config_dims(fields, Decoder)
    if decoder is None:
        raise UserError(
            f"{name} does not state all sizes of a {fields['model_type']}; add those that are its defaults."
        )
    if decoder.dense_layers or decoder.shared_experts:
        raise UserError(f"{name} has mixtures with dense layers or shared experts, which are not priced.")
    return decoder


def choose_degrees(
    decoder: Decoder, topology: str | pathlib.Path, framework: str, batch: int, seq: int
) -> tuple[DegreeChoice, ...]:
    """Return every plan for a global batch of sequences of `seq` tokens, the recommended plan first.

    The other plans follow, those that fit first, by step time. The recommended plan waits least for other nodes among
    the plans that are as fast as the fastest within the error (`INDISTINCT`). Tensor parallelism stays inside an
    island.

    - `decoder`: dims of the model.
    - `topology`: name of a topology of GPUs.
    - `framework`: a key of `ZEROS`.
    - `batch`: sequences of a step over all GPUs.
    - `seq`: tokens of a sequence.

    Raises: UserError for a topology without prices for GPUs, another framework, or a batch that no plan divides. If
    nothing fits, the UserError names the least memory that a plan needs.
    """
    if framework not in ZEROS:
        raise UserError(f"degrees are chosen for {' and '.join(ZEROS)}; found {framework!r}.")
    place = Topology.parse(str(topology))
    if place.chip.name not in host_figures().attention_efficiency["flash"]:
        raise UserError(f"{place.name} has no GPUs; degrees are chosen for topologies such as h100:8*16.")
    machine = MachinePrices(place)
    choices = [
        DegreeChoice(run, price_step(run, machine=machine)) for run in _runs(decoder, place, framework, batch, seq)
    ]
    choices = [each for each in choices if each.step.runs]
    if not choices:
        raise UserError(
            f"no degrees multiply to the {place.num_devices} GPUs of {place.name} and divide a batch of {batch} "
            f"sequences, {decoder.layers} layers and {decoder.kv_heads} heads of keys; name another --batch."
        )
    if not any(each.fits for each in choices):
        least = min(choices, key=lambda each: each.step.peak_bytes)
        raise UserError(
            f"nothing fits {place.name}: the least that a plan needs is {least.step.peak_bytes / 2**30:.1f} GiB a GPU "
            f"of {least.limit_bytes / 2**30:.1f} ({format_degrees(least.run)}); use more GPUs or shorter sequences."
        )
    choices.sort(key=lambda each: (not each.fits, each.step.seconds))
    fitting = [each for each in choices if each.fits]
    recommended = steadiest(fitting, lambda each: each.step.seconds, lambda each: each.run)
    return (recommended, *(each for each in choices if each is not recommended))


def format_degrees(run: GpuRun) -> str:
    """Return a plan in a few words: `dp8 tp4 pp1 ZeRO-2 micro 1 AC full`, with experts also `ep8`."""
    words = [f"dp{run.dp}", f"tp{run.tp}", f"pp{run.pp}", f"ZeRO-{run.zero}", f"micro {run.micro_batch}"]
    words[3:3] = [f"ep{run.ep}"] if run.decoder.experts > 1 else []
    return " ".join(words + ([] if run.recompute == "none" else [f"AC {run.recompute}"]))


def _runs(decoder: Decoder, topology: Topology, framework: str, batch: int, seq: int) -> Iterator[GpuRun]:
    """Yield every combination of degrees, microbatch, ZeRO stage and recomputation that divides devices and batch.

    Tensor parallelism divides heads of keys (`tensor_degrees`), and fits an island. Experts are divided over GPUs of a
    stage. A single replica has the least ZeRO stage. Microbatches have at most `_MOST_MICRO` sequences, and stage 3 no
    pipeline.
    """
    devices = topology.num_devices
    for tp in tensor_degrees(decoder, topology):
        for pp in _divisors(devices // tp):
            dp = devices // tp // pp
            if batch % dp or pp > decoder.layers:
                continue
            for micro in _divisors(batch // dp):
                for zero in ZEROS[framework] if dp > 1 else ZEROS[framework][:1]:
                    if micro > _MOST_MICRO or (zero == 3 and pp > 1):
                        continue  # a stage would gather its layers again for every microbatch
                    for recompute in RECOMPUTED[framework]:
                        run = GpuRun(
                            decoder, topology, framework, seq, dp, tp, pp, micro, batch // dp // micro, zero, recompute
                        )
                        for ep in _expert_degrees(decoder, dp * tp):
                            yield dataclasses.replace(run, ep=ep)


def tensor_degrees(decoder: Decoder, topology: Topology) -> list[int]:
    """Return the degrees of tensor parallelism inside an island that split whole heads of keys, MLP and vocabulary.

    Both frameworks refuse a degree that does not divide the heads of keys: neither replicates heads.
    """
    inner = decoder.mlp_width if decoder.experts == 1 else 0
    return [
        tp
        for tp in _divisors(min(topology.num_devices, topology.shape[0]))
        if not (decoder.kv_heads % tp or inner % tp or decoder.vocabulary % tp or topology.num_devices % tp)
    ]


def _expert_degrees(decoder: Decoder, devices: int) -> list[int]:
    """Return the numbers of GPUs of a stage of `devices` that can divide the experts; 1 alone for a dense decoder."""
    return [each for each in _divisors(decoder.experts) if devices % each == 0]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
