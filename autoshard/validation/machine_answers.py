"""Answers to worked questions about machines: rooflines, peaks, data transfers, memory.

The report of `autoshard validate` prints the docstring of an answer as its question.
"""

import dataclasses
import math

from autoshard.cost.calibration import Calibration, load_calibration
from autoshard.cost.collectives import Collectives
from autoshard.cost.compute import shard_bytes
from autoshard.cost.device_mesh import make_mesh
from autoshard.serving.decoder_counts import Decoder, train_state_bytes
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


# Rooflines of one chip


@answers("roof-01")
def _(setting: Setting) -> float:
    """Count the rows above which a bf16 matmul is compute bound, if rows are few compared to the weights' dims."""
    return compute_of(setting).critical_batch(2**40, 2**40)


@answers("roof-02")
def _(setting: Setting) -> float:
    """Count the rows above which a large matmul is compute bound with int8 weights, activations and arithmetic."""
    return compute_of(setting).critical_batch(2**40, 2**40, "int8", 1, 1)


@answers("roof-03")
def _(setting: Setting) -> float:
    """Count the rows above which a large bf16 matmul with int8 weights is compute bound."""
    return compute_of(setting).critical_batch(2**40, 2**40, "bf16", 1, 2)


@answers("tpu-04a")
def _(setting: Setting) -> float:
    """Count the rows above which a matmul with int8[16384, 4096] weights in main memory is compute bound."""
    return compute_of(setting).critical_batch(4096, 16384, "int8", 1, 1)


@answers("tpu-04b")
def _(setting: Setting) -> float:
    """Count the rows above which a matmul with int8[16384, 4096] weights in on-chip memory is compute bound."""
    return compute_of(setting).critical_batch(4096, 16384, "int8", 1, 1, on_chip=True)


