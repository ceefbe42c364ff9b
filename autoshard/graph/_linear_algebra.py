"""FLOPs of factorisations: LAPACK's and cuSOLVER's calls, those of XLA for TPUs, and StableHLO's own ops.

Counts are those of the dense algorithms (G. Golub, C. Van Loan, Matrix Computations, 4th ed.), for the leading orders.
"""

import math
from collections.abc import Callable, Sequence

from autoshard.graph._records import Tensor


Count = Callable[[int, int], float]
"""FLOPs for m rows and n columns."""


def _qr(m: int, n: int) -> float:
    small = min(m, n)
    return 2 * max(m, n) * small**2 - 2 * small**3 / 3


_CALLS: tuple[tuple[tuple[str, ...], Count], ...] = (
    (("geqrf", "geqp3", "Qr"), _qr),
    (("orgqr", "ungqr", "ProductOfElementaryHouseholderReflectors"), _qr),
    (("ormqr", "unmqr"), lambda m, n: 4 * m * n * min(m, n)),
    (("potrf",), lambda m, n: n**3 / 3),
    (("getrf", "LuDecomposition"), lambda m, n: m * n * min(m, n) - min(m, n) ** 3 / 3),
    (("syev", "heev", "Eigh"), lambda m, n: 9 * n**3),
    (("gesdd", "gesvd", "gesvdj", "gesvdp"), lambda m, n: 4 * m * n * min(m, n) + 22 * min(m, n) ** 3),
    (("geev", "gees"), lambda m, n: 25 * n**3),
    (("gehrd",), lambda m, n: 10 * n**3 / 3),
    (("sytrd", "hetrd"), lambda m, n: 4 * n**3 / 3),
    (("trsm",), lambda m, n: n * m**2),
)
"""Parts of targets, and what the calls compute of one matrix."""
SMALL = ("pivots_to_permutation", "gtsv", "threefry")
"""Parts of targets of calls whose time is that of reading and writing their operands."""


def call_flops(target: str, operands: Sequence[Tensor]) -> int:
    """Return the FLOPs of a custom call of linear algebra; 0 for any other."""
    for parts, count in _CALLS:
        if any(part in target for part in parts) and operands and len(operands[0].shape) >= 2:
            return _of(operands[0].shape, count)
    return 0


def decomposition_flops(kind: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the FLOPs of StableHLO's `cholesky` and `triangular_solve`; 0 for any other op."""
    if kind == "cholesky":
        return _of(operands[0].shape, lambda m, n: n**3 / 3)
    if kind == "triangular_solve":
        return results[0].elements * operands[0].shape[-1]
    return 0


def _of(shape: Sequence[int], count: Count) -> int:
    return int(math.prod(shape[:-2]) * count(shape[-2], shape[-1]))
