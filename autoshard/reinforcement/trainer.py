"""The trainer of a step: degrees, the seconds of passes and updates, and the devices of every weight.

On GPUs they are the degrees of an eager framework, on other chips the layouts of first estimates.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from autoshard.cost import Compute, Topology, load_calibration
from autoshard.degrees import (
    DegreeChoice,
    GpuRun,
    choose_degrees,
    format_degrees,
    gpu_decoder,
    gpu_stages,
    price_forward,
    price_step,
    resident_bytes,
)
from autoshard.errors import UserError
from autoshard.planning import PlacedMesh, Spec
from autoshard.program import WeightDim
from autoshard.reinforcement.chip_shares import ChipPart
from autoshard.reinforcement.rl_workload import RlModel, RlWorkload
from autoshard.serving import Layout, StepAsked, StepEstimate, layout_estimate


_REMATS = ("none", "dots", "full")
_MOST_MICRO = 16
"""Sequences of a device in the largest microbatch that is tried."""
_PARAM_BYTES = 4
"""Bytes of a parameter of trainers on TPUs, whose weights are float32 and are cast for matmuls."""
_SPLIT = frozenset((WeightDim.HEADS, WeightDim.KV, WeightDim.INNER, WeightDim.VOCABULARY))
"""Dims that tensor parallelism splits."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerStage:
    """Devices of some layers of a trainer, and the axes that split their weights."""

    mesh: Mapping[str, int]
    """Axes of the stage's devices, major first."""
    devices: Sequence[int]
    """Numbers of the devices in the trainer's topology, in the order of the mesh."""
    layers: int
    embedding: bool
    """True if the stage has the table of tokens."""
    head: bool
    """True if the stage has the head and the last norm."""
    tensor: tuple[str, ...]
    """Axes of tensor parallelism."""
    sharded: tuple[str, ...]
    """Axes over which replicas split each weight."""
    experts: "TrainerStage | None" = None
    """Axes of experts on the same devices; None if they are those of other weights."""

    def placed(self, part: ChipPart) -> PlacedMesh:
        """Return the mesh on the devices of a trainer's part of a topology."""
        return PlacedMesh(self.mesh, [part.devices[device] for device in self.devices])

    def spec(self, kinds: tuple[WeightDim, ...]) -> Spec:
        """Return the spec of a weight with dims of these kinds; replicas split the first dim, or split it further."""
        split = {WeightDim.EXPERT} if WeightDim.EXPERT in kinds else _SPLIT
        first, *others = (self.tensor if kind in split else () for kind in kinds)
        return Spec(((*first, *self.sharded), *others))


@dataclasses.dataclass(frozen=True, slots=True)
class Trainer:
    """The degrees of a trainer with their seconds for one step, and bytes of one device."""

    topology: Topology
    degrees: Mapping[str, int | str]
    """Degrees by name."""
    words: str
    """The degrees in a few words."""
    train_s: float
    """Seconds of all updates."""
    score_s: float
    """Seconds of all scoring passes."""
    peak_bytes: float
    """Peak bytes of one device while it trains."""
    resident_bytes: float
    """Bytes of one device between steps: parameters, optimizer state, and weights of a reference."""
    reference_bytes: float
    """Bytes of a reference's weights on one device."""
    batch: int
    """Sequences of one update, padded so that devices divide them."""
    stages: tuple[TrainerStage, ...]
    framework: str = ""
    """The eager framework of the degrees; empty for a first estimate."""


def best_trainer(model: RlModel, topology: Topology, work: RlWorkload) -> Trainer:
    """Return the trainer of all of a topology whose microbatches have room for the longest sequence.

    Raises `UserError` if none fits.
    """
    if not topology.traits.torus and not topology.traits.shares_machine:
        try:
            gpu_decoder(model.config)
        except UserError:
            pass
        else:
            return _eager_trainer(model, topology, dataclasses.replace(work, framework=work.framework or "torchtitan"))
    if work.framework:
        raise UserError(
            f"--framework {work.framework} has no prices for {model.config} on {topology.name}: it is for GPUs and for "
            "decoders that `autoshard degrees` knows; leave it out."
        )
    return _estimated_trainer(model, topology, work)


