"""Matmuls of rows in groups, each group with its own matrix, as opaque kernel calls without an implementation.

The calls model megablox (`jax.experimental.pallas.ops.tpu.megablox`, as MaxText calls it). One kernel is forward, one
computes the gradient of the rows, and one that of the matrices. Matrices and their gradients are unsplit operands and
results. `graph/` knows the factors of the calls. FLOPs, bytes and grid steps of a kernel follow from its tiles and are
computed here.
"""

import dataclasses
import functools
import math
from typing import Any

from autoshard.program import model_flops


GROUPED = "autoshard_grouped"
"""Target of the calls for products of rows, forward and for the gradient of the rows."""
GROUPED_GRADIENT = "autoshard_grouped_gradient"
"""Target of the call for the gradient of the matrices."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Rows, model width and inner width in one tile of the kernels, in MaxText's terms and with its defaults."""

    rows: int = 512
    width: int = 1024
    """Tile along the model's width."""
    inner: int = 1024
    """Tile along the experts' inner width."""

    def of(self, size: int, inner: int) -> int:
        """Return the tile along a dim of `size`, at most that: the experts' inner width `inner` or the model's width.

        If both widths are equal, the inner tile is used.
        """
        return min(size, self.inner if size == inner else self.width)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedKernels:
    """Tiles of the kernels, and the devices that they run on.

    A tile of rows is computed once for every group with rows in it. The number of such groups depends on the rows and
    groups of a device.
    """

    tiles: GroupedTiles = GroupedTiles()
    row_parts: int = 1
    """Number of devices over which tokens are split."""
    group_parts: int = 1
    """Number of devices over which groups are split: each has as many rows of fewer groups."""
    cores: int = 1
    """Number of cores of a device, which share the tiles of columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Work of one call on all devices."""

    share: float
    """Computed FLOPs over the FLOPs that the rows need."""
    steps: float
    """Grid steps of the kernel on the core with most, times the devices."""
    traffic: float
    """Bytes read and written in main memory of all devices."""


def _work(kernels: GroupedKernels, rows: int, groups: int, sizes: tuple[int, int], inner: int, gradient: bool) -> _Work:
    """Return the expected work of one call; elements have two bytes, and rows are spread evenly over groups.

    - `rows`, `groups`: rows and groups over all devices.
    - `sizes`: (contracted, columns) of each matrix.
    - `inner`: the experts' inner width, which selects the tiles.
    - `gradient`: True for the gradient of the matrices.
    """
    devices = kernels.row_parts * kernels.group_parts
    own, matrices = rows / devices, groups / kernels.group_parts
    deep, wide = (kernels.tiles.of(size, inner) for size in sizes)
    # Each group's end may share a tile of rows with the next group, which then visits the tile again.
    visits = own / min(kernels.tiles.rows, own) + matrices
    down, across = math.ceil(sizes[0] / deep), math.ceil(sizes[1] / wide)
    columns = math.ceil(across / kernels.cores) * kernels.cores  # a core without a tile waits
    tile = min(kernels.tiles.rows, own)
    share = visits * tile / own * (down * deep / sizes[0]) * (columns * wide / sizes[1])
    steps = visits * down * columns / kernels.cores
    if gradient:
        read = visits * tile * (sizes[0] * across + sizes[1] * down)
        moved = read + matrices * sizes[0] * sizes[1]
    else:
        # A group's matrix stays in fast memory from one tile of rows to the next if it is a single tile in depth.
        weights = (visits if down > 1 else matrices) * sizes[0] * sizes[1]
        moved = visits * tile * sizes[0] * across + weights + own * sizes[1]
    return _Work(share, steps * devices, 2.0 * moved * devices)


def kernel_matmul(rows: Any, weight: Any, kernels: GroupedKernels, inner: int) -> Any:
    """Multiply `rows` [B, E, C, D] of each of E groups by its matrix in `weight` [E, D, F]; return [B, E, C, F].

    The call has gradients and no implementation: its program can only be planned and priced. `inner` is the experts'
    inner width, which identifies the tiles' dims.
    """
    batch, groups, count, deep = rows.shape
    model_flops.record_matmul((batch, groups, count, weight.shape[2]), deep)
    return _differentiable()(rows, weight, kernels, inner)


@functools.cache
def _differentiable() -> Any:
    """Return the call as a function of rows, weight, kernels and inner width, with a custom gradient."""
    import jax

    def call(target: str, shape: Any, operands: tuple[Any, ...], work: _Work, turned: bool) -> Any:
        attributes = {"computed": work.share, "steps": work.steps, "traffic": work.traffic, "turned": float(turned)}
        return jax.ffi.ffi_call(target, shape, vmap_method="broadcast_all")(*operands, **attributes)

    def forward(rows: Any, weight: Any, kernels: GroupedKernels, inner: int) -> tuple[Any, Any]:
        batch, groups, count, deep = rows.shape
        sizes = (deep, weight.shape[2])
        work = _work(kernels, batch * groups * count, groups, sizes, inner, gradient=False)
        shape = jax.ShapeDtypeStruct((batch, groups, count, sizes[1]), rows.dtype)
        return call(GROUPED, shape, (rows, weight), work, turned=False), (rows, weight)

    def backward(kernels: GroupedKernels, inner: int, saved: Any, gradient: Any) -> tuple[Any, Any]:
        """Emit one call for the gradient of the rows, and one for that of the matrices."""
        rows, weight = saved
        batch, groups, count, deep = rows.shape
        wide, total = weight.shape[2], batch * groups * count
        of_rows = _work(kernels, total, groups, (wide, deep), inner, gradient=False)
        of_weight = _work(kernels, total, groups, (deep, wide), inner, gradient=True)
        like_rows, like_weight = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved)
        return (
            call(GROUPED, like_rows, (gradient, weight), of_rows, turned=True),
            call(GROUPED_GRADIENT, like_weight, (rows, gradient), of_weight, turned=False),
        )

    primal = jax.custom_vjp(lambda *given: forward(*given)[0], nondiff_argnums=(2, 3))
    primal.defvjp(forward, backward)
    return primal
