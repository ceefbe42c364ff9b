"""Ops that PyTorch/XLA lacks a kernel for, computed by other ops on the device.

PyTorch/XLA computes such an op on the host: the step is cut there, and operands and results are copied in every step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from autoshard.exec.torch_xla_hook.capture.host_ops import run_on_host
from autoshard.exec.torch_xla_hook.capture.resampling_ops import resampling_kernels
from autoshard.exec.torch_xla_hook.values.device_kernels import replace_kernels, wide


aten = torch.ops.aten

_BY_TORCH = (
    "_weight_norm_interface",
    "channel_shuffle",
    "col2im",
    "glu_backward",
    "huber_loss",
    "huber_loss_backward",
    "im2col",
    "linalg_cross",
    "logaddexp",
    "logit_backward",
    "vdot",
)
"""Ops that are computed by PyTorch's own decompositions."""

_MEAN, _MAX = 1, 2
"""Modes of a bag of embeddings; 0 is the sum."""


@functools.cache
def compose_missing() -> None:
    """Register kernels of the ops that PyTorch/XLA lacks, until the process ends; later calls do nothing."""
    import torch_xla.runtime as xr

    kernels: dict[str, Callable[..., Any]] = {
        name: decomposition_table[getattr(aten, name).default] for name in _BY_TORCH
    }
    own = (
        _embedding_bag,
        _embedding_bag_backward,
        _embedding_bag_per_sample_weights_backward,
        _weight_norm_interface_backward,
        unfold_backward,
        unfold_copy,
    )
    kernels |= {kernel.__name__: kernel for kernel in own}
    kernels["_embedding_bag_forward_only"] = _embedding_bag
    replace_kernels(kernels | resampling_kernels(xr.device_type() == "TPU"))


def unfold_copy(value: Any, dim: int, size: int, step: int) -> Any:
    """Compute `aten::unfold_copy`: windows of this `size` along `dim`, one each `step`, as a further last dim."""
    dim %= value.dim()
    count = (value.shape[dim] - size) // step + 1
    rows = aten.index_select.default(value, dim, _windows(count, size, step, value.device))
    windows = aten.view_copy.default(rows, [*value.shape[:dim], count, size, *value.shape[dim + 1 :]])
    order = [each for each in range(windows.dim()) if each != dim + 1]
    return aten.permute_copy.default(windows, [*order, dim + 1])


def unfold_backward(gradient: Any, shape: Sequence[int], dim: int, size: int, step: int) -> Any:
    """Compute `aten::unfold_backward`: sum the gradients of windows at their places in a value of this `shape`."""
    dim %= len(shape)
    order = [*range(dim + 1), gradient.dim() - 1, *range(dim + 1, gradient.dim() - 1)]
    rows = aten.view_copy.default(aten.permute_copy.default(gradient, order), [*shape[:dim], -1, *shape[dim + 1 :]])
    zeros = torch.zeros(list(shape), dtype=gradient.dtype, device=gradient.device)
    return aten.index_add.default(zeros, dim, _windows(gradient.shape[dim], size, step, gradient.device), rows)


def _windows(count: int, size: int, step: int, device: Any) -> Any:
    """Return the places of the elements of `count` windows of this `size`, one each `step`, in one dim."""
    starts = aten.unsqueeze_copy.default(torch.arange(count, device=device) * step, 1)
    return aten.view_copy.default(starts + torch.arange(size, device=device), [-1])


def _weight_norm_interface_backward(gradient: Any, value: Any, scale: Any, norms: Any, dim: int) -> tuple[Any, Any]:
    """Return the gradients of direction and length of a weight that weight norm composes from both.

    - `gradient`: gradient of the weight.
    - `value`, `scale`: direction and length.
    - `norms`: norms of the direction along all dims but `dim`, with these dims of size 1.
    """
    others = [each for each in range(value.dim()) if each != dim]
    norms = norms.to(scale.dtype)
    along = (value * gradient).sum(others, keepdim=True)
    return scale / norms * (gradient - value * (along / (norms * norms))), along / norms


def _embedding_bag(weight: Any, indices: Any, offsets: Any, *options: Any) -> tuple[Any, Any, Any, Any]:
    """Compute `aten::_embedding_bag`: the bags, the bag of each index, and the number of counted indices of each bag.

    `options` are the op's further arguments; the last may be missing. A maximum is computed on the host.
    """
    defaults = False, 0, False, None, False, -1
    _, mode, sparse, per_sample_weights, include_last_offset, padding_idx = (*options, *defaults[len(options) :])
    if mode == _MAX or sparse:
        return run_on_host("_embedding_bag", aten._embedding_bag.default, weight, indices, offsets, *options)
    bags = offsets.shape[0] - include_last_offset
    starts = aten.slice_copy.Tensor(offsets, 0, 0, bags)
    begun = _sum_at(starts, torch.ones_like(starts), indices.shape[0] + 1)  # bags may be empty
    bag = aten.slice_copy.Tensor(aten.cumsum.default(begun, 0) - 1, 0, 0, indices.shape[0])
    counted = indices != padding_idx
    size = _sum_at(bag, counted.to(indices.dtype), bags)
    rows = _shares(wide(aten.index_select.default(weight, 0, indices)), counted, per_sample_weights)
    out = _sum_at(bag, rows, bags)
    if mode == _MEAN:
        out = out / aten.unsqueeze_copy.default(size.clamp(min=1), 1)
    return out.to(weight.dtype), bag, size, torch.zeros_like(size)


def _embedding_bag_backward(
    gradient: Any, indices: Any, offsets: Any, bag: Any, size: Any, maximum: Any, rows: int, *options: Any
) -> Any:
    """Compute `aten::_embedding_bag_backward`: the gradient of a table of this number of `rows`.

    `options` are the op's further arguments; the last may be missing. Gradients of maxima, and those that are divided
    by frequencies, are computed on the host.
    """
    by_frequency, mode, sparse, per_sample_weights, padding_idx = (*options, -1)[:5]
    if mode == _MAX or sparse or by_frequency:
        op = aten._embedding_bag_backward.default
        given = gradient, indices, offsets, bag, size, maximum, rows
        return run_on_host("_embedding_bag_backward", op, *given, *options)
    each = wide(gradient)
    if mode == _MEAN:
        each = each / aten.unsqueeze_copy.default(size.clamp(min=1), 1)
    each = _shares(aten.index_select.default(each, 0, bag), indices != padding_idx, per_sample_weights)
    return _sum_at(indices, each, rows).to(gradient.dtype)


def _embedding_bag_per_sample_weights_backward(
    gradient: Any, weight: Any, indices: Any, offsets: Any, bag: Any, mode: int, padding_idx: int = -1
) -> Any:
    """Compute `aten::_embedding_bag_per_sample_weights_backward`: the gradient of the weight of each index."""
    rows = aten.index_select.default(gradient, 0, bag) * aten.index_select.default(weight, 0, indices)
    return rows.sum(1) * (indices != padding_idx).to(rows.dtype)


def _shares(rows: Any, counted: Any, weights: Any) -> Any:
    """Multiply rows by the weights of their indices, if given, and by 0 unless they are `counted`."""
    share = counted.to(rows.dtype) if weights is None else counted.to(rows.dtype) * weights
    return rows * aten.unsqueeze_copy.default(share, 1)


def _sum_at(places: Any, values: Any, count: int) -> Any:
    """Return `count` rows: the sum of the rows of `values` at each of the `places`."""
    zeros = torch.zeros((count, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return aten.index_add.default(zeros, 0, places, values)
