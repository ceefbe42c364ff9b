"""Linear layers with low-rank adapters, and linear layers whose frozen weights are stored in 8 or 4 bits.

Tensors have the names that PEFT gives them: `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight`.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


BASES = ("int8", "int4", "nf4")
"""Forms in which frozen weights may be stored.

`int8` has a scale for each row. `int4` and `nf4` have codes of two rows in a byte and a scale for each block. Codes of
`nf4` number the values of `_NF4`.
"""

_BLOCK = 64
"""Most elements of a row that share a scale in 4 bits, as in bitsandbytes."""

_FEWEST = 16
"""Fewest elements of such a block; a row without such a divisor has one scale."""

# Quantiles of the normal distribution in -1 to 1 (Dettmers et al. 2023, appendix E), by code.
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635)
_NF4 += (-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725)
_NF4 += (0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a trained low-rank update: `base(x) + scaling * B(A(x))`."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int], rank: int, scaling: float, seed: int) -> None:
        """Add adapters in float32 to `base`, on its device; the update is zero at first.

        - `sizes`: features of the input and of the output.
        - `seed`: seed of the values of `A`.
        """
        super().__init__()
        self.in_features, self.out_features = sizes
        self.base_layer, self.scaling = base, scaling
        device = next(base.parameters()).device
        first = torch.empty(rank, sizes[0], device=device)
        if device.type != "meta":
            first.uniform_(-1, 1, generator=torch.Generator(device).manual_seed(seed)).div_(math.sqrt(sizes[0]))
        self.lora_A = nn.ModuleDict({"default": _linear(first)})
        self.lora_B = nn.ModuleDict({"default": _linear(torch.zeros(sizes[1], rank, device=device))})

    @property
    def weight(self) -> Any:
        """Frozen weight, whose dtype some models read."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        """Frozen bias; None for none."""
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the base's result plus the scaled update, in the dtype of the base's result."""
        result = self.base_layer(x)
        first: Any = self.lora_A["default"]
        second = self.lora_B["default"]
        update = second(first(x.to(first.weight.dtype))) * self.scaling
        return (result + update).to(result.dtype)


def _linear(weight: torch.Tensor) -> nn.Linear:
    """Return a linear layer without bias that has this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


class QuantisedLinear(nn.Module):
    """A frozen linear layer whose weight is stored in 8 or 4 bits, and dequantised for its matmuls."""

    def __init__(self, weight: torch.Tensor, bias: nn.Parameter | None, form: str) -> None:
        """Store `weight` [out, in] in a form of `BASES`; `out` is even for 4 bits."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.form = form
        codes, absmax = quantised(weight.detach(), form)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_absmax = nn.Parameter(absmax, requires_grad=False)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias` in the dtype of `x`."""
        result: Any = _Product.apply(x, self.weight, self.weight_absmax, self.form)
        return result if self.bias is None else result + self.bias.to(result.dtype)


class _Product(torch.autograd.Function):
    """A matmul with a stored weight, which the backward pass dequantises again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: Any, codes: Any, absmax: Any, form: str) -> Any:
        """Return the product of `x` and the transposed weight; save what is stored."""
        ctx.save_for_backward(codes, absmax)
        ctx.form = form
        return functional.linear(x, dequantised(codes, absmax, form, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of `x`; the weight has none."""
        codes, absmax = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ dequantised(codes, absmax, ctx.form, gradient.dtype), None, None, None


def quantised(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int8 codes of a weight [out, in] and the float32 maxima that scale them.

    Codes are [out, in] with maxima [out, 1] in `int8`, and [out / 2, in] with maxima [out, blocks] in 4 bits. A block
    is the largest power of two up to `_BLOCK` that divides `in`, or a row if that is below `_FEWEST`.
    """
    rows, width = weight.shape
    block = math.gcd(width, _BLOCK)
    if form == "int8" or block < _FEWEST:
        block = width
    parts = weight.float().reshape(rows, width // block, block)
    absmax = parts.abs().amax(-1)
    # A block of zeros has no scale.
    shares = parts / absmax.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    shares = shares.reshape(rows, width)
    if form == "int8":
        return torch.round(shares * 127).to(torch.int8), absmax
    if form == "int4":
        codes = torch.round(shares * 7).to(torch.int8)
    else:
        # The nearest value is the number of midpoints below the share.
        codes = torch.zeros_like(shares, dtype=torch.int8)
        for low, high in zip(_NF4, _NF4[1:], strict=False):
            codes = codes + (shares > (low + high) / 2).to(torch.int8)
    low, high = codes.reshape(-1, 2, _together(rows), width).unbind(1)
    return ((low & 15) | (high << 4)).reshape(rows // 2, width), absmax


def _together(rows: int) -> int:
    """Return how many rows in a row have their codes in the low halves of bytes, before as many in the high halves.

    Multiples of 8 rows are whole tiles of TPUs, so that they are joined without moving data inside of tiles.
    """
    return math.gcd(rows, 64) // 2


def dequantised(codes: torch.Tensor, absmax: torch.Tensor, form: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [out, in] of stored codes and maxima in `dtype`, computed in float32."""
    if form == "int8":
        return (codes.float() * (absmax.float() / 127)).to(dtype)
    width, blocks = codes.shape[1], absmax.shape[1]
    codes = codes.reshape(-1, _together(absmax.shape[0]), width)
    # Shifts of int8 keep the sign, which `int4` needs.
    pairs = torch.stack([(codes << 4) >> 4, codes >> 4], 1)
    values = pairs.float() / 7 if form == "int4" else _looked_up(pairs)
    parts = values.reshape(absmax.shape[0], blocks, width // blocks) * absmax.float().unsqueeze(-1)
    return parts.reshape(absmax.shape[0], width).to(dtype)


def _looked_up(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of `_NF4` at the low four bits of `codes`, by selects."""
    # A gather of single numbers is slow on TPUs.
    odd = (codes & 1).float()
    values = [low + (high - low) * odd for low, high in zip(_NF4[0::2], _NF4[1::2], strict=True)]
    for bit in (2, 4, 8):
        is_set = (codes & bit) != 0
        values = [torch.where(is_set, high, low) for low, high in zip(values[0::2], values[1::2], strict=True)]
    return values[0]
