"""Chunks on the XLA device as slices: the gates of LSTMs and GRUs are such.

For want of a kernel PyTorch/XLA takes `unsafe_split` apart into views by strides, and looks every element of these up
by its index in the flattened value. XLA's partitioner gathers what is split for that, and the plan has lookups where
the script has none.
"""

import functools
from collections.abc import Sequence
from typing import Any

from autoshard.exec.torch_xla_hook._kernels import replace_kernels


@functools.cache
def slice_chunks() -> None:
    """Give PyTorch/XLA kernels for chunks that are no views, until the process ends."""
    replace_kernels({"unsafe_split.Tensor": _split, "unsafe_split_with_sizes": _split_with_sizes})


def _split(value: Any, size: int, dim: int = 0) -> list[Any]:
    import torch

    return list(torch.ops.aten.split_copy.Tensor(value, size, dim))


def _split_with_sizes(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    import torch

    return list(torch.ops.aten.split_with_sizes_copy.default(value, sizes, dim))
