"""Bytes that an array takes on one device."""

import math
from collections.abc import Sequence


def shard_bytes(shape: Sequence[int], itemsize: float, splits: Sequence[int] | None = None, tiled: bool = False) -> int:
    """Bytes of one shard of an array whose dims are split into `splits` parts (None: whole), uneven dims padded up.

    With `tiled` the two minor dims are padded to the tiles of TPU layouts: 128 lanes in the minor dim, 8 rows
    (fewer for fewer rows, rounded to a power of two) in the one before it; a vector is padded to 128 elements.
    """
    parts = [1] * len(shape) if splits is None else splits
    local = [-(-size // part) for size, part in zip(shape, parts, strict=True)]
    if tiled and local:
        local[-1] = -(-local[-1] // 128) * 128
        if len(local) > 1:
            rows = min(8, 1 << max(0, math.ceil(math.log2(max(1, local[-2])))))
            local[-2] = -(-local[-2] // rows) * rows
    return math.ceil(math.prod(local) * itemsize)
