"""Matmuls of rows in groups, each group with a matrix of its own, as kernels: calls that the planner knows, and no
implementation.

They are those of megablox (`jax.experimental.pallas.ops.tpu.megablox`, as MaxText calls it): one kernel forward, one
for the gradient of the rows, one for that of the matrices. Matrices enter whole, and so do their gradients leave.
`graph/` knows the factors of the calls; what a kernel computes, reads and steps through follows from its tiles, here.
"""

import dataclasses
import functools
import math
from typing import Any

from autoshard.program import model_flops


GROUPED = "autoshard_grouped"
GROUPED_GRADIENT = "autoshard_grouped_gradient"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Rows, model width and inner width in one tile of the kernels, as MaxText names them (its defaults)."""

    rows: int = 512
    width: int = 1024
    inner: int = 1024

    def of(self, size: int, inner: int) -> int:
        """The tile along a dim of `size`, which is that of the experts' inner width, or the model's."""
        return min(size, self.inner if size == inner else self.width)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedKernels:
    """How the kernels run: their tiles, and on what; a tile of rows is computed once for every group that it has rows
    of, which depends on how many rows and groups a device has."""

    tiles: GroupedTiles = GroupedTiles()
    row_parts: int = 1
    """Devices over which tokens are split."""
    group_parts: int = 1
    """Devices over which groups are split: each has as many rows of fewer groups."""
    cores: int = 1
    """Cores of a device, which share the tiles of columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """Of one call on all devices."""

    share: float
    """What is computed, over what the rows need."""
    steps: float
    """Steps of the kernel's grid, on the core that has most."""
    traffic: float
    """Bytes read and written."""


def _work(kernels: GroupedKernels, rows: int, groups: int, sizes: tuple[int, int], inner: int, gradient: bool) -> _Work:
    """`rows` over all devices, each times a matrix of `sizes` (contracted, columns), or (gradient) the matrices' own
    gradients; two bytes an element."""
    devices = kernels.row_parts * kernels.group_parts
    own, matrices = rows / devices, groups / kernels.group_parts
    deep, wide = (kernels.tiles.of(size, inner) for size in sizes)
    visits = own / min(kernels.tiles.rows, own) + matrices
    down, across = math.ceil(sizes[0] / deep), math.ceil(sizes[1] / wide)
    columns = math.ceil(across / kernels.cores) * kernels.cores  # a core without a tile of its own waits
    tile = min(kernels.tiles.rows, own)
    share = visits * tile / own * (down * deep / sizes[0]) * (columns * wide / sizes[1])
    steps = visits * down * columns / kernels.cores
    if gradient:
        read = visits * tile * (sizes[0] * across + sizes[1] * down)
        moved = read + matrices * sizes[0] * sizes[1]
    else:
        # A group's matrix stays where it is from one tile of rows to the next, if one tile of it is all.
        weights = (visits if down > 1 else matrices) * sizes[0] * sizes[1]
        moved = visits * tile * sizes[0] * across + weights + own * sizes[1]
    return _Work(share, steps * devices, 2.0 * moved * devices)


def kernel_matmul(rows: Any, weight: Any, kernels: GroupedKernels, inner: int) -> Any:
    """`rows` [B, E, C, D] of each of E groups times its matrix `weight` [E, D, F]: [B, E, C, F], with gradients.

    The program that holds it can be planned and priced only. `inner` is the experts' inner width, which tells the
    tiles' dims apart.
    """
    batch, groups, count, deep = rows.shape
    model_flops.record_matmul((batch, groups, count, weight.shape[2]), deep)
    return _differentiable()(rows, weight, kernels, inner)


@functools.cache
def _differentiable() -> Any:
    import jax

    def call(target: str, shape: Any, operands: tuple[Any, ...], work: _Work, turned: bool) -> Any:
        told = {"computed": work.share, "steps": work.steps, "traffic": work.traffic, "turned": float(turned)}
        return jax.ffi.ffi_call(target, shape, vmap_method="broadcast_all")(*operands, **told)

    def forward(rows: Any, weight: Any, kernels: GroupedKernels, inner: int) -> tuple[Any, Any]:
        batch, groups, count, deep = rows.shape
        sizes = (deep, weight.shape[2])
        work = _work(kernels, batch * groups * count, groups, sizes, inner, gradient=False)
        shape = jax.ShapeDtypeStruct((batch, groups, count, sizes[1]), rows.dtype)
        return call(GROUPED, shape, (rows, weight), work, turned=False), (rows, weight)

    def backward(kernels: GroupedKernels, inner: int, saved: Any, gradient: Any) -> tuple[Any, Any]:
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
