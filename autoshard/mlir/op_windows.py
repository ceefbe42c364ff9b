"""Windows: dims along which an op reads neighbouring elements, and how far it reads.

They are read from the attributes of convolutions, pooling windows, slices and pads.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.mlir.module import numbers_of


WINDOWED = frozenset({"convolution", "reduce_window", "select_and_scatter", "slice", "pad"})
"""Kinds of op (without their dialect) that `windowed_dims` reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One dim of a window, as in StableHLO: `size` elements, `spread` (window dilation) apart.

    It moves by `stride` over an input with `base - 1` gaps between its elements (base dilation). The input has `low`
    and `high` elements of padding (negative: cropped). The default window changes nothing.
    """

    size: int = 1
    """Number of elements."""
    stride: int = 1
    """Places by which the window moves."""
    low: int = 0
    """Padding before the input, in places; negative: cropped."""
    high: int = 0
    """Padding after the input, in places; negative: cropped."""
    base: int = 1
    """Distance of the input's elements, in places: base dilation."""
    spread: int = 1
    """Distance of the window's elements, in places: window dilation."""


@dataclasses.dataclass(frozen=True, slots=True)
class WindowedDim:
    """A dim that can be split in space: shards own their elements and receive a halo from their neighbours."""

    window: Window
    """Window along the dim, over the whole tensor."""
    source: int
    """Dim of the first operand (of every windowed operand), which the halo extends."""
    partner: int | None
    """Dim of the second operand that is split alike: a select_and_scatter's source, or the gradient in a kernel's
    gradient.
    """
    result: int | None
    """Dim of the result that is split alike; None if the op sums over the dim."""
    length: int
    """Elements of the dim of the first operand."""
    parts: int
    """Common divisor of the split dims: a number of shards that divides it splits all of them evenly."""
    before: int
    """Elements that a shard receives from the shard before it."""
    after: int
    """Elements that a shard receives from the shard after it."""

    @property
    def summed(self) -> bool:
        """True if the op sums over the dim."""
        return self.result is None

    def fits(self, shards: int) -> bool:
        """Return True if `shards` divides the dims evenly, and a halo comes from the next neighbour only."""
        return self.parts % shards == 0 and max(self.before, self.after) * shards <= self.length

    def local(self, shards: int) -> Window:
        """Return the window over one of `shards` shards and its halo, with padding such that the shard's results are
        its own.
        """
        own, w = self.length // shards, self.window
        # The halo replaces padding, so padding shrinks by the dilated halo; the high side ends where the shard's last
        # window does.
        low = w.low - self.before * w.base
        extended = (own + self.before + self.after - 1) * w.base + 1
        if self.summed:
            reached = (w.size // shards - 1) * w.spread + (self.positions() - 1) * w.stride + 1
            high = reached - low - extended
            return dataclasses.replace(w, size=w.size // shards, low=low, high=high)
        last = own * w.base // w.stride - 1
        return dataclasses.replace(w, low=low, high=last * w.stride + (w.size - 1) * w.spread + 1 - low - extended)

    def positions(self) -> int:
        """Return the number of positions of the window over the whole dim."""
        w = self.window
        padded = w.low + (self.length - 1) * w.base + 1 + w.high
        return (padded - (w.size - 1) * w.spread - 1) // w.stride + 1


def windowed_dims(
    kind: str, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]], result: Sequence[int]
) -> list[WindowedDim]:
    """Return the dims of an op that can be split in space, ascending; for a convolution in the order of its spatial
    dims.

    - `kind`: kind of the op, without its dialect.
    - `attributes`: attributes of the op, by name.
    - `operands`, `result`: shapes of the operands and of the result.

    Dims with the default window are left out, and so are those whose halo no neighbour could send. An `fft` has none.
    """
    if kind == "convolution":
        return _of_convolution(attributes, operands, result)
    if kind == "fft":
        return []
    rank = len(operands[0])
    if kind == "slice":
        starts, strides = _numbers(attributes, "start_indices", rank, 0), _numbers(attributes, "strides", rank, 1)
        windows = [Window(stride=s, low=-a) for a, s in zip(starts, strides, strict=True)]
    elif kind == "pad":
        windows = _pads(attributes, rank)
    else:
        windows = [w for w in _windows(attributes, rank, "window_dimensions", "base_dilations", "window_dilations")]
    dims = []
    for dim, window in enumerate(windows):
        if window == Window():
            continue
        if kind == "select_and_scatter":
            spot = _spatial(window, dim, dim, dim, operands[0][dim], operands[1][dim])
        else:
            spot = _spatial(window, dim, None, dim, operands[0][dim], result[dim])
        # Elements beyond a shard's edge can be cropped from slices and pads only.
        croppable = kind in ("slice", "pad") or (window.base == 1 and window.low >= 0 and _after(window) >= 0)
        if spot is not None and croppable:
            dims.append(spot)
    return dims


def shifted_dims(attributes: Mapping[str, Any], rank: int) -> list[int]:
    """Return the dims that a pad cuts, lengthens or spreads; `rank` is the number of its dims."""
    return [dim for dim, window in enumerate(_pads(attributes, rank)) if window != Window()]


def _pads(attributes: Mapping[str, Any], rank: int) -> list[Window]:
    """Return the window of each of a pad's `rank` dims."""
    low, high = (_numbers(attributes, f"edge_padding_{side}", rank, 0) for side in ("low", "high"))
    gaps = _numbers(attributes, "interior_padding", rank, 0)
    return [Window(low=a, high=b, base=g + 1) for a, b, g in zip(low, high, gaps, strict=True)]