@answers("tf-04")
def _(setting: Setting) -> float:
    """Divide attention FLOPs by weight FLOPs of a layer, without a causal mask, with a gated MLP of width 4 D."""
    width = setting["D"]
    layer = Decoder(1, width, 4 * width, width // 128, width // 128, 128, 0)
    return layer.attention_flops_per_token(setting["T"], causal=False) / layer.forward_flops(1)


@answers("shard-08")
def _(setting: Setting) -> float:
    """Find the contracted size above which summing partial products of shards beats gathering the operands."""
    compute, wire = compute_of(setting), collectives(chip_of(setting), "8x8x8", data=64, model=8)
    rows, columns = 1e6, 1e4

    def replicated(contracted: float) -> float:
        """Return the seconds of the matmul that each device repeats if operands are gathered."""
        return float(compute.op_seconds(2 * rows * contracted * columns, 0))

    return crossing(replicated, lambda _: float(wire.time("all-reduce", ("model",), 2 * rows * columns)))


# Machines


@answers("tpu-02a")
def _(setting: Setting) -> float:
    """Count the hosts of a full pod."""
    chip = dataclasses.replace(chip_of(setting), host_shape=tuple(setting["host"]))
    return machine(chip, "x".join(map(str, setting["pod"]))).num_hosts


ANSWERS["tpu-02b"] = ANSWERS["tpu-02a"]


@answers("tpu-02c")
def _(setting: Setting) -> float:
    """Compute the peak bf16 rate of a full 16x16 pod."""
    pod = machine(chip_of(setting), "16x16")
    return pod.peak_flops("bf16") * pod.num_devices


@answers("train-20")
def _(setting: Setting) -> float:
    """Sum the main memory of a 16x16x16 slice."""
    cube = machine(chip_of(setting), "16x16x16")
    return float(cube.chip.hbm_bytes) * cube.num_chips


# Moving data


@answers("tpu-06a")
def _(setting: Setting) -> float:
    """Estimate the load of an int8 [131072, 131072] array, split over the slice, from the hosts (ms)."""
    compute = compute_of(setting, "x".join(map(str, setting["slice"])))
    part = shard_bytes((131072, 131072), 1, (compute.topology.num_devices, 1))
    return 1e3 * float(compute.host_seconds(part))


@answers("tpu-06b")
def _(setting: Setting) -> float:
    """Estimate the gather of the 15 of 16 GB that a corner chip lacks, over two axes without wrap (ms)."""
    rows, columns = setting["slice"]
    wire = collectives(chip_of(setting), f"{rows}x{columns}", data=rows, model=columns)
    return 1e3 * float(wire.time("all-gather", ("data", "model"), 16e9))


@answers("tpu-06c")
def _(setting: Setting) -> float:
    """Estimate the time to read 16 GB from main memory (ms)."""
    return 1e3 * float(compute_of(setting).memory_seconds(16e9))


def _quiz_gather(calibration: Calibration, setting: Setting) -> float:
    """Return the microseconds of an all-gather of bf16 [256, 256] over one axis of a 4x4 slice."""
    mesh = make_mesh(machine(chip_of(setting, "v5e"), "4x4"), {"x": 4, "y": 4})
    return 1e6 * float(Collectives(mesh, calibration).time("all-gather", ("y",), shard_bytes((256, 256), 2)))


@answers("shard-03d")
def _(setting: Setting) -> float:
    """Estimate the gather of bf16 [256, 256] over an axis of 4 without wrap, at a microsecond a hop (us)."""
    return _quiz_gather(dataclasses.replace(Calibration.ideal("v5e"), hop_s=setting["t_hop"]), setting)


@answers("shard-03e")
def _(setting: Setting) -> float:
    """Estimate the gather of bf16 [256, 256] over an axis of 4 with measured rates, launch included (us)."""
    return _quiz_gather(load_calibration("v5e"), setting)


@answers("shard-05d")
def _(setting: Setting) -> float:
    """Estimate the reduce-scatter over the third axis of 1/16 of a bf16 [1024, 4096] array (us)."""
    wire = collectives(chip_of(setting), "4x4x4", x=4, y=4, z=4)
    return 1e6 * float(wire.time("reduce-scatter", ("z",), shard_bytes((1024, 4096), 2, (4, 4))))


@answers("shard-09")
def _(setting: Setting) -> float:
    """Divide the time of an all-to-all by the time of an all-gather of the same array, in a ring."""
    wire = collectives(chip_of(setting, "v5e"), "16x16", x=16, y=16)
    array_bytes = 1e9
    return float(wire.time("all-to-all", ("y",), array_bytes / 16) / wire.time("all-gather", ("y",), array_bytes))


# Memory


@answers("shard-01")
def _(setting: Setting) -> float:
    """Compute the bytes on one device of int8 [128, 2048] with rows split over X and Y."""
    return shard_bytes((128, 2048), 1, (setting["mesh"]["X"] * setting["mesh"]["Y"], 1))


@answers("shard-02")
def _(setting: Setting) -> float:
    """Sum the bytes on all devices of int8 [128, 2048] with rows split over X and Y."""
    return ANSWERS["shard-01"](setting) * math.prod(setting["mesh"].values())


def _square_decoder(setting: Setting) -> Decoder:
    """Return a decoder of `L` layers and width `D` whose intermediates are all one or four widths wide."""
    width = setting["D"]
    return Decoder(setting["L"], width, 4 * width, width // 128, width // 128, 128, 0)


@answers("tf-05")
def _(setting: Setting) -> float:
    """Compute the bytes of all intermediates of all layers."""
    return _square_decoder(setting).saved_bytes(setting["BT"])


@answers("tf-06")
def _(setting: Setting) -> float:
    """Compute the bytes of the inputs of all layers."""
    return _square_decoder(setting).saved_bytes(setting["BT"], ["input"])


@answers("train-15")
def _(setting: Setting) -> float:
    """Count the parameters of LLaMA-2 13B from its dims."""
    s = setting
    return Decoder(s["L"], s["D"], s["F"], s["N"], s["N"], s["H"], s["V"]).params


@answers("train-16")
def _(setting: Setting) -> float:
    """Compute the bytes of bf16 parameters and f32 Adam moments."""
    return train_state_bytes(setting["params"])


@answers("train-17")
def _(setting: Setting) -> float:
    """Compute the bytes of three saved intermediates a layer: its input and both MLP products before the gate."""
    width = setting["D"]
    decoder = dataclasses.replace(LLAMA2_13B, layers=setting["L"], width=width, mlp_width=round(setting["F/D"] * width))
    return decoder.saved_bytes(setting["B"], ["input", "gate", "up"])


@answers("at-06")
def _(setting: Setting) -> float:
    """Compute the bytes of four saved intermediates of one width a layer."""
    names = ["input", "query", "attention", "residual"]
    decoder = dataclasses.replace(LLAMA3_70B, layers=setting["L"], width=setting["D"])
    return decoder.saved_bytes(setting["B"], names[: setting["ckpt"]])


@answers("at-07")
def _(setting: Setting) -> float:
    """Sum the bytes of parameters, optimizer state and four saved intermediates of one width a layer."""
    saved = LLAMA3_70B.saved_bytes(4e6, ["input", "query", "attention", "residual"])
    return setting["params"] + setting["opt"] + saved


@answers("at-10")
def _(setting: Setting) -> float:
    """Divide the bytes of parameters, optimizer state and saved intermediates by the chips of a full pod."""
    total = ANSWERS["at-07"]({"params": 2 * 70e9, "opt": 8 * 70e9})
    return total / machine(chip_of(setting), "16x20x28").num_chips
