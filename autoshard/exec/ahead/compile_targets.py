"""Targets of compilation without devices, and the record of a compiled program."""

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
"""File of GPU descriptions for the compiler."""
_FLAGS = ("--xla_gpu_autotune_level=0",)
"""XLA flags for GPUs. No device can time kernels, so the compiler chooses them by its own estimates."""
_PLUGIN = "jax_cuda12_plugin"
"""Python package of JAX's CUDA plugin."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Compiler, with the topology in its own terms."""

    platform: str
    """XLA's name of the platform."""
    noun: str
    """Name of the platform in messages."""
    topology: str
    """Name of the topology for people and messages, such as `h100:8`."""
    name: str
    """Name of the topology for the compiler; empty for GPUs, whose topology is in `options`."""
    options: Mapping[str, Any]
    """Compiler options by name; for GPUs `target_config` (chip description as protobuf text) and `topology`."""
    environment: Mapping[str, str]
    """Environment variables with which the compiler starts on a machine without such devices."""


def gpu_target(topology: Topology) -> Target:
    """Return the compiler of JAX's CUDA plugin, with a description of the topology's GPU; nothing is compiled.

    The compiler sees one process per slice, with the slice's devices. Its environment runs JAX on the CPU and turns
    autotuning off. Raises `UserError` if the plugin is not installed, or if the chip has no description.
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
    """Return the number of devices of one slice."""
    return topology.num_devices // topology.slices


def _described(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a `GpuTargetConfigProto` as text (XLA's `device_description.proto`).

    `figures` is a chip's entry in `gpu_targets.json`, with `device`, `compute_capability` and `dnn`.
    """
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
    """Output of the compiler: scheduled HLO and memory, or the bytes that it lacked."""

    text: str
    """Scheduled HLO; empty if the program does not fit."""
    memory: dict[str, int]
    """Bytes of one device: `arguments`, `results`, `donated`, `temporaries` and `host` (in its host's memory); empty if
    the program does not fit. With machine code also `peak`, without it also `on_chip`.
    """
    compile_s: float
    """Seconds that the compilation lasted."""
    needed_bytes: int | None
    """Bytes of one device that the program needs; None if it fits."""
    available_bytes: int | None
    """Bytes of one device that the compiler may use; None if the program fits."""
    log: str
    """Text that the compiler wrote to stderr."""
    live: str = ""
    """The compiler's report of live ranges, whose last part lists the buffers at the peak; empty if it left none."""
    coded: bool = True
    """True if machine code was written too."""


_PLACED = ".after_optimizations_after_buffer_assignment.txt"
"""End of the name of the dump that libtpu writes once the program fits; the name begins with the module's."""
_ON_CHIP = 1
"""Number of the on-chip memory in dumps."""
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?, (.*)$", re.MULTILINE)
"""One allocation in a dump of the buffer assignment: its bytes, the number of its memory (absent: HBM) and its uses."""
_ARENA = 16384
"""Bytes to which libtpu rounds the arena of temporaries up.

In each of five compiled programs on v5e, `memory_analysis` states the arena of the dump rounded up to this multiple.
"""


def placed(directory: Path) -> str | None:
    """Return the common prefix of the dumps' file names in `directory/dump`; None until the last of them is written.

    The last dump is `<prefix>.debug_options`. libtpu writes these dumps only if the program fits. The prefix has no
    folder.
    """
    dump = directory / "dump"
    for path in dump.glob(f"*.jit_*{_PLACED}"):
        stem = path.name.removesuffix(_PLACED)
        if (dump / f"{stem}.debug_options").exists():  # the last dump to be written
            return stem
    return None


def read_placed(directory: Path, stem: str, compile_s: float, log: str) -> Compiled:
    """Read the scheduled program and its memory from the dumps of a compiler that wrote no machine code.

    The dumps are in `directory/dump`. The memory has the parts of a whole compilation with equal bytes, except `peak`,
    and also `on_chip`. A missing live-range report gives an empty `live`.

    - `stem`: prefix of the dumps' names (`placed`).
    - `compile_s`: seconds of the compilation.
    - `log`: text that the compiler wrote to stderr.

    Raises `OSError` if the text or the buffer assignment is missing.
    """
    dump = directory / "dump"
    text = (dump / f"{stem}.after_optimizations.txt").read_text()
    assignment = (dump / f"{stem}.after_optimizations-buffer-assignment.txt").read_text()
    live = dump / f"{stem}.after_optimizations-live-range.txt"
    ranges = live.read_text() if live.exists() else ""
    return Compiled(text, _assigned(assignment), compile_s, None, None, log, ranges, coded=False)


def _assigned(assignment: str) -> dict[str, int]:
    """Return the bytes of one device by part of memory from a dump of the buffer assignment.

    An argument that is live at the end is donated, and a result has its memory. Constants and the scratch of single
    instructions belong to no part, as in a whole compilation.
    """
    memory: dict[str, int] = dict.fromkeys(("arguments", "results", "temporaries", "donated", "on_chip", "host"), 0)
    for size_text, color, uses in _ALLOCATION.findall(assignment):
        size, space, left = int(size_text), int(color or 0), "maybe-live-out" in uses
        if space == HOST_SPACE:
            memory["host"] += size
        elif space == _ON_CHIP:
            memory["on_chip"] += size
        elif space == 0 and " parameter " in uses:
            memory["arguments"] += size
            memory["donated"] += left * size
            memory["results"] += left * size
        elif space == 0 and left:
            memory["results"] += size
        elif space == 0 and "preallocated-temp" in uses:
            memory["temporaries"] += -(-size // _ARENA) * _ARENA
    return memory
