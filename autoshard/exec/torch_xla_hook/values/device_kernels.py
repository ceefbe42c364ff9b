"""Kernels on the XLA device in the place of PyTorch/XLA's."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


_ROUGH = ("torch.bfloat16", "torch.float16")
"""Types whose sums are made in float32."""


@functools.cache
def expand_norms() -> None:
    """Stand in for PyTorch/XLA's kernels of batch norm, until the process ends."""
    kernels = {kernel.__name__: kernel for kernel in (native_batch_norm, native_batch_norm_backward)}
    # What `torch.compile` has in its regions instead.
    replace_kernels(
        kernels | {"_native_batch_norm_legit": native_batch_norm, "_native_batch_norm_legit.no_stats": _without_stats}
    )


def _without_stats(value: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
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
    """`aten::native_batch_norm`: the normed value, and in training the mean and 1 / deviation by channel (dim 1).

    Running statistics are updated in place, the variance as that of a sample (n - 1), as PyTorch has it.
    """
    import torch

    x = _wide(value)
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
    """`aten::native_batch_norm_backward`: gradients of value, weight and bias; None for what is not wanted."""
    import torch

    x, g = _wide(value), _wide(gradient)
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


def _wide(value: Any) -> Any:
    return value.float() if str(value.dtype) in _ROUGH else value


def _others(value: Any) -> list[int]:
    return [dim for dim in range(value.dim()) if dim != 1]


def _spread(row: Any, value: Any) -> Any:
    """One number for each channel, as a tensor that broadcasts with `value`."""
    return row.view([1, -1, *(1 for _ in range(value.dim() - 2))])


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
