"""First estimates of a configuration's step: closed forms for decoders, else lower bounds from a traced program."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.cost import Topology, larger_topologies, load_calibration
from autoshard.errors import UserError
from autoshard.planning.price.analysed_program import analyse_program, least_seconds
from autoshard.program import WEIGHTS, Program, Role, config_dims, read_config
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.decoder_estimate import StepEstimate, estimate_step
from autoshard.serving.decoder_step import StepAsked


REMATS = ("none", "dots", "full")
"""Remat policies that are estimated by default."""
_ITEMSIZES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "f32": 4, "fp32": 4, "float32": 4}
"""Dtypes of parameters and optimizer moments that have an estimate -> bytes of an element."""
_KINDS = {
    Role.PARAMETER: "parameters",
    Role.FROZEN: "parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.BATCH: "batch",
    Role.OTHER: "other",
}
"""Role of an argument of a traced program -> kind of memory in its estimate."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelEstimate:
    """An estimate for one model on one topology."""

    name: str
    """Name of the estimated model."""
    topology: Topology
    parameters: int
    """Number of the model's parameters, over all devices."""
    estimate: StepEstimate
    counted: bool
    """True if the estimate is computed from the model's dims; False for lower bounds from its traced program."""


def config_decoder(config: str) -> Decoder | None:
    """Return the decoder of `CONFIG` or `hf:CONFIG`, with its counts; None for another kind of model.

    Raises `UserError` if there is no such configuration.
    """
    return config_dims(read_config(config.removeprefix("hf:"))[1], Decoder)


def estimate_config(
    config: str,
    topology: Topology,
    *,
    train: bool | None = None,
    serve: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    cache: int | None = None,
    remat: str | None = None,
    **dtypes: str | None,
) -> list[ModelEstimate]:
    """Return estimates of a decoder's step, each on its best layout; empty for a model that is no known decoder.

    Training without `remat` has one for each of `REMATS`, in that order; else there is one estimate.

    - `config`: `hf:CONFIG`.
    - `train`: True for a training step; None or False for a forward pass, or for `serve`.
    - `serve`: `prefill` or `decode`; None for training or a forward pass.
    - `batch`: number of sequences over all devices, by default one for each device.
    - `seq`: tokens of a sequence, by default the model's context up to 1024.
    - `cache`: tokens for which the key-value cache has room, if above `seq`; `decode` reads all of them.
    - `remat`: the only policy to estimate, in training.
    - `dtypes`: `param_dtype`, by default float32 in training and else bfloat16; `state_dtype`, by default float32.

    Raises `UserError` for options that contradict one another, an unknown dtype or policy, and a batch that no layout
    divides.
    """
    decoder = config_decoder(config)
    if decoder is None:
        return []
    if train and serve is not None:
        raise UserError("--serve is for inference; leave --train out, or --serve.")
    if remat is not None and not train:
        raise UserError("--remat is for training steps; add --train, or leave it out.")
    if cache is not None and serve is None:
        raise UserError("--cache is for serving; add --serve prefill or --serve decode, or leave it out.")
    name, fields = read_config(config.removeprefix("hf:"))
    positions = fields.get("max_position_embeddings") or fields.get("n_positions") or 1024
    length = seq if seq is not None else min(positions, 1024)
    if serve == "decode" and cache is not None:
        length = max(length, cache)
    asked = StepAsked(
        topology.num_devices if batch is None else batch,
        length,
        "train" if train else serve or "infer",
        param_bytes=_itemsize(dtypes.get("param_dtype") or ("float32" if train else "bfloat16"), "param_dtype"),
        state_bytes=_itemsize(dtypes.get("state_dtype") or "float32", "state_dtype"),
        room=cache or 0,
    )
    policies = (remat or "none",) if remat is not None or not train else REMATS
    figures = load_calibration(topology.chip)
    return [
        ModelEstimate(
            name,
            topology,
            decoder.params,
            estimate_step(decoder, topology, dataclasses.replace(asked, remat=policy), figures),
            True,
        )
        for policy in policies
    ]


def fewest_devices(config: str, found: Sequence[ModelEstimate], **options: Any) -> dict[str, Topology | None]:
    """Return, for each chip's name on which no estimate of `found` fits, the smallest topology on which one does.

    `options` are those of `estimate_config`. None stands for more devices than `larger_topologies` tries. A traced
    program needs at least its arguments' share of each device, so its topology is a lower bound. Chips whose devices
    share one machine's memory, such as CPUs, are left out.
    """
    by_chip: dict[str, list[ModelEstimate]] = {}
    for each in found:
        by_chip.setdefault(each.topology.chip.name, []).append(each)
    fewest: dict[str, Topology | None] = {}
    for chip, rows in by_chip.items():
        if any(row.estimate.fits for row in rows) or rows[0].topology.chip.traits.shares_machine:
            continue
        smallest = min(rows, key=lambda row: row.topology.num_devices)
        guess = smallest.estimate
        # Parameters and moments, or a traced program's arguments, are split over all devices.
        total = guess.peak_bytes * smallest.topology.num_devices
        if smallest.counted:
            moments = 2 * guess.asked.state_bytes if guess.asked.training else 0
            total = smallest.parameters * (guess.asked.param_bytes + moments)
        devices = math.ceil(total / guess.limit_bytes)
        places = larger_topologies(smallest.topology, devices)
        fewest[chip] = next((p for p in places if not smallest.counted or _fits(config, p, options)), None)
    return fewest


def _fits(config: str, place: Topology, options: Mapping[str, Any]) -> bool:
    """Return True if an estimate fits on `place`; False for a batch that its devices cannot share."""
    try:
        return any(each.estimate.fits for each in estimate_config(config, place, **options))
    except UserError:
        return False


def _itemsize(dtype: str, flag: str) -> int:
    """Return the bytes of an element; raise `UserError`, naming the option `flag`, for a dtype without an estimate."""
    if dtype not in _ITEMSIZES:
        raise UserError(f"--{flag.replace('_', '-')} {dtype} is not estimated; give {' or '.join(_ITEMSIZES)}.")
    return _ITEMSIZES[dtype]


def least_estimate(program: Program, topology: Topology) -> ModelEstimate:
    """Return the least that any plan of a traced program needs: arguments split over all devices, and arithmetic.

    The step time is that of the arithmetic alone, without communication. The estimate has no layout, and batch and
    sequence length 0. MFU is 0 if the program has no model FLOPs.
    """
    reading = analyse_program(program, topology, kept=True)
    seconds = least_seconds(reading.graph, topology, load_calibration(topology.chip))
    sizes = dict.fromkeys(_KINDS.values(), 0.0)
    count = 0
    for argument in program.arguments:
        elements = math.prod(argument.shape)
        sizes[_KINDS[argument.role]] += elements * np.dtype(argument.dtype).itemsize / topology.num_devices
        count += elements if argument.role in WEIGHTS else 0
    kind = "train" if program.training else "infer"
    peak = topology.peak_flops("bf16") * topology.num_devices
    mfu = (program.model_flops or 0.0) / peak / seconds if seconds else 0.0
    nonzero = {name: size for name, size in sizes.items() if size}
    asked = StepAsked(batch=0, seq=0, kind=kind)
    estimate = StepEstimate({}, asked, seconds, seconds, 0.0, nonzero, topology.usable_bytes, mfu)
    return ModelEstimate(program.name, topology, count, estimate, False)
