"""Task of a `RayPool` on a Ray node: it runs a call with the environment of the machine that submitted it.

This module imports nothing that depends on the environment; the call imports its modules after `_settle` has set it.
"""

import dataclasses
import importlib
import importlib.metadata
import os
import pickle
import platform
from collections.abc import Mapping

from autoshard.errors import UserError


PREFIXES = ("AUTOSHARD_", "JAX_", "LIBTPU_", "PJRT_", "TF_", "XLA_")
"""Prefixes of the environment variables that may change a result."""
NAMES = ("OMP_NUM_THREADS",)
"""Further environment variables that may change a result; Ray itself sets this one in its workers."""
PACKAGES = ("autoshard", "jax", "jaxlib", "jax-cuda12-plugin", "libtpu", "ortools", "torch", "transformers")
"""Packages whose versions determine plans and compiled programs."""
_settled: "NodeSetting | None" = None
"""Setting that this worker process has applied last; None before the first call."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSetting:
    """Environment of the submitting machine, which every node's worker processes adopt."""

    environment: Mapping[str, str]
    folder: str
    """Working directory, from which relative paths start; a node that lacks it does not change its directory."""
    packages: Mapping[str, str | None]
    """Version of each of `PACKAGES`; None if it is not installed."""
    prepare: str | None
    """Function, as `module:function`, that a worker process calls once before its first call."""


def setting_here(prepare: str | None = None) -> NodeSetting:
    """Return the environment, working directory and package versions of this process, with `prepare` as given."""
    return NodeSetting(_environment(), os.getcwd(), _versions(), prepare)


def run_call(setting: NodeSetting, data: bytes) -> bytes:
    """Apply the setting, run the pickled call (function, arguments), and return the pickled pair (success, value).

    After an error the value is its text, or the `UserError` itself. A node whose packages differ also answers with a
    `UserError`.
    """
    try:
        _settle(setting)
        call, arguments = pickle.loads(data)
        answer = True, call(*arguments)
    except UserError as error:
        answer = False, UserError(str(error))
    except Exception as error:
        answer = False, f"{type(error).__name__}: {error}"
    return pickle.dumps(answer, protocol=5)


def _environment() -> dict[str, str]:
    """Return the environment variables of this process that may change a result, by `PREFIXES` and `NAMES`."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES) or name in NAMES}


def _versions() -> dict[str, str | None]:
    """Return the installed version of each of `PACKAGES`; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _settle(setting: NodeSetting) -> None:
    """Apply the setting to this worker process, unless it is applied already; raise `UserError` if packages differ.

    Replace the environment variables that may change a result, change to the folder if it exists, and call `prepare`.
    """
    global _settled
    if setting == _settled:
        return
    for name, version in _versions().items():
        if version != setting.packages[name]:
            there, here = (f"has {name} {v}" if v else f"has no {name}" for v in (version, setting.packages[name]))
            raise UserError(f"the Ray node {platform.node()} {there}, and this machine {here}: install the same there.")
    for name in _environment().keys() - setting.environment.keys():
        del os.environ[name]
    os.environ.update(setting.environment)
    if os.path.isdir(setting.folder):
        os.chdir(setting.folder)
    if setting.prepare:
        module, _, function = setting.prepare.partition(":")
        getattr(importlib.import_module(module), function)()
    _settled = setting
