"""Chunks and pads that cut, on the XLA device, as slices.

The gates of LSTMs and GRUs are chunks. For want of a kernel PyTorch/XLA takes `unsafe_split` apart into views by
strides, and looks every element of these up by its index in the flattened value. XLA's partitioner gathers what is
split for that, and the plan has lookups where the script has none.

A pad that cuts at one edge and adds at the other, such as a token shift, is one op of the lazy graph. Where operand and
result have one shape, the operand is whole and the result split, GSPMD of torch_xla 2.9 computes wrong values.
"""

import functools
from collections.abc import Sequence
from typing import Any

from autoshard.exec.torch_xla_hook._kernels import replace_kernels


@functools.cache
def lower_to_slices() -> None:
    """Give PyTorch/XLA kernels that slice, until the process ends."""
    import torch

    pad = torch.library.get_kernel("aten::constant_pad_nd", "XLA").call_boxed
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    replace_kernels(
        {
            "unsafe_split.Tensor": _split,
            "unsafe_split_with_sizes": _split_with_sizes,
            "constant_pad_nd": functools.partial(_pad, functools.partial(pad, keys)),
        }
    )


def _split(value: Any, size: int, dim: int = 0) -> list[Any]:
    import torch

    return list(torch.ops.aten.split_copy.Tensor(value, size, dim))


def _split_with_sizes(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    import torch

    return list(torch.ops.aten.split_with_sizes_copy.default(value, sizes, dim))


def _pad(pad: Any, value: Any, edges: Sequence[int], fill: Any = 0) -> Any:
    """Cut by the negative edges, then pad by the others; `pad` is PyTorch/XLA's kernel. The last dim's edges lead."""
    import torch

    for number in range(len(edges) // 2):
        low, high = edges[2 * number : 2 * number + 2]
        if low < 0 or high < 0:
            dim = value.dim() - 1 - number
            start, end = max(-low, 0), value.shape[dim] - max(-high, 0)
            if start > end:
                raise RuntimeError(f"pad: edges {low} and {high} cut more than dim {dim} of size {value.shape[dim]}")
            value = torch.ops.aten.slice_copy.Tensor(value, dim, start, end)
    added = [max(edge, 0) for edge in edges]
    return pad(value, added, fill) if any(added) or not any(edges) else value