def _of_convolution(
    attributes: Mapping[str, Any], operands: Sequence[Sequence[int]], result: Sequence[int]
) -> list[WindowedDim]:
    """Return the dims of a convolution that can be split in space, or that it sums over, in the order of its spatial
    dims.

    The arguments are those of `windowed_dims`.
    """
    left, right, out = convolution_dims(attributes)
    count = len(left)
    kernel = [operands[1][d] for d in right]
    windows = _windows(attributes, count, "", "lhs_dilation", "rhs_dilation", kernel)
    reversed_ = _numbers(attributes, "window_reversal", count, 0)
    dims = []
    for window, a, b, c, turned in zip(windows, left, right, out, reversed_, strict=True):
        length, size = operands[0][a], operands[1][b]
        spot = _spatial(window, a, None, c, length, result[c])
        if spot is None and not turned:
            spot = _summed(window, a, b, length, size, result[c])
        if spot is not None:
            dims.append(spot)
    return dims


def convolution_dims(attributes: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Return the spatial dims of the input, the kernel and the result of a convolution, in one order."""
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.ConvDimensionNumbers(attributes["dimension_numbers"])
    return numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions


def has_groups(attributes: Mapping[str, Any]) -> bool:
    """Return True if a convolution has more than one group, of features or of the batch."""
    return any(_numbers(attributes, f"{kind}_group_count", 1, 1) > [1] for kind in ("feature", "batch"))


def precision_passes(attributes: Mapping[str, Any]) -> int:
    """Return the number of bfloat16 passes of a matmul or convolution: 1 at the compiler's default precision.

    TPUs use 6 passes at the highest precision and 3 at the high one. An op with an algorithm in bfloat16 states its own
    number; any other algorithm counts as 6.
    """
    from jaxlib.mlir.dialects import stablehlo

    config = attributes["precision_config"] if "precision_config" in attributes else ()
    for precision, passes in (("HIGHEST", 6), ("HIGH", 3)):
        if any(stablehlo.PrecisionAttr(each).value == precision for each in config):
            return passes
    if "algorithm" not in attributes:
        return 1
    algorithm = stablehlo.DotAlgorithm(attributes["algorithm"])
    types = (algorithm.lhs_precision_type, algorithm.rhs_precision_type, algorithm.accumulation_type)
    return algorithm.num_primitive_operations if "bf16" in map(str, types) else 6


def _after(w: Window) -> int:
    """Return the elements that the last window of a shard reads beyond the shard, in the undilated dim; negative if
    fewer.
    """
    return ((w.size - 1) * w.spread - w.low - w.stride) // w.base + 1


def _spatial(w: Window, source: int, partner: int | None, result: int, length: int, out: int) -> WindowedDim | None:
    """Return a dim whose windows are aligned with their shard: the window moves as fast over the dim as over the
    result.

    - `w`: the window.
    - `source`, `partner`, `result`: dims of the first operand, the second operand (None for none) and the result.
    - `length`, `out`: elements of the dim in the first operand and in the result.

    Return None for other windows, and for halos that reach too far (`_near`).
    """
    if length * w.base != out * w.stride or (w.base > 1 and w.stride > 1):
        return None
    before, after = max(0, w.low // w.base), max(0, _after(w))
    return _near(WindowedDim(w, source, partner, result, length, math.gcd(length, out), before, after))


def _summed(w: Window, source: int, partner: int, length: int, size: int, out: int) -> WindowedDim | None:
    """Return a dim that the op sums over, as in a kernel's gradient, where both operands are split alike.

    - `w`: the window.
    - `source`, `partner`: dims of the two operands.
    - `length`, `size`, `out`: elements of the dim in the two operands and in the result.

    Return None for other windows, and for halos that reach too far (`_near`).
    """
    if size * w.spread != length or w.base > 1:
        return None
    before, after = max(0, w.low), max(0, (out - 1) * w.stride + 1 - w.spread - w.low)
    return _near(WindowedDim(w, source, partner, None, length, math.gcd(length, size), before, after))


def _near(spot: WindowedDim) -> WindowedDim | None:
    """Return the dim, but None if a halo is longer than half of it, as in cumulative sums: two shards could not send
    it.
    """
    return spot if 2 * max(spot.before, spot.after) <= spot.length else None


def _windows(
    attributes: Mapping[str, Any], count: int, sizes: str, base: str, spread: str, given: Sequence[int] = ()
) -> list[Window]:
    """Return a window for each dim from the attributes; missing attributes mean the default window's numbers.

    - `count`: number of dims.
    - `sizes`, `base`, `spread`: names of the attributes for sizes, base dilation and window dilation.
    - `given`: sizes, if no attribute has them.
    """
    size = given or _numbers(attributes, sizes, count, 1)
    strides = _numbers(attributes, "window_strides", count, 1)
    padding = _numbers(attributes, "padding", 2 * count, 0)
    bases, spreads = _numbers(attributes, base, count, 1), _numbers(attributes, spread, count, 1)
    return [Window(size[i], strides[i], padding[2 * i], padding[2 * i + 1], bases[i], spreads[i]) for i in range(count)]


def _numbers(attributes: Mapping[str, Any], name: str, count: int, default: int) -> list[int]:
    """Return the `count` numbers of an attribute, by default all of them `default`."""
    return numbers_of(attributes[name]) if name in attributes else [default] * count
