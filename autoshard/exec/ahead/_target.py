"""What compiles for a topology of which no device is there, and for GPUs what the compiler is told of the chip."""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError


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
