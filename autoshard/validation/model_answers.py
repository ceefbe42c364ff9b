"""Answers to worked questions about training and serving models."""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.cost.chip import Chip, load_chip
from autoshard.cost.compute import Compute
from autoshard.validation.answer_register import (
    ANSWERS,
    LLAMA2_13B,
    LLAMA3_70B,
    Setting,
    answers,
    chip_of,
    collectives,
    compute_of,
    crossing,
    machine,
)


_DAY = 86400.0


# Training


def _fsdp_tokens(chip: Chip, shape: str, sizes: Mapping[str, int], axes: tuple[str, ...]) -> float:
    """Tokens on a chip above which a forward MLP hides the gathering of its two matrices over `axes`."""
    wire = collectives(chip, shape, **sizes)
    compute = Compute(wire.mesh.topology, wire.calibration)
    width, mlp_width = 8192, 32768
    gather = 2 * float(wire.time("all-gather", axes, 2.0 * width * mlp_width))
    return crossing(lambda tokens: float(compute.op_seconds(4.0 * tokens * width * mlp_width, 0)), lambda _: gather)


@answers("train-01")
def _(setting: Setting) -> float:
    """Tokens a chip for FSDP over one ring to be compute bound."""
    return _fsdp_tokens(chip_of(setting), "8x16x16", {"x": 8, "y": 16, "z": 16}, ("z",))


@answers("train-02")
def _(setting: Setting) -> float:
    """The same over three rings at once."""
    return _fsdp_tokens(chip_of(setting), "8x16x16", {"data": 2048}, ("data",))


@answers("train-03")
def _(setting: Setting) -> float:
    """The same on a full pod, in tokens of all chips."""
    return setting["chips"] * _fsdp_tokens(chip_of(setting), "16x20x28", {"data": setting["chips"]}, ("data",))


def _tensor_parallel(chip: Chip, axes: tuple[str, ...], mlp_width: float | None, ways: float | None) -> float:
    """The MLP width (or, given that, the ways) at which one-dim tensor parallelism is bound by its collectives."""
    wire = collectives(chip, "16x16x16", x=16, y=16, z=16)
    compute = Compute(wire.mesh.topology, wire.calibration)
    tokens, width = 1e6, 8192
    activations = 2.0 * tokens * width
    moving = float(wire.time("all-gather", axes, activations) + wire.time("reduce-scatter", axes, activations))

    def math_time(share: float) -> float:
        return float(compute.op_seconds(4.0 * tokens * width * share, 0))

    share = crossing(math_time, lambda _: moving)
    return share * ways if ways is not None else (mlp_width or 0.0) / share


@answers("train-08")
def _(setting: Setting) -> float:
    """MLP width that 8-way tensor parallelism on one axis needs."""
    return _tensor_parallel(chip_of(setting), ("z",), None, setting["Y"])


@answers("train-09")
def _(setting: Setting) -> float:
    """Ways of tensor parallelism on one axis that a given MLP width bears."""
    return _tensor_parallel(chip_of(setting), ("z",), setting["F"], None)


@answers("train-12b")
def _(setting: Setting) -> float:
    """Tokens a slice for data parallelism over any number of slices to hide the gradients' all-reduce."""
    wire = collectives(chip_of(setting), "4x4x4*4096", slices=4096, fsdp=64)
    compute = Compute(wire.mesh.topology, wire.calibration)
    weights = 2.0 * 8192 * 32768
    reducing = float(wire.time("all-reduce", ("slices",), 2 * weights / 64))
    return crossing(lambda tokens: float(compute.op_seconds(4.0 * tokens * weights / 64, 0)), lambda _: reducing)


def _train_seconds(decoder_params: float, tokens: float, chips: float, compute: Compute, mfu: float) -> float:
    return float(compute.op_seconds(6.0 * decoder_params * tokens / chips, 0, efficiency=mfu))


@answers("train-14")
def _(setting: Setting) -> float:
    """Days to spend a number of FLOPs on ten pods at peak."""
    return float(compute_of({"chip": setting["chip"]}).op_seconds(setting["flops"] / setting["chips"], 0)) / _DAY


@answers("train-21")
def _(setting: Setting) -> float:
    """Step time of LLaMA-2 13B on 3M tokens at a given MFU (ms)."""
    return 1e3 * _train_seconds(LLAMA2_13B.params, 3e6, setting["chips"], compute_of(setting), setting["mfu"])


def _mixed(mlp_width: float, tokens_per_chip: float | None, chips: float, tokens: float = 0.0) -> float:
    """FSDP over two rings and tensor parallelism over one: the best FSDP ways, or, without tokens, the least tokens.

    Gathering weights costs a * X / N and moving activations b / X, X being the ways of FSDP on N chips.
    """
    wire = collectives(load_chip("v5p"), "16x16x16", x=16, y=16, z=16)
    compute = Compute(wire.mesh.topology, wire.calibration)
    width = 8192.0

    def slopes(batch: float) -> tuple[float, float]:
        weights = 2 * float(wire.time("all-gather", ("x", "y"), 2.0 * width * mlp_width))
        moving = 2 * float(wire.time("all-gather", ("z",), 2.0 * batch * width))
        return weights / chips, moving

    if tokens_per_chip is not None:
        a, b = slopes(tokens)
        return math.sqrt(b / a)

    def limit(per_chip: float) -> float:
        a, b = slopes(per_chip * chips)
        return 2.0 * math.sqrt(a * b)

    return crossing(lambda per_chip: float(compute.op_seconds(4.0 * per_chip * width * mlp_width, 0)), limit)


