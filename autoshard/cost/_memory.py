"""Bytes that an array takes on one device."""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


LANES = 128
"""Places of a row of a TPU's registers, along an array's minor dim."""
_ROWS = 8


def shard_bytes(shape: Sequence[int], itemsize: float, splits: Sequence[int] | None = None, tiled: bool = False) -> int:
    """Bytes of one shard of an array whose dims are split into `splits` parts (None: whole), uneven dims padded up.

    With `tiled` the two minor dims are padded to the tiles of TPU layouts: 128 lanes in the minor dim, 8 rows
    (fewer for fewer rows, rounded to a power of two) in the one before it; a vector is padded to 128 elements.
    """
    parts = [1] * len(shape) if splits is None else splits
    local = [-(-size // part) for size, part in zip(shape, parts, strict=True)]
    if tiled and local:
        local[-1] = -(-local[-1] // LANES) * LANES
        if len(local) > 1:
            rows = min(8, 1 << max(0, math.ceil(math.log2(max(1, local[-2])))))
            local[-2] = -(-local[-2] // rows) * rows
    return math.ceil(math.prod(local) * itemsize)


def tile_padding(
    local: NDArray[np.float64], itemsize: int, outer: Collection[int] = (), in_order: bool = False
) -> NDArray[np.float64]:
    """Bytes in the tiles of a TPU layout over bytes of the elements, for arrays with the dims of each row of `local`.

    `local`: [arrays, rank], of rank 2 or more. One dim is padded to 128 lanes and another one to 8 rows (fewer for
    fewer rows, rounded to a power of two that fills words of 4 bytes), whichever two take least; not those in `outer`,
    unless too few are left, when the innermost of these counts the rows. `in_order`: the last dim is the one of lanes,
    and the one before it that of rows.
    """
    sizes = np.maximum(local, 1.0)
    rank = sizes.shape[1]
    if in_order:
        outer = range(rank - 2)
    lanes = [dim for dim in range(rank) if dim not in outer] or [rank - 1]
    rows = lanes if len(lanes) > 1 else [*lanes, max(dim for dim in range(rank) if dim != lanes[0])]
    tall = np.clip(2.0 ** np.ceil(np.log2(sizes)), max(1, 4 // max(1, itemsize)), _ROWS)
    across, down = (np.ceil(sizes / tile) * tile / sizes for tile in (LANES, tall))
    pairs = [across[:, lane] * down[:, row] for lane in lanes for row in rows if row != lane]
    if in_order:
        pairs = [across[:, -1] * down[:, -2]]
    return np.minimum.reduce(pairs)
