"""Register of the functions that answer worked questions, and cost models at the rates that a question states.

Textbook answers assume peak rates, so the cost models use `Calibration.ideal`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.cost.calibration import Calibration
from autoshard.cost.chip import Chip, load_chip
from autoshard.cost.collectives import Collectives
from autoshard.cost.compute import Compute
from autoshard.cost.device_mesh import make_mesh
from autoshard.cost.topology import Topology
from autoshard.serving.decoder_counts import Decoder


Setting = Mapping[str, Any]
"""Figures that a worked question states, by the names in its book or in `chip_of`."""
ANSWERS: dict[str, Callable[[Setting], float]] = {}
"""Id of a worked question -> function that answers the question."""

LLAMA2_13B = Decoder(40, 5120, 13824, 40, 40, 128, 32000)
LLAMA3_70B = Decoder(80, 8192, 28672, 64, 8, 128, 128256)
"""Decoders whose dims several questions use."""


def answers(name: str) -> Callable[[Callable[[Setting], float]], Callable[[Setting], float]]:
    """Return a decorator that registers a function in `ANSWERS` under the question's id, and returns it unchanged. A
    later function of the same id replaces the earlier one without an error.
    """

    def register(function: Callable[[Setting], float]) -> Callable[[Setting], float]:
        ANSWERS[name] = function
        return function

    return register


def chip_of(setting: Setting, default: str = "v5p") -> Chip:
    """Return the chip that a question's setting names (`chip`, else `default`), with the rates that the setting states.

    Rates are in FLOP/s and B/s, memory in bytes; rates that are not stated are those of the chip's file.

    - `flops` or `C`, `int8_ops`: peak rates of bf16 and of int8.
    - `hbm_bw`, `hbm`, `vmem_bw`: rate and bytes of the memory, and rate of VMEM.
    - `link_oneway`, or `W_bidi` for the sum of both directions: rate of a link.
    - `W_dcn`, `pcie`: rates of a chip to the network and to its host.
    """
    chip = load_chip(setting.get("chip", default))
    peaks = dict(chip.peak_flops_per_s)
    peaks["bf16"] = setting.get("flops", setting.get("C", peaks["bf16"]))
    peaks["int8"] = setting.get("int8_ops", peaks["int8"])
    memory = setting.get("hbm_bw", chip.memory_bytes_per_s)
    return dataclasses.replace(
        chip,
        peak_flops_per_s=peaks,
        memory_bytes_per_s=memory,
        hbm_bytes=int(setting.get("hbm", chip.hbm_bytes)),
        # A setting states one direction of a link, or the sum of both (`W_bidi`).
        link_oneway_bytes_per_s=setting.get("link_oneway", setting.get("W_bidi", 2 * chip.link_oneway_bytes_per_s) / 2),
        network_bytes_per_s_per_chip=setting.get("W_dcn", chip.network_bytes_per_s_per_chip),
        pcie_bytes_per_s_per_chip=setting.get("pcie", chip.pcie_bytes_per_s_per_chip),
        vmem_over_hbm_bandwidth=setting["vmem_bw"] / memory if "vmem_bw" in setting else chip.vmem_over_hbm_bandwidth,
    )


def machine(chip: Chip, shape: str) -> Topology:
    """Return a topology of this shape, such as `4x4x4`, whose chips have the rates of `chip`."""
    return dataclasses.replace(Topology.parse(f"{chip.name}:{shape}"), chip=chip)


def compute_of(setting: Setting, shape: str = "", default: str = "v5p") -> Compute:
    """Return the compute model of a setting, at peak rates, on a slice of this shape.

    An empty `shape` stands for the smallest slice with as many torus dims as the chip. `default` is the chip of a
    setting that names none.
    """
    chip = chip_of(setting, default)
    return Compute(machine(chip, shape or ("2x2x1" if chip.torus_dims == 3 else "1x1")), Calibration.ideal(chip))


def collectives(chip: Chip, shape: str, **sizes: int) -> Collectives:
    """Return the collective model, at peak rates, of a mesh with the axes `sizes` (name -> devices) on such a slice."""
    return Collectives(make_mesh(machine(chip, shape), sizes), Calibration.ideal(chip))


def crossing(rising: Callable[[float], float], level: Callable[[float], float]) -> float:
    """Return the argument above which `rising` exceeds `level`, by bisection on a log scale from 1e-3 to 1e12.

    The two must cross at most once. Without a crossing the result is the end of the range that is nearer to one.
    """
    low, high = math.log(1e-3), math.log(1e12)
    for _ in range(200):
        middle = (low + high) / 2
        if rising(math.exp(middle)) < level(math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp(high)