@answers("train-22")
def _(setting: Setting) -> float:
    """Ways of FSDP (on two axes, tensor parallelism on one) that move least."""
    return _mixed(setting["F"], setting["B"] / setting["N"], setting["N"], setting["B"])


ANSWERS["at-13"] = ANSWERS["train-22"]


@answers("at-12")
def _(setting: Setting) -> float:
    """Tokens a chip above which that best mixture is compute bound, when its two kinds of traffic add up."""
    return _mixed(setting["F"], None, 8960)


@answers("tf-07")
def _(setting: Setting) -> float:
    """Utilisation of a published training run from its parameters, tokens and hours (percent)."""
    seconds_at_peak = 6.0 * setting["active"] * setting["tokens"] / setting["flops"]
    return 100.0 * seconds_at_peak / (setting["h800_hours"] * 3600)


@answers("at-04")
def _(setting: Setting) -> float:
    """Days to train 70B parameters on 15T tokens at a given MFU."""
    return _train_seconds(70e9, 15e12, setting["chips"], compute_of(setting), setting["mfu"]) / _DAY


@answers("at-05")
def _(setting: Setting) -> float:
    """Years for the same on one chip at peak."""
    return _train_seconds(70e9, 15e12, 1, compute_of(setting), 1.0) / (365 * _DAY)


@answers("at-11")
def _(setting: Setting) -> float:
    """Tokens on each chip of a full pod for a batch of 4 Mi tokens."""
    return 4 * 1024**2 / machine(chip_of(setting), "16x20x28").num_chips


# Inference


def _decode_ms(setting: Setting, batch: int) -> float:
    """One decode step of an int8 30B model: its cache streams, then its weights stream or multiply."""
    compute = compute_of(setting, "4x4")
    cache = batch * 100e3 * 8192 / setting["chips"]
    weights = 30e9 / setting["chips"]
    return 1e3 * float(compute.memory_seconds(cache) + compute.op_seconds(2.0 * batch * weights, weights))


@answers("inf-01")
def _(setting: Setting) -> float:
    """Decode step at batch 4 (ms)."""
    return _decode_ms(setting, 4)


@answers("inf-02")
def _(setting: Setting) -> float:
    """Decode step at batch 256 (ms), on the 8.1e11 B/s that the book gives this chip."""
    return _decode_ms({"hbm_bw": 8.1e11, **setting}, 256)


@answers("inf-03")
def _(setting: Setting) -> float:
    """Cache of one sequence of 8192 tokens."""
    decoder = dataclasses.replace(LLAMA2_13B, layers=setting["L"], kv_heads=setting["K"], head_size=setting["H"])
    return decoder.kv_bytes(8192)


@answers("ai-04")
def _(setting: Setting) -> float:
    """Tokens a second a chip of int8 LLaMA-3 70B decoding 32 sequences of 8192 on 8 chips."""
    compute = compute_of(setting, "2x4")
    streamed = LLAMA3_70B.kv_bytes(32 * 8192, 1) + 70e9
    return 32 / float(compute.memory_seconds(streamed / 8)) / 8


@answers("ai-05")
def _(setting: Setting) -> float:
    """Chips whose memory holds 70B bf16 parameters (fractional)."""
    return 2 * 70e9 / chip_of(setting, "v5e").hbm_bytes


@answers("ai-06")
def _(setting: Setting) -> float:
    """Decode step when everything in main memory is read once (ms)."""
    compute = compute_of(setting)
    return 1e3 * float(compute.memory_seconds(compute.topology.chip.hbm_bytes))


@answers("ai-07")
def _(setting: Setting) -> float:
    """Ways of tensor parallelism on two axes that LLaMA-3 70B bears."""
    return _tensor_parallel(chip_of(setting), ("y", "z")[: setting["axes"]], LLAMA3_70B.mlp_width, None)


@answers("ai-10")
def _(setting: Setting) -> float:
    """Multiplying 64 rows with one MLP matrix of LLaMA-3 70B over all chips (us)."""
    flops = 2.0 * 64 * LLAMA3_70B.width * LLAMA3_70B.mlp_width / setting["chips"]
    return 1e6 * float(compute_of(setting, "4x8").op_seconds(flops, 0))


@answers("ai-11")
def _(setting: Setting) -> float:
    """Prefill of 8192 tokens through 70B parameters at 40 % MFU (s)."""
    flops = 2.0 * 70e9 * 8192 / setting["chips"]
    return float(compute_of(setting, "4x4").op_seconds(flops, 0, efficiency=0.4))


@answers("ai-12")
def _(setting: Setting) -> float:
    """Prefill servers for each generating server, 32 sequences at a time, 512 tokens each."""
    prefill = ANSWERS["ai-11"]({"chip": "v5e", "chips": 16})
    step = ANSWERS["ai-06"]({"chip": "v5e"}) / 1e3
    return 32 * prefill / (step * 512)
