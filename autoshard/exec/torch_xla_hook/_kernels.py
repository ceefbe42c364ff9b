"""Kernels of ours in the place of PyTorch/XLA's."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


_libraries: list[Any] = []
"""A library that is collected takes its kernels along."""


def replace_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Run these for `aten` ops by name (`addmm`) on the XLA device, until the process ends; once for each op."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that they replace others
        for name, kernel in kernels.items():
            library.impl(name, kernel, "XLA")
