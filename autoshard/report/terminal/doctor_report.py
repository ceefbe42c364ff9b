"""Report of the installation: packages, devices, and the abilities that they allow."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.device_files import accelerator_files
from autoshard.base.processes import run_script
from autoshard.base.tested_versions import PACKAGES, TESTED, known_versions


@dataclasses.dataclass(frozen=True, slots=True)
class Ability:
    """One ability of autoshard that needs packages."""

    name: str
    """The ability in words, such as `plan JAX programs`."""
    works: bool
    """True if all its packages are installed."""
    note: str
    """Versions if the ability works, else the missing packages and how to install them."""


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
"""Program that a separate process runs to list devices."""
_WAIT_S = 120.0
"""Seconds within which that process must list devices."""


def doctor() -> dict[str, Any]:
    """Return versions, abilities and devices as plain values, the object of `autoshard doctor --json`.

    A separate process starts JAX to list its devices, for up to `_WAIT_S`.
    """
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
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ability(name: str, packages: tuple[str, ...], install: str) -> Ability:
    """Return an ability, with the versions of its packages, or with the missing ones and the `install` command."""
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return Ability(name, False, f"{' and '.join(missing)} not installed: {install}")
    return Ability(name, True, ", ".join(f"{package} {version}" for package, version in versions.items()))


def _devices() -> tuple[list[str], str, str]:
    """Return the devices and the backend that JAX finds, and a warning about an accelerator that JAX does not use.

    If JAX starts no backend, the list is empty and the backend is the reason. The warning is empty if there is none to
    give. A separate process runs JAX, since plugins of absent accelerators print on the terminal and may wait for their
    device.
    """
    answer = run_script(_LOOK, _WAIT_S)
    if answer is None:
        return [], f"none: JAX found no device in {_WAIT_S:.0f} s; JAX_PLATFORMS=cpu looks for no accelerator", ""
    out, complaints, code = answer
    log_lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    if code or not out.strip():
        return [], f"none: {log_lines[-1] if log_lines else 'JAX could not be started'}", ""
    listed = json.loads(out.splitlines()[-1])
    device_files = accelerator_files()
    if listed["backend"] != "cpu" or not device_files or os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return listed["devices"], listed["backend"], ""
    reason = next((line for line in reversed(log_lines) if "Error" in line), "")
    return listed["devices"], listed["backend"], f"{device_files[0]} is here, but JAX uses the CPU. {reason}".strip()


def _warnings() -> list[str]:
    """Return warnings about installed versions of torch and torch_xla, or jax and jaxlib, that do not work together."""
    warnings = []
    torch, torch_xla = _version("torch"), _version("torch_xla")
    if torch and torch_xla and _minor(torch) != _minor(torch_xla):
        warnings.append(
            f"torch {torch} and torch_xla {torch_xla} differ in their minor version; torch_xla will not load."
        )
    jax, jaxlib = _version("jax"), _version("jaxlib")
    if jax and jaxlib and jax != jaxlib:
        warnings.append(f"jax {jax} and jaxlib {jaxlib} differ; install one version of both.")
    return warnings


def _tested() -> str:
    """Return a sentence on the tested environment that differs least from the installed packages and Python."""
    installed = {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()}
    nearest = min(TESTED, key=lambda each: len(each.differs(installed)))
    differing = nearest.differs(installed)
    if not differing:
        return f"These versions were tested together on {nearest.day} (docs/versions.md)."
    parts = [f"{package} {installed[package]} (tested: {known_versions(package) or 'none'})" for package in differing]
    return f"Not tested in this combination (docs/versions.md): {', '.join(parts)}."


def _minor(version: str) -> list[str]:
    """Return the first two numbers of a version as text: `['2', '9']` for `2.9.1`."""
    return re.findall(r"\d+", version)[:2]


def doctor_report(found: dict[str, Any]) -> RenderableType:
    """Return the report of `doctor` for a terminal, with at most eight devices."""
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
