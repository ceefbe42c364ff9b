"""A call on a node of a Ray cluster, in a worker process of Ray: it works as it would on the machine that asks.

Only what the call itself needs is imported here, after the environment is as it is there.
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
"""Starts of the environment variables that may change a result."""
NAMES = ("OMP_NUM_THREADS",)
"""Further ones; Ray itself sets this in its workers."""
PACKAGES = ("autoshard", "jax", "jaxlib", "jax-cuda12-plugin", "libtpu", "ortools", "torch", "transformers")
"""Packages that decide what is planned and compiled."""
_settled: "NodeSetting | None" = None


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSetting:
    """What calls find on every node, as it is on the machine that asks."""

    environment: Mapping[str, str]
    folder: str
    """The working directory, which relative paths start from; a node without it stays where it is."""
    packages: Mapping[str, str | None]
    """Versions of `PACKAGES`; None of what is not installed."""
    prepare: str | None
    """`module:function` that is called once, before the first call."""


def setting_here(prepare: str | None = None) -> NodeSetting:
    """The setting of this process."""
    return NodeSetting(_environment(), os.getcwd(), _versions(), prepare)


def run_call(setting: NodeSetting, data: bytes) -> bytes:
    """Make the pickled call (function, arguments); returns, pickled, whether it went well, and what came of it.

    An error comes back as its text, a `UserError` as it is, one too if this node has other packages than it should.
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
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES) or name in NAMES}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _settle(setting: NodeSetting) -> None:
    """Once in a process, whose tasks are all of one job."""
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
