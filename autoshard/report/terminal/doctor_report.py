"""What is installed, what is here, and what will therefore work."""

import dataclasses
import glob
import importlib.metadata
import json
import os
import platform
import re
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.processes import told_by
from autoshard.base.tested_versions import PACKAGES, TESTED, known_versions


@dataclasses.dataclass(frozen=True, slots=True)
class Ability:
    """One thing that autoshard can do, if its packages are here."""

    name: str
    works: bool
    note: str
    """Versions if it works, else what is missing and how to get it."""


_CORE = ("jax", "jaxlib", "numpy", "scipy", "ortools", "numba")
_ABILITIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("plan JAX programs", _CORE, "pip install autoshard"),
    (
        "plan PyTorch and hf: models",
        ("torch", "torchax", "transformers", "optax"),
        "pip install autoshard",
    ),
    ("drive PyTorch/XLA", ("torch_xla",), "pip install 'autoshard[xla]'"),
    ("compile for TPUs without a TPU", ("libtpu",), "pip install 'autoshard[tpu]'"),
    ("compile for GPUs without a GPU", ("jax_cuda12_plugin",), "pip install 'autoshard[cuda]'"),
    ("tables and figures in notebooks", ("pandas", "matplotlib"), "pip install 'autoshard[notebook]'"),
    ("give candidates to a Ray cluster (--on)", ("ray", "grpcio"), "pip install 'autoshard[ray]'"),
)


_LOOK = """
import json
import jax
devices = [f"{device.id}: {device.device_kind}" for device in jax.devices()]
print()
print(json.dumps({"devices": devices, "backend": jax.default_backend()}))
"""
"""What a process of its own runs to see devices."""
_WAIT_S = 120.0
"""Seconds in which it must have seen them."""
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*")
"""Files of Linux that say that GPUs or TPUs are here."""


def doctor() -> dict[str, Any]:
    """Versions, abilities and devices, as plain values. JAX is started by another process, to see its devices."""
    abilities = [_ability(*row) for row in _ABILITIES]
    devices, backend, unused = _devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "backend": backend,
        "devices": devices,
        "abilities": [dataclasses.asdict(ability) for ability in abilities],
        "tested": _tested(),
        "warnings": [*_warnings(), *filter(None, [unused])],
        "environment": {
            key: os.environ[key]
            for key in ("JAX_PLATFORMS", "XLA_FLAGS", "PJRT_DEVICE", "XLA_AUTO_SPMD", "XLA_AUTO_SPMD_MESH")
            if key in os.environ
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ability(name: str, packages: tuple[str, ...], install: str) -> Ability:
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return Ability(name, False, f"{' and '.join(missing)} not installed: {install}")
    return Ability(name, True, ", ".join(f"{package} {version}" for package, version in versions.items()))


def _devices() -> tuple[list[str], str, str]:
    """Devices and backend that JAX finds, or why it starts none, and what it says of an accelerator that is not used.

    In a process of its own: plugins of accelerators that are not here complain on the terminal, and may wait for them.
    """
    told = told_by(_LOOK, _WAIT_S)
    if told is None:
        return [], f"none: JAX found no device in {_WAIT_S:.0f} s; JAX_PLATFORMS=cpu looks for no accelerator", ""
    out, complaints, code = told
    said = [line.strip() for line in complaints.splitlines() if line.strip()]
    if code or not out.strip():
        return [], f"none: {said[-1] if said else 'JAX could not be started'}", ""
    found = json.loads(out.splitlines()[-1])
    here = [path for pattern in _ACCELERATORS for path in glob.glob(pattern)]
    if found["backend"] != "cpu" or not here or os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return found["devices"], found["backend"], ""
    why = next((line for line in reversed(said) if "Error" in line), "")
    return found["devices"], found["backend"], f"{here[0]} is here, but JAX uses the CPU. {why}".strip()


def _warnings() -> list[str]:
    found = []
    torch, torch_xla = _version("torch"), _version("torch_xla")
    if torch and torch_xla and _minor(torch) != _minor(torch_xla):
        found.append(f"torch {torch} and torch_xla {torch_xla} differ in their minor version; torch_xla will not load.")
    jax, jaxlib = _version("jax"), _version("jaxlib")
    if jax and jaxlib and jax != jaxlib:
        found.append(f"jax {jax} and jaxlib {jaxlib} differ; install one version of both.")
    return found


def _tested() -> str:
    """Return a sentence on the tested environment that differs least from the installed packages."""
    installed = {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()}
    nearest = min(TESTED, key=lambda each: len(each.differs(installed)))
    differing = nearest.differs(installed)
    if not differing:
        return f"These versions were tested together on {nearest.day} (docs/versions.md)."
    parts = [f"{package} {installed[package]} (tested: {known_versions(package) or 'none'})" for package in differing]
    return f"Not tested in this combination (docs/versions.md): {', '.join(parts)}."


def _minor(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:2]


def doctor_report(found: dict[str, Any]) -> RenderableType:
    """What `doctor` found, for a terminal."""
    from autoshard.base.units import format_bytes

    head = Text(f"Python {found['python']}, {found['cores']} cores, {format_bytes(found['memory_bytes'])} of memory")
    devices = Text(f"JAX sees {len(found['devices'])} device(s) on {found['backend']}")
    if found["devices"]:
        devices.append(": " + ", ".join(found["devices"][:8]) + (" ..." if len(found["devices"]) > 8 else ""))
    table = Table.grid(padding=(0, 2, 0, 0))
    for ability in found["abilities"]:
        mark = Text("yes", style="green") if ability["works"] else Text("no", style="yellow")
        table.add_row(mark, Text(ability["name"], no_wrap=True), Text(ability["note"], style="dim"))
    lines = [Text(f"{key}={value}", style="dim") for key, value in found["environment"].items()]
    warnings = [Text(f"Warning: {warning}", style="yellow") for warning in found["warnings"]]
    tested = Text(found["tested"], style="dim")
    return Group(head, devices, Text(), table, Text(), tested, *([Text(), *lines] if lines else []), *warnings)
