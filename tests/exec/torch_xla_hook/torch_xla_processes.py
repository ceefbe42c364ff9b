"""Processes under the real torch_xla on 8 CPU devices."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import forked
from tests.compiling import QUICKLY


ROOT = Path(__file__).parents[3]
NOT_HANDED_ON = ("XLA_", "PJRT_", "AUTOSHARD_", "TORCH_DEVICE_BACKEND_")
"""Prefixes of this process's variables that the started processes do not inherit."""


def run_checks(module: str, *names: str, path: str = "", **environment: str) -> dict[str, dict[str, Any]]:
    """Run the named checks of a module of this directory in one process. Return the results of each; see `report`."""
    return run_module(module, (), names, path, **environment)


def run_module(
    module: str, given: Sequence[str], names: Sequence[str], path: str = "", **environment: str
) -> dict[str, dict[str, Any]]:
    """Run a module of this directory with the arguments `given` and `names`. Return its output for each name.

    An interpreter is started if autoshard is installed under `path`: its entry point is judged too.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(NOT_HANDED_ON)}
    here: Mapping[str, str] = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "XLA_FLAGS": QUICKLY,
        "PYTHONFAULTHANDLER": "1",
        # Observations of the user's own would change plans.
        "AUTOSHARD_DATA_DIR": "",
        "PYTHONPATH": os.pathsep.join([*([path] if path else []), str(ROOT)]),
    }
    command = ["-m", f"tests.exec.torch_xla_hook.{module}", *given, *names]
    env = kept | here | environment
    if path:
        process = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=env)
    else:
        process = forked.run(command, ROOT, env)
    lines = [line.removeprefix("found ") for line in process.stdout.splitlines() if line.startswith("found ")]
    if len(lines) != len(names):
        said = [line for line in process.stderr.splitlines() if "GSPMD sharding propagation is going" not in line]
        ended = ", ".join(names[: len(lines)])
        raise AssertionError(f"exit code {process.returncode} after {ended}:\n" + "\n".join(said)[-3000:])
    return {found.pop("name"): found for found in map(json.loads, lines)}
