"""Views by strides on the XLA device as slices, where they are slices: the gates of LSTMs and GRUs are such.

PyTorch/XLA looks every element of such a view up by its index in the flattened value. XLA's partitioner then gathers
what is split, and the plan has a lookup where the script has none.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

from autoshard.exec.torch_xla_hook._kernels import replace_kernels


@functools.cache
def slice_strided() -> None:
    """Stand in for PyTorch/XLA's kernel of views by strides, until the process ends."""
    import torch

    look_up = torch.library.get_kernel("aten::as_strided_copy", "XLA").call_boxed
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)

    def as_strided_copy(value: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
        starts = slice_of(tuple(value.shape), size, stride, offset or 0)
        if starts is None:
            return look_up(keys, value, size, stride, offset)
        made = value
        for dim, start in enumerate(starts):
            if size[dim] != value.shape[dim]:
                made = torch.slice_copy(made, dim, start, start + size[dim])
        return torch.clone(value) if made is value else made

    replace_kernels({"as_strided_copy": as_strided_copy})


def slice_of(shape: tuple[int, ...], size: Sequence[int], stride: Sequence[int], offset: int) -> tuple[int, ...] | None:
    """Where in each dim of a value of this shape, row-major, a view by strides begins; None if it is no slice."""
    if len(size) != len(shape):
        return None
    starts, left = [], offset
    for dim, (length, wanted, step) in enumerate(zip(shape, size, stride, strict=True)):
        row = math.prod(shape[dim + 1 :])
        start, left = divmod(left, row)
        if start + wanted > length or (wanted > 1 and step != row):
            return None
        starts.append(start)
    return tuple(starts)