def _batch(topology: Topology, work: RlWorkload) -> int:
    """Return the sequences of one update, padded to a multiple of the devices if there are more of them."""
    batch, devices = work.sequences // work.updates, topology.num_devices
    return -(-batch // devices) * devices if batch > devices else batch


def _eager_trainer(model: RlModel, topology: Topology, work: RlWorkload) -> Trainer:
    """Return the first plan of `autoshard degrees` with room for the longest sequence and a reference's weights."""
    batch = _batch(topology, work)
    choices = choose_degrees(gpu_decoder(model.config), topology.name, work.framework, batch, work.length)
    choice = next((each for each in choices if each.fits and _fits_longest(each, work)), None)
    if choice is None:
        raise UserError(
            f"no degrees of {work.framework} on {topology.name} have room for a sequence of "
            f"{work.prompt + work.longest} tokens; give a shorter --longest, or more GPUs."
        )
    run = choice.run
    reference = _reference_bytes(run, work)
    degrees = {"dp": run.dp, "tp": run.tp, "pp": run.pp, "ep": run.ep, "zero": run.zero, "recompute": run.recompute}
    return Trainer(
        topology=topology,
        degrees=degrees | {"micro_batch": run.micro_batch, "accumulation": run.accumulation},
        words=format_degrees(run),
        train_s=work.updates * choice.step.seconds,
        score_s=work.scores * work.updates * price_forward(run),
        peak_bytes=choice.step.peak_bytes + reference,
        resident_bytes=resident_bytes(run) + reference,
        reference_bytes=reference,
        batch=batch,
        stages=eager_stages(run),
        framework=work.framework,
    )


def _reference_bytes(run: GpuRun, work: RlWorkload) -> float:
    """Return the bytes of a reference's 16-bit weights on one device: all devices of a stage split them."""
    return work.references * 2.0 * run.decoder.params / run.topology.num_devices


def _fits_longest(choice: DegreeChoice, work: RlWorkload) -> bool:
    """Return True if the longest sequence fits as a microbatch of its own, next to a reference's weights."""
    run, longest = choice.run, work.prompt + work.longest
    reference = _reference_bytes(run, work)
    alone = dataclasses.replace(run, seq=longest, micro_batch=1, accumulation=run.pp)
    peak = max(choice.step.peak_bytes, price_step(alone).peak_bytes)
    return peak + reference <= choice.limit_bytes


def eager_stages(run: GpuRun) -> tuple[TrainerStage, ...]:
    """Return the stages of a run; ranks of tensor parallelism are adjacent, replicas next, stages outermost."""
    stages = gpu_stages(run) or ()
    each = run.topology.num_devices // run.pp
    found = []
    for number, stage in enumerate(stages):
        devices = range(number * each, (number + 1) * each)
        ends = (stage.layers, stage.embedding, stage.head)
        replicas = ("dp",) if run.zero == 3 else ()
        experts = None
        if run.decoder.experts > 1:
            mesh = {"replicas": run.expert_replicas, "ep": run.ep}
            experts = TrainerStage(mesh, devices, *ends, ("ep",), ("replicas",) if run.zero == 3 else ())
        found.append(TrainerStage({"dp": run.dp, "tp": run.tp}, devices, *ends, ("tp",), replicas, experts))
    return tuple(found)


def _estimated_trainer(model: RlModel, topology: Topology, work: RlWorkload) -> Trainer:
    """Return the fastest layout of first estimates, over microbatches and recomputation."""
    compute, batch = Compute(topology, load_calibration(topology.chip)), _batch(topology, work)
    best: tuple[float, StepEstimate, StepEstimate, Layout] | None = None
    reference = work.references * 2.0 * model.decoder.params / topology.num_devices
    least = math.inf
    for layout, asked in _asked(model, topology, work, batch):
        longest = dataclasses.replace(asked, batch=layout.data, seq=work.prompt + work.longest, microbatches=1)
        train = layout_estimate(model.decoder, compute, asked, layout)
        peak = max(train.peak_bytes, layout_estimate(model.decoder, compute, longest, layout).peak_bytes) + reference
        least = min(least, peak)
        if peak > train.limit_bytes:
            continue
        score = layout_estimate(model.decoder, compute, dataclasses.replace(asked, kind="score"), layout)
        seconds = train.step_time_s + work.scores * score.step_time_s
        if best is None or seconds < best[0]:
            best = seconds, train, score, layout
    if best is None:
        if math.isinf(least):
            raise UserError(
                f"no layout of {topology.num_devices} devices divides {batch} sequences of an update and "
                f"{model.decoder.heads} heads; give a multiple of {topology.num_devices} --sequences."
            )
        raise UserError(
            f"nothing that trains {model.config} fits {topology.name}: the least is {least / 2**30:.1f} GiB of each "
            f"device's {topology.usable_bytes / 2**30:.1f}; use more devices, or a shorter --longest."
        )
    _, train, score, layout = best
    asked, devices = train.asked, range(topology.num_devices)
    stage = TrainerStage(
        {"data": layout.data, "model": layout.model}, devices, model.decoder.layers, True, True, ("model",), ("data",)
    )
    return Trainer(
        topology=topology,
        degrees={"data": layout.data, "model": layout.model, "remat": asked.remat, "microbatches": asked.microbatches},
        words=f"data {layout.data}, model {layout.model}, remat {asked.remat}, {asked.microbatches} microbatches",
        train_s=work.updates * train.step_time_s,
        score_s=work.scores * work.updates * score.step_time_s,
        peak_bytes=train.peak_bytes + reference,
        resident_bytes=train.bytes["parameters"] + train.bytes["optimizer state"] + reference,
        reference_bytes=reference,
        batch=batch,
        stages=(stage,),
    )


def _asked(model: RlModel, topology: Topology, work: RlWorkload, batch: int) -> Iterator[tuple[Layout, StepAsked]]:
    """Yield layouts of all devices with microbatches and remat policies that divide the batch and the heads."""
    devices = topology.num_devices
    for split in range(1, devices + 1):
        data = devices // split
        if devices % split or batch % data or model.decoder.heads % split:
            continue
        each = batch // data
        for micro in range(1, min(each, _MOST_MICRO) + 1):
            if each % micro:
                continue
            for remat in _REMATS:
                yield (
                    Layout(data, split),
                    StepAsked(
                        data * micro, work.length, remat=remat, param_bytes=_PARAM_BYTES, microbatches=each // micro
                    ),
                )
