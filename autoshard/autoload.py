"""Hook that `import torch` loads through the `torch.backends` entry point; it imports next to nothing.

An import finder waits for `torch_xla`, then lets autoshard handle `xr.use_spmd(auto=True)` and `XLA_AUTO_SPMD=1`. A
script that imports no torch_xla, or asks for no auto-sharding, runs as if autoshard were not installed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


_LAST = "torch_xla._internal.c10d_registration"
"""Module that torch_xla imports last. The finder cannot wait for the package `torch_xla`: its import often is the one
that imports torch, so the package may be half imported already.
"""


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder for `_LAST`, used once: it finds the module as others do, and lets its loader call `_ready`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of `_LAST` with a wrapped loader, and remove this finder from `sys.meta_path`.

        None for any other module, and for `_LAST` if it is not installed.
        """
        if fullname != _LAST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that delegates to another one, and calls `_ready` after the module is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with the original loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the original loader on the module's spec, execute the module with it, then call `_ready`."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _ready()


def _asked() -> bool:
    """Return True if `XLA_AUTO_SPMD` is set and not `0` or `false`; the installation refuses an unknown answer."""
    return os.environ.get("XLA_AUTO_SPMD", "").strip().lower() not in ("", "0", "false")


def _ready() -> None:
    """Install the hook if `XLA_AUTO_SPMD` asks for it, else patch `xr.use_spmd` to install it on demand."""
    import torch_xla.runtime as xr

    if _asked():
        from autoshard.exec import torch_xla_hook

        torch_xla_hook.install()
        return
    original = xr.use_spmd

    def use_spmd(auto: bool | None = False) -> None:
        """Restore the original function and install the hook, then call `xr.use_spmd` again with `auto`.

        If neither `auto` nor `XLA_AUTO_SPMD` asks for auto-sharding, call the original function and install nothing.
        """
        if not auto and not _asked():
            return original()
        from autoshard.exec import torch_xla_hook

        xr.use_spmd = original
        torch_xla_hook.install()
        return xr.use_spmd(auto)

    use_spmd.__doc__, use_spmd.__module__ = original.__doc__, original.__module__
    xr.use_spmd = use_spmd


def autoload() -> None:
    """Register the import finder; `import torch` calls this function.

    Nothing changes if `_LAST` is imported already or a finder is registered already.
    """
    if _LAST not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
