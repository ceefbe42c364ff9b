"""Least squares that no single observation pulls far, held by what was known before."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def robust_fit(
    errors: NDArray[np.float64],
    slopes: NDArray[np.float64],
    sigma: NDArray[np.float64],
    prior: NDArray[np.float64],
    width: NDArray[np.float64],
    limits: tuple[ArrayLike, ArrayLike],
    huber: float,
    rounds: int = 20,
) -> NDArray[np.float64]:
    """The constants that make errors small, to first order around the prior.

    `errors` are those at `prior` and `slopes` how each changes with each constant; `sigma` is the expected error of
    each observation and `width` that of each prior. Errors beyond `huber` count linearly (Huber's loss, by weights
    that are found anew in each round). Constants are kept within `limits`.
    """
    values = prior.copy()
    for _ in range(rounds):
        now = errors + slopes @ (values - prior)
        weight = np.minimum(1.0, huber / np.maximum(np.abs(now), 1e-9)) / sigma**2
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(width**-2.0)
        values = prior + np.linalg.solve(normal, -slopes.T @ (weight * errors))
        values = np.clip(values, *limits)
    return values
