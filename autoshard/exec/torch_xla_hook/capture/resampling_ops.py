"""Kernels of `interpolate`: a product with a matrix for each resampled dim, and its transpose in the backward pass.

PyTorch/XLA has some of these kernels, a few of them on TPUs only, and computes the others on the host.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


aten = torch.ops.aten

_NAMES = {
    "upsample_nearest1d": "nearest",
    "upsample_nearest2d": "nearest",
    "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "exact",
    "_upsample_nearest_exact2d": "exact",
    "_upsample_nearest_exact3d": "exact",
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "linear",
    "upsample_trilinear3d": "linear",
}
"""Op -> kind of interpolation."""

_ON_TPU = ("upsample_nearest2d", "upsample_bilinear2d")
"""Ops for which a TPU has kernels of its own. Elsewhere PyTorch/XLA's forward pass ignores a scale factor."""

_BY_PYTHON = ("upsample_trilinear3d",)
"""Ops whose forward pass PyTorch/XLA registers in Python, which cannot be replaced."""


def resampling_kernels(on_tpu: bool) -> dict[str, Callable[..., Any]]:
    """Return the kernels of `interpolate` that PyTorch/XLA lacks, by op."""
    kernels: dict[str, Callable[..., Any]] = {}
    for name, kind in _NAMES.items():
        if on_tpu and name in _ON_TPU:
            continue
        if name not in _BY_PYTHON:
            kernels[name] = functools.partial(_resample, kind)
        kernels[f"{name}_backward"] = functools.partial(_resample_backward, kind)
    return kernels


def _resample(kind: str, value: Any, size: Sequence[int], *options: Any) -> Any:
    """Compute `[batch, channels, ...]` at this `size` of the further dims; `options` are those of the op."""
    matrices = _matrices(kind, value, value.shape[2:], size, options)
    return _multiply(value, matrices)


def _resample_backward(kind: str, gradient: Any, size: Sequence[int], shape: Sequence[int], *options: Any) -> Any:
    """Return the gradient of a value of this `shape` that was resampled to this `size`."""
    matrices = _matrices(kind, gradient, shape[2:], size, options)
    return _multiply(gradient, [aten.t_copy.default(matrix) for matrix in matrices])


def _multiply(value: Any, matrices: Sequence[Any]) -> Any:
    """Multiply each dim from dim 2 on by its matrix `[after, before]`."""
    for dim, matrix in enumerate(matrices, 2):
        if dim == value.dim() - 1:
            value = aten.matmul.default(value, aten.t_copy.default(matrix))
            continue
        shape = list(value.shape)
        flat = aten.view_copy.default(value, [*shape[: dim + 1], -1])
        made = aten.matmul.default(matrix, flat)
        value = aten.view_copy.default(made, [*shape[:dim], matrix.shape[0], *shape[dim + 1 :]])
    return value


def _matrices(kind: str, value: Any, before: Sequence[int], after: Sequence[int], options: Sequence[Any]) -> list[Any]:
    """Return for each dim the matrix `[after, before]` of the shares that its elements have of the new ones.

    - `kind`: `nearest`, `exact` or `linear`, as `interpolate` defines them.
    - `value`: tensor that has the device and dtype of the matrices.
    - `before`, `after`: sizes of the dims.
    - `options`: for `linear` first True to align corners; then a scale for each dim, or None. The last may be missing.
    """
    aligned, *scales = options if kind == "linear" else (False, *options)
    scales = [*scales, *(None for _ in before)]
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    matrices = []
    for old, new, scale in zip(before, after, scales, strict=False):
        step = 1 / scale if scale is not None and scale > 0 else old / new
        numbers = torch.arange(new, device=value.device, dtype=dtype)
        if aligned:
            places = numbers * ((old - 1) / (new - 1) if new > 1 else 0.0)
        elif kind == "linear":
            places = (numbers + 0.5) * step - 0.5
        else:
            places = ((numbers + 0.5 if kind == "exact" else numbers) * step).floor()
        places = aten.unsqueeze_copy.default(places.clamp(0, old - 1), 1)
        off = places - torch.arange(old, device=value.device, dtype=dtype)
        matrices.append((1 - off.abs()).clamp(min=0).to(value.dtype))
    return matrices
