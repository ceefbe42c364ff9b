"""Files that experiments save between runs: compiled programs by plan, and results by row.

Compiled programs are large and stay under `build/`. Results are small and are committed.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.exec.ahead.compile_targets import Compiled
    from autoshard.planning import Plan
    from autoshard.program import Program

BUILD = Path(__file__).parents[2] / "build"
_PACKAGE = Path(__file__).parents[2] / "autoshard"
_READERS = ("exec/ahead", "exec/apply", "exec/hlo", "planning/record", "program", "cost")
"""Folders of the package that lower a plan for a compiler, or read figures from the compiled program."""
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def checked_out() -> str:
    """Return the commit that is checked out, which distinguishes rows of older code."""
    here = str(Path(__file__).parents[1])
    done = subprocess.run(["git", "-C", here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def digest(program: "Program", plan: "Plan") -> str:
    """Hash the inputs of a compilation: the program (without line numbers in its module) and the plan."""
    hashed = hashlib.sha256(program.fingerprint.encode())
    what = (plan.topology, plan.mesh, plan.device_order, plan.arguments, plan.results, plan.pins, plan.regions)
    hashed.update(repr(what).encode())
    for flag in plan.provenance.get("xla_flags", {}).get("flags", []):
        hashed.update(flag.encode())
    return hashed.hexdigest()[:12]


def figures_digest(program: "Program", plan: "Plan") -> str:
    """Hash all that the figures of a compiled plan depend on.

    These are the inputs of the compilation and the versions of the compilers. The package's readers of compiled
    programs and the collectives that the plan foresees count too.
    """
    hashed = hashlib.sha256(digest(program, plan).encode() + _readers_and_versions())
    hashed.update(repr((plan.host, plan.calls, plan.prediction.collectives)).encode())
    return hashed.hexdigest()[:16]


@functools.cache
def _readers_and_versions() -> bytes:
    """Hash the files of the package's readers and the versions of the compilers."""
    hashed = hashlib.sha256()
    for path in sorted(file for folder in _READERS for file in (_PACKAGE / folder).rglob("*")):
        if path.suffix in (".py", ".json"):
            hashed.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            hashed.update(f"{name} {importlib.metadata.version(name)}".encode())
    return hashed.digest()


def compiled(folder: str, program: "Program", plan: "Plan", time_limit: float, whole: bool = False) -> "Compiled":
    """Load a compiled program from its folder, or compile it; with `whole` including machine code, which takes minutes.

    Raises `UserError` as `compile_without_devices` does.
    """
    from autoshard.exec.ahead.ahead_process import compile_without_devices

    path = _path(folder, program, plan)
    if path.exists():
        known = pickle.loads(gzip.decompress(path.read_bytes()))
        if known.coded or not whole:
            return known
    program_compiled = compile_without_devices(program, plan, time_limit, quick=not whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _whole(path) as part:
        part.write_bytes(gzip.compress(pickle.dumps(program_compiled)))
    return program_compiled


def is_compiled(folder: str, program: "Program", plan: "Plan") -> bool:
    """Return True if the compiled program is on disk."""
    return _path(folder, program, plan).exists()


def _path(folder: str, program: "Program", plan: "Plan") -> Path:
    return BUILD / folder / f"{digest(program, plan)}.pickle.gz"


class Results:
    """Results by key in a JSON file, each written as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def keep(self, key: str, result: Any) -> None:
        self.rows[key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _whole(self.path) as part:
            part.write_text(json.dumps(dict(sorted(self.rows.items())), indent=1) + "\n")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` once it is written."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
