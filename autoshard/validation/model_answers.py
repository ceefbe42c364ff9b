"""Answers to worked questions about training and serving models.

The report of `autoshard validate` prints the docstring of an answer as its question.
"""

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
"""Seconds of a day."""


# Training


def _fsdp_tokens(chip: Chip, shape: str, sizes: Mapping[str, int], axes: tuple[str, ...]) -> float:
    """Return the tokens on a chip above which a forward MLP hides the all-gathers of its two matrices.

    - `shape`: shape of the slice, such as `8x16x16`.
    - `sizes`: mesh axes and their sizes.
    - `axes`: mesh axes over which the matrices are gathered.
    """
    wire = collectives(chip, shape, **sizes)
    compute = Compute(wire.mesh.topology, wire.calibration)
    width, mlp_width = 8192, 32768
    gather = 2 * float(wire.time("all-gather", axes, 2.0 * width * mlp_width))
    return crossing(lambda tokens: float(compute.op_seconds(4.0 * tokens * width * mlp_width, 0)), lambda _: gather)


@answers("train-01")
def _(setting: Setting) -> float:
    """Count the tokens a chip above which FSDP over one ring is compute bound."""
    return _fsdp_tokens(chip_of(setting), "8x16x16", {"x": 8, "y": 16, "z": 16}, ("z",))


@answers("train-02")
def _(setting: Setting) -> float:
    """Count the tokens a chip above which FSDP over three rings at once is compute bound."""
    return _fsdp_tokens(chip_of(setting), "8x16x16", {"data": 2048}, ("data",))


@answers("train-03")
def _(setting: Setting) -> float:
    """Count the tokens of all chips above which FSDP over three rings of a full pod is compute bound."""
    return setting["chips"] * _fsdp_tokens(chip_of(setting), "16x20x28", {"data": setting["chips"]}, ("data",))


def _tensor_parallel(chip: Chip, axes: tuple[str, ...], mlp_width: float | None, ways: float | None) -> float:
    """Return the MLP width, or the degree, at which one-dim tensor parallelism becomes bound by its collectives.

    A forward MLP on 1e6 tokens is compared with one all-gather and one reduce-scatter of its activations.

    - `axes`: mesh axes over which activations are gathered and scattered.
    - `mlp_width`: width for which the degree is returned; None to return the width.
    - `ways`: degree for which the width is returned; None to return the degree.
    """
    wire = collectives(chip, "16x16x16", x=16, y=16, z=16)
    compute = Compute(wire.mesh.topology, wire.calibration)
    tokens, width = 1e6, 8192
    activations = 2.0 * tokens * width
    moving = float(wire.time("all-gather", axes, activations) + wire.time("reduce-scatter", axes, activations))

    def math_time(share: float) -> float:
        """Return the seconds of the MLP's matmuls for `share` columns on a device."""
        return float(compute.op_seconds(4.0 * tokens * width * share, 0))

    share = crossing(math_time, lambda _: moving)
    return share * ways if ways is not None else (mlp_width or 0.0) / share


@answers("train-08")
def _(setting: Setting) -> float:
    """Find the MLP width above which 8-way tensor parallelism on one axis is compute bound."""
    return _tensor_parallel(chip_of(setting), ("z",), None, setting["Y"])


@answers("train-09")
def _(setting: Setting) -> float:
    """Find the largest degree of tensor parallelism on one axis that stays compute bound at an MLP width."""
    return _tensor_parallel(chip_of(setting), ("z",), setting["F"], None)


@answers("train-12b")
def _(setting: Setting) -> float:
    """Count the tokens a slice above which data parallelism over slices hides the all-reduce of gradients."""
    wire = collectives(chip_of(setting), "4x4x4*4096", slices=4096, fsdp=64)
    compute = Compute(wire.mesh.topology, wire.calibration)
    weights = 2.0 * 8192 * 32768
    reducing = float(wire.time("all-reduce", ("slices",), 2 * weights / 64))
    return crossing(lambda tokens: float(compute.op_seconds(4.0 * tokens * weights / 64, 0)), lambda _: reducing)


