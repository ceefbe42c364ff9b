"""What `import torch` loads of autoshard, through the `torch.backends` entry point: next to nothing.

A finder waits for `torch_xla` to be imported, and then makes `xr.use_spmd(auto=True)` and `XLA_AUTO_SPMD=1` mean
autoshard. A script that imports no torch_xla, or asks for no auto-sharding, runs as if autoshard were not installed.
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
"""What torch_xla imports last. The package itself may be half imported already: it is what imports torch, often."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module once, as all others would, and has `_ready` called when it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LAST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _ready()


def _ready() -> None:
    import torch_xla.runtime as xr

    if os.environ.get("XLA_AUTO_SPMD", "").strip().lower() in ("1", "true"):
        from autoshard.exec import torch_xla_hook

        torch_xla_hook.install()
        return
    original = xr.use_spmd

    def use_spmd(auto: bool | None = False) -> None:
        if not auto and "XLA_AUTO_SPMD" not in os.environ:
            return original()
        from autoshard.exec import torch_xla_hook

        xr.use_spmd = original
        torch_xla_hook.install()
        return xr.use_spmd(auto)

    use_spmd.__doc__, use_spmd.__module__ = original.__doc__, original.__module__
    xr.use_spmd = use_spmd


def autoload() -> None:
    """Called by `import torch`."""
    if _LAST not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
