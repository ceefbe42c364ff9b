"""Targets of compilation without a device, and the records of a compiled program."""

import dataclasses
import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.hlo.hlo_text import HOST_SPACE


_CHIPS = pathlib.Path(__file__).with_name("gpu_targets.json")
_FLAGS = ("--xla_gpu_autotune_level=0",)
"""Without a device nothing can be timed, so that kernels are chosen by the compiler's own estimates."""
_PLUGIN = "jax_cuda12_plugin"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A compiler, and the topology as it wants it."""

    platform: str
    """XLA's name of the platform."""
    noun: str
    """What people call it."""
    topology: str
    name: str
    """The topology's name for the compiler."""
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    """What the compiler needs to start on a machine without such devices; JAX itself stays on the CPU."""


def gpu_target(topology: Topology) -> Target:
    """The compiler in JAX's CUDA plugin, for GPUs that are described to it.

    Raises `UserError` if the plugin is not installed, or the chip has no description.
    """
    if importlib.util.find_spec(_PLUGIN) is None:
        raise UserError(
            "compiling for GPUs needs JAX's CUDA plugin, which is not installed: pip install 'autoshard[cuda]'."
        )
    chips = json.loads(_CHIPS.read_text())["chips"]
    figures = chips.get(topology.chip.name)
    if figures is None:
        raise UserError(f"{topology.chip.name} is not described to the compiler; {', '.join(sorted(chips))} are.")
    options = {"target_config": "\n".join(_described(figures)), "topology": f"1x{topology.slices}x{_island(topology)}"}
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(_FLAGS), "TF_CPP_MIN_LOG_LEVEL": "1"}
    return Target("cuda", "GPU", topology.name, "", options, environment)


def _island(topology: Topology) -> int:
    return topology.num_devices // topology.slices


def _described(figures: Mapping[str, Any]) -> Iterator[str]:
    """A `GpuTargetConfigProto` as text (XLA's `device_description.proto`)."""
    yield "gpu_device_info {"
    for key, value in figures["device"].items():
        yield f"  {key}: {json.dumps(value)}"
    major, minor, feature = figures["compute_capability"]
    yield f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}"
    yield "}"
    yield 'platform_name: "CUDA"'
    major, minor, patch = figures["dnn"]
    yield f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}"
    yield f"device_description_str: {json.dumps(figures['device']['name'])}"


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler left: scheduled HLO and memory, or how much it lacked."""

    text: str
    """Scheduled HLO; empty if the program does not fit."""
    memory: dict[str, int]
    """Bytes of one device: arguments, results, temporaries, donated, peak; and in its host's memory, `host`."""
    compile_s: float
    needed_bytes: int | None
    """What the program needed, if it does not fit."""
    available_bytes: int | None
    log: str
    """What the compiler wrote to stderr."""
    live: str = ""
    """The compiler's report of live ranges, its last part the buffers at the peak; empty if it left none."""
    coded: bool = True
    """Whether machine code was written too."""


_PLACED = ".after_optimizations_after_buffer_assignment.txt"
"""Ends the name of a dump that is written when the program fits; it begins with that of the module."""
_ON_CHIP = 1
"""The number of the memory that is on the chip, as dumps have it."""
_SPACE = re.compile(r"Memory Space: \w+ \(color=(\d+)\)\s+Total bytes: (\d+)")


def placed(directory: Path) -> str | None:
    """What the dumps' names begin with, of a program that fits; None as long as that is not known."""
    dump = directory / "dump"
    for path in dump.glob(f"*.jit_*{_PLACED}"):
        stem = path.name.removesuffix(_PLACED)
        if (dump / f"{stem}.debug_options").exists():  # written after all of them
            return stem
    return None


def read_placed(directory: Path, stem: str, argument_bytes: int, compile_s: float, log: str) -> Compiled:
    """The scheduled program and its memory, from the dumps: `argument_bytes` of a device are its arguments."""
    dump = directory / "dump"
    text = (dump / f"{stem}.after_optimizations.txt").read_text()
    said = (dump / f"{stem}.after_optimizations-memory-usage-report.txt").read_text()
    live = dump / f"{stem}.after_optimizations-live-range.txt"
    spaces = {int(color): int(size) for color, size in _SPACE.findall(said)}
    memory = {
        "arguments": argument_bytes,
        "temporaries": max(0, spaces.get(0, 0) - argument_bytes),
        "on_chip": spaces.get(_ON_CHIP, 0),
        "host": spaces.get(HOST_SPACE, 0),
    }
    ranges = live.read_text() if live.exists() else ""
    return Compiled(text, memory, compile_s, None, None, log, ranges, coded=False)
