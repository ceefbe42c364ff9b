"""Kernels of ours in the place of PyTorch/XLA's."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any


_libraries: dict[str, Any] = {}
"""By `aten` op. A library that is collected takes its kernels along."""


def replace_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Run these for `aten` ops by name (`addmm`) on the XLA device, until they are restored; once for each op."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they replace others
        for name, kernel in kernels.items():
            _libraries[name] = torch.library.Library("aten", "IMPL")
            _libraries[name].impl(name, kernel, "XLA")


def restore_kernels(names: Iterable[str]) -> None:
    """Run PyTorch/XLA's own kernels again for these ops."""
    for name in names:
        _libraries.pop(name)._destroy()
