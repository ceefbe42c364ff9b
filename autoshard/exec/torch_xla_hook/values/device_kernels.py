"""Kernels of `aten` ops on the XLA device that replace PyTorch/XLA's: XLA can shard their ops, and values are right."""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


_ROUGH = ("torch.bfloat16", "torch.float16")
"""Dtypes whose sums are computed in float32."""


@functools.cache
def expand_norms() -> None:
    """Replace PyTorch/XLA's kernels of batch norm, forward and backward, until the process ends; later calls do
    nothing.
    """
    kernels = {kernel.__name__: kernel for kernel in (native_batch_norm, native_batch_norm_backward)}
    # The overloads that `torch.compile` uses in its regions.
    replace_kernels(
        kernels | {"_native_batch_norm_legit": native_batch_norm, "_native_batch_norm_legit.no_stats": _without_stats}
    )


def _without_stats(value: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    """Compute `native_batch_norm` without running statistics."""
    return native_batch_norm(value, weight, bias, None, None, training, momentum, eps)


def native_batch_norm(
    value: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    """Compute `aten::native_batch_norm`: the normed value, the mean, and the inverse deviation 1 / sqrt(variance +
    `eps`).

    In training the statistics are those of this batch, by channel (dim 1), with divisor n. The running statistics, if
    given, are updated in place, with the variance of a sample (divisor n - 1), as in PyTorch. Outside of training the
    running statistics norm the value and are returned; they must be given.

    - `value`: input, `[batch, channels, ...]`; the normed value has its dtype. bfloat16 and float16 are summed in
      float32.
    - `weight`, `bias`: scale and shift, `[channels]`, or None.
    - `running_mean`, `running_var`: running statistics, `[channels]`, or None.
    - `training`: True to compute the statistics from `value`.
    - `momentum`: weight of this batch in the running statistics.
    - `eps`: addend to the variance.
    """
    import torch

    x = wide(value)
    others = _others(x)
    count = x.numel() // x.shape[1]
    if training:
        mean = x.sum(others) / count
        centred = x - _spread(mean, x)
        variance = (centred * centred).sum(others) / count
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
            unbiased = variance * (count / max(count - 1, 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    else:
        mean, variance = running_mean.to(x.dtype), running_var.to(x.dtype)
        centred = x - _spread(mean, x)
    inverse = torch.rsqrt(variance + eps)
    slope = inverse if weight is None else inverse * weight.to(x.dtype)
    out = centred * _spread(slope, x)
    if bias is not None:
        out = out + _spread(bias.to(x.dtype), x)
    return out.to(value.dtype), mean, inverse


def native_batch_norm_backward(
    gradient: Any,
    value: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_inverse: Any,
    training: bool,
    eps: float,
    wanted: Any,
) -> tuple[Any, Any, Any]:
    """Compute `aten::native_batch_norm_backward`: gradients of value, weight and bias.

    In training the gradient passes through the batch's mean and variance too; otherwise the running statistics are
    constants.

    - `gradient`, `value`: gradient of the output, and the input, `[batch, channels, ...]`.
    - `weight`: scale, `[channels]`, or None.
    - `running_mean`, `running_var`: running statistics, `[channels]`; read only outside of training.
    - `save_mean`, `save_inverse`: mean and inverse deviation that the forward pass returned, `[channels]`; read in
      training.
    - `eps`: addend to the running variance.
    - `wanted`: three booleans, for value, weight and bias; a gradient that is not wanted is None.
    """
    import torch

    x, g = wide(value), wide(gradient)
    others = _others(x)
    count = x.numel() // x.shape[1]
    if training:
        mean, inverse = save_mean, save_inverse
    else:
        mean, inverse = running_mean.to(x.dtype), torch.rsqrt(running_var.to(x.dtype) + eps)
    unit = (x - _spread(mean, x)) * _spread(inverse, x)
    of_weight, of_bias = (g * unit).sum(others), g.sum(others)
    slope = inverse if weight is None else inverse * weight.to(x.dtype)
    of_value = None
    if wanted[0]:
        rest = g - _spread(of_bias / count, x) - unit * _spread(of_weight / count, x) if training else g
        of_value = (rest * _spread(slope, x)).to(value.dtype)
    kind = value.dtype if weight is None else weight.dtype
    return of_value, of_weight.to(kind) if wanted[1] else None, of_bias.to(kind) if wanted[2] else None


def wide(value: Any) -> Any:
    """Cast a bfloat16 or float16 tensor to float32; return any other tensor unchanged."""
    return value.float() if str(value.dtype) in _ROUGH else value


def _others(value: Any) -> list[int]:
    """Return all dims of a tensor but the channels' (dim 1)."""
    return [dim for dim in range(value.dim()) if dim != 1]


def _spread(row: Any, value: Any) -> Any:
    """View one number per channel, `[channels]`, as `[1, channels, 1, ...]`, which broadcasts with `value`."""
    return row.view([1, -1, *(1 for _ in range(value.dim() - 2))])


@functools.cache
def replace_lowerings() -> None:
    """Replace PyTorch/XLA's kernels of unsafe split, constant pad, masked scatter and ELU's gradient, until the
    process ends.

    The new kernels slice, and give every value a shape that does not depend on data. Later calls do nothing.
    """
    import torch

    pad = torch.library.get_kernel("aten::constant_pad_nd", "XLA").call_boxed
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    replace_kernels(
        {
            "unsafe_split.Tensor": _split,
            "unsafe_split_with_sizes": _split_with_sizes,
            "masked_scatter": _masked_scatter,
            "masked_scatter_backward": _masked_scatter_backward,
            "constant_pad_nd": functools.partial(_pad, functools.partial(pad, keys)),
            "elu_backward": _elu_backward,
        }
    )


def _elu_backward(gradient: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: Any) -> Any:
    """Compute `aten::elu_backward`; `value` is the result of ELU if `is_result`, else its input.

    PyTorch/XLA 2.9 always takes `value` for the result, so that its gradients of ELU, CELU and SELU are wrong below 0.
    """
    import torch

    # The exponential of a large input, whose gradient is the other one, would be infinite.
    slope = value + alpha * scale if is_result else (value * input_scale).clamp(max=0).exp() * (alpha * scale)
    return torch.where(value > 0, gradient * scale, gradient * slope * input_scale)


def _split(value: Any, size: int, dim: int = 0) -> list[Any]:
    """Slice `value` along `dim` into parts of `size` elements, the last possibly shorter; the parts are copies."""
    import torch

    return list(torch.ops.aten.split_copy.Tensor(value, size, dim))


def _split_with_sizes(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Slice `value` along `dim` into parts of these sizes; the parts are copies."""
    import torch

    return list(torch.ops.aten.split_with_sizes_copy.default(value, sizes, dim))


def _masked_scatter(value: Any, mask: Any, source: Any) -> Any:
    """Replace the elements of `value` where `mask` is True by the elements of `source`, in order.

    Each place looks up its element by the number of places before it. PyTorch/XLA scatters a list of places, whose
    length depends on data: GSPMD cannot compile that if `value` is split.
    """
    import torch

    aten = torch.ops.aten
    shape = torch.broadcast_shapes(value.shape, mask.shape)
    value, mask = aten.expand_copy.default(value, shape), aten.expand_copy.default(mask, shape)
    chosen = aten.index_select.default(aten.view_copy.default(source, [-1]), 0, _order(mask, source.numel()))
    return aten.where.self(mask, aten.view_copy.default(chosen, shape), value)


def _masked_scatter_backward(gradient: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """Compute the gradient of the source of `_masked_scatter`, of shape `sizes`; elements that it did not use get 0."""
    import torch

    aten = torch.ops.aten
    count = math.prod(sizes)
    mask = aten.expand_copy.default(mask, gradient.shape)
    used = aten.view_copy.default(aten.where.ScalarOther(mask, gradient, 0), [-1])
    summed = torch.zeros(count, dtype=gradient.dtype, device=gradient.device)
    summed = aten.index_add.default(summed, 0, _order(mask, count), used)
    return aten.view_copy.default(summed, sizes)


def _order(mask: Any, count: int) -> Any:
    """Return, for each place of a mask in flat order, the number of True places before it, less than `count`."""
    import torch

    aten = torch.ops.aten
    order = aten.cumsum.default(aten.view_copy.default(mask, [-1]).to(torch.int32), 0) - 1
    return order.clamp(0, max(count - 1, 0))


def _pad(pad: Any, value: Any, edges: Sequence[int], fill: Any = 0) -> Any:
    """Slice off the negative edges, then pad by the others.

    - `pad`: PyTorch/XLA's kernel; it is called without negative edges, and not if all edges only cut.
    - `value`: tensor to pad.
    - `edges`: elements to add before and after each dim, from the last dim on; negative to cut.
    - `fill`: value of the added elements.

    Raises `RuntimeError` if the cuts of a dim exceed its size.
    """
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


_libraries: dict[str, Any] = {}
"""Library by name of each replaced `aten` op; a library that is garbage-collected removes its kernels."""


def replace_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Register these kernels for `aten` ops by name (`addmm`, `split.Tensor`) on the XLA device, until
    `restore_kernels`.

    Call it once only for each op.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a warning about the replacement
        for name, kernel in kernels.items():
            _libraries[name] = torch.library.Library("aten", "IMPL")
            _libraries[name].impl(name, kernel, "XLA")


def restore_kernels(names: Iterable[str]) -> None:
    """Restore PyTorch/XLA's own kernels of these ops; KeyError for an op that is not replaced."""
    for name in names:
        _libraries.pop(name)._destroy()