def _train_seconds(decoder_params: float, tokens: float, chips: float, compute: Compute, mfu: float) -> float:
    """Return the seconds to train a model on `tokens` tokens at a given MFU, at 6 FLOPs for each parameter and token.

    `mfu` is a fraction; attention is not counted.
    """
    return float(compute.op_seconds(6.0 * decoder_params * tokens / chips, 0, efficiency=mfu))


@answers("train-14")
def _(setting: Setting) -> float:
    """Compute the days to spend a number of FLOPs on ten pods at peak."""
    return float(compute_of({"chip": setting["chip"]}).op_seconds(setting["flops"] / setting["chips"], 0)) / _DAY


@answers("train-21")
def _(setting: Setting) -> float:
    """Estimate the step time of LLaMA-2 13B on 3M tokens at a given MFU (ms)."""
    return 1e3 * _train_seconds(LLAMA2_13B.params, 3e6, setting["chips"], compute_of(setting), setting["mfu"])


def _mixed(mlp_width: float, tokens_per_chip: float | None, chips: float, tokens: float = 0.0) -> float:
    """Return the best degree, or the least tokens a chip, of FSDP over two rings with tensor parallelism over one.

    The two kinds of traffic add up. Gathering weights costs a * X / N and moving activations b / X, where X is the
    degree of FSDP on N chips.

    - `mlp_width`: width of the MLP; the model is 8192 wide.
    - `tokens_per_chip`: None to return the tokens on a chip above which the mixture is compute bound. Any number
      returns the best degree of FSDP.
    - `chips`: number N of chips.
    - `tokens`: tokens of all chips, if the degree is returned.
    """
    wire = collectives(load_chip("v5p"), "16x16x16", x=16, y=16, z=16)
    compute = Compute(wire.mesh.topology, wire.calibration)
    width = 8192.0

    def slopes(batch: float) -> tuple[float, float]:
        """Return the factors a (seconds of gathering weights over X) and b (seconds of moving activations times X)."""
        weights = 2 * float(wire.time("all-gather", ("x", "y"), 2.0 * width * mlp_width))
        moving = 2 * float(wire.time("all-gather", ("z",), 2.0 * batch * width))
        return weights / chips, moving

    if tokens_per_chip is not None:
        a, b = slopes(tokens)
        # The minimum of a * X + b / X over X.
        return math.sqrt(b / a)

    def limit(per_chip: float) -> float:
        """Return the least seconds of traffic at this number of tokens on a chip."""
        a, b = slopes(per_chip * chips)
        # The value of a * X + b / X at its minimum.
        return 2.0 * math.sqrt(a * b)

    return crossing(lambda per_chip: float(compute.op_seconds(4.0 * per_chip * width * mlp_width, 0)), limit)


@answers("train-22")
def _(setting: Setting) -> float:
    """Find the degree of FSDP on two axes, with tensor parallelism on the third axis, that has the least traffic."""
    return _mixed(setting["F"], setting["B"] / setting["N"], setting["N"], setting["B"])


ANSWERS["at-13"] = ANSWERS["train-22"]


@answers("at-12")
def _(setting: Setting) -> float:
    """Count the tokens a chip above which the best mix of FSDP and tensor parallelism is compute bound."""
    return _mixed(setting["F"], None, 8960)


@answers("tf-07")
def _(setting: Setting) -> float:
    """Compute the utilisation of a published training run from its parameters, tokens and hours (percent)."""
    seconds_at_peak = 6.0 * setting["active"] * setting["tokens"] / setting["flops"]
    return 100.0 * seconds_at_peak / (setting["h800_hours"] * 3600)


@answers("at-04")
def _(setting: Setting) -> float:
    """Compute the days to train 70B parameters on 15T tokens at a given MFU."""
    return _train_seconds(70e9, 15e12, setting["chips"], compute_of(setting), setting["mfu"]) / _DAY


@answers("at-05")
def _(setting: Setting) -> float:
    """Compute the years to train 70B parameters on 15T tokens on one chip at peak."""
    return _train_seconds(70e9, 15e12, 1, compute_of(setting), 1.0) / (365 * _DAY)


@answers("at-11")
def _(setting: Setting) -> float:
    """Count the tokens on each chip of a full pod for a batch of 4 Mi tokens."""
    return 4 * 1024**2 / machine(chip_of(setting), "16x20x28").num_chips


# Inference


def _decode_ms(setting: Setting, batch: int) -> float:
    """Return the milliseconds of a decode step of an int8 30B model with `batch` sequences of 8192 tokens.

    The cache is streamed from memory. Weights cost the longer of streaming them and multiplying with them.
    """
    compute = compute_of(setting, "4x4")
    cache = batch * 100e3 * 8192 / setting["chips"]
    weights = 30e9 / setting["chips"]
    return 1e3 * float(compute.memory_seconds(cache) + compute.op_seconds(2.0 * batch * weights, weights))


@answers("inf-01")
def _(setting: Setting) -> float:
    """Estimate a decode step of an int8 30B model at batch 4 (ms)."""
    return _decode_ms(setting, 4)


@answers("inf-02")
def _(setting: Setting) -> float:
    """Estimate a decode step of an int8 30B model at batch 256, with the book's 8.1e11 B/s for this chip (ms)."""
    return _decode_ms({"hbm_bw": 8.1e11, **setting}, 256)


@answers("inf-03")
def _(setting: Setting) -> float:
    """Compute the bytes of the cache of one sequence of 8192 tokens."""
    decoder = dataclasses.replace(LLAMA2_13B, layers=setting["L"], kv_heads=setting["K"], head_size=setting["H"])
    return decoder.kv_bytes(8192)


@answers("ai-04")
def _(setting: Setting) -> float:
    """Compute the tokens a second and chip of int8 LLaMA-3 70B, decoding 32 sequences of 8192 on 8 chips."""
    compute = compute_of(setting, "2x4")
    streamed = LLAMA3_70B.kv_bytes(32 * 8192, 1) + 70e9
    return 32 / float(compute.memory_seconds(streamed / 8)) / 8


@answers("ai-05")
def _(setting: Setting) -> float:
    """Count the chips whose memory stores 70B bf16 parameters (fractional)."""
    return 2 * 70e9 / chip_of(setting, "v5e").hbm_bytes


@answers("ai-06")
def _(setting: Setting) -> float:
    """Estimate a decode step that reads all of main memory once (ms)."""
    compute = compute_of(setting)
    return 1e3 * float(compute.memory_seconds(compute.topology.chip.hbm_bytes))


@answers("ai-07")
def _(setting: Setting) -> float:
    """Find the largest degree of tensor parallelism on two axes that stays compute bound for LLaMA-3 70B."""
    return _tensor_parallel(chip_of(setting), ("y", "z")[: setting["axes"]], LLAMA3_70B.mlp_width, None)


@answers("ai-10")
def _(setting: Setting) -> float:
    """Estimate the product of 64 rows with one MLP matrix of LLaMA-3 70B over all chips (us)."""
    flops = 2.0 * 64 * LLAMA3_70B.width * LLAMA3_70B.mlp_width / setting["chips"]
    return 1e6 * float(compute_of(setting, "4x8").op_seconds(flops, 0))


@answers("ai-11")
def _(setting: Setting) -> float:
    """Estimate a prefill of 8192 tokens through 70B parameters at 40 % MFU (s)."""
    flops = 2.0 * 70e9 * 8192 / setting["chips"]
    return float(compute_of(setting, "4x4").op_seconds(flops, 0, efficiency=0.4))


@answers("ai-12")
def _(setting: Setting) -> float:
    """Count the prefill servers for each decode server: 32 sequences at a time, 512 tokens each."""
    prefill = ANSWERS["ai-11"]({"chip": "v5e", "chips": 16})
    step = ANSWERS["ai-06"]({"chip": "v5e"}) / 1e3
    return 32 * prefill / (step * 512)
